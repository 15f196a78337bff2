"""The forward begins while later layers arrive: the same tokens, and no layer reads too early."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction, SwapJob

from kv_offload.engines.vllm.connector import KVOffloadConnector
from tests.engine.harness import (
    Engine,
    Tokens,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
)
from tests.support.slow import rest_is_slow

PROMPTS = prompts_with_shared_prefix(seed=41)
KIND = "qwen3_deep"
LAYERS = 4
SKIPPED = "model.layers.2.self_attn.attn"


@pytest.fixture(autouse=True)
def loads_come_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are."""
    monkeypatch.setattr("kv_offload.worker.forward_loads.WAVES_FROM_BYTES", 0)
    monkeypatch.setattr("kv_offload.worker.waves.LEAST_WAVE_BYTES", 1)


@pytest.fixture
def answers(model_folder: Path) -> list[Tokens]:
    return plain_answers(model_folder, PROMPTS, KIND, one_by_one=True)


@contextmanager
def started(models: Path, answers: list[Tokens], **arguments: Any) -> Iterator[Engine]:
    """Yield an engine that has stored the prompts and knows in which layers it waits."""
    with offloading(models, KIND, synchronous_loads=True, **arguments) as ours:
        assert ours.generate_each(PROMPTS) == answers
        yield ours


def watch(running: Engine) -> tuple[list[SwapJob], list[int]]:
    """Return lists that will hold all load jobs, and the awaited waves."""
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


@pytest.mark.parametrize("async_scheduling", rest_is_slow([False, True]))
def test_layers_wait_for_their_waves(model_folder, answers, async_scheduling):
    with started(model_folder, answers, async_scheduling=async_scheduling) as ours:
        cut = ours.rank._forward_loads.waves.cut
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
            # Each forward asks before it starts, once per layer, and at the end of the step.
            assert awaited == [0, 0, 1, 2, 3, 3] * len(jobs)
        # The control: the last wave copies the skipped one too, after its layer has read.
        await_wave, skipped = ours.rank.transfer.await_wave, cut.wave_of[SKIPPED]
        ours.rank.transfer.await_wave = lambda wave: None if wave == skipped else await_wave(wave)
        wrong = ours.reload(PROMPTS, one_by_one=True)
        assert wrong[0] != answers[0], "the first prompt loads what all of them share"


def test_a_layer_that_stops_calling_ends_the_request_and_waves(
    model_folder, answers, monkeypatch, caplog
):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with started(model_folder, answers) as ours:
        ours.forget()
        call = KVOffloadConnector.wait_for_layer_load
        monkeypatch.setattr(
            KVOffloadConnector,
            "wait_for_layer_load",
            lambda self, layer: None if layer == SKIPPED else call(self, layer),
        )
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
