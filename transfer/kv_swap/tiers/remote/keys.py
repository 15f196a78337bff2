"""The names of objects. The scheduler looks up the names that the ranks' movers write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import xxhash

from kv_swap.tiers.record import FORMAT

PREFIX = "kv-offload/"
"""Prefix of every object's key, in a store that may hold other objects."""


def namespace(description: Mapping[str, str], slot_bytes: int) -> str:
    """Return 32 hexadecimal digits that identify everything that determines the bytes' meaning."""
    text = json.dumps([FORMAT, slot_bytes, sorted(description.items())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def object_keys(file_id: str, names: Sequence[bytes]) -> list[str]:
    """Return the key of each block's object: 76 characters.

    A name is shortened to a digest. Should two names share one, the second is a mismatch, because
    the object has the whole name.
    """
    prefix = f"{PREFIX}{file_id}/"
    return [prefix + xxhash.xxh3_128_hexdigest(name) for name in names]
