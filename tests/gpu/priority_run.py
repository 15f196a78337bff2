"""Run by `test_priorities.py` in a separate process: requests of many priorities, token by token.

usage: python -m tests.gpu.priority_run MODELS_FOLDER ARGUMENTS_AS_JSON

Needs `VLLM_BATCH_INVARIANT=1`, see `fault_run`. The GPU cache is small and prompts are cut into
chunks, so many requests are preempted. Every answer is compared with that of an engine without
preemption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.harness import Engine, engine
from tests.gpu.fault_run import SETTINGS, serve
from tests.support.inputs import busy_requests
from tests.support.processes import be_run

PRIORITIES = 6


def main(models: str, arguments: dict[str, Any]) -> dict[str, Any]:
    count, seeds = arguments.pop("requests"), arguments.pop("seeds")
    settings = {
        **SETTINGS,
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 128,
        **arguments,
    }
    asked = [busy_requests(count, seed) for seed in seeds]
    with engine(Path(models), "llama_wide", None, **{**settings, "blocks": 2000}) as plain:
        expected = [serve(plain, one) for one in asked]
        assert not plain.preemptions

    def wrong(running: Engine) -> list[int]:
        """Return the number of wrong answers by seed; each seed starts with an empty GPU cache."""
        found = []
        for one, answers in zip(asked, expected, strict=True):
            assert running.core.reset_prefix_cache(False, False)
            answered = serve(running, one, PRIORITIES)
            found.append(sum(answered[request] != answers[request] for request in one))
        return found

    result: dict[str, Any] = {}
    with engine(Path(models), "llama_wide", {"cpu_bytes": "256MiB"}, **settings) as ours:
        for name in ("first", "again"):
            result[name] = wrong(ours)
            ours.settle()
        result["asynchronous"] = ours.core.batch_queue is not None
        result["preemptions"] = ours.preemptions
        result["blocks_loaded"] = ours.blocks_loaded()
        result["hook_errors"] = ours.totals["hook_errors"]
        assert ours.rank.transfer.wait(10)
        ours.slots[:] = np.roll(ours.slots, 7, axis=0)
        result["control"] = wrong(ours)
        ours.settle()
        ours.assert_nothing_left()
    return result


if __name__ == "__main__":
    be_run(main, processes=False)
