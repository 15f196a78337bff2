"""Links, anchors and cited tests of the documentation exist. Results are cited by links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
CITED_TEST = re.compile(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`")
TESTS = {file.stem: file.read_text() for file in ROOT.glob("tests/**/test_*.py")}
KNOWN_TESTS = {*TESTS, *re.findall(r"def (test_\w+)\(", "".join(TESTS.values()))}


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings, as the sites that show Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def problems(page: Path, text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: no such heading"
    for name in re.findall(r"(?<![\w/:.])test_\w+", text):
        if name not in KNOWN_TESTS:
            yield f"{name}: no such test"
    path = ""
    for named, test in CITED_TEST.findall(text):
        path = named or path  # a name behind `::` alone is one of the file that was named last
        if (named or test) and not (ROOT / path).is_file():
            yield f"{path}: no such file"
        elif test and f"def {test}(" not in (ROOT / path).read_text():
            yield f"{path}::{test}: no such test"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert list(problems(page, page.read_text())) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[gone](docs/gone.md)", "docs/gone.md: no such file"),
        ("[gone](README.md#no-such-heading)", "README.md#no-such-heading: no such heading"),
        ("`tests/test_gone.py`", "tests/test_gone.py: no such file"),
        ("`tests/test_docs.py` and `::test_gone`", "tests/test_docs.py::test_gone: no such test"),
        ("a control in `test_gone`", "test_gone: no such test"),
    ],
)
def test_what_does_not_exist_is_found(text: str, problem: str) -> None:
    """The control."""
    assert list(problems(ROOT / "README.md", text)) == [problem]


def tables(page: Path) -> dict[str, list[str]]:
    """Return the headings of a page that have a table, each with the first cells of its rows."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    found = {
        heading: re.findall(r"^\| (.*?) \|", body, re.MULTILINE)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {heading: cells[1:] for heading, cells in found.items() if cells}


def test_every_claim_of_support_cites_a_test() -> None:
    """What is said to users has its tests on a page of its own, which also has memory layouts."""
    page = ROOT / "docs/design/support_tests.md"
    claims = tables(page)
    assert claims.pop("Memory layouts")
    assert claims == tables(ROOT / "docs/use/support.md")
    assert sum(map(len, claims.values())) > 50
    for row in re.findall(r"^\| .*", page.read_text(), re.MULTILINE):
        assert CITED_TEST.search(row.split(" | ")[-1]) or row.endswith("tests |"), row
