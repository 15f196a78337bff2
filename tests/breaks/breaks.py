"""The breaks as they stand in the lists, and whether each still fits the product."""

from __future__ import annotations

import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.breaks.mutations import DoesNotFitError, Source

ROOT = Path(__file__).parents[2]
_OF_A_MODULE = ("__file__", "__name__")
FILES = sorted(Path(__file__).parent.glob("*.txt"))


@dataclass(frozen=True)
class Break:
    """One change of the product that takes a protection out."""

    protects: str
    file: str
    tests: str
    scope: str
    change: str
    hangs: bool = False
    """Whether a test that runs out of time notices it."""

    def apply(self, text: str) -> str:
        """Return the text of its file without the protection."""
        return _source(text, self.file).mutated(self.scope, self.change)

    def problems(self, root: Path = ROOT) -> Iterator[str]:
        """Say why it cannot be tried on the tree in `root`; nothing where it can."""
        path = root / self.file
        if not path.is_file():
            yield f"{self.file} does not exist: name the file that has the protection now"
            return
        text = path.read_text()
        try:
            broken = self.apply(text)
            if broken == text:
                yield f"{self.change!r} changes nothing in {self.file}"
            is_python = path.suffix == ".py"
            if is_python and (unknown := _unknown_names(broken) - _unknown_names(text)):
                yield f"{self.change!r} names {sorted(unknown)}, which {self.file} has not"
        except DoesNotFitError as error:
            yield f"{self.scope}: {error}"
        except SyntaxError as error:
            yield f"{self.file} does not compile after {self.change!r}: {error}"
        yield from self._missing_tests(root)

    def _missing_tests(self, root: Path) -> Iterator[str]:
        found = [test for test in self.tests.split() if test.partition("::")[0].endswith(".py")]
        if not found:
            yield f"`@` names no test file: {self.tests}"
        for test in found:
            file, *names = test.partition("[")[0].split("::")
            text = (root / file).read_text() if (root / file).is_file() else None
            for name in names:
                if text is not None and not re.search(rf"^\s*(def|class) {name}\b", text, re.M):
                    yield f"{file} has no test {name}"
            if text is None:
                yield f"{file} does not exist, which `@` names"


@lru_cache(maxsize=2)
def _source(text: str, file: str) -> Source:
    return Source(text, file)  # what it has parsed serves all the breaks of a file


@lru_cache(maxsize=4)
def _unknown_names(text: str) -> set[str]:
    """Names that a Python module reads and nothing in it binds: each would end any test."""
    tables = [symtable.symtable(text, "", "exec")]
    used, bound = set[str](), {*dir(builtins), *_OF_A_MODULE}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
        if table.get_type() == "module":
            used |= {s.get_name() for s in table.get_symbols() if s.is_referenced()}
            bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned()}
            bound |= {s.get_name() for s in table.get_symbols() if s.is_imported()}
            bound |= {s.get_name() for s in table.get_symbols() if s.is_namespace()}
    return used - bound


def read(files: Iterable[Path]) -> Iterator[tuple[Path, Break]]:
    """Yield the breaks of these files, each with its file."""
    for file in files:
        product_file = tests = ""
        hangs = False
        for number, line in enumerate(file.read_text().splitlines(), 1):
            mark, _, rest = line.partition(" ")
            if mark == "=":
                product_file = rest
            elif mark in ("@", "@hangs"):
                tests, hangs = rest, mark == "@hangs"
            elif line:
                change, comment, protects = line.rpartition("  # ")
                scope, colon, change = change.partition(": ")
                if not (comment and colon and product_file and tests):
                    raise ValueError(f"{file}:{number}: not `SCOPE: CHANGE  # SENTENCE`: {line}")
                yield file, Break(protects, product_file, tests, scope, change, hangs)
