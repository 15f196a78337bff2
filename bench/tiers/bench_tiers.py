"""The speed of slots to and from remote stores: GB/s from `submit` to the polled completion.

Run with `pytest bench/tiers/bench_tiers.py --benchmark-enable --basetemp=FOLDER`, where `FOLDER` is
a new folder with 2 GiB free. The stores are a real `mooncake_master`, a folder in `FOLDER`, and
`rclone serve s3` of another one. With `KV_OFFLOAD_BENCH_RESULTS` set to a folder, `remote.json` is
written there. Without the option everything runs once, at a small size.

Mooncake's memory is in this process, or in another one over TCP on loopback; folder and bucket are
in this machine's page cache. So the rates show the work per object, without a network; `s3, 20 ms`
adds the latency of a distant bucket. Figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.errors import TierError
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierDirection, TierEngine, TierJob
from kv_swap.tiers.remote.client import Fate, Parts, RemoteClient, object_keys
from kv_swap.tiers.remote.folder import FolderClient
from kv_swap.tiers.remote.mooncake import MooncakeClient
from kv_swap.tiers.remote.s3 import S3Client
from kv_swap.tiers.remote.sweep import REMOVED_AT_ONCE
from kv_swap.tiers.remote.tier import RemoteTier
from numpy.typing import NDArray

from bench.machine import keep_rows
from kv_offload.tiers.directory import Question, RemoteDirectory
from tests.support.mooncake import Master, Peer, require_mooncake
from tests.support.s3_server import BUCKET, S3Server, require_s3

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 5
POOL_BYTES = 1 << 30

sizes = pytest.mark.parametrize("slot_bytes", [64 * KIB, 256 * KIB, 512 * KIB, 2 * MIB, 4 * MIB])

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def remote_rows() -> Iterator[Rows]:
    rows: Rows = []
    yield rows
    keep_rows("remote.json", rows)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    require_mooncake()
    with Master() as master:
        yield master.address


MakeClient = Callable[[], RemoteClient]
PLACES = ("mooncake, own memory", "mooncake, another process", "folder", "s3", "s3, 20 ms")


class FarS3Client(S3Client):
    """A client with 20 ms more latency per answer, as for a bucket in the same region."""

    def _write(self, key: str, parts: Parts) -> Fate | TierError:
        time.sleep(0.02)
        return super()._write(key, parts)

    def _read(self, key: str, parts: Parts) -> Fate | TierError:
        time.sleep(0.02)
        return super()._read(key, parts)

    def _has(self, key: str) -> bool:
        time.sleep(0.02)
        return super()._has(key)


@pytest.fixture(params=PLACES)
def remote(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, MakeClient]]:
    """Yield a kind of remote store, and a function that creates a client of it."""
    kind, _, whose = request.param.partition(", ")
    if kind == "folder":
        yield request.param, lambda: FolderClient(tmp_path, POOL_BYTES)
    elif kind == "s3":
        require_s3()
        with S3Server(tmp_path, lists_once=True) as server:
            for name, value in server.variables.items():
                monkeypatch.setenv(name, value)
            client = FarS3Client if whose else S3Client
            yield request.param, lambda: client(f"s3://{BUCKET}/bench", POOL_BYTES)
    else:
        master = request.getfixturevalue("master")
        if whose == "own memory":
            yield request.param, lambda: MooncakeClient(master, POOL_BYTES)
            return
        with Peer(master, segment_bytes=POOL_BYTES):
            yield request.param, lambda: MooncakeClient(master, 0)


def filled_arena(num_slots: int, slot_bytes: int) -> NDArray[np.uint8]:
    """Return slots of random bytes: a disk may compress data."""
    view = HostArena(num_slots, slot_bytes, register=None).view()
    rng = np.random.default_rng(0)
    for slot in view:
        slot[:] = np.frombuffer(rng.bytes(slot_bytes), np.uint8)
    return view


def names_of(slots: NDArray[np.int32]) -> list[bytes]:
    """Return names as long as keys with their generation."""
    return [slot.to_bytes(52, "little") for slot in slots.tolist()]


def same_slots(count: int) -> NDArray[np.int32]:
    return np.repeat(np.arange(count, dtype=np.int32)[:, None], 2, axis=1)


def finish(tier: TierEngine, direction: TierDirection, pairs: NDArray[np.int32]) -> float:
    """Run a job to its end, and return its seconds."""
    job = TierJob(1, direction, pairs, names_of(pairs[:, 1]))
    started = time.perf_counter()
    tier.submit(job)
    assert tier.wait(600)
    (done,) = tier.poll()
    assert not done.failed
    return time.perf_counter() - started


@sizes
def test_rate_of_a_remote(
    benchmark: Any, remote_rows: Rows, remote: tuple[str, MakeClient], slot_bytes: int
) -> None:
    """Put new objects, get them and remove them, in turn."""
    place, make_client = remote
    count = (128 if benchmark.enabled else 8) * MIB // slot_bytes
    arena, pairs = filled_arena(count, slot_bytes), same_slots(count)
    took: dict[TierDirection, list[float]] = {way: [] for way in TierDirection}
    asker, client = make_client(), make_client()
    asker.connect()
    with RemoteTier(client, arena, {}) as tier:
        keys = object_keys(tier.file_id, names_of(pairs[:, 1]))

        def run() -> None:
            for way in TierDirection:
                took[way].append(finish(tier, way, pairs))
            for first in range(0, count, REMOVED_AT_ONCE):
                asker.remove(keys[first : first + REMOVED_AT_ONCE])

        run()  # connects, and touches the memory of the pool
        for seconds in took.values():
            seconds.clear()
        benchmark.pedantic(run, rounds=ROUNDS if benchmark.enabled else 1)
    asker.close()
    for way, seconds in took.items():
        gbps = count * slot_bytes / statistics.median(seconds) / 1e9
        benchmark.extra_info[way.value] = gbps
        if benchmark.enabled:
            row = {"name": way.value, "place": place, "slot_bytes": slot_bytes, "gbps": gbps}
            remote_rows.append(row)


@pytest.mark.parametrize("chained", [False, True], ids=["each", "chained"])
def test_asking_a_remote(
    benchmark: Any, remote_rows: Rows, remote: tuple[str, MakeClient], chained: bool
) -> None:
    """Time a lookup of 256 blocks that the store does not have: the slowest case for a chain."""
    place, make_client = remote
    directory = RemoteDirectory(make_client(), ["0" * 32], object_keys)
    names = names_of(np.arange(256, dtype=np.int32))

    def ask() -> float:
        started = time.perf_counter()
        question = Question(names, chained)
        directory.ask(question)
        while not question.is_done:
            time.sleep(0.0001)
        assert question.found is not None
        assert not any(question.found)
        return time.perf_counter() - started

    took: list[float] = []
    benchmark.pedantic(lambda: took.append(ask()), rounds=60 if benchmark.enabled else 1)
    for shown, share in (("median", 50), ("p99", 99)) if benchmark.enabled else ():
        name = f"ask for 256 {'chained ' * chained}blocks, {shown}"
        milliseconds = 1e3 * float(np.percentile(took, share))
        remote_rows.append({"name": name, "place": place, "milliseconds": milliseconds})
    directory.close(10)
