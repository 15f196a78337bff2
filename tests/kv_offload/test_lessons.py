"""The lessons of `docs/design/lessons.md` that need no device and no engine."""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import Any

import numpy as np
import pytest
from kv_swap.memory.arena import HostArena
from numpy.typing import NDArray

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.connector import KVOffloadConnector
from tests.support.played_engine import PlayedEngine
from tests.support.registrars import is_mapped


def held_view(arena: HostArena) -> NDArray[np.uint8]:
    return arena.view()


def bare_view(arena: HostArena) -> NDArray[np.uint8]:
    """Return the same bytes by address alone, like a deleter that holds nothing."""
    memory = (ctypes.c_uint8 * arena.nbytes).from_address(arena.address)
    return np.ctypeslib.as_array(memory).reshape(arena.num_slots, arena.slot_bytes)


@pytest.mark.parametrize(("make_view", "lives"), [(held_view, True), (bare_view, False)])
def test_memory_is_returned_only_when_no_view_is_left(make_view, lives):
    arena = HostArena(64, mmap.PAGESIZE, register=None)
    address = arena.address
    view = make_view(arena)[3:5].view(np.int32)
    del arena
    gc.collect()
    assert is_mapped(address) is lives
    del view
    gc.collect()
    assert not is_mapped(address)


def test_keys_follow_the_blocks_of_the_final_configuration(monkeypatch):
    """`cache_config.block_size` may be a placeholder while the connector is built."""
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1]
    build = KVOffloadConnector.__init__

    def build_with_placeholder(
        self: Any, vllm_config: Any, role: Any, kv_cache_config: Any
    ) -> None:
        final, vllm_config.cache_config.block_size = vllm_config.cache_config.block_size, 32
        build(self, vllm_config, role, kv_cache_config)
        vllm_config.cache_config.block_size = final

    monkeypatch.setattr(KVOffloadConnector, "__init__", build_with_placeholder)
    engine = PlayedEngine((CacheGroup(0, 4),))
    engine.serve("a", prompt, max_tokens=1)
    assert engine.totals["stored_bytes"] == 3 * 64
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("b", prompt, max_tokens=1)
    assert engine.totals["hit_tokens"] == 12
    engine.check_rest()
