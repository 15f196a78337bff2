"""The breaks as they stand in the TOML files, and whether each still fits the product."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("*.toml"))


@dataclass(frozen=True)
class Break:
    """One change of the product that takes a protection out."""

    protects: str
    file: str
    old: str
    tests: str
    new: str = ""
    hangs: bool = False
    """Whether a test that runs out of time notices it."""

    def apply(self, text: str) -> str:
        """Return the text of its file without the protection."""
        return text.replace(self.old, self.new)

    def problems(self, root: Path = ROOT) -> Iterator[str]:
        """Say why it cannot be tried on the tree in `root`; nothing where it can."""
        path = root / self.file
        if not path.is_file():
            yield f"{self.file} does not exist: name the file that has the protection now"
            return
        text = path.read_text()
        count = text.count(self.old)
        if count != 1:
            yield f"`old` occurs {count} times in {self.file}, not once: {self.old!r}"
        if self.apply(text) == text:
            yield f"`new` changes nothing in {self.file}: {self.new!r}"
        if path.suffix == ".py":
            try:
                compile(self.apply(text), self.file, "exec")
            except SyntaxError as error:
                yield f"{self.file} does not compile with `new`: {error}"
        yield from self._missing_tests(root)

    def _missing_tests(self, root: Path) -> Iterator[str]:
        found = [test for test in self.tests.split() if test.partition("::")[0].endswith(".py")]
        if not found:
            yield f"`tests` names no test file: {self.tests}"
        for test in found:
            file, *names = test.partition("[")[0].split("::")
            text = (root / file).read_text() if (root / file).is_file() else None
            for name in names:
                if text is not None and not re.search(rf"^\s*(def|class) {name}\b", text, re.M):
                    yield f"{file} has no test {name}"
            if text is None:
                yield f"{file} does not exist, which `tests` names"


def read(files: Iterable[Path]) -> Iterator[tuple[Path, Break]]:
    """Yield the breaks of these files, each with its file."""
    for file in files:
        for product_file, entries in tomllib.loads(file.read_text()).items():
            for entry in entries:
                yield file, Break(file=product_file, **entry)
