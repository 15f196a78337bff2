"""Run every test that needs a GPU and print the claims of docs/use/support.md with the results.

usage: python -m tests.gpu.support_table [PYTEST_ARGUMENTS...]

The last column shows the result of a row's GPU tests here; rows without one rest on tests that need
no GPU, which `make test` runs. Exits with pytest's status, and with 1 if a row cites a GPU test
that did not run. A run ended by a time limit prints the failures and the tables so far.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from tests.support import claims

ROOT = Path(__file__).parents[2]
CITATION = re.compile(r"`(tests/gpu/\w+\.py)(?:::(\w+))?`(?: \(([^)]*)\))?")


def outcomes(report: Path) -> dict[str, str]:
    """Return `passed`, `failed` or `skipped` of every test, by `file::name[parameters]`."""
    found = {}
    # The test that is running when the run ends has no class.
    for case in ElementTree.parse(report).getroot().iterfind(".//testcase[@classname]"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        ended = {child.tag for child in case}
        outcome = "failed" if ended & {"failure", "error"} else "passed"
        found[f"{file}::{case.attrib['name']}"] = "skipped" if "skipped" in ended else outcome
    return found


def cited(cell: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the GPU tests that a table cell cites: a file, and words that their ids contain."""
    for file, name, parameters in CITATION.findall(cell):
        names = re.findall(r"`([^`]+)`", parameters)
        for word in names or [""]:
            yield file, [part for part in (name, word) if part]


def matches(test: str, file: str, words: list[str]) -> bool:
    """Return whether a test is cited; a word in brackets is a whole parameter."""
    parameters = re.split(r"[\[\]-]", test)
    return test.startswith(file) and all(
        f"::{word}" in test or word in parameters for word in words
    )


def annotate(text: str, found: dict[str, str]) -> tuple[str, list[str]]:
    """Add a column to every table of `text`; return it with the citations that match no test."""
    lines, missing = [], []
    for line in text.splitlines():
        if not line.startswith("|"):
            lines.append(line)
            continue
        counts: dict[str, int] = {}
        for file, words in cited(line):
            ended = [outcome for test, outcome in found.items() if matches(test, file, words)]
            if not ended:
                missing.append(f"{file} {' '.join(words)}")
            for outcome in ended:
                counts[outcome] = counts.get(outcome, 0) + 1
        summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        lines.append(f"{line} {'---' if set(line) <= set('|- ') else summary} |")
    return "\n".join(lines), missing


def main() -> int:
    """Run the tests, print the table, return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "tests/gpu", f"--junitxml={report}"]
        # In a separate process group: pytest would end at a time limit's SIGTERM without saying
        # what failed until then.
        with subprocess.Popen([*command, *sys.argv[1:]], cwd=ROOT, process_group=0) as tests:
            for ending in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ending, lambda *_: tests.send_signal(signal.SIGINT))
            status = tests.wait()
        claimed = "\n\n".join(f"## {one.heading}\n\n{one.with_tests()}" for one in claims.tables())
        table, missing = annotate(claimed, outcomes(report))
    print(table)
    for citation in missing:
        print(f"{claims.FILE.name} cites a GPU test that did not run: {citation}", file=sys.stderr)
    return status or int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
