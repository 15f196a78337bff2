"""The lines of the report, and the report as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kv_offload.errors import KVOffloadError
from kv_offload.tools.output import COLUMNS

State = Literal["ok", "warning", "problem", "not checked"]

_COLOURS: dict[State, int] = {"ok": 32, "warning": 33, "problem": 31, "not checked": 36}
"""Terminal colour codes: green, yellow, red, cyan."""

_STATE_COLUMNS = max(map(len, _COLOURS))


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was found, what is needed, and what to do about it."""

    name: str
    state: State
    found: str
    needed: str = ""
    remedy: str = ""


Sections = dict[str, list[Check]]
"""The lines of the report by section heading."""


def not_checked(name: str, reason: str, remedy: str = "") -> Check:
    """Return the line of a subject that could not be checked."""
    return Check(name, "not checked", reason, remedy=remedy)


def judged(
    name: str, found: str, needed: str, remedy: str, *, fits: bool, otherwise: State = "problem"
) -> Check:
    """Return the line of a subject: ok if it fits, else `otherwise` with the remedy."""
    return Check(name, "ok" if fits else otherwise, found, needed, "" if fits else remedy)


def accepted(name: str, found: str, check: Callable[[], object]) -> Check:
    """Return the line of a subject that an engine's check accepts, or refuses with an error."""
    try:
        check()
    except KVOffloadError as error:
        return Check(name, "problem", error.message)
    return Check(name, "ok", found)


def counts(sections: Sections) -> dict[State, int]:
    """Return the number of lines in each state."""
    found = Counter(check.state for checks in sections.values() for check in checks)
    return {state: found[state] for state in _COLOURS}


def as_text(title: str, sections: Sections, *, colour: bool = False) -> str:
    """Return the report for a person, `COLUMNS` wide."""
    lines = [title]
    for heading, checks in sections.items():
        lines += ["", heading, *(_lines(check, colour=colour) for check in checks)]
    counted = [
        f"{count} {state}{'s' if state in ('warning', 'problem') and count != 1 else ''}"
        for state, count in counts(sections).items()
    ]
    return "\n".join([*lines, "", ", ".join(counted)])


def as_data(title: str, sections: Sections) -> dict[str, Any]:
    """Return the report for a program: a list of lines, each with its section."""
    checks = [
        {"section": heading, **dataclasses.asdict(check)}
        for heading, checks in sections.items()
        for check in checks
    ]
    return {"title": title, "counts": counts(sections), "checks": checks}


def _lines(check: Check, *, colour: bool) -> str:
    parts = [f"{check.name}: {check.found}"]
    if check.needed and check.state == "ok":
        parts[0] += f" (needed: {check.needed})"
    elif check.needed:
        parts.append(f"needed: {check.needed}")
    if check.remedy:
        parts.append(f"to do: {check.remedy}")
    indent = " " * (_STATE_COLUMNS + 4)
    wrapped = [line for part in parts for line in textwrap.wrap(part, COLUMNS - len(indent))]
    state = f"{check.state:<{_STATE_COLUMNS}}"
    if colour:
        state = f"\033[{_COLOURS[check.state]}m{state}\033[0m"
    return f"  {state}  " + f"\n{indent}".join(wrapped)
