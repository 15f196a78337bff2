"""Inside vLLM's MultiConnector, before or after a connector that behaves like Nixl's."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.engine import nixl_run
from tests.engine.harness import (
    BLOCK_TOKENS,
    Engine,
    Tokens,
    all_differ,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
)
from tests.engine.multiprocess_run import check
from tests.support.processes import run_module
from tests.support.remote_connector import RemoteConnector, multi_config

PROMPTS = prompts_with_shared_prefix(seed=5)
SENT = random_tokens(5 * BLOCK_TOKENS + 7, seed=50)
ALL = [*PROMPTS, SENT]


def remote(connector: Any) -> RemoteConnector:
    """Return the member that is not ours."""
    (found,) = [c for c in connector._connectors if isinstance(c, RemoteConnector)]
    return found


def ask(running: Engine, request_id: str, prompt: Tokens, **params: Any) -> Any:
    """Answer one prompt, with parameters for the remote connector; return vLLM's output."""
    running.add(request_id, prompt, extra_args={"kv_transfer_params": params})
    return running.run()[request_id]


def send(running: Engine) -> Any:
    """Compute `SENT`, whose KV then only the remote connector has; return vLLM's output."""
    sent = ask(running, "sends", SENT, do_remote_decode=True)
    running.settle()
    running.forget()
    running.offload.manager.reset()
    return sent


def tokens_of(output: Any) -> Tokens:
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(("first", "role"), [(True, "kv_both"), (False, "kv_producer")])
def test_both_members_serve_their_requests(model_folder, first, role):
    """Ours from host memory, the other's from its sender, in one process, with stats; a control."""
    *answers, answer = expected = plain_answers(model_folder, ALL)
    config = multi_config({}, first=first, role=role)
    with offloading(model_folder, kv_transfer_config=config, disable_log_stats=False) as running:
        handshake = remote(running.scheduler.connector).handshake
        assert len(handshake) == 1, "each member has its own metadata"
        assert running.offload.manager.usable_slots == running.rank.num_slots
        assert running.generate(PROMPTS) == answers
        assert running.reload(PROMPTS) == answers
        for prompt, cached in zip(PROMPTS, running.cached_tokens, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

        sent = send(running)
        received = ask(running, "receives", SENT, **sent.kv_transfer_params)
        assert tokens_of(sent) == tokens_of(received) == answer
        assert received.num_cached_tokens >= len(SENT) - 1, "only the last token was computed"
        assert running.blocks_loaded() == 0
        # Received blocks were stored, and are loaded from host memory.
        running.settle()
        assert running.reload([SENT]) == [answer]
        assert running.blocks_loaded() == 5

        metrics = {m.name: m for m in running.llm.get_metrics() if hasattr(m, "value")}
        assert metrics["vllm:remote_loaded_blocks"].value == 6
        assert metrics["vllm:host_kv_cache_slots"].value == running.rank.num_slots
        assert metrics["vllm:host_kv_cache_hit_tokens"].value > 0

        assert running.generate(PROMPTS) == answers  # computed: `send` emptied host memory
        assert all_differ(running.reload(ALL, corrupted=True), expected)


def test_ranks_in_processes_of_their_own(model_folder, forks):
    """Capacities, reports and stats cross processes; the rank with the fewest slots decides."""
    arguments = {"tensor_parallel_size": 2, "sleep": True, "beside": True}
    words = ("tests.engine.multiprocess_run", model_folder, "qwen3", arguments)
    check(run_module(*words, forks=forks), ranks=2)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs Nixl: pip install nixl")
def test_nixl_sends_what_one_engine_has_computed(model_folder):
    """With vLLM's own NixlConnector next to ours, on both sides."""
    nixl_run.check(run_module("tests.engine.nixl_run", model_folder, "qwen3", {}, forks=True))
