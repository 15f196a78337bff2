"""Reads the folder of a disk: the index of each replica, and the file of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_swap.errors import TierError
from kv_swap.tiers.record import Verdict
from kv_swap.tiers.region import FileDescription, read_description
from kv_swap.tiers.verify import verify

from kv_offload.cache.disk_index.contents import DamagedIndexError, DiskContents, read_index
from kv_offload.cache.disk_index.file import is_in_use
from kv_offload.config.disk_folder import INDEX_FILE, find_ranks, find_replicas
from kv_offload.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankFile:
    """The file of a rank's slots; `problem` says why there is no `content`."""

    rank: int
    path: Path
    file_bytes: int
    """What the filesystem has given it."""
    content: FileDescription | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """The files of one replica; `problem` says why there is no `index`."""

    folder: Path
    index: DiskContents | None
    ranks: tuple[RankFile, ...]
    in_use: bool | None
    """By an engine; None where that cannot be looked at."""
    problem: str = ""

    def belongs(self, file: RankFile) -> bool:
        """Say whether the index is of this file, as it is now."""
        if self.index is None or file.content is None:
            return False
        return self.index.files.get(str(file.rank)) == file.content.file_id

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a block, over all ranks."""
        used = 0 if self.index is None else len(self.index.slots)
        return used * sum(f.content.slot_bytes for f in self.ranks if f.content is not None)


def read_folder(path: Path) -> list[Replica]:
    """Read what each replica has in a folder. Raises `ConfigError` if there is nothing of ours."""
    try:
        folders = find_replicas(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Give the folder that an engine has as its "
            "disk_path"
        ) from error
    if not folders:
        raise ConfigError(
            f"{path}: has no {INDEX_FILE} and no file of a rank, nor has a folder of a replica in "
            "it. Give the folder that an engine has as its disk_path"
        )
    return [_read_replica(folder) for folder in folders]


def _read_replica(folder: Path) -> Replica:
    ranks = tuple(_read_rank(rank, file) for rank, file in find_ranks(folder).items())
    path, index, problem = folder / INDEX_FILE, None, ""
    try:
        in_use: bool | None = is_in_use(path)
    except OSError:
        in_use = None
    try:
        index = read_index(path)
    except (ConfigError, DamagedIndexError) as error:
        problem = error.args[0]
    return Replica(folder, index, ranks, in_use, problem)


def _read_rank(rank: int, path: Path) -> RankFile:
    file_bytes = path.stat().st_blocks * 512
    try:
        return RankFile(rank, path, file_bytes, read_description(path))
    except TierError as error:
        return RankFile(rank, path, file_bytes, None, str(error))


def verify_rank(replica: Replica, file: RankFile) -> Iterator[Verdict]:
    """Read the record of each slot that the index knows, in their order; yield what it is.

    Nothing is read of a file that has no `content`. Raises `ConfigError` for one that is gone.
    """
    names = {} if replica.index is None or file.content is None else replica.index.names()
    try:
        for state in verify(file.path, sorted(names), names) if names else ():
            yield state.verdict
    except TierError as error:
        raise ConfigError(f"{error}; look at the folder again") from error
