"""Sessions whose prompt grows (vLLM's streaming input), on a real engine."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request

from tests.engine.harness import (
    BLOCK_TOKENS,
    Engine,
    all_differ,
    engine,
    greedy,
    offloading,
    patiently,
    plain_answers,
    random_tokens,
)
from tests.support.inputs import Tokens

PARTS = [random_tokens(tokens, seed) for seed, tokens in enumerate((70, 40, 9, 150), start=50)]


def serve(running: Engine, request_id: str, parts: list[Tokens] = PARTS) -> Tokens:
    """Serve a session of all parts, and end it; return its text with the kept parts of answers."""

    def part(tokens: Tokens, **more: Any) -> Request:
        hasher = running.core.request_block_hasher
        return Request(request_id, list(tokens), greedy(8), None, block_hasher=hasher, **more)

    session, *others = (part(tokens, resumable=True) for tokens in parts)
    for added in (session, *others, part([0])):
        running.scheduler.add_request(added)
    for _ in patiently(2000):
        if session.is_finished():
            return list(session.all_token_ids)
        running.step()
    raise AssertionError("the session does not end")


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_what_a_session_says_is_stored_and_right(model_folder, kind):
    """Compares with an engine without the plugin, and ends with corrupted host memory."""
    with engine(model_folder, kind) as plain:
        text = serve(plain, "session")
    expected = plain_answers(model_folder, [text], kind)
    assert len(text) > sum(map(len, PARTS))
    with offloading(model_folder, kind) as ours:
        assert serve(ours, "session") == text
        ours.settle()
        assert ours.reload([text]) == expected
        assert ours.cached_tokens == [(len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
        assert all_differ(ours.reload([text], corrupted=True), expected)
