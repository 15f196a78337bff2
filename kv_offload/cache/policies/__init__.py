"""Eviction policies of the host cache, one per module, by their name in the configuration."""

from __future__ import annotations

from kv_offload.cache.policies.auto import AutoPolicy
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.policies.lru import LRUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUPolicy, "auto": AutoPolicy}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make the policy `name` for a cache of `capacity` slots. Raises `CapacityError`."""
    return POLICIES[name](capacity)
