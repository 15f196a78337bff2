"""Runs pytest in forks of a process that has imported vLLM: the import takes 13 s, most tests none.

Reads one run a line, `{"arguments": [...], "limit_seconds": ..., "output": FILE}`, and answers each
with its exit code, or with `null` where it ran out of time. Imports nothing of the tree but itself:
every run imports that anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

PRELOADED = (
    "hypothesis.stateful",
    "pytest",
    "pytest_benchmark.plugin",
    "pytest_timeout",
    "vllm.engine.arg_utils",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)

INTERNAL_ERROR = 3
"""pytest's exit code for its own errors: no test has failed."""


def preload() -> None:
    """Import what most tests need. What is not installed is skipped, as the tests do."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    stale = [name for name in sys.modules if name.partition(".")[0] in ("kv_offload", "kv_swap")]
    assert not stale, f"imported before the break: {stale}"


def run(arguments: Sequence[str], limit_seconds: float, output: str) -> int | None:
    """Run pytest in a fork. Return its exit code; None if it ran out of time and was killed."""
    child = os.fork()
    if child == 0:
        _run_in_fork(arguments, output)
    end = time.monotonic() + limit_seconds
    status = None
    try:
        while status is None and time.monotonic() < end:
            time.sleep(0.02)
            done, ended = os.waitpid(child, os.WNOHANG)
            status = ended if done else None
    finally:
        if status is None:  # out of time, or interrupted
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _run_in_fork(arguments: Sequence[str], output: str) -> NoReturn:
    code = INTERNAL_ERROR
    try:
        os.setsid()  # so that what the tests start is killed with them
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        early = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
        code = int(pytest.main([*early, *arguments]))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def main() -> None:
    """Answer the runs of standard input, and before them once when the imports are done."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    preload()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
