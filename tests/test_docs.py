"""Links, anchors and cited tests of the documentation exist, and its words are plain English."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_offload.config.schema import SCHEMA
from kv_offload.config.unknown_keys import _NOT_NEEDED, _OTHERS_KEYS, _RENAMED, _VLLMS_KEYS
from tests.support import claims

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
        path = named or path  # a name after `::` alone is of the file that was named last
        if (named or test) and not (ROOT / path).is_file():
            yield f"{path}: no such file"
        elif test and f"def {test}(" not in (ROOT / path).read_text():
            yield f"{path}::{test}: no such test"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
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
def test_what_does_not_exist_is_found(text, problem):
    """The control."""
    assert list(problems(ROOT / "README.md", text)) == [problem]


def test_the_tables_of_support_are_those_of_the_claims():
    """`python -m tests.support.claims` writes them."""
    assert claims.filled(claims.PAGE.read_text()) == claims.PAGE.read_text()


def test_every_claim_of_support_cites_tests_that_exist():
    rows = [row for table in claims.tables() for row in table.rows]
    assert len(rows) > 50
    for claim, _, tests in rows:
        assert CITED_TEST.search(tests), claim
        assert list(problems(claims.FILE, tests)) == []


def test_a_page_without_a_place_for_a_table_is_noticed():
    """The control."""
    text = claims.PAGE.read_text().replace("## Cache types", "## Types of caches")
    with pytest.raises(ValueError, match="has 0 tables under 'Cache types'"):
        claims.filled(text)


def test_keys_of_others_that_errors_answer_are_on_the_page_about_migration():
    page = (ROOT / "docs/use/migration.md").read_text()
    named = {name.strip("_") for name in re.findall(r"\w+", page.replace("-", "_"))}
    assert {*_OTHERS_KEYS, *_NOT_NEEDED} - named == set()


def test_errors_answer_the_keys_of_others_on_the_page_about_migration():
    """Options, values and groups of keys, such as `pd_*`, aside."""
    page = (ROOT / "docs/use/migration.md").read_text()
    cells = "".join(re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE))
    keys = {*re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:: [^`]*)?`", cells)}
    assert len(keys) > 35
    assert keys - {*_OTHERS_KEYS, *_NOT_NEEDED, *_RENAMED, *_VLLMS_KEYS, *SCHEMA} == set()


GIVEN_UP = re.compile(
    r"\b(anew|lately|learnt|in the mean|of late|nobody|somebody|whoever|afresh|his|he|beside|"
    r"tells?|told|hears?|heard|forget|forgets|forgot|forgotten|lies|lay|goes on|comes? back|came "
    r"back|sooner)\b",
    re.IGNORECASE,
)
"""Words of translated English, and of people for programs. Each has a better one in every use."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_that_were_given_up_stay_away(page):
    """Prose only: what programs print, and rows that come from the code, are as they are there."""
    prose = re.sub(r"```.*?```|`[^`]*`|^\| `.*?$", "", page.read_text(), flags=re.DOTALL | re.M)
    assert GIVEN_UP.findall(prose) == []
