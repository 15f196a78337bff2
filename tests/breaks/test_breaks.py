"""Every break still fits the product, so that `make breaks` can try it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.breaks.breaks import FILES, Break, read


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_breaks_fit_the_product(file: Path) -> None:
    breaks = [one for _, one in read([file])]
    assert breaks
    assert [problem for one in breaks for problem in one.problems()] == []
    changes = [(one.file, one.old, one.new) for one in breaks]
    assert len(set(changes)) == len(changes), "a break stands there twice"


@pytest.fixture
def one(tmp_path: Path) -> Break:
    (tmp_path / "product.py").write_text("def f(x):\n    if x:\n        wait()\n    return x\n")
    (tmp_path / "test_product.py").write_text("def test_f():\n    pass\n")
    return Break("It waits.", "product.py", "wait()", "test_product.py::test_f", "pass")


def test_a_break_that_fits_has_no_problems(one: Break, tmp_path: Path) -> None:
    assert list(one.problems(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"old": "gone()"}, "`old` occurs 0 times"),
        ({"old": "x", "new": "y"}, "`old` occurs 3 times"),
        ({"new": "wait()"}, "`new` changes nothing"),
        ({"new": "else"}, "does not compile"),
        ({"tests": "-k f"}, "names no test file"),
        ({"tests": "test_gone.py"}, "test_gone.py does not exist"),
        ({"tests": "test_product.py::test_g[1]"}, "has no test test_g"),
    ],
)
def test_a_break_that_does_not_fit_says_why(
    one: Break, tmp_path: Path, change: dict[str, str], problem: str
) -> None:
    assert any(problem in found for found in replace(one, **change).problems(tmp_path))
