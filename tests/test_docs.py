"""Links, anchors, cited tests and cited result files of the documentation exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

CITED_TEST = re.compile(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`")
CITED_RESULT = re.compile(r"\bbench/results/[\w*./{},-]*[\w*/}]")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as the sites that show Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


def tables(page: Path) -> list[tuple[str, list[str]]]:
    """Return the headings of a page that have a table, each with the first cells of its rows."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    sections = zip(parts[1::2], parts[2::2], strict=True)
    rows = [(name, re.findall(r"^\| (.*?) \|", body, re.MULTILINE)) for name, body in sections]
    return [(name, cells[1:]) for name, cells in rows if cells]


def broken_links(page: Path, text: str) -> Iterator[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: no such heading"


@functools.cache
def known_tests() -> set[str]:
    """Return the names of all tests, and of their modules."""
    modules = list(ROOT.glob("tests/**/test_*.py"))
    return {module.stem for module in modules}.union(
        *(re.findall(r"def (test_\w+)\(", module.read_text()) for module in modules)
    )


def missing_tests(text: str) -> Iterator[str]:
    """A name behind `::` alone is one of the file that was named last; others are of any file."""
    for name in re.findall(r"(?<![\w/:.])test_\w+", text):
        if name not in known_tests():
            yield f"{name}: no such test"
    path = ""
    for named, test in CITED_TEST.findall(text):
        path = named or path
        if not named and not test:
            continue
        if not (ROOT / path).is_file():
            yield f"{path}: no such file"
        elif test and f"def {test}(" not in (ROOT / path).read_text():
            yield f"{path}::{test}: no such test"


def missing_results(text: str) -> Iterator[str]:
    for cited in CITED_RESULT.findall(text):
        braces = re.search(r"\{([^}]*)\}", cited)
        for choice in braces[1].split(",") if braces else [""]:
            path = cited.replace(braces[0], choice) if braces else cited
            if not any(ROOT.glob(path.rstrip("/"))):
                yield f"{path}: no such file"


def problems(page: Path, text: str) -> list[str]:
    return [*broken_links(page, text), *missing_tests(text), *missing_results(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert problems(page, page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[gone](docs/gone.md)", "docs/gone.md: no such file"),
        ("[gone](README.md#no-such-heading)", "README.md#no-such-heading: no such heading"),
        ("`tests/test_gone.py`", "tests/test_gone.py: no such file"),
        ("`tests/test_docs.py` and `::test_gone`", "tests/test_docs.py::test_gone: no such test"),
        ("a control in `test_gone`", "test_gone: no such test"),
        ("bench/results/h200/gone-*.json", "bench/results/h200/gone-*.json: no such file"),
        ("bench/results/{h200,gone}", "bench/results/gone: no such file"),
    ],
)
def test_what_does_not_exist_is_found(text: str, problem: str) -> None:
    """The control."""
    assert problems(ROOT / "README.md", text) == [problem]


def test_every_claim_of_support_cites_a_test() -> None:
    """What is said to users has its tests on a page of its own, which also has memory layouts."""
    page = ROOT / "docs/design/support_tests.md"
    *claims, (layouts, _) = tables(page)
    assert claims == tables(ROOT / "docs/use/support.md")
    assert layouts == "Memory layouts"
    assert sum(len(rows) for _, rows in claims) > 50
    for row in re.findall(r"^\| .*", page.read_text(), re.MULTILINE):
        assert CITED_TEST.search(row.split(" | ")[-1]) or row.endswith("tests |"), row


def test_the_documentation_cites_links_tests_and_results() -> None:
    """The patterns still fit: otherwise nothing would ever be missing."""
    text = "".join(page.read_text() for page in PAGES)
    assert len(re.findall(r"\]\([^)\s]*\.md", text)) > 20
    assert sum(bool(path) for path, _ in CITED_TEST.findall(text)) > 20
    assert len(CITED_RESULT.findall(text)) > 5
