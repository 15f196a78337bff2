"""The demo's engines that share a store: one computes prompts, the other loads them.

As a module, `python -m bench.demo_store MODEL DTYPE MASTER`, this runs the second engine, in a
separate process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.demo_engine import (
    COMPUTED,
    FROM_STORE,
    HOST_CACHE,
    Engine,
    Phase,
    Prompt,
    make_prompts,
)
from bench.environment import say
from tests.support.mooncake import Master, environment, missing
from tests.support.processes import print_result, run_module


def options(master: str, given: str | int) -> dict[str, Any]:
    """Return the plugin's keys for an engine that gives `given` bytes to the store."""
    return {"remote": {"kind": "mooncake", "address": master, "bytes": given}}


def share(model: Path, dtype: str, prompts: list[Prompt]) -> tuple[Phase, Phase]:
    """Compute the prompts with one engine, and answer them with another while the first runs.

    The second engine has none of the prompts in its own memory.
    """
    from tests.support.totals import counted_stats

    say("starting mooncake_master, and an engine that shares a store")
    with Master() as master, counted_stats() as totals:
        engine = Engine(model, dtype, totals, options(master.address, HOST_CACHE))
        try:
            say(f"answering {len(prompts)} prompts: computed, and written to the store")
            computed = engine.answer("with a store", COMPUTED, prompts)
            engine.rest()
            say("starting a second engine with the store, in another process")
            variables: dict[str, Any] = dict(environment())
            found = run_module("bench.demo_store", model, dtype, master.address, **variables)
        finally:
            engine.close()
    return computed, Phase(**found)


def main(model: str, dtype: str, master: str) -> None:
    """Answer the prompts from the store, and return the phase to the first process."""
    from tests.support.totals import counted_stats

    missing()  # loads what Mooncake needs
    with counted_stats() as totals:
        engine = Engine(Path(model), dtype, totals, options(master, 0))
        phase = engine.answer("another engine", FROM_STORE, make_prompts())
        engine.close()
    print_result(asdict(phase))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
