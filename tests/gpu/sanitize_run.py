"""Run every kernel on a small job under compute-sanitizer: memcheck, then racecheck.

`python tests/gpu/sanitize_run.py` needs a CUDA device, CuPy and compute-sanitizer, which comes with
the CUDA toolkit. The exit status is 0 if both tools found nothing and every byte was right,
otherwise 1. Torch launches nothing here: checking its kernels, too, would take minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kv_swap.cuda.kernel_families import (  # noqa: E402
    BULK,
    FAMILIES,
    PACKED,
    KernelFamily,
    can_pack,
    can_run,
)
from kv_swap.cuda.swap import (  # noqa: E402
    LIST_BYTES,
    STATUS_OFFSET_BYTES,
    SwapKernel,
    write_list,
)
from kv_swap.engine import Direction  # noqa: E402
from kv_swap.layout import KVLayout, Packing, Region  # noqa: E402
from kv_swap.memory.arena import HostArena  # noqa: E402
from kv_swap.packing.slots import SlotPacker  # noqa: E402

TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")
TOOLS = ("memcheck", "racecheck")

Pages = list[tuple[int, int]]
"""Page bytes and block stride of each region."""

PAGES = [(48, 64), (4112, 8192), (20 << 10, 20 << 10), (256, 256)]
PACKED_PAGES = [(48 << 10, 48 << 10), ((32 << 10) + 48, (32 << 10) + 64), (4112, 8192)]
BLOCKS, SLOTS, PAIRS = 24, 20, 9


def main() -> int:
    if sys.argv[1:2] == ["job"]:
        return run_job(sys.argv[2])
    sanitizer = shutil.which("compute-sanitizer") or (TOOLKIT.exists() and str(TOOLKIT))
    if not sanitizer:
        print(f"compute-sanitizer is neither on PATH nor at {TOOLKIT}: install the CUDA toolkit")
        return 1
    failed = []
    for tool in TOOLS:
        started = time.perf_counter()
        # Leaves fewer modules of other libraries for the tool to check.
        environment = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
        command += [sys.executable, __file__, "job", tool]
        done = subprocess.run(command, env=environment, check=False)
        print(f"{tool}: exit status {done.returncode}, {time.perf_counter() - started:.0f} s\n")
        if done.returncode:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "both tools found nothing")
    return 1 if failed else 0


def run_job(tool: str) -> int:
    import torch

    torch.cuda.init()
    packed = run_packed(stores=tool != "racecheck")
    wrong = [what for what, right in (*run_raw(), *packed) if not right]
    print(f"WRONG: {', '.join(wrong)}" if wrong else "all bytes are right")
    return 1 if wrong else 0


class Bed:
    """KV in CuPy's memory, its slots, and one list."""

    def __init__(self, pages: Pages, content: NDArray[np.uint8], packing: Packing | None) -> None:
        import cupy
        import torch
        from kv_swap.cuda.device import CudaRegistrar

        self.device = torch.device("cuda", 0)
        self.content = content
        self.memory = cupy.asarray(content)
        regions, address, offset = [], self.memory.data.ptr, 0
        for page_bytes, stride in pages:
            regions.append(Region(address, page_bytes, stride, offset, frozenset(["kv"])))
            address += stride * BLOCKS
            offset += page_bytes
        layout = KVLayout(BLOCKS, tuple(regions))
        self.layout = layout if packing is None else layout.packed({"kv": packing})
        registrar = CudaRegistrar(self.device)
        self.arena = HostArena(SLOTS, self.layout.slot_bytes, register=registrar)
        self.slots = self.arena.view()
        self.lists = HostArena(1, LIST_BYTES, register=registrar)

    def launch(
        self, direction: Direction, pairs: NDArray[np.int32], *families: KernelFamily
    ) -> None:
        import torch

        stream = torch.cuda.current_stream(self.device)
        write_list(self.lists.view()[0], pairs)
        for family in families:
            kernel = SwapKernel(self.layout, self.arena, self.device, family, direction)
            kernel.launch(self.lists.address, stream)
            stream.synchronize()


