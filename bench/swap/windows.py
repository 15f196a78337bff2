"""Compares loads from another process's arena with loads from this process's arena.

usage: python -m bench.swap.windows [--gib 4] [--rounds 15] [--out FILE.json]

Another process page-locks an arena of `--gib` GiB in /dev/shm with the same bytes as this process's
arena. Jobs of the same scattered blocks load from both in turns. The exit status is 1 if a byte
differs. Without a GPU, the host engine copies, and nothing is page-locked.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.kernel_families import can_pack
from kv_swap.engine import Direction, SwapEngine, SwapJob
from kv_swap.factory import create_engine, numa_node
from kv_swap.layout import Packing
from kv_swap.memory.arena import HostArena
from kv_swap.memory.arena_file import ArenaFiles
from kv_swap.memory.shared import SharedMemory

from bench.machine import cuda_torch, machine, write_result
from bench.swap.bed import describe

KIB, GIB = 1 << 10, 1 << 30
LAYERS = 32
SHAPES: tuple[tuple[int, Packing | None], ...] = (
    (16 * KIB, None),
    (2048 * KIB, None),
    (64 * KIB, Packing(128)),
)
"""Page sizes: on a GPU, kernels copy the first, the copy engine the second; the last is packed."""

JOB_BLOCKS = 1024
LIMIT_SECONDS = 600.0


@dataclass
class Bed:
    """An engine with a KV cache, whose blocks are in its slots, in order."""

    engine: SwapEngine
    memory: torch.Tensor
    num_blocks: int

    @classmethod
    def make(cls, nbytes: int, page_bytes: int, packing: Packing | None) -> Bed:
        """Fill a KV cache of `nbytes` with normally distributed bf16, and store all blocks."""
        device = torch.device("cpu" if cuda_torch() is None else "cuda:0")
        num_blocks = max(2, nbytes // (LAYERS * page_bytes))
        shape = (LAYERS * num_blocks * page_bytes // 2,)
        memory = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().view(torch.uint8)
        layout = describe(memory.data_ptr(), num_blocks, LAYERS, page_bytes)
        if packing is not None:
            layout = layout.packed({f"layer.{layer}": packing for layer in range(LAYERS)})
        engine = create_engine("auto", layout, num_blocks, keep_alive=[memory], num_windows=1)
        wait_until(lambda: engine.ready_slots == num_blocks)
        made = cls(engine, memory, num_blocks)
        for first in range(0, num_blocks, JOB_BLOCKS):
            blocks = np.arange(first, min(first + JOB_BLOCKS, num_blocks), dtype=np.int32)
            made.run(Direction.STORE, np.stack([blocks, blocks], 1))
        return made

    def run(self, direction: Direction, pairs: Any) -> float:
        """Run a job, and return the seconds until its completion was polled."""
        started = time.perf_counter()
        self.engine.submit(SwapJob(1, direction, pairs))
        if self.memory.device.type == "cpu":
            self.engine.wait(LIMIT_SECONDS)  # its thread needs the GIL
        while not (completions := self.engine.poll()):
            pass
        seconds = time.perf_counter() - started
        assert completions[0].error is None, completions[0].error
        assert not completions[0].refused_rows
        return seconds


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("memory was not page-locked in time: see the log")
        time.sleep(0.001)


@contextmanager
def owner(bed: Bed, folder: Path) -> Iterator[Path]:
    """Copy the slots to an arena that another process holds, and yield the arena's path."""
    files = ArenaFiles(folder, 0, "bench", reserve=False)
    slots = bed.engine.slots()
    with files.create(slots.nbytes) as memory:
        device = bed.memory.device
        node = numa_node("cuda", device) if device.type == "cuda" else None
        if node is not None:
            memory.prefer_node(node, 0, 1)
        HostArena(*slots.shape, register=None, shared=memory).view()[:] = slots
        arguments = (str(folder), memory.name, *map(str, slots.shape), str(device))
        command = [sys.executable, "-m", "bench.swap.windows", "--own", *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                yield folder / memory.name
            finally:
                process.kill()


def own(folder: str, name: str, num_slots: str, slot_bytes: str, device: str) -> None:
    """Hold an arena, page-locked for a GPU, until standard input ends."""
    files = ArenaFiles(Path(folder), 0, "bench", reserve=False)
    shape = int(num_slots), int(slot_bytes)
    register = CudaRegistrar(torch.device(device)) if device.startswith("cuda") else None
    memory: SharedMemory = files.attach(name, shape[0] * shape[1])
    arena = HostArena(*shape, register=register, shared=memory)
    print("ready", flush=True)
    sys.stdin.read()
    del arena


def free_device_bytes() -> int | None:
    """Return the free memory of the GPU."""
    return None if cuda_torch() is None else int(torch.cuda.mem_get_info()[0])


def measure(nbytes: int, page_bytes: int, packing: Packing | None, rounds: int) -> dict[str, Any]:
    """Return the row of one shape. Exits if a byte of a load differs."""
    bed = Bed.make(nbytes, page_bytes, packing)
    windows = bed.engine.windows
    assert windows is not None
    before = bed.memory.clone()
    with TemporaryDirectory(dir="/dev/shm") as folder, owner(bed, Path(folder)) as path:
        free_bytes, started = free_device_bytes(), time.perf_counter()
        windows.attach(0, str(path), bed.num_blocks)
        wait_until(lambda: windows.ready_slots[0] == bed.num_blocks)
        attach_seconds, free_after = time.perf_counter() - started, free_device_bytes()
        count = min(JOB_BLOCKS, bed.num_blocks)
        chosen = np.random.default_rng(0).permutation(bed.num_blocks)[:count].astype(np.int32)
        starts = {"own": 0, "window": windows.window_slots}
        seconds: dict[str, list[float]] = {name: [] for name in starts}
        for number in range(rounds + 2):
            for name, start in starts.items():
                took = bed.run(Direction.LOAD, np.stack([chosen, chosen + start], 1))
                if number >= 2:  # the first two rounds warm up
                    seconds[name].append(took)
        bed.memory.zero_()
        for first in range(0, bed.num_blocks, JOB_BLOCKS):
            blocks = np.arange(first, min(first + JOB_BLOCKS, bed.num_blocks), dtype=np.int32)
            bed.run(Direction.LOAD, np.stack([blocks, blocks + windows.window_slots], 1))
        if not torch.equal(bed.memory, before):
            raise SystemExit("a load from a window brought other bytes than were stored")
        started = time.perf_counter()
        windows.detach(0)
        wait_until(lambda: str(path) not in Path("/proc/self/maps").read_text())
        detach_seconds = time.perf_counter() - started
    loaded_bytes = count * bed.engine.layout.block_bytes
    rates = {name: loaded_bytes / statistics.median(took) / 1e9 for name, took in seconds.items()}
    row = {
        "page_bytes": page_bytes,
        "packed": bool(bed.engine.layout.num_tiles),
        "path": bed.engine.copies_with,
        "arena_bytes": bed.engine.slots().nbytes,
        "own_gbps": round(rates["own"], 2),
        "window_gbps": round(rates["window"], 2),
        "ratio": round(rates["window"] / rates["own"], 3),
        "attach_seconds": round(attach_seconds, 3),
        "detach_seconds": round(detach_seconds, 3),
        "device_bytes": None if free_after is None else (free_bytes or 0) - free_after,
    }
    bed.engine.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--gib", type=float, default=4.0, help="GiB of KV cache and arena")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    parser.add_argument("--own", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.own:
        own(*arguments.own)
        return
    rows = []
    for page_bytes, packing in SHAPES:
        found = cuda_torch()
        if packing is not None and found and not can_pack(found.cuda.get_device_capability()):
            continue
        rows.append(measure(int(arguments.gib * GIB), page_bytes, packing, arguments.rounds))
        print(rows[-1], flush=True)
    if arguments.out:
        write_result(arguments.out, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
