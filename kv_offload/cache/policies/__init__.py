"""Eviction policies of the host cache, one a file, by the name that the configuration uses."""

from __future__ import annotations

from kv_offload.cache.policies.auto import AutoPolicy
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.policies.lru import LRUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRUPolicy, "auto": AutoPolicy}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Make the policy `name` for a cache of `capacity` slots. Raises `CapacityError`."""
    return POLICIES[name](capacity)
