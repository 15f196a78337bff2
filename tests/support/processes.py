"""Runs statements, or a module of the tests, in a new process and brings back what they found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 500.0
"""Below the limit of a test, whose end would say less."""


def run_code(code: str, **environment: str) -> str:
    """Run statements in a new Python that finds the same packages; return what they printed.

    It has `environment`, and nothing of what this process has.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout


def run_module(
    module: str,
    *arguments: object,
    timeout_seconds: float | None = None,
    forks: bool = False,
    **environment: str,
) -> Any:
    """Run `python -m module`; return what it gave to `print_result`.

    Arguments that are not text or paths are passed as JSON. The process sees this checkout before
    any installed copy, and `environment` besides what this process has. With `forks` its engines
    fork their processes, as in `forked`. One that takes longer than `timeout_seconds`, or else
    `LIMIT_SECONDS`, is ended, and the assertion says where each of its threads was.
    """
    timeout_seconds = timeout_seconds or LIMIT_SECONDS
    words = [str(a) if isinstance(a, str | Path) else json.dumps(a) for a in arguments]
    modules = ["tests.support.forked", module] if forks else [module]
    paths = [str(ROOT), str(ROOT / "transfer"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(paths).rstrip(os.pathsep)
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", *modules, *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that an engine core in a process of its own ends with it
    )
    ended = f"{module} {words}: "
    try:
        out, err = process.communicate(timeout=timeout_seconds)
        ended += f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        ended += f"ended after {timeout_seconds:.0f} s"
        _kill(process)
        out, err = process.communicate()
    except BaseException:
        _kill(process)
        raise
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{ended}\n{out[-4000:]}\n{err[-6000:]}"
    return json.loads(lines[0].removeprefix("RESULT "))


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def print_result(result: object) -> None:
    """Give `run_module` what was found; once a process."""
    print("RESULT " + json.dumps(result), flush=True)
