"""A copy of the tree, to which breaks are applied, and the tests that run in it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.breaks.breaks import ROOT, Break

LIMIT_SECONDS = 120.0
"""How long the tests of one break may take; each should take seconds."""


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest gave; `code` is None where it ran out of time."""

    code: int | None
    seconds: float
    output: str

    @property
    def first_failure(self) -> str:
        """The first test that failed, and how, as pytest sums it up."""
        lines = self.failures or self.output.splitlines()[-1:]
        return "".join(lines[:1])

    @property
    def failures(self) -> list[str]:
        """All that failed and that pytest names."""
        return re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", self.output, re.MULTILINE)


class Copy:
    """A copy of the tree in a folder of its own, and the process that runs its tests."""

    def __init__(self, folder: Path, warm: subprocess.Popen[str]) -> None:
        self.folder = folder
        self._warm = warm
        self._output = folder.with_name("output.txt")
        self._unbroken: dict[str, Outcome] = {}

    def unbroken(self, tests: str) -> Outcome:
        """Run tests on the product as it is; once, however often asked."""
        if tests not in self._unbroken:
            self._unbroken[tests] = self._run(tests, LIMIT_SECONDS)
        return self._unbroken[tests]

    def broken(self, one: Break) -> Outcome:
        """Run a break's tests on the product without its protection."""
        usual = self.unbroken(one.tests).seconds
        path = self.folder / one.file
        text = path.read_text()
        try:
            self._write(path, one.apply(text))
            return self._run(one.tests, min(LIMIT_SECONDS, 15 + 5 * usual))
        finally:
            self._write(path, text)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        # Python tells by size and by second whether what it has compiled is of this text.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def _run(self, tests: str, limit_seconds: float) -> Outcome:
        began = time.monotonic()
        job = {
            "arguments": ["-x", "-q", *tests.split()],
            "limit_seconds": limit_seconds,
            "output": str(self._output),
        }
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(job) + "\n")
        self._warm.stdin.flush()
        code = json.loads(self._warm.stdout.readline())
        output = self._output.read_text(errors="replace")
        return Outcome(code, time.monotonic() - began, output)


@contextlib.contextmanager
def copied_tree() -> Iterator[Copy]:
    """Copy the tracked files as they are in the working tree, and start what runs tests there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tree"
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_file():  # not one that is deleted and still tracked
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        path = os.pathsep.join([str(folder), str(folder / "transfer")])
        with subprocess.Popen(
            [sys.executable, "-m", "tests.breaks.warm"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as warm:
            assert warm.stdout is not None
            warm.stdout.readline()
            yield Copy(folder, warm)
