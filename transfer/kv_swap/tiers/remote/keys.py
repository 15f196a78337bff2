"""The names of objects. The scheduler asks for the names that the ranks' movers write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import xxhash

from kv_swap.tiers.record import FORMAT

PREFIX = "kv-offload/"
"""Begins the key of every object, in a store that may have others."""


def namespace(description: Mapping[str, str], slot_bytes: int) -> str:
    """Return 32 hexadecimal digits that stand for all that changes what the bytes mean."""
    text = json.dumps([FORMAT, slot_bytes, sorted(description.items())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def object_keys(file_id: str, names: Sequence[bytes]) -> list[str]:
    """Return the key of each block's object: 76 characters.

    A name is shortened to a digest. Should two share one, the second is a mismatch: the object has
    the whole name.
    """
    prefix = f"{PREFIX}{file_id}/"
    return [prefix + xxhash.xxh3_128_hexdigest(name) for name in names]
