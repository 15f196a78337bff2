"""The files in a disk's folder: an index, and a file of slots for each rank.

PATH/index.sqlite, PATH/rank-0.kv, ...
PATH/replica-1/index.sqlite, ...               for data-parallel replicas after the first
"""

from __future__ import annotations

import re
from pathlib import Path

INDEX_FILE = "index.sqlite"


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's slots."""
    return folder / f"rank-{rank}.kv"


def replica_folder(folder: Path, replica: int) -> Path:
    """Return the folder of a data-parallel replica; the first replica uses `folder` itself."""
    return folder / f"replica-{replica}" if replica else folder


def find_replicas(folder: Path) -> list[Path]:
    """Return the folders in which replicas have files: `folder`, and those of further replicas.

    Raises `OSError` if a folder cannot be read.
    """
    named = [found for _, found in _numbered(folder, r"replica-(\d+)")]
    folders = [folder, *(found for found in named if found.is_dir())]
    return [found for found in folders if (found / INDEX_FILE).exists() or find_ranks(found)]


def find_ranks(folder: Path) -> dict[int, Path]:
    """Return the slot files in a replica's folder, by rank."""
    return dict(_numbered(folder, r"rank-(\d+)\.kv"))


def _numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    matches = ((re.fullmatch(pattern, path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)
