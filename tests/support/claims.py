"""The claims of docs/use/support.md, each with its tests: `claims.toml`.

python -m tests.support.claims      writes the tables of the page
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("claims.toml")
PAGE = ROOT / "docs/use/support.md"


@dataclass(frozen=True)
class Table:
    """The claims under one heading: (claim, note, tests)."""

    heading: str
    columns: tuple[str, str]
    rows: tuple[tuple[str, str, str], ...]
    shown: bool = True

    def for_users(self) -> str:
        """Return the table of the page: without tests, and without notes where no row has one."""
        wide = any(note for _, note, _ in self.rows)
        rows = [(claim, note) if wide else (claim,) for claim, note, _ in self.rows]
        return _markdown([self.columns if wide else self.columns[:1], *rows])

    def with_tests(self) -> str:
        return _markdown([(self.columns[0], "tests"), *((row[0], row[2]) for row in self.rows)])


def _markdown(rows: list[tuple[str, ...]]) -> str:
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "\n".join(re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines)


def tables() -> list[Table]:
    """Return all tables of the file, in its order."""
    return [
        Table(
            one["heading"],
            tuple(one["columns"]),
            tuple(map(tuple, one["rows"])),
            one.get("shown", True),
        )
        for one in tomllib.loads(FILE.read_text())["table"]
    ]


def filled(text: str) -> str:
    """Return the page's text with the tables of the file under their headings."""
    for table in tables():
        if table.shown:
            place = rf"(^## {re.escape(table.heading)}\n(?:(?!^#|^\|).*\n)*)(?:^\|.*\n)+"
            text, found = re.subn(
                place,
                lambda match, of=table: f"{match[1]}{of.for_users()}\n",  # type: ignore[misc]
                text,
                flags=re.MULTILINE,
            )
            if found != 1:
                raise ValueError(f"{PAGE} has {found} tables under {table.heading!r}, not one")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
