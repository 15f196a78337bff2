"""Run `kv-offload` in a separate process: in a shell, or on a terminal."""

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
    """Run a command in a folder, whose modules take precedence over all others."""
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
    """A program in its own terminal of 110 x 50, and everything that it has written there."""

    def __init__(self, program: Sequence[str], **more: str) -> None:
        self._ours, theirs = pty.openpty()
        # A shell ignores SIGINT in background jobs, and programs inherit this.
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
        # A terminal that is not read would block the process.
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
        """Return the exit status; a program that does not end prints its stacks."""
        try:
            return self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler writes the stack
            self.process.wait()
            self._reader.join()
            pytest.fail(f"still runs: {self.output}")

    @property
    def output(self) -> str:
        """Its output, complete once the terminal has been left."""
        return self._output.decode()
