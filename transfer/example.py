"""Copy blocks of a tensor to host memory and back: python transfer/example.py [cuda]."""

import sys

import numpy as np
import torch
from kv_swap import Direction, KVLayout, SwapJob, TensorDescription, create_engine


def round_trip(kv: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Store blocks of `kv`, `(num_blocks, ...)`, in slots, zero them all, and load these again.

    Each pair is a block and its slot. Kernels copy a CUDA tensor, the host copies any other.
    """
    layout = KVLayout.from_tensors(len(kv), [TensorDescription.of("kv", kv, len(kv))])
    with create_engine("auto", layout, num_slots=4, keep_alive=[kv]) as engine:
        for direction in (Direction.STORE, Direction.LOAD):
            engine.submit(SwapJob(0, direction, np.array(pairs, np.int32)))
            assert engine.wait(timeout_seconds=10), "a serving engine polls instead"
            assert [done.error for done in engine.poll()] == [None]
            if direction is Direction.STORE:
                kv.zero_()


if __name__ == "__main__":
    tensor = torch.arange(8.0 * 64, device=(sys.argv[1:] or ["cpu"])[0]).reshape(8, 64)
    round_trip(tensor, pairs=[(1, 0), (4, 2)])
    print(tensor[:, 0].tolist())  # of all blocks, 1 and 4 are back
