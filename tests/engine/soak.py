"""A long random run of one engine under pressure, every copied block checked by a digest.

usage: python -m tests.engine.soak MODELS_FOLDER SECONDS SEED ARGUMENTS_AS_JSON

`test_soak.py` calls `soak` on the CPU engine; `tests/gpu/test_soak.py` runs this module on a GPU in
a separate process. A seed replays the same decisions, though not the same timing.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.factory import create_engine
from kv_swap.host import transfers

from kv_offload.engines.vllm.versions import bytes_per_block
from kv_offload.messages import LoadJob, OffloadMetadata
from kv_offload.worker.worker import OffloadWorker
from tests.engine.harness import (
    BLOCK_TOKENS,
    PATIENCE_SECONDS,
    Engine,
    Tokens,
    engine,
    greedy,
    random_tokens,
)
from tests.support.processes import be_run

GPU_BLOCKS = 24
"""Room for two of the longest requests; up to `MAX_LIVE` are live."""
POOL_SLOTS = 40
MAX_LIVE = 8
MAX_TOKENS = 40
NEEDED = ("answered", "aborted", "reset", "preempted", "evictions", "digests_load")
"""Events without which a run proves little; a slow machine runs until they have happened."""
MOST_EXTRA_ACTIONS = 20_000
PATIENCE_STEPS = 20_000
"""Steps without a finished request after which the engine counts as stuck; it is a failure only
after `PATIENCE_SECONDS` as well."""


# -- digests -----------------------------------------------------------------------------------


class Digests:
    """Records what every store of a transfer engine copied, and checks every load against it.

    Both digests are of the bytes in the KV cache: of the source when its store has completed, while
    it is still pinned, and of the destination when its load has completed, before its request runs.
    A forward that waits for its load may have run by then; it changes the last block of a whole
    load (`rewritten`). `delay` is called before every job and may hold up its stream. No copy may
    fail.
    """

    def __init__(self, engine: SwapEngine, read: Callable[[int, int], bytes], delay: Any) -> None:
        self.checked: Counter[str] = Counter()
        self.rewritten: set[int] = set()
        self.unchecked: dict[tuple[Direction, int], Any] = {}
        self._layout = engine.layout
        self._read = read
        self._digests: dict[int, bytes] = {}
        submit, poll = engine.submit, engine.poll

        def submit_and_note(job: SwapJob) -> None:
            delay(engine, job.direction)
            submit(job)
            self.unchecked[job.direction, job.job_id] = job.pairs.copy()

        def poll_and_check() -> list[Completion]:
            completions = poll()
            for done in completions:
                self._check(done)
            return completions

        def load_now(pairs: object) -> None:
            raise AssertionError("no copy fails here")

        watched: Any = engine
        watched.submit, watched.poll = submit_and_note, poll_and_check
        watched.load_now = load_now

    def expect_rewritten(self, jobs: Sequence[LoadJob]) -> None:
        """Record which blocks of these loads a forward will write to before they are checked."""
        self.rewritten.update(
            int(job.pairs[-1, 0])
            for job in jobs
            if job.whole and job.synchronous and not job.incomplete
        )

    def _check(self, done: Completion) -> None:
        pairs = self.unchecked.pop((done.direction, done.job_id))
        assert done.error is None, done.error
        for block, slot in pairs.tolist():
            digest = self._digest(block)
            if done.direction is Direction.STORE:
                self._digests[slot] = digest
            elif block in self.rewritten:
                self.rewritten.discard(block)
            else:
                assert digest == self._digests[slot], (
                    f"load job {done.job_id}: block {block} is not what was stored in slot {slot}"
                )
        self.checked[done.direction.value] += len(pairs)

    def _digest(self, block: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for region in self._layout.regions:
            address = region.address + block * region.block_stride_bytes
            digest.update(self._read(address, region.page_bytes))
        return digest.digest()


def read_device(address: int, nbytes: int) -> bytes:
    import cupy

    target = np.empty(nbytes, np.uint8)
    runtime = cupy.cuda.runtime
    runtime.memcpy(target.ctypes.data, address, nbytes, runtime.memcpyDeviceToHost)
    return target.tobytes()


@contextmanager
def digesting(chance: random.Random) -> Iterator[list[Digests]]:
    """Make the engine that starts in this context check digests, with copies of random slowness."""
    made: list[Digests] = []

    def delay_on_device(engine: Any, direction: Direction) -> None:
        import torch

        if chance.random() < 0.3:
            lane = engine._state.lanes[direction]
            with torch.cuda.stream(lane.stream.stream):
                torch.cuda._sleep(chance.randrange(20_000_000))  # up to 10 ms at 2 GHz

    def create(kind: Any, *arguments: Any, **more: Any) -> SwapEngine:
        engine = create_engine(kind, *arguments, **more)
        if kind == "cuda":
            made.append(Digests(engine, read_device, delay_on_device))
        else:
            made.append(Digests(engine, ctypes.string_at, lambda *_: None))
        return engine

    start = OffloadWorker.start_copies

    def start_copies(worker: OffloadWorker, metadata: OffloadMetadata, **how: bool) -> None:
        made[-1].expect_rewritten(metadata.loads)
        start(worker, metadata, **how)

    copy_runs = transfers.copy_runs
    slowness = random.Random(chance.random())  # separate: the copying thread draws from it

    def copy_slowly(runs: Any) -> None:
        if slowness.random() < 0.3:
            time.sleep(slowness.random() * 0.02)
        copy_runs(runs)

    with (
        mock.patch("kv_offload.worker.forward_loads.WAVES_FROM_BYTES", 0),
        mock.patch("kv_offload.worker.waves.LEAST_WAVE_BYTES", 1),
        mock.patch("kv_offload.worker.allocation.create_engine", create),
        mock.patch.object(OffloadWorker, "start_copies", start_copies),
        mock.patch("kv_swap.host.transfers.copy_runs", copy_slowly),
    ):
        yield made


# -- questions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A prompt, its answer without the plugin, and how clear each token of it was.

    `margins` are the differences in log-probability between the best token and the next, or empty
    if answers must match exactly.
    """

    prompt: Tokens
    answer: Tokens
    margins: list[float]

    def accepts(self, answer: Tokens, tolerance: float) -> bool:
        """Return whether an answer is right, up to a first token that was a toss-up."""
        for position, (found, expected) in enumerate(zip(answer, self.answer, strict=False)):
            if found != expected:
                return bool(self.margins) and self.margins[position] <= tolerance
        return True


