"""What cannot be served is refused at start, in one error that says what to do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_offload.config.host_memory import headroom_bytes, read_host_memory
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from tests.engine.harness import (
    all_differ,
    engine,
    offloading,
    plain_answers,
    random_tokens,
    refusal,
    transfer_config,
)
from tests.support.small_models import write_model


def test_with_another_role(model_folder: Path) -> None:
    config = {**transfer_config({}), "kv_role": "kv_consumer"}
    message = refusal(model_folder, UnsupportedError, kv_transfer_config=config)
    assert "set it to 'kv_both'" in message


def test_the_role_of_a_producer(model_folder: Path) -> None:
    """Stores and loads as with `kv_both`, and vLLM accepts no embeddings for it. With a control."""
    prompts = [random_tokens(100, seed=seed) for seed in (1, 2)]
    expected = plain_answers(model_folder, prompts)
    config = {**transfer_config({}), "kv_role": "kv_producer"}
    with offloading(model_folder, kv_transfer_config=config) as ours:
        assert ours.generate(prompts) == expected
        assert ours.reload(prompts) == expected
        assert ours.blocks_loaded() == 6
        assert all_differ(ours.reload(prompts, corrupted=True), expected)


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


def test_vllms_own_offloading_beside_the_plugin(model_folder: Path) -> None:
    message = refusal(model_folder, ConfigError, plugin={}, kv_offloading_size=1.0)
    assert message.startswith("kv-offload: --kv-offloading-size 1.0: ")


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


@pytest.mark.parametrize("config", [{}, {"kv_role": "kv_both"}], ids=["empty", "no connector"])
def test_vllm_refuses_a_transfer_configuration_without_a_connector(
    model_folder: Path, config: dict[str, Any]
) -> None:
    """So it cannot serve without the plugin unsaid, as after an empty argument."""
    message = refusal(model_folder, ValueError, kv_transfer_config=config)
    assert "Connector name is not set in KVTransferConfig" in message


def test_the_start_says_how_large_the_pool_is(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """32 tokens and 32768 bytes a block; the engine has 400 blocks."""
    with engine(model_folder, plugin={"cpu_bytes": 600 * 32768}):
        pass
    assert "host memory holds 19200 tokens, 1.5 times the 12800 tokens of the" in caplog.text
    assert "vLLM's own kv_load_failure_policy is not read" in caplog.text
    assert "smaller" not in caplog.text
    with engine(model_folder, plugin={"cpu_bytes": 100 * 32768}):
        pass
    assert "host memory holds 3200 tokens, 0.25 times the 12800 tokens of the" in caplog.text
    (warning,) = [record for record in caplog.records if "smaller" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "Give cpu_bytes 4 times as much or more" in warning.getMessage()


def test_pool_smaller_than_a_slot(model_folder: Path) -> None:
    message = refusal(model_folder, CapacityError, plugin={"cpu_bytes": "1000B"})
    assert message.startswith("kv-offload: cpu_bytes gives this engine 1000 bytes, and one slot ")
    assert "set cpu_bytes to 1GiB or more" in message


def test_pool_larger_than_what_is_available(model_folder: Path) -> None:
    """It exists, but this process and the system have some of it."""
    host = read_host_memory()
    size_bytes = host.size_bytes - headroom_bytes(host)
    message = refusal(model_folder, CapacityError, plugin={"cpu_bytes": size_bytes})
    assert f"cpu_bytes: {size_bytes}: asks for" in message
    assert "are available now (" in message
    assert "Lower cpu_bytes, end what else takes memory" in message


def test_version_that_is_not_known(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    message = refusal(model_folder, UnsupportedError, plugin={})
    assert "0.26 to 0.33" in message
    assert "0.40.1" in message


def test_yaml_file(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text("cpu_bytes: 1MiB\neviction_policy: arc\n")
    with engine(model_folder, plugin={"config_file": str(path), "cpu_bytes": "2MiB"}) as running:
        assert running.offload.manager.num_slots == 2 * (1 << 20) // 32768
        running.generate([random_tokens(100, seed=1)])
