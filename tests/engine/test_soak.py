"""The soak on the CPU engine, `SOAK_SECONDS` in all; `tests/gpu` has the one on a GPU."""

from __future__ import annotations

import ctypes
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kv_swap.engine import Direction, SwapJob
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

from tests.engine.soak import Digests, Question, Soak, check, soak
from tests.support.kv_memory import Storage

SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
"""Of all decisions: the same in every run, unless `SOAK_SEED` is set to explore others."""


@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize(
    ("kind", "synchronous"), [("qwen3", False), ("qwen3", True), ("gemma3", False)]
)
def test_every_loaded_block_is_the_one_that_was_stored(model_folder, kind, synchronous):
    """With one cache group, loads in waves, and two groups; scheduling is synchronous here."""
    result = soak(model_folder, SECONDS / 3, SEED, kind=kind, synchronous_loads=synchronous)
    print(result)
    check(result)
    assert result["same"] == result["answered"]
    assert (result.get("synchronous_loads", 0) > 0) == synchronous


# -- the soak would notice faults --------------------------------------------------------------


@pytest.mark.parametrize("changed", ["slot", "nothing"])
def test_a_load_of_other_bytes_than_were_stored_is_noticed(changed):
    storage = Storage(8 * 64)
    storage.data[:] = np.arange(8 * 64) % 251
    layout = KVLayout.from_tensors(8, [storage.describe("kv", 8, (8, 64), (64, 1), block_dim=0)])
    arena = HostArena(4, layout.slot_bytes, register=None)
    engine = HostSwapEngine(layout, arena, [storage])
    digests = Digests(engine, ctypes.string_at, lambda *_: None)
    engine.submit(SwapJob(0, Direction.STORE, np.array([[3, 1]], np.int32)))
    assert engine.wait(120)
    assert len(engine.poll()) == 1
    if changed == "slot":
        arena.view()[1, 17] ^= 1
    engine.submit(SwapJob(0, Direction.LOAD, np.array([[6, 1]], np.int32)))
    assert engine.wait(120)
    if changed == "slot":
        with pytest.raises(AssertionError, match="block 6 is not what was stored in slot 1"):
            engine.poll()
    else:
        assert len(engine.poll()) == 1
        assert digests.checked == {"store": 1, "load": 1}
    engine.close()


def test_a_wrong_answer_ends_the_soak():
    output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5, 9])])
    running: Any = SimpleNamespace(step=lambda: {"request-0": output})
    run = Soak(running, [], random.Random(0), 0.0)
    run.live["request-0"] = (Question([1], [5, 6, 7], []), 2)
    with pytest.raises(AssertionError, match=r"answers \[5, 9\] instead of \[5, 6\]"):
        run.step()
