"""A line of the report, and the report as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem", "not checked"]

COLUMNS = 100
_COLOURS: dict[State, int] = {"ok": 32, "warning": 33, "problem": 31, "not checked": 36}
"""Of the terminal: green, yellow, red, cyan."""

_INDENT = max(map(len, _COLOURS)) + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: what was found, what is needed, and what to do about it."""

    name: str
    state: State
    found: str
    needed: str = ""
    remedy: str = ""


Sections = Mapping[str, Sequence[Check]]
"""The report: by the heading of a section, its lines."""


def not_checked(name: str, reason: str, remedy: str = "") -> Check:
    """Return the line of a subject that could not be looked at."""
    return Check(name=name, state="not checked", found=reason, remedy=remedy)


def judged(
    name: str, found: str, needed: str, remedy: str, *, fits: bool, otherwise: State = "problem"
) -> Check:
    """Return the line of a subject that fits, or else has a remedy."""
    state: State = "ok" if fits else otherwise
    return Check(name=name, state=state, found=found, needed=needed, remedy="" if fits else remedy)


def exit_status(sections: Sections) -> int:
    """Return 1 if there is a problem, else 0."""
    return int(_count(sections)["problem"] > 0)


def as_text(title: str, sections: Sections, *, colour: bool = False) -> str:
    """Return the report for a person, `COLUMNS` wide."""
    lines = [title]
    for heading, checks in sections.items():
        lines += ["", heading]
        for check in checks:
            lines += _lines(check, colour=colour)
    counts = _count(sections)
    lines += ["", ", ".join(_counted(state, counts[state]) for state in _COLOURS)]
    return "\n".join(lines)


def as_json(title: str, sections: Sections) -> str:
    """Return the report for a program: a list of lines, each with its section."""
    checks = [
        {"section": heading, **dataclasses.asdict(check)}
        for heading, checks in sections.items()
        for check in checks
    ]
    counts = _count(sections)
    report = {"title": title, "counts": {state: counts[state] for state in _COLOURS}}
    return json.dumps({**report, "checks": checks}, indent=2)


def _count(sections: Sections) -> Counter[State]:
    return Counter(check.state for checks in sections.values() for check in checks)


def _counted(state: State, count: int) -> str:
    several = state in ("warning", "problem") and count != 1
    return f"{count} {state}{'s' if several else ''}"


def _lines(check: Check, *, colour: bool) -> Iterator[str]:
    state = f"{check.state:<{_INDENT - 4}}"
    if colour:
        state = f"\033[{_COLOURS[check.state]}m{state}\033[0m"
    text = f"{check.name}: {check.found}"
    parts = [text]
    if check.needed and check.state == "ok":
        parts = [f"{text} (needed: {check.needed})"]
    elif check.needed:
        parts.append(f"needed: {check.needed}")
    if check.remedy:
        parts.append(f"to do: {check.remedy}")
    wrapped = [line for part in parts for line in textwrap.wrap(part, COLUMNS - _INDENT)]
    yield f"  {state}  {wrapped[0]}"
    yield from (" " * _INDENT + line for line in wrapped[1:])
