"""The disk of a replica, and the file on it with the blocks of a rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kv_swap.engine import SwapEngine
from kv_swap.errors import TierError

from kv_offload.cache.disk_index.file import check_unused
from kv_offload.config.disk_folder import INDEX_FILE, find_ranks, rank_file
from kv_offload.config.sizes import describe_bytes
from kv_offload.errors import CapacityError, ConfigError
from kv_offload.worker.sharing import SharingRanks

if TYPE_CHECKING:
    from kv_swap.tiers.disk import DiskTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Disk:
    """The disk of one replica, which its ranks divide.

    `contents` names everything that determines the bytes of a block or the meaning of its key.
    """

    folder: Path
    nbytes: int
    contents: Mapping[str, str]

    def file_slots(self, num_ranks: int, slot_bytes: int) -> int:
        """Return the number of slots in each rank's file. Raises `CapacityError` if it is 0."""
        from kv_swap.tiers.region import fitting_slots

        file_bytes = self.nbytes // num_ranks
        num_slots = fitting_slots(file_bytes, slot_bytes)
        if num_slots < 1:
            raise CapacityError(
                f"disk.bytes gives each of {num_ranks} ranks {describe_bytes(file_bytes)}, and one "
                f"slot takes {describe_bytes(slot_bytes)}: a disk needs thousands of them"
            )
        return num_slots

    def open(
        self, rank: int, num_ranks: int, sharing: SharingRanks, pages: str, transfer: SwapEngine
    ) -> DiskTier:
        """Open or create the file of a rank; `pages` describes the layout of a slot.

        Refuses the folder of a running engine before it creates a file: if that engine has fewer
        ranks, a new file would stay there. Then removes the files of an engine with more ranks: no
        engine can find their contents, and this one may need their space.

        Raises `ConfigError` or `CapacityError`.
        """
        from kv_swap.tiers.disk import DiskTier

        slot_bytes = transfer.layout.slot_bytes
        num_slots = self.file_slots(num_ranks, slot_bytes)
        description = {
            **self.contents,
            "rank": f"{rank} of {num_ranks}",
            "sharing": f"{sharing.index} of {sharing.count}",
            "pages": pages,
        }
        path = rank_file(self.folder, rank)
        check_unused(self.folder / INDEX_FILE)
        self._remove_surplus(num_ranks)
        try:
            file = DiskTier(path, num_slots, transfer.slots(), description)
        except TierError as error:
            raise ConfigError(f"disk.path: {error}") from error
        logger.log(
            logging.DEBUG if rank else logging.INFO,  # the other ranks log the same
            "kv-offload: rank %d keeps %d slots in %s, with %s I/O; it %s",
            rank,
            num_slots,
            path,
            "direct" if file.direct else "buffered",
            "continues with what is there" if file.continued else f"begins empty: {file.reason}",
        )
        return file

    def _remove_surplus(self, num_ranks: int) -> None:
        """Remove files of ranks that no longer exist; log those that cannot be removed."""
        from kv_swap.tiers.file import remove_file

        try:
            found = find_ranks(self.folder)
        except OSError:  # opening a file in this folder will report the reason
            return
        for rank, path in found.items():
            if rank < num_ranks:
                continue
            try:
                nbytes = remove_file(path)
            except TierError as error:
                logger.warning(
                    "kv-offload: a file left by an engine with more ranks takes space in addition "
                    "to disk.bytes: %s",
                    error,
                )
                continue
            if nbytes:
                logger.info(
                    "kv-offload: %s of an engine with more ranks was removed, which had %s",
                    path,
                    describe_bytes(nbytes),
                )
