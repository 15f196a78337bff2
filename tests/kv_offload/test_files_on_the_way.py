"""How many of the project's files a block passes on its way to host memory and back.

A file is on the way if a function of it runs meanwhile that a request with neither store nor load
does not run. Scheduler, worker and CUDA engine are real, the device is played.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kv_swap
import pytest
import torch
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.memory.arena import HostArena

import kv_offload
from tests.support import played_rank
from tests.support.played_cuda import PlayedCuda
from tests.support.played_engine import PlayedEngine

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (kv_offload, kv_swap))
PROMPT = list(range(3, 24))

Functions = set[tuple[str, str]]
"""The file and the qualified name of each function."""


class Copies(CudaSwapEngine):
    submitted = ()  # the device runs what is queued, not the played engine

    @property
    def arena(self) -> Any:
        return self.slots()


class Engine(PlayedEngine):
    """Copies with the CUDA engine."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda
        with mock.patch.object(played_rank, "manual_copies", self._cuda_copies):
            super().__init__(async_scheduling=True)

    @contextlib.contextmanager
    def _cuda_copies(self) -> Iterator[list[Copies]]:
        device, made = torch.device("cuda", 0), []

        def create(_kind: Any, layout: Any, num_slots: int, **more: Any) -> Copies:
            arena = HostArena(num_slots, layout.slot_bytes, register=CudaRegistrar(device))
            made.append(Copies(layout, arena, device, more["keep_alive"]))
            return made[-1]

        with mock.patch("kv_offload.worker.allocation.create_engine", create):
            yield made

    def run_copies(self, *_: Any, **__: Any) -> None:
        self.cuda.run()

    def until(self, done: Callable[[], object]) -> None:
        for _ in range(20):
            if done():
                return
            self.run_ahead(1)
        raise AssertionError("the engine does not get there")


def functions_of(run: Callable[[], None]) -> Functions:
    """Run, and return the project's functions that were called."""
    called: Functions = set()

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS):
            called.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


def files_of(functions: Functions) -> list[str]:
    """Return the files by their path in the repository."""
    return sorted({Path(file).relative_to(ROOT).as_posix() for file, _ in functions})


def our_objects() -> int:
    gc.collect()
    modules = (type(one).__module__ for one in gc.get_objects())
    return sum(module.startswith(("kv_offload.", "kv_swap.")) for module in modules)


@pytest.fixture
def engine(monkeypatch):
    cuda = PlayedCuda()
    cuda.install(monkeypatch)
    engine = Engine(cuda)
    yield engine
    for rank in engine.ranks:
        rank.connector.shutdown()


@pytest.fixture
def idle(engine):
    """The functions that a request with neither store nor load runs."""
    return functions_of(lambda: serve(engine, "idle", [40], 3))


def serve(engine: Engine, *request: Any) -> None:
    engine.add(*request)
    engine.until(lambda: not engine.scheduler.has_requests())
    engine.finish_steps()


def test_a_store_passes_28_files_from_its_forward_until_its_slot_is_readable(engine, idle):
    readable = engine.offload.manager.readable_slots
    engine.add("first", PROMPT, 8)
    engine.schedule_all()
    engine.execute()
    assert not readable()
    files = files_of(functions_of(lambda: engine.until(readable)) - idle)
    assert len(files) <= 28, files
    assert "transfer/kv_swap/cuda/swap.py" in files


def test_a_load_passes_24_files_from_its_lookup_until_the_first_token(engine, idle):
    serve(engine, "first", PROMPT, 8)
    assert engine.pool.reset_prefix_cache()
    engine.add("again", PROMPT, 8)
    files = files_of(functions_of(lambda: engine.until(lambda: engine.answers.get("again"))) - idle)
    assert engine.totals["loaded_bytes"] > 0
    assert len(files) <= 24, files
    assert "transfer/kv_swap/cuda/swap.py" in files


def test_a_request_with_neither_store_nor_load_makes_8_objects(engine, idle):
    before = our_objects()
    engine.add("other", [41], 3)
    engine.until(lambda: engine.answers.get("other"))
    made = our_objects() - before
    assert 0 < made <= 8