def make_pairs(rng: np.random.Generator) -> NDArray[np.int32]:
    chosen = [rng.permutation(n)[:PAIRS] for n in (BLOCKS, SLOTS)]
    return np.stack(chosen, 1).astype(np.int32)


def run_raw() -> Iterator[tuple[str, bool]]:
    """Each family on random bytes."""
    from tests.support.kv_memory import expect_copied

    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, sum(stride for _, stride in PAGES) * BLOCKS).astype(np.uint8)
    bed = Bed(PAGES, content, None)
    # The memory's content before each kernel, and its place.
    storage: Any = SimpleNamespace(address=bed.memory.data.ptr, data=content)
    for family in FAMILIES:
        if not can_run(family, bed.device):
            print(f"{family.name}: this device does not run it")
            continue
        for direction in Direction:
            bed.slots[:] = rng.integers(0, 256, bed.slots.shape)
            bed.memory.set(content)
            pairs = make_pairs(rng)
            expected, expected_slots = expect_copied(
                bed.layout, storage, bed.slots, direction, pairs.tolist()
            )
            bed.launch(direction, pairs, family)
            right = np.array_equal(bed.memory.get(), expected)
            yield (
                f"{family.name} {direction.value}",
                right and np.array_equal(bed.slots, expected_slots),
            )


def run_packed(*, stores: bool) -> Iterator[tuple[str, bool]]:
    """Run the packing family, and the one for raw pages of its layout, in both directions.

    Without `stores`, only loads. Racecheck reports hazards if one lane of a warp arrives at a
    barrier in shared memory for all, as in a store: see csrc/swap_packed.cu.
    """
    import torch

    from tests.support.packed_kv import (
        hostile_tiles,
        normal_tiles,
        random_tiles,
        tiles_with_escapes,
        tiles_with_zeros,
    )

    if not can_pack(torch.cuda.get_device_capability()):
        print(f"{PACKED.name}: this device is too old for it")
        return
    nbytes = sum(stride for _, stride in PACKED_PAGES) * BLOCKS
    odd = [
        hostile_tiles(),
        tiles_with_zeros(20),
        tiles_with_escapes(list(range(20))),
        random_tiles(4),
    ]
    tiles = np.concatenate([*[normal_tiles(64, seed) for seed in range(3)], *odd])
    rng = np.random.default_rng(0)
    tiles = tiles[rng.integers(0, len(tiles), nbytes // 16384 + 1)]
    bed = Bed(PACKED_PAGES, tiles.ravel()[:nbytes], Packing(24))
    pairs = make_pairs(rng)
    blocks, slots = pairs.T
    pages, first = {}, 0
    for index, (page_bytes, stride) in enumerate(PACKED_PAGES):
        page = bed.content[first : first + stride * BLOCKS].reshape(BLOCKS, stride)
        pages[index] = page[blocks, :page_bytes]
        first += stride * BLOCKS
    expected = np.zeros((PAIRS, bed.layout.slot_bytes), np.uint8)
    refused = SlotPacker(bed.layout).pack(pages, expected)
    if stores:
        bed.launch(Direction.STORE, pairs, PACKED, BULK)
        yield "packed store", np.array_equal(bed.slots[slots][~refused], expected[~refused])
        statuses = bed.lists.view()[0, STATUS_OFFSET_BYTES : STATUS_OFFSET_BYTES + PAIRS]
        yield "packed statuses", np.array_equal(statuses != 0, refused)
    bed.slots[slots] = expected
    bed.memory.fill(0)
    bed.launch(Direction.LOAD, pairs[~refused], PACKED, BULK)
    loaded, first, right = bed.memory.get(), 0, True
    for index, (page_bytes, stride) in enumerate(PACKED_PAGES):
        page = loaded[first : first + stride * BLOCKS].reshape(BLOCKS, stride)
        right &= np.array_equal(page[blocks[~refused], :page_bytes], pages[index][~refused])
        first += stride * BLOCKS
    yield f"packed load of {int((~refused).sum())} of {PAIRS} blocks", right


if __name__ == "__main__":
    sys.exit(main())
