"""The test bed of the swap benchmark: an engine with a scattered job, its roofline and peer.

The KV is random, normally distributed bf16, which packs like a model's KV. Copies that do not pack
do not depend on the content.

The roofline is one contiguous copy of the same number of bytes. The peer is vLLM's own
`swap_blocks_batch`, if vLLM is installed, with descriptors prepared in advance.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.engine import CopiesWith, Direction, SwapEngine, SwapJob
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout, Packing, TensorDescription
from kv_swap.memory.arena import HostArena

from bench.machine import cuda_torch, vllm_module

LAYERS = 32


def describe(address: int, num_blocks: int, layers: int, page_bytes: int) -> KVLayout:
    """Return the layout of consecutive layers without gaps between pages."""
    layer_bytes = num_blocks * page_bytes
    return KVLayout.from_tensors(
        num_blocks,
        [
            TensorDescription(
                f"layer.{layer}",
                address + layer * layer_bytes,
                (num_blocks, page_bytes),
                (page_bytes, 1),
                1,
                0,
                page_bytes,
            )
            for layer in range(layers)
        ],
    )


def scattered(direction: Direction, num_blocks: int, count: int) -> SwapJob:
    """Return a job of `count` blocks and slots in random order."""
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(num_blocks)[:count] for _ in range(2)]
    return SwapJob(1, direction, np.stack(chosen, 1).astype(np.int32))


@dataclass
class Case:
    """A job on an engine, other ways to copy as many bytes, and the seconds of every round."""

    engine: SwapEngine
    job: SwapJob
    nbytes: int
    others: dict[str, Callable[[], None]]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run_others(self) -> None:
        """Copy in the other ways, one after the other."""
        for name, call in self.others.items():
            started = time.perf_counter()
            call()
            self._note(name, started)

    def run(self) -> None:
        """Submit the job, and poll until it has ended."""
        started = time.perf_counter()
        self.engine.submit(self.job)
        self._note("submit", started)
        if isinstance(self.engine, HostSwapEngine):
            self.engine.wait(60)  # its thread needs the GIL
        while not (completions := self.engine.poll()):
            pass
        self._note("engine", started)
        assert completions[0].error is None

    def _note(self, name: str, started: float) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def gbps(self, name: str) -> float | None:
        """Return the rate of a way to copy, in GB/s; None if it did not take part."""
        return self.nbytes / self.median(name) / 1e9 if name in self.seconds else None


class CudaBed:
    """A CUDA engine for layers of one page size, and contiguous copies between the same sides."""

    def __init__(
        self,
        page_bytes: int,
        num_blocks: int,
        layers: int = LAYERS,
        *,
        packing: Packing | None = None,
        copies_with: CopiesWith | None = None,
    ) -> None:
        from kv_swap.cuda.engine import CudaSwapEngine

        self.torch = cuda_torch()
        self.device = self.torch.device("cuda", 0)
        nbytes = num_blocks * layers * page_bytes
        self.memory = self._random(nbytes)
        self.layout = describe(self.memory.data_ptr(), num_blocks, layers, page_bytes)
        if packing is not None:
            self.layout = self.layout.packed({f"layer.{i}": packing for i in range(layers)})
        registrar = CudaRegistrar(self.device)
        self.arena = HostArena(num_blocks, self.layout.slot_bytes, register=registrar)
        self.host = self.torch.ones(nbytes, dtype=self.torch.uint8, pin_memory=True)
        self.engine = CudaSwapEngine(
            self.layout, self.arena, self.device, [self.memory], copies_with=copies_with
        )
        self.streams = {way: self.torch.cuda.Stream() for way in Direction}
        self.torch.cuda.synchronize()

    def _random(self, nbytes: int) -> Any:
        """Return normally distributed bf16, as bytes, on the device."""
        torch = self.torch
        values = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=self.device).normal_()
        return values.view(torch.uint8)

    def copy(self, direction: Direction, part: slice) -> Any:
        """Queue one contiguous copy; return its stream."""
        with self.torch.cuda.stream(self.streams[direction]):
            if direction is Direction.LOAD:
                self.memory[part].copy_(self.host[part], non_blocking=True)
            else:
                self.host[part].copy_(self.memory[part], non_blocking=True)
        return self.streams[direction]

    def store_everything(self) -> None:
        """Fill every slot, so that packed slots can be loaded."""
        everything = np.repeat(np.arange(self.layout.num_blocks, dtype=np.int32), 2).reshape(-1, 2)
        self.engine.submit(SwapJob(0, Direction.STORE, everything))
        assert self.engine.wait(60)
        (done,) = self.engine.poll()
        assert (done.error, done.refused_rows) == (None, ())

    def case(self, job: SwapJob) -> Case:
        """Return the job with the roofline and, if there is one, the peer."""
        nbytes = len(job.pairs) * self.layout.block_bytes
        case = Case(self.engine, job, nbytes, {})
        case.others["roofline"] = lambda: self.copy(job.direction, slice(nbytes)).synchronize()
        if vllm_module() is not None:
            case.others["peer"] = self._peer(job)
        return case

    def _peer(self, job: SwapJob) -> Callable[[], None]:
        """Return a call of vLLM's batch copy that moves the same pages as the job."""
        torch, (blocks, slots) = self.torch, job.pairs.astype(np.int64).T
        on_device, on_host, sizes = [], [], []
        for region in self.layout.regions:
            on_device.append(region.address + blocks * region.block_stride_bytes)
            first = self.arena.address + region.slot_offset_bytes
            on_host.append(first + slots * self.layout.slot_bytes)
            sizes.append(np.full(len(blocks), region.page_bytes, np.int64))
        device, host, nbytes = (
            torch.from_numpy(np.concatenate(parts)) for parts in (on_device, on_host, sizes)
        )
        load = job.direction is Direction.LOAD
        source, destination = (host, device) if load else (device, host)
        stream = torch.cuda.Stream()
        swap_blocks_batch = vllm_module()._custom_ops.swap_blocks_batch

        def copy() -> None:
            with torch.cuda.stream(stream):
                # The last argument is as in vLLM's worker: only loads may read their source early.
                swap_blocks_batch(source, destination, nbytes, load)
            stream.synchronize()

        return copy


@dataclass(frozen=True)
class Copies:
    """A copy of `nbytes` that can be queued repeatedly."""

    nbytes: int
    start: Callable[[], object]
    """Queues one more copy."""
    ended: Callable[[], int]
    """Returns the number of copies that have ended since the last call."""


NO_COPIES = Copies(0, lambda: None, lambda: 1)
"""The case with which others are compared."""


def engine_copies(bed: CudaBed, job: SwapJob) -> Copies:
    """Return copies that repeat a job of the engine."""
    nbytes = len(job.pairs) * bed.layout.block_bytes
    return Copies(nbytes, lambda: bed.engine.submit(job), lambda: len(bed.engine.poll()))


def big_copies(bed: CudaBed, job: SwapJob) -> Copies:
    """Return contiguous copies with the job's number of bytes each."""
    nbytes = len(job.pairs) * bed.layout.block_bytes
    events: deque[Any] = deque()

    def start() -> None:
        events.append(bed.torch.cuda.Event())
        events[-1].record(bed.copy(job.direction, slice(nbytes)))

    def ended() -> int:
        count = 0
        while events and events[0].query():
            events.popleft()
            count += 1
        return count

    return Copies(nbytes, start, ended)
