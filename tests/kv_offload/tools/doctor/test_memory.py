from __future__ import annotations

import resource

import pytest

from kv_offload.config import ResolvedConfig, trace_config
from kv_offload.config.host_memory import HostMemory
from kv_offload.errors import CapacityError
from kv_offload.tools.doctor import memory
from kv_offload.tools.doctor.memory import check_free, check_lockable, check_memory

GIB = 1 << 30
HOST = HostMemory(64 * GIB, "/proc/meminfo")


def traced(size: str, replicas: int = 1) -> ResolvedConfig:
    return trace_config({"cpu_bytes": size}, {}, host=HOST, replicas=replicas)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    available = HostMemory(32 * GIB, "MemAvailable in /proc/meminfo")
    for module in ("kv_offload.tools.doctor.memory", "kv_offload.worker.capacity"):
        monkeypatch.setattr(f"{module}.read_available_memory", lambda: available)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("size", "replicas", "state"),
    [
        ("25GiB", 1, "ok"),
        ("26GiB", 1, "warning"),  # more than 80 %
        ("31GiB", 1, "problem"),  # 2 GiB must stay free
        ("15GiB", 2, "ok"),
        ("16GiB", 2, "warning"),
        ("31GiB", 2, "problem"),
    ],
)
def test_free_memory_for_all_replicas(size, replicas, state):
    check = check_free(traced(size, replicas))
    assert check.state == state
    assert check.found == "32 GiB are available now (MemAvailable in /proc/meminfo)"
    assert bool(check.remedy) == (state != "ok")


def test_free_memory_that_cannot_be_read_is_a_problem(monkeypatch):
    def fail() -> HostMemory:
        raise CapacityError("no MemAvailable")

    monkeypatch.setattr(memory, "read_available_memory", fail)
    check = check_free(traced("1GiB"))
    assert (check.state, check.found) == ("problem", "no MemAvailable"), "no engine would start"


@pytest.mark.parametrize(
    ("limit_bytes", "has_gpu", "state", "found"),
    [
        (resource.RLIM_INFINITY, True, "ok", "ulimit -l is unlimited"),
        (16 * GIB, True, "ok", "ulimit -l is 16 GiB"),
        (8 << 20, True, "warning", "ulimit -l is 8 MiB"),
        (8 << 20, False, "ok", "ulimit -l is 8 MiB; without a GPU nothing is locked"),
    ],
)
def test_lockable_memory(limit_bytes, has_gpu, state, found):
    check = check_lockable(traced("16GiB"), limit_bytes, has_gpu=has_gpu)
    assert (check.state, check.found) == (state, found)


def test_the_lines_of_a_configuration():
    lines = {check.name: check for check in check_memory(traced("1MiB", 2), has_gpu=False)}
    assert list(lines) == ["configuration", "memory", "free memory", "lockable memory"]
    assert lines["configuration"].state == "ok"
    assert "cpu_bytes is 1 MiB for each replica" in lines["configuration"].found
    unread = trace_config({"cpu_bytes": "1MiB"}, {"KV_OFFLOAD_CONFIG": "kv.yaml"}, host=HOST)
    first = next(check_memory(unread, has_gpu=False))
    assert first.state == "warning"
    assert "KV_OFFLOAD_CONFIG is not read" in first.remedy


def test_the_place_of_a_host_pool_is_judged_as_by_an_engine(tmp_path, memory_folder):
    for folder, state, says in (
        (memory_folder, "ok", "can have it"),
        (tmp_path / "missing", "problem", "there is no such folder"),
    ):
        keys = {"cpu_bytes": "1MiB", "host_pool": "chat", "host_pool_path": str(folder)}
        pool = [*check_memory(trace_config(keys, {}, host=HOST), has_gpu=False)][-1]
        assert (pool.name, pool.state) == ("host pool", state)
        assert says in pool.found
