"""Wrong settings are refused while vLLM resolves them, before any weight is read."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kv_offload.config.host_memory import read_host_memory
from kv_offload.engines.vllm.plugin import register
from kv_offload.engines.vllm.start import early
from kv_offload.errors import CapacityError, ConfigError, KVOffloadError, UnsupportedError
from tests.support.configurations import around, make_vllm_config, ours

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def inside(plugin: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """Return the configuration of a MultiConnector with our connector as a member."""
    return around(ours(plugin), **outer)


both_places = pytest.mark.parametrize("place", [ours, inside], ids=["alone", "in a MultiConnector"])


def refusal(error: type[KVOffloadError], plugin: dict[str, Any], **arguments: Any) -> str:
    """Have vLLM resolve a user's arguments; return the refusal."""
    with pytest.raises(error) as caught:
        make_vllm_config(plugin, **arguments)
    assert str(caught.value).startswith("kv-offload: ")
    assert str(caught.value).count("kv-offload: ") == 1
    return str(caught.value)


@both_places
def test_a_wrong_key_or_value(place: Any) -> None:
    for plugin, remedy in (
        ({"eviction_polcy": "arc"}, "Did you mean eviction_policy?"),
        ({"transfer_engine": "cuda"}, "use 'auto' or 'host'"),
    ):
        assert remedy in refusal(ConfigError, plugin, transfer_config=place)
    make_vllm_config({"eviction_policy": "arc"}, transfer_config=place)


def test_more_memory_than_all_replicas_have_together() -> None:
    size_bytes = read_host_memory().size_bytes * 6 // 10
    message = refusal(CapacityError, {"cpu_bytes": size_bytes}, replicas=2)
    assert "for each of 2 replicas on this host" in message


def test_settings_that_do_not_fit_each_other() -> None:
    consumer = functools.partial(ours, role="kv_consumer")
    assert "set it to 'kv_both'" in refusal(UnsupportedError, {}, transfer_config=consumer)
    recomputes = functools.partial(inside, kv_load_failure_policy="recompute")
    message = refusal(UnsupportedError, {"on_load_failure": "fail"}, transfer_config=recomputes)
    assert "kv_load_failure_policy of the MultiConnector" in message


def test_ranks_with_a_scheduler_each() -> None:
    config = make_vllm_config({}, ranks=2)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(UnsupportedError, match="'external_launcher' with 2 ranks"):
        early.check_settings(config)


def test_a_variable_named_after_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_OFFLOAD_CPU_BYTES", "100GiB")
    assert "unset KV_OFFLOAD_CPU_BYTES" in refusal(ConfigError, {})


@both_places
def test_a_size_that_lacks_its_unit(place: Any) -> None:
    message = refusal(ConfigError, {"cpu_bytes": 5000}, transfer_config=place)
    assert "Did you mean 5000MiB or 5000B?" in message


def test_a_vllm_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.40.1")
    assert "works with vLLM 0.26 to 0.33, this is '0.40.1'" in refusal(UnsupportedError, {})


def test_an_engine_on_another_host_is_left_to_that_host() -> None:
    config = make_vllm_config({})
    config.kv_transfer_config.kv_connector_extra_config["eviction_polcy"] = "arc"
    with pytest.raises(ConfigError):
        early.check_settings(config)
    for name, value in (("data_parallel_backend", "ray"), ("distributed_executor_backend", "ray")):
        before = getattr(config.parallel_config, name)
        setattr(config.parallel_config, name, value)
        early.check_settings(config)
        setattr(config.parallel_config, name, before)
    config.parallel_config.data_parallel_size_local = 0
    early.check_settings(config)


OTHER = KVTransferConfig(
    kv_connector="OffloadingConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"eviction_polcy": "arc"},
)


@pytest.mark.parametrize("transfer", [OTHER, None])
def test_without_the_plugin_nothing_is_looked_at(transfer: KVTransferConfig | None) -> None:
    config = make_vllm_config({})
    config.kv_transfer_config = transfer
    early.check_settings(config)
    early.check_arguments(
        EngineArgs(model="unused", kv_transfer_config=transfer, kv_offloading_size=4.0)
    )


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_without_cupy(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_vllm_config({})
    config.device_config.device_type = "cuda"
    find = importlib.util.find_spec
    spec = find("json") if installed else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: spec if name == "cupy" else find(name)
    )
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises
    if installed:
        early.check_settings(config)
    else:
        with pytest.raises(UnsupportedError, match=r"CuPy, .* install it with pip install cupy-"):
            early.check_settings(config)


def serve(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Have this process be the front end of `vllm serve` with these words."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", *words])
    *_, last = [word.partition("=")[2] or word for word in words]
    arguments = EngineArgs(model="unused", kv_transfer_config=json.loads(last))
    early.check_arguments(arguments)


@both_places
@pytest.mark.parametrize("name", ["--kv-transfer-config", "--kv_transfer_config"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_key_that_the_command_line_has_twice(
    place: Any, name: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(text: str) -> list[str]:
        return [f"{name}={text}"] if joined else [name, text]

    text = json.dumps(place({"cpu_bytes": "2GiB"}))
    serve(monkeypatch, *words(text))
    twice = text.replace('"cpu_bytes"', '"cpu_bytes": "1GiB", "cpu_bytes"')
    with pytest.raises(ConfigError) as caught:
        serve(monkeypatch, *words(twice))
    assert str(caught.value) == (
        "kv-offload: --kv-transfer-config: cpu_bytes is given twice, as '1GiB' and as '2GiB': "
        "remove one of the two"
    )


def test_a_key_that_another_connector_has_twice_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_role": "kv_both"}'
    serve(monkeypatch, "--kv-transfer-config", other)


@both_places
@pytest.mark.parametrize("made", [KVTransferConfig, dict])
def test_a_setting_with_which_vllm_replaces_the_plugin(place: Any, made: Any) -> None:
    arguments = EngineArgs(model="unused", kv_transfer_config=made(**place({})))
    early.check_arguments(arguments)
    arguments.kv_offloading_size = 4.0
    with pytest.raises(ConfigError, match=r"--kv-offloading-size 4\.0: .* Remove --kv-offloading"):
        early.check_arguments(arguments)
