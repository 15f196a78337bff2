"""KV caches on a device, their slots, and the expected result of a copy.

Without a CUDA device or CuPy, modules of tests that import this are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kv_swap
import numpy as np
import pytest
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.cuda.streams import CopyStream
from kv_swap.cuda.swap import MAX_PAIRS
from kv_swap.engine import Completion, CopiesWith, Direction, SwapEngine
from kv_swap.layout import KVLayout, Packing, TensorDescription
from kv_swap.memory.arena import HostArena

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
cupy: Any = pytest.importorskip("cupy", reason="CuPy, which compiles the kernels, is not installed")

LOAD, STORE = Direction.LOAD, Direction.STORE
KIB, MIB = 1 << 10, 1 << 20

Pages = list[tuple[int, int]]
"""Page bytes and block stride of each region."""

SHAPES: list[tuple[Pages, int, int]] = [
    ([(16, 16)], 25_000, 1),
    ([(16, 16)], 25_000, 20_000),
    ([(16, 48)], 5_000, 3_000),
    ([(4 * KIB, 4 * KIB)], 12_000, MAX_PAIRS),
    ([(4 * KIB, 4 * KIB)], 12_000, MAX_PAIRS + 1),
    ([(4 * KIB + 16, 5 * KIB)], 6_000, 5_000),
    ([(64 * KIB, 64 * KIB)], 1_500, 1_000),
    ([(2 * MIB, 2 * MIB)], 60, 40),
    ([(2 * MIB - 16, 2 * MIB)], 60, 1),
    ([(16, 32), (4 * KIB + 32, 8 * KIB), (512, 512), (48 * KIB, 48 * KIB)], 900, 700),
    ([(16 * KIB, 16 * KIB)] * 64, 150, 100),
    ([(64 * KIB, 64 * KIB)] * 32, 200, 180),
    ([(96 * KIB, 96 * KIB)] * 50 + [(9 * MIB, 9 * MIB)], 30, 25),
]
"""Pages, number of blocks, and number of pairs to copy."""

ONE_PAIR = np.array([[3, 5]], np.int32)
"""Block 3 and slot 5."""


@dataclass
class Cache:
    """A KV cache of several tensors in one allocation, in the order of its regions."""

    storage: Any
    tensors: list[Any]
    layout: KVLayout

    def pages(self, storage: Any) -> list[Any]:
        """Return views `(num_blocks, page_bytes)` of the pages in the storage, or in a copy."""
        tensors = storage.split([tensor.numel() for tensor in self.tensors])
        return [
            tensor.view(self.layout.num_blocks, -1)[:, : region.page_bytes]
            for tensor, region in zip(tensors, self.layout.regions, strict=True)
        ]

    def blocks(self) -> Any:
        """Return all blocks, region after region: uint8 `(num_blocks, block_bytes)` on the host."""
        return torch.cat(self.pages(self.storage), 1).cpu()


Packings = list[Packing | None] | None
"""The packing of each region, or None."""


def make_cache(
    num_blocks: int, pages: Pages, device: str = "cuda:0", packings: Packings = None
) -> Cache:
    sizes = [num_blocks * stride for _, stride in pages]
    storage = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors = [tensor.view(num_blocks, -1) for tensor in storage.split(sizes)]
    descriptions = [
        TensorDescription.of(f"layer.{index}", tensor[:, :page_bytes], num_blocks)
        for index, (tensor, (page_bytes, _)) in enumerate(zip(tensors, pages, strict=True))
    ]
    layout = KVLayout.from_tensors(num_blocks, descriptions)
    assert len(layout.regions) == len(pages)
    wanted = {f"layer.{i}": p for i, p in enumerate(packings or []) if p is not None}
    return Cache(storage, tensors, layout.packed(wanted))


def make_arena(
    cache: Cache, num_slots: int, slot_bytes: int | None = None, num_windows: int = 0
) -> HostArena:
    return HostArena(
        num_slots,
        slot_bytes or cache.layout.slot_bytes,
        register=CudaRegistrar(cache.storage.device),
        num_windows=num_windows,
    )


def make_engine(
    num_blocks: int,
    pages: Pages,
    num_slots: int,
    device: str = "cuda:0",
    packings: Packings = None,
    copies_with: CopiesWith | None = None,
) -> tuple[CudaSwapEngine, Cache, Any]:
    """Return an engine, its cache, and its slots `(num_slots, slot_bytes)` on the host."""
    cache = make_cache(num_blocks, pages, device, packings)
    arena = make_arena(cache, num_slots)
    engine = CudaSwapEngine(
        cache.layout, arena, cache.storage.device, [cache.storage], copies_with=copies_with
    )
    return engine, cache, torch.from_numpy(arena.view())


def randomize(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=tensor.device))
    torch.cuda.synchronize()


def random_pairs(rng: np.random.Generator, blocks: int, slots: int, count: int) -> Any:
    chosen = [rng.permutation(blocks)[:count], rng.permutation(slots)[:count]]
    return np.stack(chosen, 1).astype(np.int32)


def same_pairs(count: int) -> Any:
    """Return pairs of each block and the slot of the same number."""
    return np.stack([np.arange(count, dtype=np.int32)] * 2, 1)


def ids(pairs: Any) -> tuple[Any, Any]:
    """Return block ids and slot ids, as torch indexes."""
    blocks, slots = torch.from_numpy(pairs.astype(np.int64)).unbind(1)
    return blocks, slots


def expect_copied(cache: Cache, slots: Any, pairs: Any, direction: Direction) -> tuple[Any, Any]:
    """Return the storage and the slots expected after the copy, both on the host."""
    storage, slots = cache.storage.cpu(), slots.clone()
    block_ids, slot_ids = ids(pairs)
    if direction is STORE:
        slots[slot_ids] = cache.blocks()[block_ids]
    else:
        parts = slots[slot_ids].split([region.page_bytes for region in cache.layout.regions], 1)
        for pages, part in zip(cache.pages(storage), parts, strict=True):
            pages[block_ids] = part
    return storage, slots


def finish(engine: SwapEngine) -> list[Completion]:
    assert engine.wait(60)
    return engine.poll()


def no_wait(stream: CopyStream, marks: Any) -> None:
    """A faulty `wait_stream`, which does not order a copy after anything."""


def run_script(script: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run a script, in which names stand for `values`, in a separate process."""
    for name, value in values.items():
        script = script.replace(name, value)
    root = str(Path(kv_swap.__file__).parents[1])
    search = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
