"""Every break still fits the product, so that `make breaks` can try it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.breaks.breaks import FILES, Break, read
from tests.breaks.mutations import Source


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_breaks_fit_the_product(file):
    breaks = [one for _, one in read([file])]
    assert breaks
    assert [problem for one in breaks for problem in one.problems()] == []
    changes = [(one.file, one.scope, one.change) for one in breaks]
    assert len(set(changes)) == len(changes), "a break stands there twice"


PRODUCT = """\
class Pool:
    def f(self, x, y=1):
        if x and not y:  # both
            self.wait(
                x,
            )
            x.release()
        return x

    def g(self):
        self.wait(1); return 1
"""


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        ("drop self.wait", "self.wait(\n                x,\n            )", "pass"),
        ("drop if x", PRODUCT[PRODUCT.index("if x") : PRODUCT.index("\n        return")], "pass"),
        ("always x and not y", "x and not y", "True"),
        ("never not y", "not y", "False"),
        ("negate x and not y", "x and not y", "(not (x and not y))"),
        ("without not y", "and not y", " "),
        ("without y=1", ", y=1", " "),
        ("wait(x,) => wait()", "wait(\n                x,\n            )", "wait()"),
        (r"return x => x.wait()\nreturn x", "return x", "x.wait()\n        return x"),
        (
            "swap self.wait( <> x.release()",
            "self.wait(\n                x,\n            )\n            x.release()",
            "x.release()\n            self.wait(\n                x,\n            )",
        ),
    ],
)
def test_an_operator_changes_one_place(change, old, new):
    assert PRODUCT.count(old) == 1
    assert Source(PRODUCT, "pool.py").mutated("Pool.f", change) == PRODUCT.replace(old, new)


def test_device_code_is_changed_by_its_tokens():
    device = Source("void f() {\n  wait(1);  // wait(1)\n  go(2 > 1);\n}\n", "device.cu")
    assert device.mutated("*", "drop wait(1)") == device.text.replace("wait(1);  ", ";  ")
    assert device.mutated("*", "never 2>1") == device.text.replace("2 > 1", "false")


@pytest.fixture
def one(tmp_path: Path) -> Break:
    (tmp_path / "product.py").write_text(PRODUCT)
    (tmp_path / "test_product.py").write_text("def test_f():\n    pass\n")
    return Break("It waits.", "product.py", "test_product.py::test_f", "f", "drop self.wait")


def test_a_break_that_fits_has_no_problems(one, tmp_path):
    assert list(one.problems(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"scope": "h"}, "0 functions or classes h"),
        ({"scope": "*"}, "2 statements begin with 'self.wait'"),
        ({"change": "drop gone()"}, "0 statements begin"),
        ({"change": "x => y"}, "occurs 5 times"),
        ({"change": "negate gone()"}, "occurs 0 times"),
        ({"change": "without x.release()"}, "nothing joins"),
        ({"change": "remove x"}, "no operator"),
        ({"change": "return x => return x"}, "changes nothing"),
        ({"change": "return x => else"}, "does not compile"),
        ({"change": "return x => return z"}, "names ['z']"),
        ({"tests": "-k f"}, "names no test file"),
        ({"tests": "test_gone.py"}, "test_gone.py does not exist"),
        ({"tests": "test_product.py::test_g[1]"}, "has no test test_g"),
    ],
)
def test_a_break_that_does_not_fit_says_why(one, tmp_path, change, problem):
    assert any(problem in found for found in replace(one, **change).problems(tmp_path))


@pytest.mark.parametrize("line", ["f: drop x", "f drop x  # It waits."])
def test_a_line_that_is_no_break_is_named(tmp_path, line):
    (tmp_path / "list.txt").write_text(f"= product.py\n@ test_product.py\n{line}\n")
    with pytest.raises(ValueError, match=r"list\.txt:3: not `SCOPE: CHANGE"):
        list(read([tmp_path / "list.txt"]))
