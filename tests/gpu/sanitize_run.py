"""Runs every kernel on a small job under compute-sanitizer: memcheck, then racecheck.

`python tests/gpu/sanitize_run.py` needs a CUDA device, CuPy and compute-sanitizer, which comes with
the CUDA toolkit. Exit status 0 if both tools found nothing and every byte was right; 1 otherwise.
Torch launches nothing here: its kernels would be checked too, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")
TOOLS = ("memcheck", "racecheck")

PAGES = [(48, 64), (4112, 8192), (20 << 10, 20 << 10), (256, 256)]
"""Page bytes and block stride of each region."""
BLOCKS, SLOTS, PAIRS = 24, 20, 9


def main() -> int:
    if sys.argv[1:] == ["job"]:
        return run_job()
    sanitizer = shutil.which("compute-sanitizer") or (TOOLKIT.exists() and str(TOOLKIT))
    if not sanitizer:
        print(f"compute-sanitizer is neither on PATH nor at {TOOLKIT}: install the CUDA toolkit")
        return 1
    failed = []
    for tool in TOOLS:
        started = time.perf_counter()
        # Fewer modules of other libraries for the tool to look at.
        environment = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
        command += [sys.executable, __file__, "job"]
        done = subprocess.run(command, env=environment, check=False)
        print(f"{tool}: exit status {done.returncode}, {time.perf_counter() - started:.0f} s\n")
        if done.returncode:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "both tools found nothing")
    return 1 if failed else 0


def run_job() -> int:
    import cupy
    import torch
    from kv_swap.cuda.device import CudaRegistrar
    from kv_swap.cuda.kernel_families import FAMILIES
    from kv_swap.cuda.swap import LIST_BYTES, SwapKernel, write_list
    from kv_swap.engine import Direction
    from kv_swap.layout import KVLayout, Region
    from kv_swap.memory.arena import HostArena

    from tests.support.kv_memory import expect_copied

    device = torch.device("cuda", 0)
    torch.cuda.init()
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, sum(stride for _, stride in PAGES) * BLOCKS).astype(np.uint8)
    memory = cupy.asarray(content)
    regions, address, offset = [], memory.data.ptr, 0
    for page_bytes, stride in PAGES:
        regions.append(Region(address, page_bytes, stride, offset))
        address += stride * BLOCKS
        offset += page_bytes
    layout = KVLayout(BLOCKS, tuple(regions))
    registrar = CudaRegistrar(device)
    arena = HostArena(SLOTS, layout.slot_bytes, register=registrar)
    lists = HostArena(1, LIST_BYTES, register=registrar)
    slots = arena.view()
    stream = torch.cuda.current_stream(device)

    # What `memory` holds before each kernel, and where it lies.
    storage: Any = SimpleNamespace(address=memory.data.ptr, data=content)
    wrong = []
    for family in FAMILIES:
        if torch.cuda.get_device_capability(device) < family.min_capability:
            print(f"{family.name}: this device is too old for it")
            continue
        kernel = SwapKernel(layout, arena, device, family)
        for direction in Direction:
            slots[:] = rng.integers(0, 256, slots.shape)
            memory.set(content)
            pairs = np.stack([rng.permutation(n)[:PAIRS] for n in (BLOCKS, SLOTS)], 1)
            expected, expected_slots = expect_copied(
                layout, storage, slots, direction, pairs.tolist()
            )
            write_list(lists.view()[0], pairs.astype(np.int32))
            kernel.launch(direction, lists.address, stream)
            stream.synchronize()
            right = np.array_equal(memory.get(), expected) and np.array_equal(slots, expected_slots)
            print(f"{family.name} {direction.value}: bytes {'right' if right else 'WRONG'}")
            if not right:
                wrong.append(f"{family.name} {direction.value}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
