"""Blocks that vLLM names before they are computed, and that are then never computed.

Such a block is freed with its name if a request is preempted in the step that scheduled it, or if
an error cuts a step short and the user of an in-process engine continues. A diffusion model may
read a canvas whose KV it never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from vllm.v1.outputs import DraftTokenIds

from kv_offload.cache.prefix import CacheGroup
from kv_offload.errors import UnsupportedError
from tests.support.configurations import make_vllm_config
from tests.support.played_cases import FULL, OTHER, PROMPT, STATE, WINDOW, both_ways, wrong_bytes
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import Draft, PlayedModel, Tokens

pytestmark = pytest.mark.engine

LONG = [*PROMPT, *OTHER][:36]
FULL_CACHE = [((FULL,), 11), ((FULL, WINDOW), 18), ((FULL, STATE), 15)]
"""Cache groups, and the number of blocks with which the third step finds none free."""


def preempt_what_the_step_has_scheduled(
    groups: Sequence[CacheGroup], blocks: int, async_scheduling: bool
) -> PlayedEngine:
    """Have a chunk of `low` preempted in the step that schedules it; then serve it."""
    engine = PlayedEngine(
        groups,
        blocks=blocks,
        async_scheduling=async_scheduling,
        scheduling_policy="priority",
        long_prefill_token_threshold=8,
        max_model_len=40,
    )
    engine.scheduler.scheduler_reserve_full_isl = False
    low = engine.add("low", LONG, max_tokens=3, priority=1)
    while low.num_computed_tokens < 16:
        engine.step(copies=True)
    engine.add("high", OTHER[:8], max_tokens=2)
    for _ in range(3):
        computed = low.num_computed_tokens
        output = engine.step(copies=True)
        if low.num_preemptions:
            break
    assert "low" not in output.num_scheduled_tokens
    assert 0 < computed < len(LONG), "its chunk was scheduled before it was preempted"
    engine.run()
    return engine


@both_ways
@pytest.mark.parametrize(("groups", "blocks"), FULL_CACHE, ids=["full", "window", "state"])
def test_a_block_that_a_preempted_request_never_computed_is_not_served(
    groups, blocks, async_scheduling
):
    engine = preempt_what_the_step_has_scheduled(groups, blocks, async_scheduling)
    assert engine.answers["low"] == engine.expected["low"]
    engine.serve("low again", LONG, 3)
    engine.check_rest()


@pytest.mark.parametrize(("groups", "blocks"), FULL_CACHE[:2], ids=["full", "window"])
def test_without_the_mend_vllm_serves_what_lay_there_before(monkeypatch, groups, blocks):
    """The control. With states the request's next lookup ends before these blocks."""
    monkeypatch.setattr(
        "kv_offload.engines.vllm.patches.vllm_workarounds._hashed_uncomputed", lambda *_: iter(())
    )
    with wrong_bytes():
        preempt_what_the_step_has_scheduled(groups, blocks, async_scheduling=False)


