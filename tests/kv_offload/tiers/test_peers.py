"""The host memory of other engines in a pool, above a disk."""

from __future__ import annotations

import numpy as np
import pytest
from kv_swap.tiers.engine import TierDirection

from kv_offload.cache.peer_slots import PeerSlots
from tests.kv_offload.test_host_pool import PooledEngine, meet
from tests.support.manual_tier import REMOTE, disk_config, manual_remote
from tests.support.played_cases import PROMPT

pytestmark = pytest.mark.engine


def test_what_a_peer_evicts_while_it_is_looked_up_is_computed(memory_folder, tmp_path, monkeypatch):
    """The disk never had it: to read it from there would hold the slots that were to be filled."""
    peer = PooledEngine(memory_folder)
    peer.serve("first", PROMPT)
    engine = PooledEngine(memory_folder, more=disk_config(tmp_path))
    meet(engine)
    find, calls = PeerSlots._find, []

    def find_no_longer(peers, keys, names, *, uses=False):
        found = find(peers, keys, names, uses=uses)
        calls.append(int((found >= 0).sum()))
        manager = peer.offload.manager
        manager.forget(np.array([*manager.readable_slots().values()], np.int32))
        return found

    monkeypatch.setattr(PeerSlots, "_find", find_no_longer)
    engine.serve("same", PROMPT)
    assert any(calls)
    assert not peer.offload.manager.readable_slots()
    assert not engine.totals["peers_read_bytes"]
    assert not engine.totals["hook_errors"]
    engine.check_rest()


def reads_from(engine: PooledEngine) -> dict[str, float]:
    return {name: engine.totals[f"{name}_read_bytes"] for name in ("peers", "disk", "remote")}


@pytest.mark.parametrize("shares", [False, True])
def test_a_block_is_in_the_tiers_of_the_engine_that_stored_it_alone(
    memory_folder, tmp_path, shares: bool
) -> None:
    """A tier is written once a pool. What one engine's disk alone has, another one computes."""
    with manual_remote():
        owner, engine = (
            PooledEngine(
                memory_folder,
                async_scheduling=True,
                more={**disk_config(path), **(REMOTE if shares else {})},
            )
            for path in (tmp_path / "first", tmp_path / "second")
        )
        meet(owner, engine)
        owner.serve("stored", PROMPT)
        engine.serve("loaded", PROMPT)
        owner.rest()
        engine.rest()
        assert reads_from(engine)["peers"] > 0
        written = [one.totals["demoted_slots"] for one in (owner, engine)]
        assert written == [(1 + shares) * len(owner.blocks_on_disk()), 0]
        assert owner.blocks_on_disk()
        manager = owner.offload.manager
        manager.forget(np.array([*manager.readable_slots().values()], np.int32))
        assert engine.scheduler.reset_prefix_cache()
        engine.totals.clear()
        engine.serve("again", PROMPT)
        engine.rest()
        read = reads_from(engine)
        assert (read["peers"], read["disk"]) == (0, 0)
        assert (read["remote"] > 0) == (engine.totals["hit_tokens"] > 0) == shares
        assert engine.blocks_on_disk() == owner.blocks_on_disk()
        for one in (owner, engine):
            one.connector.shutdown()


def test_what_is_read_here_and_a_peer_has_by_now_is_waited_for(memory_folder, tmp_path):
    """A request that has less of it on the GPU reads the rest; its slots are still written."""
    engine = PooledEngine(memory_folder, more=disk_config(tmp_path))
    host, tier = engine.offload.manager, engine.ranks[0].tier
    engine.serve("first", PROMPT, 1)
    engine.rest()
    host.forget(np.array([*host.readable_slots().values()], np.int32))
    assert engine.scheduler.reset_prefix_cache()
    engine.serve("beginning", PROMPT[:9], 1)
    try:
        tier.stuck = True
        engine.add("a", PROMPT, 2)
        engine.step(3, copies=True)
        assert len(host.readable_slots()) == 2
        read = [job for job in tier.submitted if job.direction is TierDirection.PROMOTE]
        assert sum(len(job.pairs) for job in read) == len(PROMPT) // 4 - 2
        peer = PooledEngine(memory_folder)
        peer.serve("same", PROMPT, 1)
        meet(engine)
        assert (host.peers.find([*peer.offload.manager.readable_slots()]) >= 0).all()
        assert engine.scheduler.reset_prefix_cache()
        engine.add("b", PROMPT, 2)
        engine.step(3, copies=True)
        assert not engine.totals["hook_errors"]
        assert not engine.answers.keys() & {"a", "b"}
    finally:
        tier.stuck = False
    engine.run()
    engine.check_rest()
    assert not engine.totals["hook_errors"]
