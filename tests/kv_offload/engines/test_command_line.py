"""An engine that got no transfer configuration says why, and a mistake is a warning."""

from __future__ import annotations

import logging
import sys

import pytest

from kv_offload.engines.vllm.start.command_line import log_not_in_use


@pytest.mark.parametrize(
    ("more", "is_empty"),
    [
        ([], False),
        (["--kv-transfer-config", ""], True),
        (["--kv-transfer-config", "None"], True),
        (["--kv-transfer-config="], True),
        (["--kv_transfer_config", ""], True),
        (["--kv_transfer_config=None", "--port", "1"], True),
        (["--kv-transfer-config", "{}"], False),
        (["--kv-transfer-config", '{"a": ""}', ""], False),
        (["--kv-transfer-config"], False),  # vLLM refuses it
        (["--served-model-name", ""], False),
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
        log_not_in_use()
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if is_empty else "INFO")
    assert record.getMessage().startswith("kv-offload: not in use: --kv-transfer-config is ")
