"""Records which prompts an engine serves, as `kv_offload.simulation.trace` reads it; no text.

The scheduler's thread hands over a request that ends, and goes on. A thread of the recorder's own
writes the lines: a disk that is full, slow or gone costs lines alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from kv_offload.config.sizes import format_size
from kv_offload.engine import Request
from kv_offload.errors import ConfigError
from kv_offload.simulation.trace import BLOCK_TOKENS

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests that wait to be written, at most. A prompt of 100,000 tokens keeps 13 kB while it waits:
its block hashes."""


class _Ended(NamedTuple):
    """What is kept of a request that ended."""

    milliseconds: int
    input_length: int
    output_length: int
    block_hashes: list[bytes]
    block_tokens: int


class TraceRecorder:
    """Writes a JSON object a line to a file of its own, for each request that ends.

    Blocks are named by a hash with a random key, which is never written down. Prompts that share a
    prefix have equal names in one file. Whoever has a prompt cannot find out whether it is there.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Make the file, for this user alone; it ends before `max_bytes`.

        Raises `ConfigError` for a file that cannot be made, that has something in it, or that
        another engine records to.
        """
        self._path, self._max_bytes = path, max_bytes
        self._file = _make_file(path)
        self._size = 0
        self._is_full = False
        self._salt = os.urandom(blake2b.MAX_KEY_SIZE)
        self._began = time.monotonic()
        self._queue: SimpleQueue[_Ended | None] = SimpleQueue()
        # Each is counted by one thread alone.
        self._dropped = self._failed = self._told = 0
        self._thread = threading.Thread(target=self._run, name="kv-offload-trace", daemon=True)
        self._thread.start()

    def record(self, request: Request, hash_block_tokens: int) -> None:
        """Hear that a request ends; does not block. Too many that wait are left out, and counted.

        Each of its hashes covers `hash_block_tokens`, and all before.
        """
        if self._is_full:
            return
        if self._queue.qsize() >= MAX_WAITING:
            self._dropped += 1
            return
        step = max(1, BLOCK_TOKENS // hash_block_tokens)
        prompt_tokens = request.num_prompt_tokens
        # Of each block the last hash: it covers the whole block.
        ends = slice(step - 1, prompt_tokens // hash_block_tokens, step)
        self._queue.put(
            _Ended(
                int((time.monotonic() - self._began) * 1000),
                prompt_tokens,
                request.num_tokens - prompt_tokens,
                list(request.block_hashes[ends]),
                step * hash_block_tokens,
            )
        )

    def take_errors(self) -> int:
        """Return how many requests have been left out since the last call."""
        errors = self._dropped + self._failed
        new, self._told = errors - self._told, errors
        return new

    def close(self, seconds: float) -> None:
        """Write what waits, and close the file; a disk that hangs is left after `seconds`."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            try:
                self._write(self._line(ended))
            except OSError as error:
                if not self._failed:
                    logger.error(
                        "kv-offload: %s: a request could not be recorded: %s. The engine is not "
                        "hurt, and goes on recording; trace_errors counts what is missing",
                        self._path,
                        error,
                    )
                self._failed += 1
        os.close(self._file)

    def _line(self, ended: _Ended) -> bytes:
        fields = {
            "timestamp": ended.milliseconds,
            "input_length": ended.input_length,
            "output_length": ended.output_length,
            "hash_ids": [self._name(block_hash) for block_hash in ended.block_hashes],
            "block_size": ended.block_tokens,
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

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
                "kv-offload: %s: the trace ends here, since it has the %s that record_trace_bytes "
                "allows",
                self._path,
                format_size(self._max_bytes),
            )
            return
        if not os.fstat(self._file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        written = os.pwrite(self._file, line, self._size)
        if written < len(line):
            os.ftruncate(self._file, self._size)  # half a line would make the file unreadable
            raise OSError(errno.ENOSPC, "the disk took a part of a line")
        self._size += len(line)


def check_file(path: Path) -> None:
    """Raise `ConfigError` for a file that could not be begun, without making it.

    One that an engine records to passes: it may be the engine of the server that asks.
    """
    with _refused(path):
        try:
            found = path.stat()
        except FileNotFoundError:
            path.parent.stat()
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "its folder may not be written") from None
        else:
            if not found.st_size or not _is_recorded_to(path):
                _check_new(found)


def _is_recorded_to(path: Path) -> bool:
    """Whether an engine has the file. Only of one with something in it: this locks it a moment."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _make_file(path: Path) -> int:
    """Return the descriptor of a new or empty file that is this process's alone."""
    # A pipe that nobody reads would wait for its reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with _refused(path):
        file = os.open(path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_new(os.fstat(file))
            os.fchmod(file, 0o600)
        except OSError:
            os.close(file)
            raise
    return file


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn what stands in the way of a file into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        is_used = isinstance(error, BlockingIOError)
        raise ConfigError(
            f"record_trace: {str(path)!r}: the file cannot be begun: "
            f"{'another engine records to it' if is_used else error.strerror}. Name a file that "
            "does not exist, in a folder that this user may write; or leave record_trace out"
        ) from error


def _check_new(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if found.st_size:
        raise FileExistsError(errno.EEXIST, "there is something in it")
