from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kv_offload.config import ResolvedConfig, trace_config
from kv_offload.config.host_memory import HostMemory, headroom_bytes
from kv_offload.errors import CapacityError
from kv_offload.worker.capacity import check_available, describe_share, warn_of_hidden_replicas

GIB = 1 << 30
HOST = HostMemory(256 * GIB, "/proc/meminfo")
HEADROOM = headroom_bytes(HOST)


def asking(cpu_bytes: Any, replicas: int = 1) -> ResolvedConfig:
    return trace_config({"cpu_bytes": cpu_bytes}, {}, host=HOST, replicas=replicas)


def check(traced: ResolvedConfig, size_bytes: int) -> str | None:
    """Check the only rank of a replica; return the warning."""
    return Ranks(("a", size_bytes)).check(0, traced)


def test_what_is_available_is_enough_to_the_byte():
    check(asking("100GiB"), 100 * GIB + HEADROOM)
    with pytest.raises(CapacityError) as caught:
        check(asking("100GiB"), 100 * GIB + HEADROOM - 1)
    assert str(caught.value) == (
        "kv-offload: kv_connector_extra_config: cpu_bytes: '100GiB': asks for 100 GiB "
        "(107374182400 bytes), but only 102 GiB (109521666047 bytes) are available now "
        "(MemAvailable in /proc/meminfo), of which 2 GiB must stay free. Lower cpu_bytes, stop "
        "other programs, or give this one more memory."
    )


def test_a_share_above_80_percent_of_what_is_available_is_said():
    assert check(asking("100GiB"), 125 * GIB) is None
    assert check(asking("100GiB"), 125 * GIB - 1) == (
        "cpu_bytes takes 80% of the 125 GiB that are available now (MemAvailable in "
        "/proc/meminfo): lower it unless nothing else on this machine will grow; otherwise the "
        "kernel may kill a process"
    )
    ranks = Ranks(("a", 200 * GIB), ("b", 60 * GIB))
    assert ranks.check(0, asking("100GiB")) is None
    assert "takes 83% of the 60 GiB" in (ranks.check(1, asking("100GiB")) or "")


def test_a_replica_needs_its_share_only_whatever_the_others_have_taken():
    """Eight replicas take 80 % of a host of which all is available; each starts after another."""
    left = HOST.size_bytes - 16 * GIB
    for _ in range(8):
        traced = asking("80%", replicas=8)
        check(traced, left)
        left -= traced.config.cpu_bytes
    with pytest.raises(CapacityError, match=r"for each of 8 replicas on this host, 204\.8 GiB"):
        check(asking("80%", replicas=8), 25 * GIB)


class Ranks:
    """The ranks of one replica: each tells its host and what is available there."""

    def __init__(self, *told: tuple[str, int]) -> None:
        source = "MemAvailable in /proc/meminfo"
        self._told = [(host, HostMemory(size_bytes, source)) for host, size_bytes in told]
        self.calls = 0

    def check(self, rank: int, traced: ResolvedConfig) -> str | None:
        host, memory = self._told[rank]
        with (
            mock.patch("kv_offload.worker.capacity.read_available_memory", return_value=memory),
            mock.patch("kv_offload.worker.capacity.read_boot", return_value=host),
        ):
            return check_available(traced, self._gather)

    def _gather(self, own: Any) -> list[Any]:
        self.calls += 1
        *told, headroom = own
        assert tuple(told) in self._told
        return [(*one, headroom) for one in self._told]


def test_all_ranks_decide_by_the_least_that_one_of_them_saw():
    ranks = Ranks(("a", 200 * GIB), ("a", 101 * GIB), ("a", 200 * GIB))
    for rank in range(3):
        ranks.check(rank, asking("99GiB"))
        with pytest.raises(CapacityError, match="but only 101 GiB"):
            ranks.check(rank, asking("100GiB"))
    assert ranks.calls == 6, "a rank that refuses has told the others before"


@pytest.mark.parametrize("frees", [False, True])
def test_memory_that_others_are_about_to_free_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    """By all ranks, as long as one of them has a reason to."""
    available = [HEADROOM]
    monkeypatch.setattr(
        "kv_offload.worker.capacity.read_available_memory",
        lambda: HostMemory(available[-1], "MemAvailable in /proc/meminfo"),
    )
    lacks: list[str] = []

    def wait(lack: str) -> bool:
        lacks.append(lack)
        if frees and len(lacks) == 3:
            available.append(100 * GIB + HEADROOM)
        return len(lacks) < 5

    def gather(own: Any) -> list[Any]:
        return [own, own] if isinstance(own, tuple) else [False, own]

    if frees:
        assert check_available(asking("100GiB"), gather, wait=wait)
        assert len(lacks) == 3
    else:
        with pytest.raises(CapacityError, match="but only 2 GiB"):
            check_available(asking("100GiB"), gather, wait=wait)
        assert len(lacks) == 5
    assert lacks[0].endswith("of which 2 GiB must stay free")


def test_ranks_whose_limits_differ_come_to_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that went on alone would leave the others in a gather that never ends."""
    memory = HostMemory(100 * GIB + HEADROOM, "MemAvailable in /proc/meminfo")
    monkeypatch.setattr("kv_offload.worker.capacity.read_available_memory", lambda: memory)

    def gather(own: Any) -> list[Any]:
        if not isinstance(own, tuple):
            return [own, own]
        host, found, headroom = own
        return [own, (host, found, headroom + 1)]

    def wait(lack: str) -> bool:
        raise FileNotFoundError("the folder of the seat was removed")

    with pytest.raises(CapacityError, match="must stay free"):
        check_available(asking("100GiB"), gather, wait=wait)


def test_a_replica_that_spans_hosts_needs_the_part_of_each():
    ranks = Ranks(("a", 200 * GIB), ("a", 200 * GIB), ("b", 60 * GIB), ("a", 200 * GIB))
    traced = asking("200GiB")
    ranks.check(0, traced)
    ranks.check(2, traced)
    ranks = Ranks(("a", 200 * GIB), ("a", 200 * GIB), ("b", 50 * GIB), ("a", 200 * GIB))
    ranks.check(0, traced)
    with pytest.raises(CapacityError, match=r"asks for 200 GiB .*, 50 GiB .* of it here, but only"):
        ranks.check(2, traced)


def test_the_start_says_how_much_of_what_for_how_many():
    assert describe_share(asking("25%", replicas=8)) == (
        "takes 8 GiB, 3.12% of the 256 GiB that /proc/meminfo says; the 8 replicas here take 64 GiB"
    )
    assert describe_share(asking("64GiB")) == (
        "takes 64 GiB, 25% of the 256 GiB that /proc/meminfo says; no other replica is seen here"
    )


@pytest.mark.parametrize(("cpu_bytes", "warned"), [("25 %", True), ("8GiB", False), (GIB, False)])
def test_only_a_percentage_needs_to_know_the_replicas(cpu_bytes, warned, caplog):
    warn_of_hidden_replicas(asking(cpu_bytes))
    assert ("takes cpu_bytes 25 % alone" in caplog.text) == warned
    assert bool(caplog.records) == warned
