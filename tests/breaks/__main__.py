"""Takes protections out one by one and says whether the tests notice.

    python -m tests.breaks [FILE.txt ...] [--only TEXT]

Exits with 1 if any was not noticed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.breaks.breaks import FILES, Break, read
from tests.breaks.copies import Copy, copied_tree

TESTS_FAILED, INTERNAL_ERROR = 1, 3
"""pytest's exit codes for failed tests, and where it raises an error itself: also at its end, for a
thread that a failed test left behind. Others tell of a collection or a usage error."""


def check(copy: Copy, one: Break) -> tuple[bool, str]:
    """Return whether a break was noticed, and by which test, or why not."""
    if problems := list(one.problems(copy.folder)):
        return False, f"does not fit: {'; '.join(problems)}"
    unbroken = copy.unbroken(one.tests)
    if unbroken.code != 0:
        return False, f"its tests do not pass without it either: {unbroken.first_failure}"
    broken = copy.broken(one)
    if broken.code is None:
        return one.hangs, "ran out of time" + ("" if one.hangs else ", and does not say `hangs`")
    if broken.code == 0:
        return False, "its tests pass"
    if broken.code != TESTS_FAILED and not (broken.code == INTERNAL_ERROR and broken.failures):
        return False, f"pytest ended with {broken.code}: {broken.first_failure}"
    return True, broken.first_failure


def main() -> int:
    """Check the breaks that were asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaks", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=FILES, metavar="FILE.txt")
    parser.add_argument("--only", default="", metavar="TEXT", help="part of a break's text")
    arguments = parser.parse_args()
    chosen = [(f, one) for f, one in read(arguments.files) if arguments.only in repr(one)]
    began = time.monotonic()
    unnoticed = []
    with copied_tree() as copy:
        for file, one in chosen:
            noticed, why = check(copy, one)
            line = f"{file.stem}: {one.protects} {one.file} {one.scope}: {why}"
            if not noticed:
                unnoticed.append(line)
            answer = "noticed    " if noticed else "NOT NOTICED"
            print(f"{time.monotonic() - began:4.0f} s  {answer}  {line}", flush=True)
    print(f"\n{len(chosen) - len(unnoticed)} of {len(chosen)} breaks were noticed")
    for line in unnoticed:
        print(f"- {line}")
    return bool(unnoticed) or not chosen


if __name__ == "__main__":
    sys.exit(main())