def make_prompts(chance: random.Random) -> list[Tokens]:
    """Return prompts of 2 to 9 blocks; families of them share prefixes of different lengths."""
    prompts = []
    for _ in range(5):
        stem = random_tokens(8 * BLOCK_TOKENS, chance.randrange(1 << 30))
        for _ in range(5):
            tail = random_tokens(chance.randrange(1, 60), chance.randrange(1 << 30))
            prompts.append(stem[: chance.randrange(BLOCK_TOKENS, len(stem))] + tail)
    return prompts


def ask(plain: Engine, prompts: Sequence[Tokens], *, exact: bool) -> list[Question]:
    """Answer prompts one by one if answers depend on the batch (not `exact`)."""
    if exact:
        answers = plain.generate(prompts, MAX_TOKENS)
        return [Question(*asked, []) for asked in zip(prompts, answers, strict=True)]
    questions = []
    for prompt in prompts:
        (output,) = plain.llm.generate(
            [{"prompt_token_ids": prompt}], greedy(MAX_TOKENS, logprobs=2), use_tqdm=False
        )
        best = output.outputs[0]
        margins = []
        for choices in best.logprobs or ():
            first, second = sorted((c.logprob for c in choices.values()), reverse=True)[:2]
            margins.append(first - second)
        questions.append(Question(prompt, list(best.token_ids), margins))
    return questions


# -- the run -----------------------------------------------------------------------------------


