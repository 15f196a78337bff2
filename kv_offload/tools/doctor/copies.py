"""Measures the speed of stores and loads, with the copy paths that engines use."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from kv_swap import Direction, KVLayout, SwapJob, TensorDescription, create_engine
from kv_swap.engine import CopiesWith
from kv_swap.layout import Packing

from kv_offload.tools.doctor import BLOCK_BYTES

if TYPE_CHECKING:
    import torch
    from kv_swap import SwapEngine

BLOCKS = 64
"""128 MiB each of GPU memory and host memory."""

ROUNDS = 5
TIMEOUT_SECONDS = 30.0

PATHS: dict[CopiesWith, str] = {
    "host": "the host",
    "kernels": "the kernels",
    "gates": "the copy engine",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of the fastest round, and the copy path that was used."""

    store: float
    load: float
    path: str


def measure(device: torch.device, *, packs: bool = False) -> Rates:
    """Store and load the blocks of a tensor while this process copies nothing else.

    With `packs`, the blocks hold bfloat16 numbers and are packed; rates count the tensor's bytes.
    Blocks for some seconds. Raises the errors of torch and `kv_swap` (out of memory, no CuPy, a
    failed copy), and `TimeoutError` if page-locking or a copy takes too long.
    """
    import torch

    kv = torch.randn((BLOCKS, BLOCK_BYTES // 2), device=device).to(torch.bfloat16)
    layout = KVLayout.from_tensors(BLOCKS, [TensorDescription.of("kv", kv, BLOCKS)])
    if packs:
        layout = layout.packed({"kv": Packing(period=BLOCK_BYTES // 16)})
    with create_engine("auto", layout, BLOCKS, keep_alive=[kv]) as engine:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while engine.ready_slots < BLOCKS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"memory was not page-locked within {TIMEOUT_SECONDS:g} s")
            time.sleep(0.001)
        store, load = (
            max(_run(engine, direction) for _ in range(ROUNDS))
            for direction in (Direction.STORE, Direction.LOAD)
        )
        path = PATHS[engine.copies_with]
    return Rates(store, load, path)


def _run(engine: SwapEngine, direction: Direction) -> float:
    """Copy every block once and return bytes per second."""
    pairs = np.repeat(np.arange(BLOCKS, dtype=np.int32)[:, None], 2, axis=1)
    engine.submit(SwapJob(0, direction, pairs))
    if not engine.wait(TIMEOUT_SECONDS):
        raise TimeoutError(f"a copy did not end within {TIMEOUT_SECONDS:g} s")
    (done,) = engine.poll()
    if done.error is not None:
        raise done.error
    return done.nbytes / done.seconds
