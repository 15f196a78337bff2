"""The gated path on a played device: pieces and gates, failures, and which layouts have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from kv_swap.cuda import gate_test, gated, lane  # noqa: E402
from kv_swap.cuda.device import CudaRegistrar  # noqa: E402
from kv_swap.cuda.engine import CudaSwapEngine  # noqa: E402
from kv_swap.cuda.gate_test import MOST_PIECES, TURNS, GateReport, Turn, judge  # noqa: E402
from kv_swap.cuda.gated import PIECE_BYTES, SLICE_PIECES  # noqa: E402
from kv_swap.engine import CopiesWith, Direction, SwapJob  # noqa: E402
from kv_swap.memory.arena import HostArena  # noqa: E402

from tests.support.kv_memory import layered_cache  # noqa: E402
from tests.support.played_cuda import PlayedCuda  # noqa: E402

LOAD, STORE = Direction.LOAD, Direction.STORE
KIB, MIB = 1 << 10, 1 << 20
DEVICE = torch.device("cuda", 0)


class Bed:
    """Layers of an allocation, whose bytes tell layer and block, and slots of zeros."""

    def __init__(
        self,
        page_bytes: int,
        num_layers: int,
        blocks: int,
        copies_with: CopiesWith | None = "gates",
    ) -> None:
        layout, self.storage, self.pages = layered_cache(num_layers, blocks, page_bytes)
        layer, block = np.ogrid[:num_layers, :blocks]
        self.pages[:] = ((7 * layer + block) % 251)[:, :, None]
        arena = HostArena(blocks, layout.slot_bytes, register=CudaRegistrar(DEVICE))
        self.slots = arena.view()
        self.engine = CudaSwapEngine(layout, arena, DEVICE, [self.storage], copies_with=copies_with)

    def pages_in_slots(self) -> np.ndarray:
        shape = (len(self.slots), *self.pages.shape[::2])
        return self.slots.reshape(shape).swapaxes(0, 1)


def pairs_of(count: int) -> Any:
    return np.stack([np.arange(count), np.arange(count)[::-1]], 1).astype(np.int32)


def handle(bed: Bed, lane: Any) -> int:
    return bed.engine._state.lanes[lane].stream.stream.cuda_stream


@pytest.mark.parametrize("has_batches", [True, False])
@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize(
    ("page_bytes", "num_layers", "blocks", "gates"),
    [(2 * MIB, 1, 18, 5), (256 * KIB, 2, 40, 3), (9 * MIB, 1, 3, 5)],
)
def test_a_gate_follows_every_piece(
    cuda, page_bytes, num_layers, blocks, gates, direction, has_batches
):
    cuda.has_batches = has_batches
    bed = Bed(page_bytes, num_layers, blocks)
    assert bed.engine.copies_with == "gates"
    expected = bed.pages[:, ::-1].copy()
    if direction is LOAD:
        bed.pages_in_slots()[:] = bed.pages
        bed.pages[:] = 0
    cuda.calls.clear()
    bed.engine.submit(SwapJob(1, direction, pairs_of(blocks)))
    cuda.run()
    (done,) = bed.engine.poll()
    assert done.error is None
    np.testing.assert_array_equal(
        bed.pages if direction is LOAD else bed.pages_in_slots(), expected
    )
    *pieces, rest = cuda.gates[handle(bed, direction)]
    assert rest == 0, "the last piece has a gate, too"
    assert len(pieces) == gates
    assert all(PIECE_BYTES // 2 < nbytes <= PIECE_BYTES for nbytes in pieces[:-1])
    calls = Counter(call for call, _ in cuda.calls)
    assert calls["cuStreamWriteValue32"] == gates
    if has_batches:
        assert calls["cuMemcpyBatchAsync"] + calls["cuMemcpyAsync"] == gates
    else:
        assert calls["cuMemcpyAsync"] >= blocks


@pytest.mark.parametrize(
    ("num_layers", "has_batches"), [(1, True), (1, False), (2, True), (2, False)]
)
def test_no_more_calls_are_queued_than_fit(cuda, monkeypatch, num_layers, has_batches):
    """Else CUDA would make the step wait."""
    monkeypatch.setattr(gated, "PIECE_BYTES", 512 * KIB)
    monkeypatch.setattr(gated, "MOST_CALLS", 3 * 16)
    monkeypatch.setattr(gated, "FIRST_PIECES", 1000)
    cuda.has_batches = has_batches
    bed = Bed(256 * KIB, num_layers, 100)
    expected = bed.pages[:, ::-1].copy()
    cuda.queue(lambda: None)
    cuda.calls.clear()
    bed.engine.submit(SwapJob(1, STORE, pairs_of(100)))
    queued = [call for call, _ in cuda.calls if call.startswith("cu")]
    assert len(queued) == 48
    assert queued.count("cuStreamWriteValue32") % SLICE_PIECES == 0
    ended: list[Any] = []
    for _ in range(100):
        cuda.run()
        ended += bed.engine.poll()
    assert [done.error for done in ended] == [None]
    np.testing.assert_array_equal(bed.pages_in_slots(), expected)


def slices_queued(cuda: PlayedCuda) -> int:
    """Return how many slices were queued since the last call."""
    count = sum(call == "cuStreamWriteValue32" for call, _ in cuda.calls)
    cuda.calls.clear()
    assert count % SLICE_PIECES == 0
    return count // SLICE_PIECES


def test_a_step_queues_little_until_the_stream_runs_empty(cuda, monkeypatch):
    """Twice as much each time, and little again once there was nothing to do."""
    monkeypatch.setattr(gated, "PIECE_BYTES", 256 * KIB)
    monkeypatch.setattr(gated, "FIRST_PIECES", 2 * SLICE_PIECES)
    monkeypatch.setattr(gated, "PIECES_PER_SECOND", 0)
    blocks = SLICE_PIECES * 40
    bed = Bed(256 * KIB, 1, blocks)
    for _ in range(2):
        cuda.calls.clear()
        cuda.queue(lambda: None)
        bed.engine.submit(SwapJob(1, STORE, pairs_of(blocks)))
        queued = [slices_queued(cuda)]
        while True:
            ended = bed.engine.poll()
            assert slices_queued(cuda) == 0, "the stream has not run empty"
            cuda.run()
            if ended := bed.engine.poll():
                break
            queued.append(slices_queued(cuda))
        assert queued == [2, 4, 8, 16, 10]
        assert ended[0].error is None
    np.testing.assert_array_equal(bed.pages_in_slots(), bed.pages[:, ::-1])


@pytest.fixture
def steps(cuda, monkeypatch) -> Callable[[float], None]:
    """Let so many seconds pass, in which all copies that are queued end."""
    monkeypatch.setattr(gated, "PIECE_BYTES", 256 * KIB)
    monkeypatch.setattr(lane.time, "perf_counter", lambda: cuda.now / 1000)

    def step(seconds: float) -> None:
        cuda.run()
        cuda.now += 1000 * seconds

    return step


def test_before_a_long_step_as_much_is_queued_as_the_link_moves_meanwhile(cuda, steps):
    """The longer of two intervals counts: a step polls at its start and at its end."""
    bed = Bed(256 * KIB, 1, 400)
    for seconds in (0.02, 0.0001):
        steps(seconds)
        bed.engine.poll()
    cuda.calls.clear()
    bed.engine.submit(SwapJob(1, STORE, pairs_of(400)))
    assert slices_queued(cuda) == 0.02 * gated.PIECES_PER_SECOND / SLICE_PIECES


def test_many_small_jobs_end_in_one_step(cuda, steps):
    """Their pieces count, not their number."""
    bed = Bed(256 * KIB, 1, gated.FIRST_PIECES)
    for job_id, pairs in enumerate(np.split(pairs_of(gated.FIRST_PIECES), gated.FIRST_PIECES)):
        bed.engine.submit(SwapJob(job_id, LOAD, pairs))
    steps(0.001)
    assert len(bed.engine.poll()) == gated.FIRST_PIECES


def test_the_time_in_which_nothing_of_a_job_was_queued_does_not_count(cuda, steps):
    bed = Bed(256 * KIB, 1, 80)
    bed.engine.submit(SwapJob(1, STORE, pairs_of(80)))
    cuda.run()
    cuda.now += 1000.0
    bed.engine.poll()
    cuda.run()
    (done,) = bed.engine.poll()
    assert done.seconds == pytest.approx(0.002), "each part took a millisecond"


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuStreamWriteValue32"])
def test_a_copy_or_gate_that_fails_in_a_job_fails_it_alone(cuda, monkeypatch, call):
    monkeypatch.setattr(gated, "FIRST_PIECES", SLICE_PIECES)
    monkeypatch.setattr(gated, "PIECES_PER_SECOND", 0)
    bed = Bed(2 * MIB, 1, 40)
    bed.engine.submit(SwapJob(1, STORE, pairs_of(40)[:36]))
    assert bed.engine.poll() == []
    cuda.run()
    cuda.failing = {call}
    assert bed.engine.poll() == []
    cuda.failing = set()
    bed.engine.submit(SwapJob(2, STORE, pairs_of(40)[36:]))
    assert bed.engine.poll() == [], "what was queued of the first still runs"
    cuda.run()
    failed, fine = bed.engine.poll()
    assert f"queueing gated copies failed with {call}: injected fault" in str(failed.error)
    assert fine.error is None
    np.testing.assert_array_equal(bed.pages_in_slots()[:, :4], bed.pages[:, ::-1][:, :4])


@pytest.mark.parametrize("in_waves", [False, True])
def test_kernels_load_what_compute_waits_for(cuda, in_waves):
    """SMs are free meanwhile, and a load by kernels costs the step less time."""
    bed = Bed(256 * KIB, 4, 6)
    bed.engine.set_waves([range(2), range(2, 4)])
    bed.pages_in_slots()[:] = 5
    cuda.calls.clear()
    job = SwapJob(1, LOAD, pairs_of(6), before_compute=True, in_waves=in_waves)
    bed.engine.submit(job)
    bed.engine.await_loads()
    cuda.run()
    assert bed.engine.poll()[0].error is None
    assert set(np.unique(bed.pages)) == {5}
    assert not [call for call, _ in cuda.calls if call.startswith("cu")]


# -- which path --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_bytes", "num_layers", "yields", "chosen"),
    [
        (MIB, 1, True, "gates"),
        (MIB, 1, False, "kernels"),
        (512 * KIB, 1, True, "kernels"),
        (64 * KIB, 4, True, "kernels"),
    ],
)
def test_the_gate_is_for_long_runs_where_it_yields(
    cuda, page_bytes, num_layers, yields, chosen, caplog
):
    cuda.yields = yields
    assert Bed(page_bytes, num_layers, 2, None).engine.copies_with == chosen
    told = caplog.text.count("kernels copy, not the copy engine")
    assert told == (0 if yields else 1), "only where the copy engine would copy"


def turn(waited: float, *, began: float = 0.1, queued_early: bool = True) -> Turn:
    """A turn of 8 ms in which small copies took so many pieces."""
    return Turn(8.0, began, began + waited, queued_early)


@pytest.mark.parametrize(
    ("loads", "stores", "yields", "found"),
    [
        ([1.1] * 3, [0.8] * 3, True, "3 small loads took the time of 1.1 pieces of 8 MiB"),
        ([1.1] * 3, [7.9] * 3, False, "3 small stores took the time of 7.9 pieces"),
        ([7.9] * 3, [1.1] * 3, False, "at most 3 pass"),
        ([9.0, 1.2, 1.3], [1.1] * 3, True, "1.3 pieces"),  # a turn may be spoiled
        ([MOST_PIECES + 0.1] * 3, [1.0] * 3, False, ""),
    ],
)
def test_small_copies_must_be_served_within_three_pieces(loads, stores, yields, found):
    report = judge({LOAD: [*map(turn, loads)], STORE: [*map(turn, stores)]})
    assert report.yields is yields
    assert found in report.found


def test_turns_count_only_if_the_small_copies_came_early():
    """Of a slow host they may come when all long copies have ended, and wait for nothing."""
    late = [turn(0.1, began=7.0, queued_early=False)] * 9
    report = judge({LOAD: [*late, *map(turn, [7.9] * TURNS)], STORE: [turn(1.0)] * TURNS})
    assert not report.yields
    assert "7.9" in report.found
    report = judge({LOAD: late, STORE: [turn(1.0)] * TURNS})
    assert report == GateReport(
        yields=False,
        found="the host was too slow to test it: 0 of 9 turns of loads count, 3 are needed",
    )


def test_copies_that_were_queued_early_and_began_late_had_to_wait():
    """As those of a process with one connection do: its events wait, too."""
    report = judge({LOAD: [turn(0.1, began=8.0)] * 12, STORE: []})
    assert not report.yields
    assert "in 12 of 12 turns small loads began only when most of the long ones" in report.found
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in report.found


def test_a_driver_without_gates_leaves_it_to_the_kernels():
    """As here: no driver, or no CuPy. Nothing is raised, and the report says why."""
    gate_test._test.cache_clear()
    report = gate_test.check_gates(DEVICE)
    gate_test._test.cache_clear()
    assert not report.yields
    assert "it could not be tested: " in report.found
