import json

import pytest

from kv_offload.tools.doctor.report import (
    COLUMNS,
    Check,
    as_json,
    as_text,
    exit_status,
    not_checked,
)

FINE = Check(name="Python", state="ok", found="3.12", needed="3.11 or newer")
SLOW = Check(name="link", state="warning", found="x4", needed="x16", remedy="Reseat the card.")
BAD = Check(name="vLLM", state="problem", found="0.25", needed="0.26", remedy="Install another.")
UNSEEN = not_checked("GPU", "no driver answers", "Install one.")


def test_every_line_says_what_was_found_what_is_needed_and_what_to_do() -> None:
    assert as_text("doctor", {"One": [FINE, SLOW], "Two": [BAD, UNSEEN]}).split("\n") == [
        "doctor",
        "",
        "One",
        "  ok           Python: 3.12 (needed: 3.11 or newer)",
        "  warning      link: x4",
        "               needed: x16",
        "               to do: Reseat the card.",
        "",
        "Two",
        "  problem      vLLM: 0.25",
        "               needed: 0.26",
        "               to do: Install another.",
        "  not checked  GPU: no driver answers",
        "               to do: Install one.",
        "",
        "1 ok, 1 warning, 1 problem, 1 not checked",
    ]


def test_json_has_every_line_with_its_section() -> None:
    report = json.loads(as_json("doctor", {"One": [FINE], "Two": [BAD]}))
    assert report["counts"] == {"ok": 1, "warning": 0, "problem": 1, "not checked": 0}
    assert report["checks"][1] == {
        "section": "Two",
        "name": "vLLM",
        "state": "problem",
        "found": "0.25",
        "needed": "0.26",
        "remedy": "Install another.",
    }


def test_the_last_line_counts() -> None:
    assert as_text("", {"": [BAD, BAD]}).endswith("\n0 ok, 0 warnings, 2 problems, 0 not checked")


@pytest.mark.parametrize(("checks", "status"), [([FINE, SLOW, UNSEEN], 0), ([FINE, BAD], 1)])
def test_only_a_problem_is_status_1(checks: list[Check], status: int) -> None:
    assert exit_status({"One": checks}) == status


def test_colour_does_not_change_the_width() -> None:
    long = Check(name="n", state="problem", found="word " * 60, needed="w" * 300, remedy="r " * 99)
    plain = as_text("doctor", {"One": [long]})
    assert max(map(len, plain.splitlines())) <= COLUMNS
    coloured = as_text("doctor", {"One": [long]}, colour=True)
    assert "\033[31mproblem    \033[0m" in coloured
    assert coloured.replace("\033[31m", "").replace("\033[0m", "") == plain