def cut_a_step_short(engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the step that computes `PROMPT` with an error; the user then aborts the request."""
    engine.model.may_lose_kv = True
    engine.add("cut short", PROMPT)
    engine.schedule()
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            engine.execute()
    engine.abort("cut short")


@both_ways
def test_after_a_step_that_was_cut_short_nobody_is_served_what_it_did_not_compute(monkeypatch):
    """vLLM serves these blocks to the next request, which ends before it returns a token."""
    engine = PlayedEngine()
    cut_a_step_short(engine, monkeypatch)
    engine.serve("next", PROMPT)
    assert (engine.ended["next"], engine.answers["next"]) == ("error", [])
    engine.model.may_lose_kv = False
    engine.serve("after it", PROMPT)
    assert len(engine.answers["after it"]) == 4
    assert engine.totals["stored_bytes"] > 0
    assert not engine.offload.has_pending_work
    assert engine.offload.watch.under_way == 0


@both_ways
def test_what_a_step_that_was_cut_short_left_behind_is_forgotten_before_somebody_asks(monkeypatch):
    """The aborted request is gone when the next step reports it; its blocks still have names."""
    engine = PlayedEngine()
    cut_a_step_short(engine, monkeypatch)
    engine.step()
    engine.model.may_lose_kv = False
    engine.serve("next", PROMPT)
    assert len(engine.answers["next"]) == 4


@both_ways
def test_where_the_engine_was_reset_after_a_step_that_was_cut_short_nobody_ends(monkeypatch):
    engine = PlayedEngine()
    cut_a_step_short(engine, monkeypatch)
    assert engine.reset(reset_running_requests=True)
    engine.model.may_lose_kv = False
    for request_id in ("next", "after it"):
        engine.serve(request_id, PROMPT)
        assert len(engine.answers[request_id]) == 4
    assert engine.totals["stored_bytes"] > 0


def test_a_step_that_was_cut_short_while_others_run_ends_these(monkeypatch):
    """Their results of that step are missing, and nothing shows what they had before."""
    engine = PlayedEngine()
    engine.add("runs", OTHER, max_tokens=20)
    engine.step(3, copies=True)
    stored = dict(engine.offload.manager.readable_slots())
    cut_a_step_short(engine, monkeypatch)
    engine.run()
    assert engine.ended["runs"] == "error"
    assert engine.offload.manager.readable_slots() == stored
    engine.model.may_lose_kv = False
    engine.serve("again", OTHER)
    assert len(engine.answers["again"]) == 4
    engine.check_rest()


CANVAS = 8


class PlayedDiffusion(PlayedModel):
    """Returns a canvas in the one step that reads it, and writes no KV of it."""

    def forward_request(self, request_id: str, computed: int, output: Any, draft: Draft) -> Tokens:
        tokens = self.requests[request_id].tokens
        if output.scheduled_spec_decode_tokens.get(request_id):
            canvas = [0, 1] * (CANVAS // 2)
            tokens += canvas
            return canvas
        known = len(tokens)
        super().forward_request(request_id, computed, output, draft)
        del tokens[known:], self.requests[request_id].names[known:]  # a prompt samples nothing
        return []


class DiffusionEngine(PlayedEngine):
    def check_answer(self, request_id: str) -> None:
        """Do nothing: another model answers."""


@pytest.fixture
def diffusion(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("vllm.config.diffusion", reason="this vLLM has no such models")

    def make(*arguments: Any, **more: Any) -> Any:
        made = make_vllm_config(*arguments, **more)
        made.diffusion_config = config.DiffusionConfig(canvas_length=CANVAS)
        vars(made.model_config)["is_diffusion"] = True
        return made

    monkeypatch.setattr("tests.support.played_engine.make_vllm_config", make)


def read_canvas(*, async_scheduling: bool) -> DiffusionEngine:
    engine = DiffusionEngine(async_scheduling=async_scheduling, max_num_batched_tokens=32)
    engine.model = PlayedDiffusion(engine.groups, [rank.kv for rank in engine.ranks])
    request = engine.add("read", PROMPT[:18], CANVAS, extra_args={"diffusion_read_only": True})
    engine.step(copies=True)
    if not async_scheduling:
        engine.scheduler.update_draft_token_ids(DraftTokenIds(["read"], [[0] * CANVAS]))
    engine.run()
    assert request.num_tokens == 18 + CANVAS
    return engine


@pytest.mark.usefixtures("diffusion")
def test_a_canvas_that_is_only_read():
    engine = read_canvas(async_scheduling=False)
    engine.rest()
    assert engine.totals["stored_slots"] == 4, "those of the prompt"
    with pytest.raises(UnsupportedError, match="the model is a diffusion model"):
        read_canvas(async_scheduling=True)


@pytest.mark.usefixtures("diffusion")
def test_with_asynchronous_scheduling_vllm_names_what_was_only_read(monkeypatch):
    """The control. If it no longer holds, diffusion models can be served without the setting."""
    monkeypatch.setattr(
        "kv_offload.engines.vllm.start.support._engine_problems", lambda *_: iter(())
    )
    with wrong_bytes():
        read_canvas(async_scheduling=True)
