"""The operators of a break: each makes one change of a function's text, whatever its line breaks.

    drop S          the statement that begins with S does nothing
    always C        the condition C is true
    never C         the condition C is false
    negate C        the condition C is its opposite
    without P       P goes, with the `and`, `or`, `if`, operator or comma that joins it to the rest
    swap S <> T     the statements that begin with S and with T change places
    P => Q          Q stands for P; `\\n` in Q begins a line with the indentation of P's

Texts are compared token by token: white space, line breaks and comments do not count. Each must
occur once in the function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import PurePath

_STRING = r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|' + r"'''[\s\S]*?'''|'(?:\\.|[^'\\\n])*'"
_PYTHON = re.compile(rf"#[^\n]*|((?:\b[A-Za-z]{{1,2}})?(?:{_STRING})|\w+|[^\w\s])")
_CUDA = re.compile(r"//[^\n]*|/\*[\s\S]*?\*/|(\"(?:\\.|[^\"\\\n])*\"|\w+|[^\w\s])")

_JOINED = ("and {}", "{} and", "or {}", "{} or", "if {}", "& {}", "{} &", "| {}", "- {}", "+ {}")
_LISTED = (", {}", "{},")

Span = tuple[int, int]


class DoesNotFitError(Exception):
    """The product has no place, or several, where the break says that there is one."""


@dataclass(frozen=True)
class Source:
    """The text of a file, and where its functions and statements are."""

    text: str
    file: str

    def mutated(self, scope: str, change: str) -> str:
        """Return the text with the change made in a function or class; `*` is the whole file."""
        span = self.scope(scope)
        operator, _, rest = change.partition(" ")
        if operator == "drop":
            return self._replaced(self._statement(rest, span), "pass" if self._is_python else ";")
        if operator in ("always", "never"):
            truth = str(operator == "always")
            return self._replaced(
                self.find(rest, span), truth if self._is_python else truth.lower()
            )
        if operator == "negate":
            start, end = self.find(rest, span)
            return self._replaced((start, end), f"(not ({self.text[start:end]}))")
        if operator == "without":
            return self._without(rest, span)
        if operator == "swap":
            return self._swapped(*rest.split(" <> "), span=span)
        old, arrow, new = change.partition(" => ")
        if not arrow:
            raise DoesNotFitError(f"no operator in {change!r}: {__doc__}")
        start, end = self.find(old, span)
        return self._replaced((start, end), new.replace("\\n", "\n" + self._indentation(start)))

    def scope(self, name: str) -> Span:
        """Return where a function or class is, by the end of its qualified name."""
        if name == "*":
            return 0, len(self.text)
        found = [span for full, span in self.scopes if f".{full}".endswith(f".{name}")]
        if len(found) != 1:
            raise DoesNotFitError(
                f"{self.file} has {len(found)} functions or classes {name}, not one"
            )
        return found[0]

    @cached_property
    def scopes(self) -> list[tuple[str, Span]]:
        """The functions and classes with their qualified names."""
        found = []
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        waiting: list[tuple[str, ast.AST]] = [("", self._tree)]
        while waiting:
            prefix, node = waiting.pop()
            for child in ast.iter_child_nodes(node):
                name = prefix + child.name if isinstance(child, kinds) else prefix
                if isinstance(child, kinds):
                    found.append((name, self._span(child, child.decorator_list)))
                    name += "."
                waiting.append((name, child))
        return found

    def find(self, pattern: str, within: Span) -> Span:
        """Return where the tokens of `pattern` are; they must be there once."""
        found = list(self._matches(pattern, within))
        if len(found) != 1:
            raise DoesNotFitError(
                f"{pattern!r} occurs {len(found)} times, not once, in {self.file}"
            )
        return found[0]

    @property
    def _is_python(self) -> bool:
        return PurePath(self.file).suffix == ".py"

    def _matches(self, pattern: str, within: Span) -> Iterator[Span]:
        wanted = [token for token, _ in self._tokens(pattern)]
        first, last = within
        here = [(t, (i, j)) for t, (i, j) in self._own_tokens if first <= i and j <= last]
        for i in range(len(here) - len(wanted) + 1 if wanted else 0):
            if all(here[i + k][0] == token for k, token in enumerate(wanted)):
                yield here[i][1][0], here[i + len(wanted) - 1][1][1]

    def _tokens(self, text: str) -> Iterator[tuple[str, Span]]:
        for found in (_PYTHON if self._is_python else _CUDA).finditer(text):
            if found[1] is not None:
                yield found[1], found.span(1)

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _own_tokens(self) -> list[tuple[str, Span]]:
        return list(self._tokens(self.text))

    @cached_property
    def _statements(self) -> list[Span]:
        return [self._span(node, []) for node in ast.walk(self._tree) if isinstance(node, ast.stmt)]

    def _span(self, node: ast.AST, decorators: list[ast.expr]) -> Span:
        first = min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]
        start = self._offset(first, node.col_offset)  # type: ignore[attr-defined]
        return start, self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        start, text = self._lines[line - 1]
        return start + len(text.encode()[:column].decode())

    @cached_property
    def _lines(self) -> list[tuple[int, str]]:
        lines = self.text.splitlines(keepends=True)
        return list(zip(accumulate(map(len, lines), initial=0), lines, strict=False))

    def _statement(self, pattern: str, within: Span) -> Span:
        starts = {i for i, _ in self._matches(pattern, within)}
        if not self._is_python:
            start, _ = self.find(pattern, within)
            return start, self.text.index(";", start) + 1
        found = [span for span in self._statements if span[0] in starts]
        if len(found) != 1:
            raise DoesNotFitError(
                f"{len(found)} statements begin with {pattern!r}, not one, in {self.file}"
            )
        return found[0]

    def _replaced(self, span: Span, new: str) -> str:
        return self.text[: span[0]] + new + self.text[span[1] :]

    def _indentation(self, place: int) -> str:
        line = self.text[self.text.rfind("\n", 0, place) + 1 : place]
        return line[: len(line) - len(line.lstrip())]

    def _without(self, pattern: str, within: Span) -> str:
        self.find(pattern, within)
        for joined in (*_JOINED, *_LISTED):
            if found := list(self._matches(joined.format(pattern), within)):
                return self._replaced(found[0], " ")
        raise DoesNotFitError(f"nothing joins {pattern!r} to anything in {self.file}")

    def _swapped(self, first: str, second: str, span: Span) -> str:
        (a, b), (c, d) = sorted((self._statement(first, span), self._statement(second, span)))
        text = self.text
        return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]
