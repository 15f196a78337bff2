"""Run by `run_module` in a process of its own: nobody asks an engine after its disk has failed.

usage: python -m tests.engine.idle_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

`arguments` are `LLM`'s, and `folder`. The first write fails. Hands back how many blocks were
stored while nothing was written, and how many of them are on disk later, though nobody asks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kv_swap.errors import TierError
from kv_swap.tiers.engine import TierDirection
from kv_swap.tiers.mover import Outcome
from kv_swap.tiers.transfers import Transfers
from vllm import LLM

from tests.engine.harness import engine_settings, greedy, noted_blocks
from tests.engine.multiprocess_run import ask
from tests.support.inputs import random_tokens, transfer_config
from tests.support.processes import be_run, shut_down
from tests.support.waiting import wait_until

PROMPT_TOKENS = 257


def fail_first_write(failed: Path) -> None:
    """Have the first write of a process that is forked later fail, and make a file then."""
    move = Transfers.move

    def fail_or_move(mover: Transfers, direction: TierDirection, rows: Any) -> Outcome:
        if direction is TierDirection.PROMOTE or failed.exists():
            return move(mover, direction, rows)
        failed.touch()
        outcome = Outcome()
        for row in rows:
            outcome.fail(row, TierError("injected fault"))
        return outcome

    Transfers.move = fail_or_move  # type: ignore[method-assign]


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, int]:
    folder = Path(arguments.pop("folder"))
    failed = folder.with_name("failed")
    fail_first_write(failed)
    settings = engine_settings(Path(models), kind, **arguments)
    plugin = {"cpu_bytes": "32MiB", "disk": {"path": str(folder), "bytes": "64MiB"}}
    llm = LLM(**settings, kv_transfer_config=transfer_config(plugin))
    ask(llm, [random_tokens(PROMPT_TOKENS, seed=1)], greedy(1))
    wait_until(failed.exists)
    time.sleep(0.5)  # the engine hears of it
    ask(llm, [random_tokens(PROMPT_TOKENS, seed=2)], greedy(1))
    blocks = (PROMPT_TOKENS - 1) // settings["block_size"]
    wait_until(lambda: noted_blocks(folder) >= blocks)
    result = {"blocks": blocks, "written": noted_blocks(folder)}
    shut_down(llm)
    return result


if __name__ == "__main__":
    be_run(main)
