"""Run by `test_faults.py` in a separate process: a busy engine whose copies fail, token by token.

usage: python -m tests.gpu.fault_run MODELS_FOLDER ARGUMENTS_AS_JSON

Needs `VLLM_BATCH_INVARIANT=1`: then the tokens of a bfloat16 model do not depend on the rest of a
batch, and every answer of an engine under pressure is compared with that of an engine without the
plugin. One in ten copies of each kind fails, at each possible place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from kv_swap.cuda import state
from kv_swap.engine import SwapJob
from kv_swap.errors import JobError

from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.scheduler.loads import decision
from kv_offload.worker import forward_loads, waves
from tests.engine.harness import Engine, engine
from tests.support.inputs import Tokens, busy_requests
from tests.support.processes import be_run

AT_ONCE = 24
EVERY = 10


SETTINGS = {
    # With this backend, and heads of 128, tokens do not depend on the rest of a batch.
    "attention_config": {"backend": "FLASH_ATTN"},
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.1,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
}


def serve(
    running: Engine, asked: dict[str, tuple[Tokens, int]], priorities: int = 1
) -> dict[str, tuple[str, Tokens]]:
    """Answer all requests, some at once; return how each ended, with its tokens.

    `priorities` is the number of different priorities, which requests get in turn.
    """
    waiting, live, ended = list(asked.items()), set(), {}
    while waiting or live:
        while waiting and len(live) < AT_ONCE:
            request_id, (prompt, max_tokens) = waiting.pop(0)
            running.add(request_id, prompt, max_tokens, priority=len(waiting) % priorities)
            live.add(request_id)
        for request_id, output in running.step().items():
            live.discard(request_id)
            ended[request_id] = (output.outputs[0].finish_reason, list(output.outputs[0].token_ids))
    return ended


class Faults:
    """Fails copies of an engine: one in `EVERY` of each kind, at the places in turn."""

    def __init__(self, running: Engine) -> None:
        self.happened: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._engine = running.rank.transfer
        self._armed: str | None = None
        for name in ("submit", "load_now"):
            self._replace(self._engine, name, getattr(self, f"_{name}"))
        for lane in self._engine._state.lanes.values():
            self._replace(lane.path, "queue", self._launch)
            self._replace(lane.stream, "make_compute_wait", self._make_wait)

    @staticmethod
    def _replace(target: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(target, name)
        setattr(target, name, lambda *arguments: wrapper(original, *arguments))

    def _turn(self, kind: str) -> int:
        """Return the number of the fault of a kind that is due, from 1, or 0."""
        self._seen[kind] += 1
        count, rest = divmod(self._seen[kind], EVERY)
        return 0 if rest else count

    def _submit(self, submit: Callable[[SwapJob], None], job: SwapJob) -> None:
        kind = "synchronous load" if job.before_compute else job.direction.value
        turn = self._turn(kind)
        places = ("refused", "launch", "wait") if job.before_compute else ("refused", "launch")
        place = places[turn % len(places)]
        if turn:
            self.happened[f"{kind}, {place}"] += 1
        if turn and place == "refused":
            raise JobError("injected fault: refused")
        self._armed = place if turn else None
        submit(job)
        if self._armed == "launch":
            self._armed = None

    def _launch(self, launch: Callable[..., None], *arguments: Any) -> None:
        if self._armed == "launch":
            self._armed = None
            raise RuntimeError("injected fault: launch")
        launch(*arguments)

    def _make_wait(self, make_wait: Callable[..., None], *arguments: Any) -> None:
        if self._armed == "wait":
            self._armed = None
            raise RuntimeError("injected fault: wait")
        make_wait(*arguments)

    def _load_now(self, load_now: Callable[[Any], None], pairs: Any) -> None:
        if self._turn("copy at once"):
            self.happened["copy at once"] += 1
            raise JobError("injected fault: copy at once")
        load_now(pairs)


@contextmanager
def silent_layer() -> Iterator[list[int]]:
    """Make a layer read its KV without calling the connector, as if it had never called."""
    original = KVOffloadConnector.wait_for_layer_load
    skipped = [0]

    def called(self: Any, layer_name: str) -> None:
        rank = self.offload_worker
        # In this step layers wait for waves, instead of being learned.
        waits = rank.on_layer is not None and not rank._forward_loads.waves.learning
        if waits and ".1." in layer_name:
            skipped[0] += 1
        else:
            original(self, layer_name)

    KVOffloadConnector.wait_for_layer_load = called
    try:
        yield skipped
    finally:
        KVOffloadConnector.wait_for_layer_load = original


def main(models: str, arguments: dict[str, Any]) -> dict[str, Any]:
    count, copies_with = arguments.pop("requests"), arguments.pop("copies_with")
    state.choose_copies = lambda *_given: copies_with  # its blocks are too small for a rule
    settings = {**SETTINGS, "blocks": 260, **arguments}
    forward_loads.WAVES_FROM_BYTES, waves.LEAST_WAVE_BYTES = 0, 1  # all of these loads are small
    asked = busy_requests(count)
    with engine(Path(models), "llama_wide", None, **settings) as plain:
        expected = serve(plain, asked)
    result: dict[str, Any] = {}
    chance = random.Random(3)
    decision.is_synchronous = lambda _costs: chance.random() < 0.6
    with engine(
        Path(models), "llama_wide", {"cpu_bytes": "256MiB"}, synchronous_loads=True, **settings
    ) as ours:
        result["asynchronous"] = ours.core.batch_queue is not None
        result["copies_with"] = ours.rank.transfer.copies_with

        def compare(name: str, *, empty: bool = True) -> None:
            ours.reset_gpu_cache()
            if empty:
                assert ours.core.reset_prefix_cache(False, True)
            ours.totals.clear()
            answers = serve(ours, asked)
            ours.settle()
            wrong = [r for r, (why, _) in answers.items() if why != "error"]
            wrong = [r for r in wrong if answers[r] != expected[r]]
            leaked = [r for r, (why, tokens) in answers.items() if why == "error"]
            leaked = [r for r in leaked if answers[r][1] != expected[r][1][: len(answers[r][1])]]
            result[name] = {
                "wrong": len(wrong) + len(leaked),
                "ended": sum(why == "error" for why, _ in answers.values()),
                "answered": len(answers),
                "blocks_loaded": ours.blocks_loaded(),
                "totals": {
                    key: ours.totals[key]
                    for key in (
                        "synchronous_loads",
                        "failed_loads",
                        "repaired_loads",
                        "lost_requests",
                        "skipped_copy_failed",
                        "hook_errors",
                    )
                },
            }

        compare("without faults")
        faults = Faults(ours)
        compare("with faults")
        result["faults"] = faults.happened.copy()
        compare("with faults again", empty=False)
        result["faults again"] = faults.happened - result["faults"]
        with silent_layer() as skipped:
            ours.rank._forward_loads.waves._given_up = False
            compare("silent layer", empty=False)
            result["silent layer"]["skipped"] = skipped[0]
        assert ours.rank.transfer.wait(10)
        ours.slots[:] = np.roll(ours.slots, 7, axis=0)
        compare("control", empty=False)
        ours.assert_nothing_left()
    return result


if __name__ == "__main__":
    be_run(main, processes=False)
