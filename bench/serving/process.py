"""The process of one engine, as the bench sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from bench.serving.process_main import serve
from bench.serving.settings import EngineSettings

ANSWER_SECONDS = 300
"""Longest wait for an engine's start or for one section; a stuck engine is ended."""
END_SECONDS = 60
_BEGAN = time.monotonic()


class EngineError(RuntimeError):
    """An engine could not be started, or ended, or did not answer in time."""

    def __init__(self, connector: str, text: str) -> None:
        super().__init__(f"{connector}, {text}")
        self.connector = connector


def progress(text: str) -> None:
    """Print a line with the seconds since the bench began."""
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


class EngineProcess:
    """A process for one engine; it imports vLLM at once, and starts the engine when asked to."""

    def __init__(self, settings: EngineSettings) -> None:
        self.connector = settings.connector
        self.counted: dict[str, dict[str, float]] = {}
        """What the connector counted in each section, of this project only."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(settings, theirs))
        self._process.start()
        theirs.close()

    def ask(self, name: str, **more: Any) -> Any:
        """Have the engine started, or one section measured. Raises `EngineError`."""
        began = time.monotonic()
        try:
            self._pipe.send((name, more))
            if not self._pipe.poll(ANSWER_SECONDS):
                self.kill()
                raise EngineError(self.connector, f"{name}: no answer within {ANSWER_SECONDS} s")
            value, counted, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(END_SECONDS)
            status = self._process.exitcode
            raise EngineError(self.connector, f"{name}: it ended, exit status {status}") from None
        if error:
            raise EngineError(self.connector, f"{name}: {error}")
        if name != "turn":
            progress(f"{self.connector}: {name} took {time.monotonic() - began:.1f} s")
            if counted:
                self.counted[name] = counted
        return value

    def close(self) -> None:
        """Let the engine end by itself, or end it."""
        self._pipe.close()
        self._process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the engine at once, with the processes that it started."""
        if self._process.is_alive() and self._process.pid:
            # It leads a group of its own as soon as it runs Python.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
