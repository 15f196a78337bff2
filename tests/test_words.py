"""The English of the product: docstrings and comments say what a thing is, in the field's words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    file
    for folder in ("kv_offload", "transfer/kv_swap", "csrc", "bench")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in {".py", ".cu", ".cuh"}
]

POINTS = re.compile(r"(What|Whether|Of|Hear) ")
"""How a text begins that points to a thing and does not name it."""
FEW = 20
"""Fewer texts may begin so: for some it is the best way."""

LEFT = re.compile(
    r"\b(mends|left_over|front_end|distrust_stores|take_lost|take_risen|worth_keeping|"
    r"cut_short|wishes|leftovers|OtherSizes|TracedConfig|behind_\w+|"
    r"RunningOperations|of late|in the mean|anew|lately|learnt|"
    r"hear_\w+|tell_\w+|\w*_told|is_brought|nobody_\w+)\b",
    re.IGNORECASE,
)
"""Words that were given up for those of the field, and for plain English."""


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield docstrings and comments, each with its line; comments line by line."""
    source = file.read_text()
    if file.suffix != ".py":
        for number, line in enumerate(source.splitlines(), 1):
            if "//" in line:
                yield number, line.partition("//")[2].strip()
        return
    for node in ast.walk(ast.parse(source)):
        for statement in (
            getattr(node, "body", None) or () if not isinstance(node, ast.expr) else ()
        ):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def test_few_texts_begin_with_a_word_that_only_points():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in FILES
        for line, text in texts(file)
        if POINTS.match(text)
    ]
    assert len(found) < FEW, "\n".join(found)


def test_no_word_that_was_given_up_is_left():
    found = [
        f"{file.relative_to(ROOT)}:{number}: {word[0]}"
        for file in FILES
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (word := LEFT.search(line))
    ]
    assert found == []
