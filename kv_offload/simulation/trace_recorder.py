"""Records the prompts of an engine, without text, as `kv_offload.simulation.trace` reads them.

The scheduler's thread queues each request that ends. A thread of the recorder writes the lines, so
a disk that is full, slow or gone costs lines and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import threading
import time
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kv_offload.config.checks import check_regular, refused_recording
from kv_offload.config.sizes import format_size
from kv_offload.engine import Request
from kv_offload.simulation.trace import BLOCK_TOKENS

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Maximum requests that wait to be written. The block hashes of a prompt of 100,000 tokens take
13 kB meanwhile."""


class TraceRecorder:
    """Writes a line of JSON for each request that ends, to a separate file.

    Blocks are named by a hash with a random key that is never written down, so no reader can check
    whether a prompt is in the file. Prompts that share a prefix share its names in one file.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Make the file, for this user alone: `path`, or with a number added if that is taken.

        Recording ends when this file and the earlier ones reach `max_bytes` together, so that an
        engine in a restart loop fills no disk. Raises `ConfigError` if no file can be made.
        """
        self._path, self._file, taken_bytes = _make_file(path)
        self._max_bytes, self._all_bytes = max_bytes - taken_bytes, max_bytes
        if self._path != path:
            logger.info("kv-offload: %s is taken: requests are recorded to %s", path, self._path)
        self._size = 0
        self._is_full = False
        self._salt = os.urandom(blake2b.MAX_KEY_SIZE)
        self._began = time.monotonic()
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        # Each counter belongs to one thread.
        self._dropped = self._failed = self._reported = 0
        self._thread = threading.Thread(target=self._run, name="kv-offload-trace", daemon=True)
        self._thread.start()

    def record(self, request: Request, hash_block_tokens: int) -> None:
        """Queue an ended request without blocking; drop and count it if the queue is full.

        Each of its hashes covers `hash_block_tokens` tokens and all tokens before them.
        """
        if self._is_full:
            return
        if self._queue.qsize() >= MAX_WAITING:
            self._dropped += 1
            return
        step = max(1, BLOCK_TOKENS // hash_block_tokens)
        prompt_tokens = request.num_prompt_tokens
        # The last hash of each block: it covers the whole block.
        ends = slice(step - 1, prompt_tokens // hash_block_tokens, step)
        self._queue.put(
            {
                "timestamp": int((time.monotonic() - self._began) * 1000),
                "input_length": prompt_tokens,
                "output_length": request.num_tokens - prompt_tokens,
                "hash_ids": list(request.block_hashes[ends]),
                "block_size": step * hash_block_tokens,
            }
        )

    def take_errors(self) -> int:
        """Return the number of requests left out since the last call."""
        errors = self._dropped + self._failed
        new, self._reported = errors - self._reported, errors
        return new

    def close(self, seconds: float) -> None:
        """Write queued requests and close the file; give up after `seconds` if the disk hangs."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            try:
                self._write(self._line(ended))
            except OSError as error:
                if not self._failed:
                    logger.error(
                        "kv-offload: %s: a request could not be recorded: %s. The engine "
                        "and the recording continue; trace_errors counts missing requests",
                        self._path,
                        error,
                    )
                self._failed += 1
        os.close(self._file)

    def _line(self, ended: dict[str, Any]) -> bytes:
        named = {**ended, "hash_ids": [self._name(one) for one in ended["hash_ids"]]}
        return json.dumps(named, separators=(",", ":")).encode() + b"\n"

    def _name(self, block_hash: bytes) -> int:
        # 53 bits: any program that reads JSON has integers of that size.
        digest = blake2b(block_hash, key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 11

    def _write(self, line: bytes) -> None:
        if self._is_full:
            return
        if self._size + len(line) > self._max_bytes:
            self._is_full = True
            logger.info(
                "kv-offload: %s: the trace ends here, since what is recorded there has the %s that "
                "record_trace_bytes allows, with earlier recordings. To record more, move these "
                "away before the next start",
                self._path,
                format_size(self._all_bytes),
            )
            return
        if not os.fstat(self._file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        written = os.pwrite(self._file, line, self._size)
        if written < len(line):
            os.ftruncate(self._file, self._size)  # half a line would make the file unreadable
            raise OSError(errno.ENOSPC, "the disk took a part of a line")
        self._size += len(line)


def _make_file(path: Path) -> tuple[Path, int, int]:
    """Return the path of the new file, its descriptor, and the bytes of the earlier files.

    It is the first of `path`, `path.1`, `path.2` and so on that is not taken: a crashed engine's
    recording is kept, and does not stop the next engine from starting.
    """
    taken_bytes = 0
    for number in itertools.count():
        tried = path.with_name(f"{path.name}.{number}") if number else path
        with refused_recording(tried):
            file = _begin_file(tried)
            if file is not None:
                return tried, file, taken_bytes
            taken_bytes += tried.stat().st_size
    raise AssertionError("unreachable")


def _begin_file(path: Path) -> int | None:
    """Return the descriptor of a file that only this process writes; None if it is taken.

    A file is taken if it is not empty, another process records to it, or it is another user's.
    """
    # A pipe without a reader would block.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
    except PermissionError:
        if path.is_file():
            return None
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, file)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not check_regular(os.fstat(file)).st_size:
                os.fchmod(file, 0o600)
                undo.pop_all()
                return file
    return None
