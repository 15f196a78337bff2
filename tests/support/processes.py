"""Run statements, or a module of the tests, in a new process, and return what they found."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import forked

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 500.0
"""Less than a test's own limit, whose message would say less."""
END_SECONDS = 30
"""A busy machine that stalls once exceeds vLLM's own 5 s, after which vLLM kills its processes."""


def run_code(code: str) -> str:
    """Run statements in a new Python that finds the same packages; return what they printed.

    It gets nothing else from this process's environment.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout


def _python(*words: str, **how: Any) -> subprocess.Popen[str]:
    """Start `python -m`, in which this checkout takes precedence over an installed copy."""
    command = [sys.executable, "-X", "faulthandler", "-m", *words]
    return subprocess.Popen(command, cwd=ROOT, text=True, **how)


def _environment(more: dict[str, str]) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "transfer"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(END_SECONDS),
        **more,
    }


class Forked:
    """A process that is no child of this one, with what tests need of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None while it runs; its exit status is unknown here."""
        return 0 if select.select([self._ended], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, number)


Process = subprocess.Popen[Any] | Forked


def start_module(
    module: str, *words: str, stdout: Path, stderr: Path, forks: bool, **environment: str
) -> Process:
    """Start `python -m module` as the leader of a process group; its output is appended to files.

    This checkout takes precedence in the process, which gets `environment` in addition to this
    process's. With `forks`, the process and its engines are forked where vLLM is already imported.
    """
    environment = _environment(environment)
    if forks:
        outputs = [str(stdout), str(stderr)]
        request = {"words": [module, *words], "environment": environment, "outputs": outputs}
        print(json.dumps(request), file=forked.start(), flush=True)
        return Forked(int(forked.start().readline()))
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return _python(
            module, *words, env=environment, stdout=out, stderr=err, start_new_session=True
        )


def run_module(
    module: str,
    *arguments: object,
    timeout_seconds: float | None = None,
    forks: bool = False,
    **environment: str,
) -> Any:
    """Run `python -m module` as `start_module` does; return what it passed to `print_result`.

    Arguments other than text or paths are passed as JSON. A process that takes longer than
    `timeout_seconds`, or else `LIMIT_SECONDS`, is ended, and the assertion shows its threads'
    stacks.
    """
    timeout_seconds = timeout_seconds or LIMIT_SECONDS
    words = [str(a) if isinstance(a, str | Path) else json.dumps(a) for a in arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        for file in (out, err):
            file.touch()
        process = start_module(module, *words, stdout=out, stderr=err, forks=forks, **environment)
        ended = "it ended"
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            ended = f"ended after {timeout_seconds:.0f} s"
        finally:
            kill_group(process)
        lines = [line for line in out.read_text().splitlines() if line.startswith("RESULT ")]
        said = f"{module} {words}: {ended}\n{out.read_text()[-4000:]}\n{err.read_text()[-6000:]}"
        assert lines, said
    return json.loads(lines[0].removeprefix("RESULT "))


def run_function(
    function: Callable[..., object], *arguments: object, processes: bool = False, **more: Any
) -> Any:
    """Call a function of a test's module as `run_module` does; return its result.

    With `processes` its engines run their cores in separate processes.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    given = [str(a) if isinstance(a, Path) else a for a in arguments]
    words = (__name__, function.__module__, function.__name__, given)
    return run_module(*words, **{"forks": True, **environment, **more})


def kill_group(process: Process) -> None:
    """Kill what is left of a process group, including an engine core in a separate process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def print_result(result: object) -> None:
    """Pass a result to `run_module`; once per process."""
    print("RESULT " + json.dumps(result), flush=True)


def be_run(main: Callable[..., object], *, processes: bool = True) -> None:
    """Call `main` with this process's words, the last as JSON; pass its result to `run_module`.

    With `processes` its engines run their cores in separate processes and call functions of the
    tests there, which vLLM has to pickle.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    *words, arguments = sys.argv[1:]
    print_result(main(*words, json.loads(arguments)))


def shut_down(llm: Any) -> None:
    """Shut an engine (`vllm.LLM`) and its processes down."""
    import psutil

    core = llm.llm_engine.engine_core
    if hasattr(core, "resources"):  # the core is in a separate process
        for process in core.resources.engine_manager.processes:
            process.join = _wake_until_it_ends(core, process)
    # vLLM also kills a core that is just exiting, and fails if a child of it exits before vLLM has
    # named it. `kill_group` ends whatever is left.
    with contextlib.suppress(psutil.NoSuchProcess):
        core.shutdown(timeout=END_SECONDS)


def _wake_until_it_ends(core: Any, process: Any) -> Callable[[float], None]:
    """Return a `join` that puts a request into the core's queue each second, which wakes the core.

    Python runs a signal's handler between two instructions of the main thread. When SIGTERM
    arrives, that thread may have checked for signals, but not be asleep in `Queue.get` yet. Then it
    sleeps, and the handler waits until the queue has an entry. Shutdowns right after an answer hit
    that moment: 7 of 173, with three engines on two cores (vLLM 0.32 without the plugin,
    2026-11-26).

    A second SIGTERM would wake it too, but kills a core that has handled the first and is cleaning
    up.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    join = process.join

    def wake(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while process.is_alive() and (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(EngineDeadError):  # it has just exited
                core.abort_requests(["a request that nobody made"])
            join(min(left, 1.0))

    return wake


@contextlib.contextmanager
def staying(
    module: str, *words: object, folder: Path, forks: bool = False, **environment: str
) -> Iterator[tuple[Process, str]]:
    """Start a module that calls `stay` with its last word; kill it with SIGKILL at the end.

    Yields the process, once it has done its part, and its result. Its files are in `folder`.
    """
    out, err, ready = (folder / name for name in ("out", "err", "ready"))
    out.touch(), err.touch()
    words = (*words, ready)
    process = start_module(
        module, *map(str, words), stdout=out, stderr=err, forks=forks, **environment
    )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not ready.exists():
            assert process.poll() is None, f"{module} has ended\n{err.read_text()[-6000:]}"
            assert time.monotonic() < deadline, err.read_text()[-6000:]
            time.sleep(0.05)
        yield process, ready.read_text()
    finally:
        kill_group(process)


def stay(ready: str, said: object = "") -> None:
    """Let `staying` continue, and wait to be killed."""
    told = Path(ready).with_name("told")
    told.write_text(str(said))
    told.rename(ready)
    signal.pause()


if __name__ == "__main__":  # for `run_function`
    module, name, arguments = sys.argv[1:]
    print_result(getattr(importlib.import_module(module), name)(*json.loads(arguments)))
