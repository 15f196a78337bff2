"""The remote store of a replica, and a rank's connection to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kv_swap.engine import SwapEngine
from kv_swap.tiers.remote import mooncake, s3

from kv_offload.config import RemoteConfig
from kv_offload.config.checks import check_shared_folder
from kv_offload.config.sizes import format_size
from kv_offload.errors import UnsupportedError
from kv_offload.worker.sharing import SharingRanks

if TYPE_CHECKING:
    from kv_swap.tiers.remote.client import RemoteClient
    from kv_swap.tiers.remote.tier import RemoteTier

logger = logging.getLogger(__name__)

SMALL_OBJECT_BYTES = 512 << 10
"""At 20 ms per request, S3 objects of 64 KiB were read at a fifth of the rate of 4 MiB, those of
256 KiB at half, and those of 512 KiB at three quarters (2 cores, `rclone serve s3`, November
2026)."""


def make_client(remote: RemoteConfig, segment_bytes: int) -> RemoteClient:
    """Return an unconnected client. Mooncake gets `segment_bytes` of memory from it."""
    if remote.path is not None:
        from kv_swap.tiers.remote.folder import FolderClient

        return FolderClient(Path(remote.path), remote.bytes)
    if remote.url is not None:
        from kv_swap.tiers.remote.s3 import S3Client

        return S3Client(remote.url, remote.bytes)
    from kv_swap.tiers.remote.mooncake import MooncakeClient

    assert remote.address is not None
    return MooncakeClient(remote.address, segment_bytes)


def check_usable(remote: RemoteConfig) -> None:
    """Refuse an unusable shared folder, or a store whose package is not installed.

    Raises `ConfigError` or `UnsupportedError`.
    """
    if remote.path is not None:
        check_shared_folder(Path(remote.path))
    if remote.kind == "mooncake" and not mooncake.is_installed():
        raise UnsupportedError(f"remote.kind: {remote.kind}: {mooncake.NOT_INSTALLED}")
    if remote.kind == "s3" and not s3.is_installed():
        raise UnsupportedError(f"remote.kind: {remote.kind}: {s3.NOT_INSTALLED}")


@dataclass(frozen=True)
class Remote:
    """The remote store of one replica, whose ranks divide the memory that it gives to the store.

    `contents` names everything that determines the bytes of a block or the meaning of its key.
    """

    remote: RemoteConfig
    contents: Mapping[str, str]

    def open(
        self, rank: int, num_ranks: int, sharing: SharingRanks, pages: str, transfer: SwapEngine
    ) -> RemoteTier:
        """Return a rank's tier in the store; `pages` describes the layout of a slot.

        It connects in the background, so an engine starts even while the store is unavailable.
        """
        from kv_swap.tiers.remote.tier import RemoteTier

        # Ranks that share memory hold the same bytes, so they count as one part of a block.
        part = f"{rank - sharing.index} of {num_ranks}, kept for {sharing.count}"
        description = {**self.contents, "part": part, "pages": pages}
        remote, segment_bytes = self.remote, 0
        if remote.kind == "mooncake":
            segment_bytes = remote.bytes // num_ranks
        logger.log(
            logging.DEBUG if rank else logging.INFO,  # the other ranks log the same
            "kv-offload: rank %d keeps blocks in the remote store (%s) at %s%s",
            rank,
            remote.kind,
            remote.address or remote.path or remote.url,
            f", and gives it {format_size(segment_bytes)}" if segment_bytes else "",
        )
        slots = transfer.slots()
        slot_bytes = slots.shape[1]
        if remote.kind == "s3" and slot_bytes < SMALL_OBJECT_BYTES and not rank:
            logger.warning(
                "kv-offload: a block is an object of %s in the bucket. Those of less than %s are "
                "read at half the rate of larger ones or less, and each costs a request: give "
                "vLLM a --block-size that is %d times as large",
                format_size(slot_bytes),
                format_size(SMALL_OBJECT_BYTES),
                -(-SMALL_OBJECT_BYTES // slot_bytes),
            )
        return RemoteTier(make_client(remote, segment_bytes), slots, description)
