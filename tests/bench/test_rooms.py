"""Who may import whom: benches use `tests.support`, and the tests of other rooms use no bench."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (file, full name of what it imports) for every import of a folder."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield name, node.module or ""


def test_benches_use_nothing_of_the_tests_but_their_support() -> None:
    found = {(file, name) for file, name in imports("bench") if name.split(".")[0] == "tests"}
    assert found
    assert [(file, name) for file, name in found if not name.startswith("tests.support")] == []


def test_only_the_tests_of_benches_import_benches() -> None:
    found = [file for file, name in imports("tests") if name.split(".")[0] == "bench"]
    assert found
    assert [file for file in found if not file.startswith("tests/bench/")] == []
