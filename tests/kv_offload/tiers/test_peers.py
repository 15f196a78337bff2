"""The host memory of other engines in a pool, above a disk."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.cache.peer_slots import PeerSlots
from tests.kv_offload.test_host_pool import PooledEngine, meet
from tests.support.played_cases import PROMPT

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def test_what_a_peer_evicts_while_it_is_looked_up_is_computed(memory_folder, tmp_path, monkeypatch):
    """The disk never had it: to read it from there would hold the slots that were to be filled."""
    disk = {"path": str(tmp_path), "bytes": "1MiB", "keep_on_restart": False}
    peer = PooledEngine(memory_folder)
    peer.serve("first", PROMPT)
    engine = PooledEngine(memory_folder, more={"disk": disk})
    meet(engine)
    find, calls = PeerSlots.find, []

    def find_no_longer(peers, keys, *, uses=False):
        found = find(peers, keys, uses=uses)
        calls.append(int((found >= 0).sum()))
        manager = peer.offload.manager
        manager.forget(np.array([*manager.readable_slots().values()], np.int32))
        return found

    monkeypatch.setattr(PeerSlots, "find", find_no_longer)
    engine.serve("same", PROMPT)
    assert any(calls)
    assert not peer.offload.manager.readable_slots()
    assert not engine.totals["peers_read_bytes"]
    assert not engine.totals["hook_errors"]
    engine.check_rest()
