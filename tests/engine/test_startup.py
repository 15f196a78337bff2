"""What an engine says at its start, and what it refuses before it reads weights."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_offload.errors import ConfigError, UnsupportedError
from tests.engine.harness import engine, refusal
from tests.support.small_models import write_model


def test_a_wrong_setting_is_refused_before_weights_are_read(
    model_folder: Path, tmp_path: Path
) -> None:
    """A model without weights: who reads them gets another error, as the control shows."""
    bare = tmp_path / "qwen3"
    shutil.copytree(write_model("qwen3", model_folder / "qwen3"), bare)
    (bare / "model.safetensors").unlink()
    message = refusal(tmp_path, ConfigError, plugin={"evicton_policy": "lru"})
    assert message.startswith("kv-offload: kv_connector_extra_config: evicton_policy: ")
    assert "eviction_policy" in message
    message = refusal(tmp_path, UnsupportedError, plugin={}, enable_prefix_caching=False)
    assert message.startswith("kv-offload: this engine cannot be served correctly: prefix caching")
    assert "remove --no-enable-prefix-caching" in message
    assert "model weights" in refusal(tmp_path, RuntimeError, plugin={})


def test_an_engine_without_the_plugin_says_so(
    model_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that loses an error of `kv-offload config` leaves vLLM an empty argument."""

    def log(**arguments: Any) -> str:
        caplog.clear()
        with engine(model_folder, **arguments):
            pass
        return caplog.text

    not_given = "kv-offload: not in use: --kv-transfer-config is not given, or is empty"
    assert not_given in log()
    with monkeypatch.context() as empty_argument:
        empty_argument.setattr(sys, "argv", ["vllm", "--kv-transfer-config", ""])
        log()
    (record,) = [record for record in caplog.records if "not in use" in record.getMessage()]
    assert record.levelname == "WARNING"
    other = log(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    assert "kv-offload: not in use: the connector of this engine is ExampleConnector" in other
    ours = log(plugin={})
    assert "kv-offload: " in ours
    assert "not in use" not in ours


def test_yaml_file(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text("cpu_bytes: 1MiB\neviction_policy: arc\n")
    with engine(model_folder, plugin={"config_file": str(path), "cpu_bytes": "2MiB"}) as running:
        assert running.offload.manager.num_slots == 2 * (1 << 20) // 32768
