"""A fork of pytest's process that forks others, which run a module as `python -m` does.

vLLM's imports take 10 s, longer than what a test does with an engine. Pytest's process has imported
vLLM to collect tests, and is forked before any test starts a thread.

The processes of an engine are forked, too. On a GPU vLLM itself forks unless something prevents it.
Its CPU platform always spawns, since forked OpenMP threads hang, but tests have one thread only.
vLLM also inspects each model in a process that imports all of vLLM; here it does so in its own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import stat
import sys
import traceback
import warnings
from typing import Any, NoReturn, TextIO

from tests.support import imports

spawning = multiprocessing.get_context


def get_context(method: str | None = None) -> Any:
    return spawning("fork" if method == "spawn" else method)


def become(words: list[str], environment: dict[str, str], outputs: list[str]) -> NoReturn:
    """Run a module, the first of `words`, in a new session; write to two files."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    faulthandler.enable()
    for handler in logging.getLogger("vllm").handlers:
        handler.setStream(sys.stdout)  # replaces pytest's captured stream of import time
    os.environ.clear()
    os.environ.update(environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv[:] = words
    sys.modules.pop(words[0], None)
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def serve(requests: TextIO) -> None:
    """Fork a process for each request, a line with `become`'s arguments; answer with its id."""
    import torch._dynamo.config
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    registry._run_in_subprocess = lambda call: call()
    # Each of several ranks would compile the embedding lookup, for 3 s.
    torch._dynamo.config.disable = True
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    with imports.frozen():
        for line in requests:
            pid = os.fork()
            if pid == 0:
                become(**json.loads(line))
            print(pid, file=requests, flush=True)


@functools.cache
def start() -> TextIO:
    """Fork this process, once; return a file for requests and answers; closing it ends the fork."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            warnings.simplefilter("ignore")  # pytest makes them errors
            # `runpy` asks for a module's code, which pytest's import hook cannot give.
            sys.meta_path[:] = [f for f in sys.meta_path if "pytest" not in type(f).__module__]
            close_pipes(but=theirs.fileno())
            serve(theirs.makefile("rw"))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(0)
    with ours, theirs:
        return ours.makefile("rw")


def close_pipes(but: int) -> None:
    """Close inherited pipes that another process may read to the end."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed
            mode = os.fstat(fd).st_mode
            if (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and fd > 2 and fd != but:
                os.close(fd)
