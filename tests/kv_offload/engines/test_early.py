"""Wrong arguments and settings are refused, or told, before any weight is read."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap.tiers.probe import find_filesystem
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.ray.ray_env import get_env_vars_to_copy

from kv_offload.config import checks
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.plugin import register
from kv_offload.engines.vllm.start import early
from kv_offload.engines.vllm.start.command_line import check_keys, check_settings
from kv_offload.errors import CapacityError, ConfigError, KVOffloadError, UnsupportedError
from kv_offload.simulation.trace_recorder import TraceRecorder
from kv_offload.tools.main import main
from tests.support.configurations import around, make_vllm_config, ours


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def inside(plugin: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """Return the configuration of a MultiConnector with our connector as a member."""
    return around(ours(plugin), **outer)


both_places = pytest.mark.parametrize("place", [ours, inside], ids=["alone", "in a MultiConnector"])


@both_places
def test_actors_of_ray_are_given_the_variable_that_names_the_file(place, tmp_path, monkeypatch):
    """They get a part of the environment only, and would run with the defaults, unsaid."""
    file = tmp_path / "kv-offload.yaml"
    file.write_text("eviction_policy: lru\n")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "OTHER")
    make_vllm_config({}, transfer_config=place)
    assert "KV_OFFLOAD_CONFIG_FILE" not in get_env_vars_to_copy()
    monkeypatch.setenv("KV_OFFLOAD_CONFIG_FILE", str(file))
    for _ in range(2):  # as each of several API servers does
        make_vllm_config({}, transfer_config=place)
    assert {"OTHER", "KV_OFFLOAD_CONFIG_FILE"} <= get_env_vars_to_copy()


def refusal(error: type[KVOffloadError], plugin: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(error) as caught:
        make_vllm_config(plugin, **arguments)
    assert str(caught.value).startswith("kv-offload: ")
    assert str(caught.value).count("kv-offload: ") == 1
    return str(caught.value)


def given(plugin: dict[str, Any]) -> Any:
    """Return an engine's configuration, in which these settings have not been looked at yet."""
    config = make_vllm_config({})
    config.kv_transfer_config.kv_connector_extra_config.update(plugin)
    return config


def with_package(patch: pytest.MonkeyPatch, package: str, *, installed: bool) -> None:
    find = importlib.util.find_spec
    spec = find("json") if installed else None
    patch.setattr(
        importlib.util, "find_spec", lambda name, *more: spec if name == package else find(name)
    )


def disk(path: Path, size: str = "64MiB") -> dict[str, Any]:
    return {"disk": {"path": str(path), "bytes": size}}


