"""A process that has imported vLLM and forks others, which run a module as `python -m` does.

vLLM's imports take longer than what a test does with an engine: 13 s on two cores. On a GPU vLLM
itself forks unless something keeps it from that. Its CPU platform always spawns, since forked
OpenMP threads hang: tests have one thread only. So here the processes of an engine are forked, too.
And vLLM asks each model what it can in a process that imports all of vLLM: here it asks in its own.

Each line of standard input is a request, as the JSON of `become`'s arguments; the answer is the id
of the process. It ends when the input ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
from typing import Any, NoReturn

from tests.support import imports

spawning = multiprocessing.get_context


def get_context(method: str | None = None) -> Any:
    return spawning("fork" if method == "spawn" else method)


def become(words: list[str], environment: dict[str, str], outputs: list[str]) -> NoReturn:
    """Run a module, the first of `words`, in a session of its own; write to two files."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


def main() -> None:
    # Some versions of vLLM write to standard output while they are imported.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm.entrypoints.llm
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    registry._run_in_subprocess = lambda call: call()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for them
    with imports.frozen():
        for line in sys.stdin:
            pid = os.fork()
            if pid == 0:
                become(**json.loads(line))
            print(pid, file=answers, flush=True)


if __name__ == "__main__":
    main()
