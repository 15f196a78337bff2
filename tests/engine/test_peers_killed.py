"""An engine answers right while its peer is killed at drawn moments, and starts again.

Host memory is too small for all prompts: both engines evict what the other one loads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.engine.harness import full_blocks, offloading, plain_answers, prompts_with_shared_prefix
from tests.engine.test_peers import plugin
from tests.support.processes import staying
from tests.support.waiting import wait_until

SETS = [prompts_with_shared_prefix(seed=seed) for seed in range(1, 7)]
LIVES = 4


def pool(folder: Path) -> dict[str, Any]:
    return {**plugin(folder), "cpu_bytes": "2MiB"}


def compute_until_killed(models: str, folder: str, seed: str, ready: str) -> None:
    """Answer drawn prompts for ever; say after some rounds how many slots were adopted."""
    expected = json.loads(Path(folder, "expected").read_text())
    chance = random.Random(seed)
    with offloading(Path(models), plugin=pool(Path(folder))) as running:
        adopted = running.offload.gauges()["adopted_slots"]
        for turn in range(10**9):
            number = chance.randrange(len(SETS))
            if running.generate(SETS[number]) != expected[number]:
                Path(folder, "wrong").touch()
            running.reset_gpu_cache()
            if turn == 2:
                Path(f"{ready}.new").write_text(str(int(adopted)))
                Path(f"{ready}.new").rename(ready)


def test_an_engine_answers_right_whenever_its_peer_is_killed(
    model_folder: Path, memory_folder: Path
) -> None:
    expected = [plain_answers(model_folder, prompts) for prompts in SETS]
    (memory_folder / "expected").write_text(json.dumps(expected))
    chance = random.Random(5)
    with offloading(model_folder, plugin=pool(memory_folder)) as ours:

        def serve(sets: list[int]) -> None:
            for number in sets:
                assert ours.generate(SETS[number]) == expected[number]
                ours.reset_gpu_cache()

        for life in range(LIVES):
            own = memory_folder / f"life {life}"
            own.mkdir()
            words = ("tests.engine.test_peers_killed", model_folder, memory_folder, life)
            with staying(*words, folder=own, forks=True) as (process, adopted):
                wait_until(lambda: ours.settle() or ours.offload.gauges()["peers"] == 1)
                assert (int(adopted) > 0) is (life > 0)
                os.killpg(process.pid, signal.SIGSTOP)
                serve([*range(len(SETS))])
                assert ours.totals["peers_read_bytes"] > 0
                os.killpg(process.pid, signal.SIGCONT)
                kill = os.killpg, (process.pid, signal.SIGKILL)
                killing = threading.Timer(chance.uniform(0, 0.5), *kill)
                killing.start()
                serve([chance.randrange(len(SETS)) for _ in range(6)])
                killing.join()
            serve([chance.randrange(len(SETS)) for _ in range(3)])
            ours.offload.check_integrity()
            ours.offload.manager.check_integrity()
        slots = ours.offload.manager.num_slots
        assert sum(map(full_blocks, SETS)) > slots, "all fit: nothing is evicted"
        assert ours.offload.manager.forgotten > 0
    assert not (memory_folder / "wrong").exists()


if __name__ == "__main__":
    compute_until_killed(*sys.argv[1:])
