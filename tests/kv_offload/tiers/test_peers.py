"""The host memory of other engines in a pool, as the tier above a disk."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.cache.peers import PeerDirectories
from kv_offload.engines.vllm.start import ranks
from tests.support.played_cases import PROMPT
from tests.support.played_engine import PlayedEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def in_pool(folder: Path, disk: Path | None = None) -> PlayedEngine:
    """Return an engine that has a seat in a pool, and maybe a disk."""
    plugin = {"host_pool": "chat", "host_pool_path": str(folder)}
    if disk is not None:
        plugin["disk"] = {"path": str(disk), "bytes": "1MiB", "keep_on_restart": False}
    with mock.patch.object(ranks, "gather_over_ranks", lambda value: [value]):
        return PlayedEngine(plugin=plugin)


def test_what_a_peer_evicts_while_it_is_looked_up_is_computed(memory_folder, tmp_path, monkeypatch):
    """The disk, which is the last tier, never had it: to read it from there would hold the slots
    that were to be filled for ever."""
    peer = in_pool(memory_folder)
    peer.serve("first", PROMPT)
    engine = in_pool(memory_folder, tmp_path)
    have = PeerDirectories.have

    def have_no_longer(directories, keys, *, uses=False):
        found = have(directories, keys, uses=uses)
        manager = peer.offload.manager
        manager.forget(np.array([*manager.readable_slots().values()], np.int32))
        return found

    monkeypatch.setattr(PeerDirectories, "have", have_no_longer)
    engine.serve("same", PROMPT)
    assert not peer.offload.manager.readable_slots()
    assert not engine.totals["hook_errors"]
    engine.check_rest()
