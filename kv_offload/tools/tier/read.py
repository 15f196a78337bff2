"""Reads a disk's folder: the index of each replica, and the file of each rank."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kv_swap.errors import TierError
from kv_swap.tiers.region import FIRST_REGION_BYTES, read_description

from kv_offload.cache.disk_index.contents import DamagedIndexError, DiskContents
from kv_offload.cache.disk_index.file import check_files
from kv_offload.config.checks import check_regular
from kv_offload.config.disk_folder import INDEX_FILE, find_ranks, find_replicas
from kv_offload.config.sizes import format_size
from kv_offload.errors import ConfigError
from kv_offload.tools.tier.index import is_in_use, read_index


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The file with a rank's slots; `problem` says why some or all of them are lost."""

    rank: int
    file: Path
    file_bytes: int
    """Bytes that the filesystem has allocated for the file."""
    slot_bytes: int | None
    belongs_to_index: bool
    """True if the index belongs to this file in its current state."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The files of one replica; `problem` says why there is no index. Times are since 1970."""

    folder: Path
    in_use: bool | None
    """True if an engine is using the disk; None if that is unknown."""
    problem: str
    description: dict[str, str] | None
    slots: int | None
    used_slots: int
    """Number of slots that hold a block."""
    used_bytes: int
    """Bytes of the used slots, over all ranks."""
    last_use: float | None
    first_use: float | None
    """Last use of the slot that will be evicted next."""
    was_reset: bool
    """True if there is no index, as after a reset."""
    ranks: list[RankFile]


def read_folder(path: Path) -> list[Replica]:
    """Read each replica's files in a folder.

    Raises `ConfigError` if the folder has no kv-offload files, or if a file disappears meanwhile.
    """
    try:
        folders = find_replicas(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Give the folder that an engine has as its "
            "disk.path"
        ) from error
    if not folders:
        raise ConfigError(
            f"{path}: has no {INDEX_FILE}, no file of a rank and no folder of a replica in "
            "it. Give the folder that an engine has as its disk.path"
        )
    try:
        return [_read_replica(folder) for folder in folders]
    except (OSError, TierError) as error:
        raise ConfigError(f"{error}; look at the folder again") from error


def _read_replica(folder: Path) -> Replica:
    path, index, problem, in_use = folder / INDEX_FILE, None, "", None
    try:
        check_files(path)
        with contextlib.suppress(OSError):
            in_use = is_in_use(path)
        if path.exists():  # a reset leaves no index
            index = read_index(path)
    except (ConfigError, DamagedIndexError) as error:
        problem = error.message
    ranks = [_read_rank(rank, file, index) for rank, file in find_ranks(folder).items()]
    used = [] if index is None else index.used.tolist()
    return Replica(
        folder=folder,
        in_use=in_use,
        problem=problem,
        description=None if index is None else dict(index.description),
        slots=None if index is None else index.num_slots,
        used_slots=len(used),
        used_bytes=len(used) * sum(rank.slot_bytes or 0 for rank in ranks),
        last_use=used[-1] / 1e6 if used else None,
        first_use=used[0] / 1e6 if used else None,
        was_reset=not path.exists(),
        ranks=ranks,
    )


def _read_rank(rank: int, file: Path, index: DiskContents | None) -> RankFile:
    status = file.stat()
    content, problem = None, ""
    try:
        check_regular(status)
        content = read_description(file)
    except OSError as error:
        problem = f"{file}: {error.strerror}"
    except TierError as error:
        problem = str(error)
        if _lacks_beginning(file):
            problem = (
                f"{file}: its beginning is gone: the file was cut or overwritten after an engine "
                "had made it, and its blocks are lost. Remove it when no engine uses it"
            )
    if content is not None and status.st_size < content.nbytes:
        problem = (
            f"{file}: has {format_size(status.st_size)} of the {format_size(content.nbytes)} that "
            "its first region describes: it was cut, and the blocks past its end are lost. The "
            "next start of the engine repairs it"
        )
    return RankFile(
        rank=rank,
        file=file,
        file_bytes=status.st_blocks * 512,
        slot_bytes=None if content is None else content.slot_bytes,
        belongs_to_index=index is not None
        and content is not None
        and index.files.get(str(rank)) == content.file_id,
        problem=problem,
    )


def _lacks_beginning(file: Path) -> bool:
    """Return whether a file is empty or begins with zeros, as if cut short or just created."""
    try:
        with file.open("rb") as opened:
            return not any(opened.read(FIRST_REGION_BYTES))
    except OSError:
        return False
