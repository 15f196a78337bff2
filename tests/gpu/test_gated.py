"""The gated path on a device: failures within a job, small copies next to it, and its start."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.driver import Driver
from kv_swap.cuda.gate_test import check_gates
from kv_swap.cuda.state import choose_copies
from kv_swap.engine import SwapJob

from tests.gpu.caches import (
    KIB,
    LOAD,
    MIB,
    STORE,
    Pages,
    expect_copied,
    finish,
    ids,
    make_cache,
    make_engine,
    random_pairs,
    randomize,
    same_pairs,
    torch,
)
from tests.gpu.gate import Gate

DEVICE = torch.device("cuda", 0)

RUNS: Pages = [(2 * MIB, 2 * MIB)]
SHORT_RUNS: Pages = [(256 * KIB, 256 * KIB)] * 8


def make(pages: Pages, count: int) -> Any:
    engine, cache, slots = make_engine(count, pages, count, copies_with="gates")
    randomize(cache.storage, slots)
    return engine, cache, slots


# -- failures ----------------------------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, after: int) -> None:
    """Make CUDA itself refuse the call of this name after `after` calls."""
    made, calls = getattr(Driver, call), [0]

    def call_or_refuse(driver: Driver, *arguments: int) -> None:
        calls[0] += 1
        if calls[0] == after + 1:
            # No copies, or an odd address: arguments that the function refuses.
            arguments = {
                "copy_batch": (*arguments[:3], 0, *arguments[4:]),
                "write_one": (arguments[0], arguments[1] + 1),
            }[call]
        made(driver, *arguments)

    monkeypatch.setattr(Driver, call, call_or_refuse)


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("pages", [RUNS, SHORT_RUNS])
@pytest.mark.parametrize("call", ["copy_batch", "write_one"])
@pytest.mark.parametrize("after", [0, 2, 40])
def test_a_call_that_cuda_refuses_fails_its_job_alone(monkeypatch, pages, call, after, direction):
    """At the start of a job, in its first slice, and in a later one."""
    engine, cache, slots = make(pages, 400)
    first, second = (random_pairs(np.random.default_rng(0), 400, 400, 400)[i::2] for i in range(2))
    expected_storage, expected_slots = expect_copied(cache, slots, second, direction)
    with monkeypatch.context() as patch:
        refuse(patch, call, after)
        engine.submit(SwapJob(1, direction, first))
        (failed,) = finish(engine)
    assert "queueing gated copies failed with cu" in str(failed.error)
    assert "CUDA_ERROR_INVALID_VALUE" in str(failed.error)
    engine.submit(SwapJob(2, direction, second))
    (fine,) = finish(engine)
    assert fine.error is None
    block_ids, slot_ids = ids(second)
    if direction is STORE:
        assert torch.equal(slots[slot_ids], expected_slots[slot_ids])
    else:
        expected = torch.cat(cache.pages(expected_storage), 1)
        assert torch.equal(cache.blocks()[block_ids], expected[block_ids])
    engine.close()


# -- jobs larger than what is queued at once ---------------------------------------------------


def test_a_load_starts_while_a_long_store_waits_for_compute():
    """3.9 GiB, more than fits in the queue."""
    engine, cache, slots = make(RUNS, 2100)
    pairs = same_pairs(2100)
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate.hold()
        engine.submit(SwapJob(1, STORE, pairs[:2000]))
        time.sleep(0.05)
        engine.submit(SwapJob(2, LOAD, pairs[2000:], after_compute=False))
        deadline = time.monotonic() + 20
        ended = []
        while not ended and time.monotonic() < deadline:
            ended = engine.poll()
        gate.release()
    assert [(done.job_id, done.error) for done in ended] == [(2, None)]
    assert torch.equal(cache.tensors[0][2000:].cpu(), slots[2000:])
    (stored,) = finish(engine)
    assert stored.error is None
    assert torch.equal(cache.tensors[0][:2000].cpu(), slots[:2000])
    engine.close()


# -- work queued later also comes after compute ------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_the_last_bytes_of_a_long_store_are_what_compute_wrote_late(monkeypatch, ordered):
    """This exposes a missing wait, since racecheck does not check a copy engine. With a control.

    The kernel writes when a copy without a wait would have ended.
    """
    count = 1800
    engine, cache, slots = make(RUNS, count)
    if not ordered:
        monkeypatch.setattr("kv_swap.cuda.streams.CopyStream.wait_stream", lambda *given: None)
    cache.storage.fill_(1)
    torch.cuda.synchronize()
    gate = Gate()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate.hold()
        cache.storage.fill_(9)
        engine.submit(SwapJob(1, STORE, same_pairs(count)))
        gate.open(engine, after_copies=not ordered)
    finish(engine)
    assert slots[[0, 1, 40, count - 1]].unique().tolist() == [9 if ordered else 1]
    engine.close()


# -- others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [RUNS, SHORT_RUNS])
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_small_copies_get_through(direction, pages):
    """Three copies of 2 KiB in a row, repeated next to a copy of 2 GB."""
    engine, _, _ = make(pages, 1000)
    host = torch.zeros(3, 2 * KIB, dtype=torch.uint8).pin_memory()
    device = torch.zeros(3, 2 * KIB, dtype=torch.uint8, device=DEVICE)
    target, source = (device, host) if direction is LOAD else (host, device)
    torch.cuda.synchronize()
    took = []
    engine.submit(SwapJob(1, direction, same_pairs(1000)))
    with torch.cuda.stream(torch.cuda.Stream()):
        while not engine.poll():
            began = time.perf_counter()
            for row in range(3):
                target[row].copy_(source[row], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            took.append(time.perf_counter() - began)
    assert len(took) > 10
    assert statistics.median(took) < 1e-3, "2 GB take 40 ms, and without gates so do these"
    engine.close()


def test_the_gate_is_chosen_for_long_runs_here():
    report = check_gates(DEVICE)
    assert report.yields, report.found
    for pages, chosen in (
        (RUNS, "gates"),
        (SHORT_RUNS, "kernels"),
        ([(64 * KIB, 64 * KIB)] * 32, "kernels"),
    ):
        layout = make_cache(4, pages).layout
        assert choose_copies(layout, DEVICE) == chosen


@pytest.mark.parametrize(("connections", "yields"), [("1", False), ("2", True), ("32", True)])
def test_the_test_of_gates_fails_where_copies_share_a_connection(connections, yields):
    script = (
        "import torch; from kv_swap.cuda.gate_test import check_gates; "
        "print(check_gates(torch.device('cuda', 0)))"
    )
    root = str(Path(sys.modules["kv_swap"].__file__ or "").parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": root, "CUDA_DEVICE_MAX_CONNECTIONS": connections},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"yields={yields}" in ended.stdout, ended.stdout + ended.stderr
