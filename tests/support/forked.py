"""Runs a module whose engines fork their processes, which so have vLLM imported already.

usage: python -m tests.support.forked MODULE ARGUMENT...

On a GPU vLLM itself forks unless something keeps it from that. Its CPU platform always spawns,
since forked OpenMP threads hang: tests have one thread only. Every process then imports vLLM, which
takes longer than what a test does with the engine.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
from typing import Any

from tests.support import imports

spawning = multiprocessing.get_context


def get_context(method: str | None = None) -> Any:
    return spawning("fork" if method == "spawn" else method)


def main() -> None:
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    del sys.argv[0]
    with imports.frozen():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
