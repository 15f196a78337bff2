"""Measures a remote store: writes, looks up, reads back and removes blocks."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

import numpy as np

from kv_swap.errors import TierError
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierCompletion, TierDirection, TierJob
from kv_swap.tiers.remote.client import RemoteClient, object_keys
from kv_swap.tiers.remote.tier import RemoteTier

TIMEOUT_SECONDS = 90.0
"""Seconds; more than any call to a store takes."""


@dataclass(frozen=True, slots=True)
class RemoteRates:
    """Bytes per second, and the numbers of blocks tried and stored."""

    put_bytes_per_second: float
    get_bytes_per_second: float
    stored: int
    tried: int


def measure(
    asker: RemoteClient, client: RemoteClient, num_blocks: int, block_bytes: int
) -> RemoteRates:
    """Store blocks under names unique to this call, read them back, and verify each.

    `asker`, which must be connected, looks the blocks up and removes them. Raises `TierError` if
    the store cannot be reached or accepts no block, or if a stored block is missing or changed.
    """
    memory = HostArena(num_blocks, block_bytes, register=None).view()
    memory[:] = np.frombuffer(os.urandom(memory.nbytes), np.uint8).reshape(memory.shape)
    names = [secrets.token_bytes(16) for _ in range(num_blocks)]
    with RemoteTier(client, memory, {"probe": secrets.token_hex(8)}) as tier:
        _run(tier, TierDirection.PROMOTE, [0], names[:1])  # connects, and finds nothing
        put = _run(tier, TierDirection.DEMOTE, list(range(num_blocks)), names)
        stored = [slot for slot in range(num_blocks) if slot not in put.failed]
        kept = [names[slot] for slot in stored]
        keys = object_keys(tier.file_id, kept)
        found = asker.exist(keys)
        get = _run(tier, TierDirection.PROMOTE, stored, kept)
        asker.remove(keys)
    if get.failed or not all(found):
        raise TierError(
            f"of {len(stored)} blocks that the store took {sum(found)} were found, "
            f"{len(stored) - len(get.failed)} read, and {get.mismatches} were something else: it "
            f"evicts too soon, or damages what it holds"
        )
    return RemoteRates(put.nbytes / put.seconds, get.nbytes / get.seconds, len(stored), num_blocks)


def _run(
    tier: RemoteTier, direction: TierDirection, slots: list[int], names: list[bytes]
) -> TierCompletion:
    pairs = np.array([slots, range(len(slots))], np.int32).T
    tier.submit(TierJob(1, direction, pairs, names))
    if not tier.wait(TIMEOUT_SECONDS):
        raise TierError(f"a {direction.value} did not end within {TIMEOUT_SECONDS:g} s")
    (done,) = tier.poll()
    if done.error is not None:
        raise done.error
    return done
