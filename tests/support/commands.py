"""`kv-offload` in a process of its own: in a shell, and on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

PYTHON = shlex.quote(sys.executable)
COMMAND = f"{PYTHON} -m kv_offload"
LIMIT_SECONDS = 120


def run_in_shell(
    folder: Path, command: str, shell: str = "bash", stdout: int = subprocess.PIPE, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, whose modules come before all others."""
    return subprocess.run(
        [shell, "-c", command],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join([str(folder), *sys.path]), **more},
        check=False,
    )


class Terminal:
    """A program in a terminal of its own, 110 x 50, and all that it wrote there."""

    def __init__(self, program: Sequence[str], **more: str) -> None:
        self._ours, theirs = pty.openpty()
        # A shell that runs the tests in its background has SIGINT ignored, and programs inherit it.
        outer = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                program,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "50", **more},
            )
        finally:
            signal.signal(signal.SIGINT, outer)
            os.close(theirs)
        self._output = bytearray()
        # A terminal that nobody reads would stop the process.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._ours, 65536):
                self._output += part

    def wait(self) -> int:
        """Return the exit status; a program that does not end says where it is."""
        try:
            return self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler writes the stack
            self.process.wait()
            self._reader.join()
            pytest.fail(f"still runs: {self.output}")

    @property
    def output(self) -> str:
        """What it wrote: all of it once the terminal has been left."""
        return self._output.decode()
