"""Settings that an engine refuses before it reads weights."""

from __future__ import annotations

import shutil

from kv_offload.errors import ConfigError, UnsupportedError
from tests.engine.harness import refusal
from tests.support.small_models import write_model


def test_a_wrong_setting_is_refused_before_weights_are_read(model_folder, tmp_path):
    """The model has no weights, and reading them raises another error, as the control shows."""
    bare = tmp_path / "qwen3"
    shutil.copytree(write_model("qwen3", model_folder / "qwen3"), bare)
    (bare / "model.safetensors").unlink()
    message = refusal(tmp_path, ConfigError, plugin={"evicton_policy": "lru"})
    assert message.startswith("kv-offload: kv_connector_extra_config: evicton_policy: ")
    assert "eviction_policy" in message
    message = refusal(tmp_path, UnsupportedError, plugin={}, enable_prefix_caching=False)
    assert message.startswith("kv-offload: this engine cannot be served correctly: prefix caching")
    assert "remove --no-enable-prefix-caching" in message
    trace = {"record_trace": str(tmp_path / "no" / "trace.jsonl")}
    assert "No such file or directory" in refusal(tmp_path, ConfigError, plugin=trace)
    disk = {"disk": {"path": str(tmp_path / "no" / "kv"), "bytes": "64MiB"}}
    assert "the folder cannot be created" in refusal(tmp_path, ConfigError, plugin=disk)
    assert "model weights" in refusal(tmp_path, RuntimeError, plugin={})
