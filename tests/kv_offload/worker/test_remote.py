"""A rank's way to a remote store."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap.memory.arena import HostArena

from kv_offload.config import RemoteConfig
from kv_offload.worker.remote import SMALL_OBJECT_BYTES, Remote
from kv_offload.worker.sharing import ALONE


@pytest.mark.parametrize(
    ("kind", "slot_bytes", "parts"),
    [
        ("s3", SMALL_OBJECT_BYTES // 8, ["64 KiB in the bucket", "8 times as large"]),
        ("s3", SMALL_OBJECT_BYTES, []),
        ("folder", SMALL_OBJECT_BYTES // 8, []),
    ],
)
def test_blocks_that_are_small_for_a_bucket_are_named_once(
    kind, slot_bytes, parts, tmp_path, caplog
):
    where = {"s3": {"url": "s3://nowhere/kv"}, "folder": {"path": str(tmp_path)}}[kind]
    remote = Remote(RemoteConfig(kind=kind, bytes=0, **where), {})
    arena = HostArena(1, slot_bytes, register=None)
    transfer: Any = SimpleNamespace(slots=arena.view)
    with caplog.at_level(logging.WARNING, logger="kv_offload"):
        for rank in range(2):
            remote.open(rank, 2, ALONE, "", transfer).close()
    assert len(caplog.messages) == bool(parts)
    assert all(part in caplog.text for part in parts)
