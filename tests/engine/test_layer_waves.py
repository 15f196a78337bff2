"""The forward begins while later layers arrive: the same tokens, and no layer reads too early."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction, SwapJob

from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.engines.vllm.runner import VLLMRank
from tests.engine.copies import Copies
from tests.engine.harness import (
    Engine,
    Tokens,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
)

PROMPTS = prompts_with_shared_prefix(seed=41)
KIND = "qwen3_deep"
LAYERS = 4
SKIPPED = "model.layers.2.self_attn.attn"


@pytest.fixture(autouse=True)
def loads_come_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are."""
    monkeypatch.setattr("kv_offload.worker.forward_loads.WAVES_FROM_BYTES", 0)


@pytest.fixture
def answers(model_folder: Path) -> list[Tokens]:
    return plain_answers(model_folder, PROMPTS, KIND, one_by_one=True)


@contextmanager
def started(models: Path, answers: list[Tokens], **arguments: Any) -> Iterator[Engine]:
    """Yield an engine that has stored the prompts and knows which layers it waits in."""
    with offloading(models, KIND, synchronous_loads=True, **arguments) as ours:
        assert ours.generate_each(PROMPTS) == answers
        yield ours


def watch(running: Engine) -> tuple[list[SwapJob], list[int]]:
    """Return lists that will hold all load jobs, and the waves that are awaited."""
    jobs: list[SwapJob] = []
    awaited: list[int] = []
    submit, await_wave = running.rank.transfer.submit, running.rank.transfer.await_wave

    def submitted(job: SwapJob) -> None:
        if job.direction is Direction.LOAD:
            jobs.append(job)
        submit(job)

    def waited(wave: int) -> None:
        awaited.append(wave)
        await_wave(wave)

    running.rank.transfer.submit = submitted
    running.rank.transfer.await_wave = waited
    return jobs, awaited


def skip_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `SKIPPED` read its KV without a call, as layers that are no attention do."""
    original: Callable[[Any, str], None] = KVOffloadConnector.wait_for_layer_load

    def called(self: Any, layer_name: str) -> None:
        if layer_name != SKIPPED:
            original(self, layer_name)

    monkeypatch.setattr(KVOffloadConnector, "wait_for_layer_load", called)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_layers_wait_for_their_waves(
    model_folder: Path, answers: list[Tokens], async_scheduling: bool
) -> None:
    with started(model_folder, answers, async_scheduling=async_scheduling) as ours:
        cut = ours.rank.waves.cut
        assert len(cut.waves) == LAYERS
        assert sorted(cut.wave_of.values()) == [1, 2, 3]
        jobs, awaited = watch(ours)
        for _ in range(2):
            jobs.clear()
            awaited.clear()
            assert ours.reload(PROMPTS, one_by_one=True) == answers
            assert ours.totals["failed_loads"] == 0
            assert jobs
            assert all(job.in_waves for job in jobs)
            # Each forward asks before it, once a layer, and at the end of the step.
            assert awaited == [0, 0, 1, 2, 3, 3] * len(jobs)


def test_where_a_graph_is_replayed_whole_loads_stop_coming_in_waves(
    model_folder: Path, answers: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(model_folder, answers) as ours:
        jobs, awaited = watch(ours)
        known = VLLMRank.forward_with_layer_calls
        for layers_call, in_waves in ((False, True), (False, False), (True, False), (True, True)):
            find = known if layers_call else lambda _: None
            monkeypatch.setattr(VLLMRank, "forward_with_layer_calls", find)
            jobs.clear()
            awaited.clear()
            assert ours.reload(PROMPTS[:1]) == answers[:1]
            assert [job.in_waves for job in jobs] == [in_waves]
            assert bool(awaited) == (layers_call and in_waves)
            assert ours.totals["failed_loads"] == 0


def test_a_layer_that_does_not_wait_gives_other_tokens(
    model_folder: Path, answers: list[Tokens]
) -> None:
    """The control: what the engine on the CPU does not wait for is not there."""
    with started(model_folder, answers) as ours:
        await_wave, skipped = ours.rank.transfer.await_wave, ours.rank.waves.cut.wave_of[SKIPPED]

        def careless(wave: int) -> None:
            if wave != skipped:
                await_wave(wave)

        # The last wave brings the third with it, but only after the third layer.
        ours.rank.transfer.await_wave = careless
        wrong = ours.reload(PROMPTS, one_by_one=True)
        assert wrong[0] != answers[0], "the first prompt loads what all of them share"


def test_a_layer_that_stops_calling_ends_the_request_and_waves(
    model_folder: Path,
    answers: list[Tokens],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with started(model_folder, answers) as ours:
        ours.forget()
        skip_calls(monkeypatch)
        ours.add("reads too early", PROMPTS[0])
        ended = ours.run()["reads too early"].outputs[0]
        assert (ended.finish_reason, ended.token_ids) == ("error", [])
        assert ours.totals["lost_requests"] == 1
        assert ours.generate_each(PROMPTS) == answers, "nothing that was computed then is served"
        errors = {r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR}
        (error,) = (message for message in errors if "kv-offload" in message)
        assert f"1 layers, {SKIPPED} first, did not call the connector" in error
        jobs, _ = watch(ours)
        assert ours.reload(PROMPTS, one_by_one=True) == answers
        assert jobs
        assert not any(job.in_waves for job in jobs)
        assert ours.totals["lost_requests"] == 0


def test_what_layers_without_calls_read_comes_first(
    model_folder: Path, answers: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_calls(monkeypatch)
    with started(model_folder, answers) as ours:
        cut, layout = ours.rank.waves.cut, ours.rank.transfer.layout
        assert SKIPPED not in cut.wave_of
        assert len(cut.wave_of) == LAYERS - 2
        first = set().union(*(layout.regions[region].tensors for region in cut.waves[0]))
        assert first == {"model.layers.0.self_attn.attn", SKIPPED}
        jobs, _ = watch(ours)
        assert ours.reload(PROMPTS, one_by_one=True) == answers
        assert jobs
        assert all(job.in_waves for job in jobs)
        assert ours.totals["failed_loads"] == 0


def test_a_wave_that_fails_is_made_good_before_its_layer(
    model_folder: Path, answers: list[Tokens], copies: Copies
) -> None:
    with started(model_folder, answers) as ours:
        await_wave = ours.rank.transfer.await_wave

        def failing(wave: int) -> None:
            if wave == 2:
                copies.fail(Direction.LOAD, every=1000)
            await_wave(wave)

        ours.rank.transfer.await_wave = failing
        assert ours.reload(PROMPTS, one_by_one=True) == answers
        assert ours.totals["repaired_loads"] == len(PROMPTS)
        copies.release()
        ours.rank.transfer.await_wave = await_wave
        assert ours.reload(PROMPTS, one_by_one=True) == answers
