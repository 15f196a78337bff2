"""The worker side of the plugin over CPU tensors; its transfer engine copies in host memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kv_swap.engine import Completion, SwapJob
from kv_swap.host.transfers import copy_runs
from kv_swap.layout import KVLayout, Packing, TensorDescription

from kv_offload.config import OffloadConfig
from kv_offload.engine import KVCaches
from kv_offload.errors import UnsupportedError
from kv_offload.messages import (
    LoadJob,
    OffloadMetadata,
    Outcome,
    RankReport,
    StoreJob,
    Window,
)
from kv_offload.worker.pool import Seat
from kv_offload.worker.sharing import ALONE, SharingRanks
from kv_offload.worker.worker import OffloadWorker

PAGE_WORDS = 8
"""Words of 8 bytes in a block of a layer."""
BLOCKS = 8
BLOCK_BYTES = PAGE_WORDS * 8
NO_BLOCK = 99
"""A block that does not exist: the transfer engine refuses jobs that name it."""


def pairs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1, 2)


def store(job_id: int, *values: tuple[int, int]) -> StoreJob:
    return StoreJob(job_id, pairs(*values))


def load(job_id: int, request_id: str, *values: tuple[int, int], **more: bool) -> LoadJob:
    return LoadJob(job_id, request_id, pairs(*values), **more)


def synchronous(job_id: int, request_id: str, *values: tuple[int, int], **more: bool) -> LoadJob:
    return load(job_id, request_id, *values, synchronous=True, **more)


class PlainRank:
    """Describes tensors whose first dimension is the block; tests set its other answers."""

    def __init__(self) -> None:
        self.gives_idle_blocks = False
        self.weight_loads = 0
        self.context: object | None = None
        self.forward: tuple[object, Hashable] | None = None
        self.packings: dict[str, Packing] = {}

    def describe_kv_caches(self, kv_caches: Mapping[str, Any]) -> KVCaches:
        unknown = [name for name in kv_caches if not name.startswith("layer.")]
        if unknown:
            raise UnsupportedError(f"layer {unknown[0]} is not known")
        num_blocks = len(next(iter(kv_caches.values())))
        layout = KVLayout.from_tensors(
            num_blocks,
            [TensorDescription.of(name, kv, num_blocks) for name, kv in kv_caches.items()],
        ).packed(self.packings)
        regions = {
            name: frozenset(i for i, region in enumerate(layout.regions) if name in region.tensors)
            for name in kv_caches
        }
        return KVCaches(layout, list(kv_caches.values()), regions)

    def describe_pages(self, kv_caches: Mapping[str, Any]) -> str:
        return f"{len(kv_caches)} layers"

    def find_output_copy_stream(self) -> None:
        """Return None: a CPU has no such stream."""

    def count_weight_loads(self) -> Callable[[], int]:
        return lambda: self.weight_loads

    def forward_context(self) -> object | None:
        return self.context

    def forward_with_layer_calls(self) -> tuple[object, Hashable] | None:
        return self.forward


class Rank:
    """A rank's worker side and KV cache: `BLOCKS` blocks of different words for each layer."""

    def __init__(
        self,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        sharing: SharingRanks = ALONE,
        slots: int = 8,
        layers: int = 1,
        seat: Seat | None = None,
        **config: Any,
    ) -> None:
        names = [f"layer.{index}" for index in range(layers)]
        config.setdefault("cpu_bytes", slots * num_ranks * layers * BLOCK_BYTES)
        self.engine = PlainRank()
        self.half = OffloadWorker(
            OffloadConfig(**config), self.engine, rank, num_ranks, sharing, seat=seat
        )
        words = torch.arange(layers * BLOCKS * PAGE_WORDS, dtype=torch.int64)
        self.layers = dict(zip(names, words.view(layers, BLOCKS, 4, -1), strict=True))
        self.first = [layer.clone() for layer in self.layers.values()]
        """The layers' first content."""
        self.next_job_id = 0
        self._told: tuple[int, ...] = ()

    @property
    def kv(self) -> torch.Tensor:
        """The tensor of the first layer."""
        return self.layers["layer.0"]

    @property
    def transfer(self) -> Any:
        return self.half.transfer

    def start(self) -> Rank:
        self.half.register_kv_caches(self.layers)
        return self

    def layers_call(self) -> None:
        """Let every later forward run layers that call the connector."""
        self.engine.context = object()
        self.engine.forward = (self.engine.context, "eager")

    # -- a step --------------------------------------------------------------------------------

    def plan(
        self,
        *stores: StoreJob,
        loads: Sequence[LoadJob] = (),
        known: Sequence[int] | None = None,
        admissions: int = 0,
        windows: Sequence[Window] = (),
    ) -> OffloadMetadata:
        """Return the plan of the next step; by default it acknowledges the last report."""
        ids = [job.job_id for job in (*stores, *loads)]
        self.next_job_id = max([self.next_job_id, *(job_id + 1 for job_id in ids)])
        told = self._told if known is None else known
        return OffloadMetadata(
            stores,
            tuple(loads),
            self.next_job_id,
            tuple(told),
            admissions,
            windows=tuple(windows),
        )

    def begin(self, *stores: StoreJob, **plan: Any) -> OffloadMetadata:
        """Run the hooks at the start of a step; return its plan."""
        metadata = self.plan(*stores, **plan)
        self.half.start_kv_transfers(metadata)
        return metadata

    def call(self, *layers: str) -> None:
        """Run attention layers, as far as the worker listens to their calls."""
        for layer in layers:
            if self.half.on_layer is not None:
                self.half.on_layer(layer)

    def end(self, metadata: OffloadMetadata) -> None:
        self.half.prepare_store_kv(metadata)
        self.half.poll()

    def step(self, *stores: StoreJob, **plan: Any) -> None:
        """Run a step's hooks; its loads end within it, its stores within the next one."""
        metadata = self.begin(*stores, **plan)
        assert self.transfer.wait(120)
        self.end(metadata)

    def store(self, *jobs: StoreJob) -> dict[int, Outcome]:
        """Run steps that store; return how the jobs ended."""
        self.step(*jobs)
        self.step()
        return self.jobs()

    def drain(self, *stores: StoreJob, **plan: Any) -> dict[int, Outcome]:
        """Drain between two steps; return how jobs ended, as far as not acknowledged."""
        return self.half.drain(self.plan(*stores, **plan)).ranks[self.half.rank].jobs

    # -- what it reports -----------------------------------------------------------------------

    def report(self) -> RankReport:
        """Return the report of the step that ended, which may be empty."""
        told = self.half.report()
        report = RankReport() if told is None else told.ranks[self.half.rank]
        self._told = tuple(report.jobs)
        return report

    def jobs(self) -> dict[int, Outcome]:
        """Return how jobs ended, from the report of the step that ended."""
        return self.report().jobs

    def stats(self) -> dict[str, Any]:
        """Return the metrics counted since the last call."""
        stats = self.half.take_stats()
        return {} if stats is None else stats.data

    # -- the KV cache --------------------------------------------------------------------------

    def poison(self) -> None:
        """Overwrite the KV cache, so that only a load restores it."""
        for kv in self.layers.values():
            kv[:] = -1

    def holds(self, block: int) -> list[bool]:
        """Return by layer whether a block has block 1's first content; else it is poisoned."""
        found = []
        for kv, first in zip(self.layers.values(), self.first, strict=True):
            found.append(torch.equal(kv[block], first[1]))
            assert found[-1] or (kv[block] == -1).all()
        return found


def refuse_blocks(monkeypatch: pytest.MonkeyPatch, rank: Rank, *blocks: int) -> None:
    """Make a rank's transfer engine report that these blocks do not fit packed slots."""
    submitted: dict[int, np.ndarray] = {}
    submit, poll = rank.transfer.submit, rank.transfer.poll

    def remember(job: SwapJob) -> None:
        submitted[job.job_id] = job.pairs
        submit(job)

    def refuse() -> list[Completion]:
        return [
            dataclasses.replace(
                done,
                refused_rows=tuple(
                    row for row, (block, _) in enumerate(submitted[done.job_id]) if block in blocks
                ),
            )
            for done in poll()
        ]

    monkeypatch.setattr(rank.transfer, "submit", remember)
    monkeypatch.setattr(rank.transfer, "poll", refuse)


class Gate:
    """Holds copies back before they start, or makes them fail."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.failing = False

    def copy_runs(self, runs: Any) -> None:
        assert self.opened.wait(120)
        if self.failing:
            raise OSError("injected fault")
        copy_runs(runs)
