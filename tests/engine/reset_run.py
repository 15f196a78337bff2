"""Run by `run_module`: an engine whose weights change is killed as soon as a reset is answered.

usage: python -m tests.engine.reset_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

`arguments` are `folder`, `faults`, `weights` (a file with the new ones) and `prompts`. Hands
back the answer to the reset, and ends by SIGKILL: no thread of the engine does anything afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kv_swap.tiers.disk import DiskTier
from safetensors.torch import load_file

from kv_offload.cache.disk_index import index
from tests.engine.harness import offloading, wait_until_noted
from tests.engine.test_new_weights import CHANGED
from tests.support.processes import be_run, print_result

FAULTS: dict[str, Any] = {
    "the index hangs": lambda: setattr(index, "end_index", lambda *_: time.sleep(3600)),
    "the rank fails": lambda: setattr(DiskTier, "revoke", lambda *_: "injected fault"),
}


def main(models: str, kind: str, arguments: dict[str, Any]) -> None:
    plugin = {"disk": {"path": arguments["folder"], "bytes": "64MiB"}}
    with offloading(Path(models), kind, plugin) as running:
        running.generate(arguments["prompts"])
        running.settle()
        assert running.offload.gauges()["demoting_slots"] == 0
        wait_until_noted(running, arguments["folder"])
        for fault in arguments["faults"]:
            FAULTS[fault]()
        model = running.llm.llm_engine.model_executor.driver_worker.model_runner.model
        # As a broadcast into the model's tensors, which nobody can notice.
        weights = load_file(arguments["weights"])
        type(model).load_weights(model, ((name, weights[name]) for name in CHANGED))
        print_result(running.llm.reset_prefix_cache(reset_connector=True))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    be_run(main, processes=False)