class Soak:
    """Random requests, aborts and resets on one engine, and its answers."""

    def __init__(
        self, running: Engine, questions: list[Question], chance: random.Random, tolerance: float
    ) -> None:
        self.engine = running
        self.questions = questions
        self.chance = chance
        self.tolerance = tolerance
        self.live: dict[str, tuple[Question, int]] = {}
        self.happened: Counter[str] = Counter()
        self._steps_since_finish = 0
        self._last_finish = time.monotonic()

    def act(self) -> None:
        """Perform one random action."""
        draw = self.chance.random()
        if draw < 0.15 and len(self.live) < MAX_LIVE:
            self.add()
        elif draw < 0.16 and self.live:
            self.abort(self.chance.choice(sorted(self.live)))
        elif draw < 0.165:
            self.reset()
        else:
            self.step()

    def add(self) -> None:
        request_id = f"request-{self.happened['added']}"
        question = self.chance.choice(self.questions)
        tokens = self.chance.randint(1, MAX_TOKENS)
        self.happened["added"] += 1
        self.live[request_id] = (question, tokens)
        self.engine.add(request_id, question.prompt, tokens, self.chance.randrange(4))

    def abort(self, request_id: str) -> None:
        del self.live[request_id]
        self.engine.abort(request_id)
        self.happened["aborted"] += 1

    def reset(self) -> None:
        """Reset as a user does, and as a pause does, which preempts running requests.

        vLLM raises in the latter case if a request waits for its load.
        """
        with_connector = self.chance.random() < 0.2
        waits = any(
            request.status.name == "WAITING_FOR_REMOTE_KVS"
            or (request.num_computed_tokens and request.status.name != "RUNNING")
            for request in self.engine.scheduler.requests.values()
            if not request.is_finished()
        )
        running = not waits and self.chance.random() < 0.7
        done = self.engine.core.reset_prefix_cache(running, with_connector)
        assert done or not running
        self.happened["reset"] += bool(done)
        self.engine.offload.manager.check_integrity()

    def step(self) -> None:
        finished = self.engine.step()
        self._steps_since_finish += 1
        if finished or not self.live:
            self._steps_since_finish, self._last_finish = 0, time.monotonic()
        for request_id, output in finished.items():
            question, tokens = self.live.pop(request_id)
            answer = list(output.outputs[0].token_ids)
            assert len(answer) == tokens
            assert question.accepts(answer, self.tolerance), (
                f"{request_id} answers {answer} instead of {question.answer[:tokens]}, whose "
                f"margins are {question.margins[:tokens]}"
            )
            self.happened["answered"] += 1
            self.happened["same"] += answer == question.answer[:tokens]
        if self._steps_since_finish > PATIENCE_STEPS and self.live:
            late = time.monotonic() - self._last_finish
            assert late < PATIENCE_SECONDS, f"nothing ends: {self.live.keys()}"

    def finish(self) -> None:
        while self.live:
            self.step()
        self.engine.run()
        self.engine.assert_nothing_left()


def soak(
    models: Path,
    seconds: float,
    seed: int,
    *,
    tolerance: float = 0.0,
    kind: str = "qwen3",
    **arguments: Any,
) -> dict[str, Any]:
    """Run for about `seconds`; return counts of what happened. Raises `AssertionError`.

    It runs longer, by at most `MOST_EXTRA_ACTIONS`, if some of `NEEDED` has not happened.

    With a `tolerance` above 0 an answer may differ from the point on where the model found two
    tokens equally likely, up to that difference of log-probability: on a GPU, rounding depends on
    the batch.
    """
    print(f"soak with seed {seed} for {seconds:.0f} s: {arguments}", flush=True)
    chance = random.Random(seed)
    prompts = make_prompts(chance)
    with engine(models, kind, **arguments) as plain:
        questions = ask(plain, prompts, exact=tolerance == 0)
        block_bytes = bytes_per_block(plain.scheduler.kv_cache_config)
    with digesting(chance) as made:
        plugin = {"cpu_bytes": f"{POOL_SLOTS * block_bytes}B"}
        tight = {
            "blocks": GPU_BLOCKS,
            "max_model_len": 10 * BLOCK_TOKENS + MAX_TOKENS,
            "max_num_seqs": MAX_LIVE,
            "max_num_batched_tokens": 128,
            "scheduling_policy": "priority",
        }
        with engine(models, kind, plugin, **tight, **arguments) as running:
            run = Soak(running, questions, chance, tolerance)
            (digests,) = made

            def result() -> dict[str, Any]:
                checked = {f"digests_{way}": count for way, count in digests.checked.items()}
                totals = {name: int(value) for name, value in running.totals.items()}
                return {**run.happened, "preempted": running.preemptions, **checked, **totals}

            until = time.monotonic() + seconds
            while time.monotonic() < until:
                run.act()
            for _ in range(MOST_EXTRA_ACTIONS):
                if not missing(result()):
                    break
                run.act()
            run.finish()
            run.happened["asynchronous"] = running.core.batch_queue is not None
            found = result()
    assert not digests.unchecked
    return found


def missing(result: Mapping[str, Any]) -> list[str]:
    """Return those of `NEEDED` that have not happened."""
    return [name for name in NEEDED if not result.get(name)]


def check(result: dict[str, Any], least_same: float = 0.95) -> None:
    """Check the result of a soak.

    Every answer was accepted; at least this share must be the exact tokens, not just tokens that
    the model finds as likely within the tolerance.
    """
    assert missing(result) == [], result
    assert result["same"] >= least_same * result["answered"], result


def main(models: str, seconds: str, seed: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return soak(Path(models), float(seconds), int(seed), **arguments)


if __name__ == "__main__":
    be_run(main, processes=False)
