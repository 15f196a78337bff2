"""What this process's command line says in vLLM's argument."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from kv_offload.engines.vllm.start.command_line import check_keys, check_settings
from kv_offload.errors import ConfigError

ONCE, TWICE = '{"a": {"b": 2}}', '{"a": {"b": 1, "b": 2}}'


@pytest.mark.parametrize("words", ["--kv-transfer-config X", "--kv-transfer-config=X"])
@pytest.mark.parametrize("underscores", [True, False])
def test_a_key_that_is_given_twice_is_refused(words: str, underscores: bool) -> None:
    argv = (words.replace("-", "_").replace("__", "--") if underscores else words).split()
    check_keys([word.replace("X", ONCE) for word in argv])
    with pytest.raises(ConfigError) as caught:
        check_keys([word.replace("X", TWICE) for word in argv])
    assert str(caught.value) == (
        "kv-offload: --kv-transfer-config: b is given twice, as 1 and as 2: remove one of the two"
    )
    check_keys([word.replace("X", "not JSON") for word in argv])  # vLLM says what is wrong with it
    check_keys(["--other", TWICE])


@pytest.mark.parametrize(
    ("more", "is_empty"),
    [
        ([], False),
        (["--kv-transfer-config", ""], True),
        (["--kv-transfer-config", "None"], True),
        (["--kv_transfer_config=", "--port", "1"], True),
        (["--kv-transfer-config", '{"a": ""}', ""], False),
        (["--kv-transfer-config"], False),  # vLLM refuses it
    ],
)
def test_an_empty_argument_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    more: list[str],
    is_empty: bool,
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", *more])
    with caplog.at_level(logging.INFO):
        assert check_settings(lambda _: "made", SimpleNamespace(kv_transfer_config=None)) == "made"
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if is_empty else "INFO")
    assert record.getMessage().startswith("kv-offload: not in use: --kv-transfer-config is ")