def test_sizes_that_hold_no_block_and_disks_without_room(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM 0.28 draws its hashes without it
    for plugin, says in (
        ({"cpu_bytes": "8B"}, "asks for 8 bytes, less than 1 MiB"),
        (disk(tmp_path / "kv", "5000B"), "disk.bytes: '5000B': asks for 4.88 KiB (5000 bytes)"),
        (disk(tmp_path / "kv", "100TiB"), f"but the filesystem of {tmp_path} has "),
    ):
        with pytest.raises(CapacityError) as caught:
            early.check_settings(given(plugin))
        assert says in str(caught.value)
    room = shutil.disk_usage(tmp_path)
    if room.free < room.total - (1 << 30):
        size = f"{(room.free + room.total) // 2}B"
        with pytest.raises(CapacityError, match=r"only .* are free on .* Free space, or ask"):
            early.check_settings(given(disk(tmp_path / "kv", size)))


def test_keys_of_blocks_that_mean_nothing_to_another_process(tmp_path, memory_folder, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = make_vllm_config({})
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    options = config.kv_transfer_config.kv_connector_extra_config
    early.check_settings(config)
    store = {"remote": {"kind": "mooncake", "address": "10.0.0.5:50051", "bytes": 0}}
    pool = {"host_pool": "chat", "host_pool_path": str(memory_folder)}
    for tier in (disk(tmp_path / "kv"), store, pool):
        with monkeypatch.context() as changed:
            for name, value in tier.items():
                changed.setitem(options, name, value)
            with pytest.raises(ConfigError, match="set the environment variable PYTHONHASHSEED"):
                early.check_settings(config)
            changed.setenv("PYTHONHASHSEED", "0")
            with_package(changed, "mooncake", installed=True)
            early.check_settings(config)


@pytest.mark.parametrize("path", ["none", "file"])
def test_a_place_for_pools_that_is_no_folder(tmp_path, path):
    (tmp_path / "file").touch()
    config = given({"host_pool": "chat", "host_pool_path": str(tmp_path / path)})
    with pytest.raises(ConfigError, match=r"host_pool_path: .* Mount a memory filesystem there"):
        early.check_settings(config)


def test_a_place_for_pools_that_is_not_in_memory(tmp_path):
    """On a disk, pages that were written later may survive a power failure without the earlier."""
    kind = find_filesystem(tmp_path)
    if kind == "tmpfs":
        pytest.skip("the folder of this test is in memory")
    config = given({"host_pool": "chat", "host_pool_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=f"'{tmp_path}' is on {kind}, and must be on tmpfs"):
        early.check_settings(config)


@pytest.mark.parametrize(
    ("package", "extra", "store"),
    [
        ("mooncake", "mooncake", {"kind": "mooncake", "address": "10.0.0.5:50051", "bytes": 0}),
        ("obstore", "s3", {"kind": "s3", "url": "s3://bucket/kv", "bytes": 0}),
    ],
)
def test_a_store_without_its_package(monkeypatch, package, extra, store):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with_package(monkeypatch, package, installed=False)
    message = refusal(UnsupportedError, {"remote": store})
    assert f"{package} is not installed" in message.replace("Mooncake", "mooncake")
    assert f"pip install 'kv-offload[{extra}]'" in message
    with_package(monkeypatch, package, installed=True)
    make_vllm_config({"remote": store})


def test_a_trace_that_an_engine_records_to_stops_nobody(tmp_path):
    """Each of several API servers reads the arguments, maybe after its engine has begun."""
    path = tmp_path / "trace"
    recorder = TraceRecorder(path, 1 << 20)
    try:
        make_vllm_config({"record_trace": str(path)})
        path.write_text("a line")
        make_vllm_config({"record_trace": str(path)})
    finally:
        recorder.close(10)
    make_vllm_config({"record_trace": str(path)})
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


def test_a_variable_named_after_a_key_and_a_vllm_that_is_not_known(monkeypatch):
    monkeypatch.setenv("KV_OFFLOAD_CPU_BYTES", "100GiB")
    assert "unset KV_OFFLOAD_CPU_BYTES" in refusal(ConfigError, {})
    monkeypatch.setattr("vllm.__version__", "0.40.1")
    assert "works with vLLM 0.31 to 0.33, this is '0.40.1'" in refusal(UnsupportedError, {})


def test_an_engine_on_another_host_is_left_to_that_host(monkeypatch):
    config = given({"eviction_polcy": "arc"})
    with pytest.raises(ConfigError):
        early.check_settings(config)
    for name, value in (
        ("data_parallel_backend", "ray"),
        ("distributed_executor_backend", "ray"),
        ("data_parallel_size_local", 0),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(config.parallel_config, name, value)
            early.check_settings(config)


def test_a_trace_is_looked_at_where_the_scheduler_is(tmp_path):
    """A second host of a replica has ranks alone, and needs no folder for it."""
    config = given({"record_trace": str(tmp_path / "no" / "trace")})
    with pytest.raises(ConfigError, match="record_trace"):
        early.check_settings(config)
    parallel = config.parallel_config
    parallel.nnodes, parallel.node_rank = 2, 1
    early.check_settings(config)


OTHER = KVTransferConfig(
    kv_connector="OffloadingConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"eviction_polcy": "lru"},
)


@pytest.mark.parametrize("transfer", [OTHER, None])
def test_without_the_plugin_nothing_is_looked_at(transfer):
    config = make_vllm_config({})
    config.kv_transfer_config = transfer
    early.check_settings(config)
    early.check_arguments(
        EngineArgs(model="unused", kv_transfer_config=transfer, kv_offloading_size=4.0)
    )


def test_an_engine_without_the_plugin_says_so(caplog):
    caplog.set_level(logging.INFO, "kv_offload")
    make_vllm_config({})
    assert "not in use" not in caplog.text
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    make_vllm_config({}, transfer_config=lambda _plugin: other)
    assert "kv-offload: not in use: the connector of this engine is ExampleConnector" in caplog.text


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_without_cupy(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    config = make_vllm_config({})
    config.device_config.device_type = "cuda"
    with_package(monkeypatch, "cupy", installed=installed)
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it raises
    advice = r"CuPy, .* install it with pip install cupy-"
    with nullcontext() if installed else pytest.raises(UnsupportedError, match=advice):
        early.check_settings(config)


@pytest.mark.parametrize(("writable", "in_memory"), [(True, False), (False, False), (False, True)])
def test_a_gpu_without_a_folder_for_its_kernels(writable, in_memory, tmp_path, monkeypatch):
    """As in a container whose user has no home. CuPy 13 can keep kernels in memory instead."""
    config = make_vllm_config({})
    config.device_config.device_type = "cuda"
    with_package(monkeypatch, "cupy", installed=True)
    home = tmp_path / "home"
    home.mkdir() if writable else home.touch()
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", str(int(in_memory)))
    advice = r"no folder for compiled kernels: .*\.cupy.*; .*set CUPY_CACHE_DIR to a folder"
    starts = writable or in_memory
    with nullcontext() if starts else pytest.raises(UnsupportedError, match=advice):
        early.check_settings(config)
    assert not writable or (home / ".cupy" / "kernel_cache").is_dir()


@pytest.mark.parametrize(
    ("capability", "packs"),
    [((8, 0), True), ((8, 0), False), ((9, 0), True), ((12, 0), True), ((12, 0), False)],
)
def test_a_gpu_that_cannot_pack(capability, packs, monkeypatch):
    from vllm.platforms import current_platform

    config = make_vllm_config({"pack_kv": packs})
    config.device_config.device_type = "cuda"
    monkeypatch.setattr(early, "_check_cupy", lambda: None)
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda *_, **__: capability
    )
    refused = packs and capability != (9, 0)
    advice = rf"capability {capability[0]}\.0, .* set pack_kv to false"
    with pytest.raises(UnsupportedError, match=advice) if refused else nullcontext():
        early.check_settings(config)


@pytest.mark.parametrize("connector", [CONNECTOR, "NixlConnector"])
def test_only_a_key_of_ours_that_is_given_twice_is_refused(connector, monkeypatch):
    text = f'{{"kv_connector": "{connector}", "kv_role": "kv_both", "kv_role": "kv_both"}}'
    arguments = EngineArgs(model="unused", kv_transfer_config=json.loads(text))
    config = make_vllm_config({})
    config.kv_transfer_config = KVTransferConfig(**json.loads(text))
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", "--kv-transfer-config", text])
    with nullcontext() if connector != CONNECTOR else pytest.raises(ConfigError, match="twice"):
        check_settings(lambda _: config, arguments)


@both_places
@pytest.mark.parametrize("made", [KVTransferConfig, dict])
def test_a_setting_with_which_vllm_replaces_the_plugin(place, made):
    arguments = EngineArgs(model="unused", kv_transfer_config=made(**place({})))
    early.check_arguments(arguments)
    arguments.kv_offloading_size = 4.0
    with pytest.raises(ConfigError, match=r"--kv-offloading-size 4\.0: .* Remove --kv-offloading"):
        early.check_arguments(arguments)


ONCE, TWICE = '{"a": {"b": 2}}', '{"a": {"b": 1, "b": 2}}'


@pytest.mark.parametrize("words", ["--kv-transfer-config X", "--kv-transfer-config=X"])
@pytest.mark.parametrize("underscores", [True, False])
def test_a_key_that_is_given_twice_is_refused(words, underscores):
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
def test_an_empty_argument_is_a_warning(monkeypatch, caplog, more, is_empty):
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", *more])
    with caplog.at_level(logging.INFO):
        assert check_settings(lambda _: "made", SimpleNamespace(kv_transfer_config=None)) == "made"
    # Both loggers, ours and vLLM's, may tell pytest of the same record.
    ((level, message),) = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert level == ("WARNING" if is_empty else "INFO")
    assert message.startswith("kv-offload: not in use: --kv-transfer-config is ")


def test_a_shared_folder_that_is_not_for_this_user(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(os, "access", lambda *_: False)
    shared = {"remote": {"kind": "folder", "path": str(tmp_path), "bytes": "1GiB"}}
    assert "this user may not write there" in refusal(ConfigError, shared)


def test_a_shared_folder_that_does_not_answer_stops_no_start(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "ANSWER_SECONDS", 0.1)
    goes_on = threading.Event()

    class Hanging(type(tmp_path)):  # type: ignore[misc]
        def stat(self, **_: Any) -> os.stat_result:
            goes_on.wait(60)
            raise FileNotFoundError

    checks.check_shared_folder(Hanging(tmp_path))
    goes_on.set()


def test_all_that_stands_in_the_way_is_said_at_once(tmp_path):
    plugin = {
        "cpu_bytes": "8B",
        "disk": {"path": str(tmp_path / "gone" / "kv"), "bytes": "1GiB"},
        "record_trace": str(tmp_path),
        "transfer_engine": "cuda",
    }
    config = given(plugin)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(CapacityError) as caught:
        early.check_settings(config)
    text = str(caught.value)
    for problem in ("(1) ", "asks for 8 bytes", "prefix caching is off", "(3) disk.path: "):
        assert problem in text
    assert "(4) record_trace: " in text
    assert "(5) transfer_engine is 'cuda'" in text
    assert text.count("disk.path: ") == 1


DISK = {"path": "new", "bytes": "1MiB"}
FOLDER = {"kind": "folder", "path": ".", "bytes": "1GiB"}

RULES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"eviction_polcy": "lru"}, "Did you mean eviction_policy?"),
    ({"cpu_bytes": 5000}, "Did you mean 5000MiB?"),
    ({"cpu_bytes": "8B"}, "asks for 8 bytes, less than 1 MiB"),
    ({"cpu_bytes": "100%"}, "must stay free"),
    ({"disk": DISK}, ""),
    *(({"disk": {**DISK, "path": path}}, "cannot be created") for path in ("gone/kv", "file")),
    ({"disk": {**DISK, "bytes": "5000B"}}, "disk.bytes: '5000B': asks for 4.88 KiB (5000 bytes)"),
    ({"disk": {**DISK, "bytes": "900TiB"}}, "but the filesystem of "),
    ({"remote": FOLDER}, ""),
    ({"remote": {**FOLDER, "path": "gone"}}, "the folder cannot be used: [Errno 2] No such file"),
    ({"remote": {**FOLDER, "path": "file"}}, "the folder cannot be used: [Errno 20] Not a"),
    ({"remote": {**FOLDER, "bytes": "8B"}}, "remote.bytes: '8B': asks for 8 bytes, less than"),
    ({"remote": {"kind": "s3", "url": "s3://bucket", "bytes": 0}}, "obstore is not installed"),
    ({"record_trace": "new"}, ""),
    ({"record_trace": "."}, "it is not a regular file"),
    ({"record_trace": "gone/trace"}, "No such file or directory"),
    ({"record_trace": "file/trace"}, "Not a directory"),
    ({"transfer_engine": "host"}, ""),
    ({"transfer_engine": "cuda"}, "use 'auto' or 'host'"),
]
"""Settings, and what an engine on this CPU says of those that it refuses."""


@pytest.mark.parametrize(("plugin", "says"), RULES, ids=str)
def test_doctor_finds_a_problem_where_the_engine_refuses_and_only_there(
    plugin, says, tmp_path, monkeypatch, capsys
):
    """An engine would say it after it has loaded the weights and captured its graphs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with_package(monkeypatch, "obstore", installed=False)
    (tmp_path / "file").touch()
    (tmp_path / "kv.yaml").write_text(json.dumps(plugin))
    status = main(["doctor", "kv.yaml", "--no-measure", "--json"])
    printed = capsys.readouterr().out  # nothing where `config` refuses the file as well
    checks = json.loads(printed)["checks"] if printed else []
    installation = {"Versions", "GPUs"} - ({"GPUs"} if "transfer_engine" in plugin else set())
    found = {
        check["name"]
        for check in checks
        if check["state"] == "problem"
        and check["section"] not in installation
        and check["name"] != "plugin"
    }
    assert (status == 2 or bool(found)) is bool(says)
    config = make_vllm_config({})
    member = ours({}) | {"kv_connector_extra_config": {"config_file": "kv.yaml"}}
    for transfer in (member, around(member)):
        config.kv_transfer_config = KVTransferConfig(**transfer)
        with pytest.raises(KVOffloadError, match=re.escape(says)) if says else nullcontext():
            early.check_settings(config)
    # An engine makes the folder of its disk for itself.
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"file", "kv.yaml"}
    assert not (tmp_path / "gone").exists()
