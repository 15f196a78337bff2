"""Inside vLLM's MultiConnector, before or behind a connector with the habits of Nixl's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kv_offload.engines.vllm import CONNECTOR
from kv_offload.errors import UnsupportedError
from tests.engine.harness import (
    BLOCK_TOKENS,
    Copies,
    Engine,
    Tokens,
    engine,
    prompts_with_shared_prefix,
    random_tokens,
)
from tests.engine.multiprocess_run import check, run_engine
from tests.engine.test_startup import _forget_half_started_engine
from tests.support.remote_connector import RemoteConnector, multi_config

PROMPTS = prompts_with_shared_prefix(seed=5)
SENT = random_tokens(5 * BLOCK_TOKENS + 7, seed=50)
ORDERS = pytest.mark.parametrize("first", [True, False], ids=["first", "last"])


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, list[Tokens]]:
    """The answers of engines without a connector, those of `SENT` last."""
    answers = {}
    for kind in ("qwen3", "gemma3"):
        with engine(model_folder, kind) as plain:
            answers[kind] = plain.generate([*PROMPTS, SENT])
    return answers


def member(kind: type) -> Any:
    (found,) = [c for c in get_kv_transfer_group()._connectors if isinstance(c, kind)]
    return found


def ask(running: Engine, request_id: str, prompt: Tokens, **params: Any) -> Any:
    """Answer one prompt, with parameters for the remote connector; return vLLM's output."""
    running.add(request_id, prompt, extra_args={"kv_transfer_params": params})
    return running.run()[request_id]


def hand_over(running: Engine) -> Tokens:
    """Compute `SENT`, have the remote connector keep its KV and bring it back; return the answer.

    No other cache has it then: the second request computes the last token only.
    """
    sent = ask(running, "sends", SENT, do_remote_decode=True)
    running.settle()
    running.reset_gpu_cache()
    running.offload.manager.reset()
    received = ask(running, "receives", SENT, **sent.kv_transfer_params)
    tokens = list(received.outputs[0].token_ids)
    assert tokens == list(sent.outputs[0].token_ids)
    assert received.num_cached_tokens >= len(SENT) - 1
    return tokens


@ORDERS
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_both_members_serve_their_requests(
    model_folder: Path, expected: dict[str, list[Tokens]], first: bool, role: str
) -> None:
    """Ours from host memory, the other's from afar, in one process, with stats and a control."""
    *answers, answer = expected["qwen3"]
    config = multi_config({}, first=first, role=role)
    with engine(
        model_folder, plugin={}, kv_transfer_config=config, disable_log_stats=False
    ) as running:
        (scheduler,) = [
            c for c in running.scheduler.connector._connectors if isinstance(c, RemoteConnector)
        ]
        assert len(scheduler.handshake) == 1, "each member has its own metadata"
        assert running.offload.manager.usable_slots == running.rank.num_slots
        assert running.generate(PROMPTS) == answers
        running.reset_gpu_cache()
        assert running.generate(PROMPTS) == answers
        assert running.blocks_loaded() > 0
        for prompt, cached in zip(PROMPTS, running.cached_tokens, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

        loaded = running.blocks_loaded()
        assert hand_over(running) == answer
        assert running.blocks_loaded() == loaded
        # What came from afar was stored, and comes back from host memory.
        running.settle()
        running.reset_gpu_cache()
        assert running.generate([SENT]) == [answer]
        assert running.blocks_loaded() == loaded + 5

        metrics = {m.name: m for m in running.llm.get_metrics() if hasattr(m, "value")}
        assert metrics["vllm:remote_loaded_blocks"].value == 6
        assert metrics["vllm:host_kv_cache_slots"].value == running.rank.num_slots
        assert metrics["vllm:host_kv_cache_hit_tokens"].value > 0

        assert running.generate(PROMPTS) == answers  # computed: `hand_over` emptied host memory
        running.reset_gpu_cache()
        running.slots[:] ^= 0x40
        changed = running.generate([*PROMPTS, SENT])
        assert all(a != b for a, b in zip(changed, expected["qwen3"], strict=True))
        running.assert_nothing_left()


@ORDERS
def test_several_cache_groups(
    model_folder: Path, expected: dict[str, list[Tokens]], first: bool
) -> None:
    answers = expected["gemma3"]
    config = multi_config({}, first=first)
    with engine(model_folder, "gemma3", {}, kv_transfer_config=config) as running:
        assert len(running.scheduler.kv_cache_config.kv_cache_groups) == 2
        assert running.generate([*PROMPTS, SENT]) == answers
        running.reset_gpu_cache()
        assert running.generate([*PROMPTS, SENT]) == answers
        assert running.blocks_loaded() > 0
        running.assert_nothing_left()


@ORDERS
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
def test_a_failed_load_costs_no_request(
    model_folder: Path,
    copies: Copies,
    expected: dict[str, list[Tokens]],
    first: bool,
    synchronous: bool,
) -> None:
    """Though `kv_load_failure_policy` of the MultiConnector is vLLM's default, to fail."""
    *answers, _ = expected["qwen3"]
    config = multi_config({}, first=first)
    assert "kv_load_failure_policy" not in config
    with engine(
        model_folder, plugin={}, kv_transfer_config=config, synchronous_loads=synchronous
    ) as running:
        assert running.generate(PROMPTS) == answers
        running.reset_gpu_cache()
        # The copy that makes up for a synchronous load succeeds.
        copies.fail(Direction.LOAD, every=2 if synchronous else 1)
        assert running.generate(PROMPTS) == answers
        assert (running.blocks_loaded() > 0) == synchronous
        assert running.totals["repaired_loads" if synchronous else "failed_loads"] > 0
        copies.release()
        running.reset_gpu_cache()
        assert running.generate(PROMPTS) == answers
        assert running.blocks_loaded() > 0
        running.assert_nothing_left()


def test_a_failed_load_may_fail_its_request(model_folder: Path, copies: Copies) -> None:
    config = multi_config({"on_load_failure": "fail"})
    with engine(model_folder, plugin={}, kv_transfer_config=config) as running:
        running.generate(PROMPTS[:1])
        running.reset_gpu_cache()
        copies.fail(Direction.LOAD)
        running.add("fails", PROMPTS[0])
        assert running.run()["fails"].outputs[0].finish_reason == "error"


@ORDERS
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
def test_what_the_other_member_failed_to_load_is_not_stored(
    model_folder: Path, expected: dict[str, list[Tokens]], first: bool, synchronous: bool
) -> None:
    """A synchronous load of the other's is known by hash, and stored, when its failure is told."""
    *_, answer = expected["qwen3"]
    config = multi_config({}, first=first, remote={"synchronous": synchronous})
    with engine(model_folder, plugin={}, kv_transfer_config=config) as running:
        sent = ask(running, "sends", SENT, do_remote_decode=True)
        running.settle()
        running.reset_gpu_cache()
        running.offload.manager.reset()
        member(RemoteConnector).failing = True
        rank = running.rank
        submit = rank.submit_stores
        # The copies end before the next forward would give them the right bytes.
        rank.submit_stores = lambda: (submit(), rank.transfer.wait(120))
        received = ask(running, "receives", SENT, **sent.kv_transfer_params)
        assert list(received.outputs[0].token_ids) == answer
        running.settle()
        running.reset_gpu_cache()
        assert running.generate([SENT]) == [answer]
        running.assert_nothing_left()


def test_ranks_in_processes_of_their_own(model_folder: Path, forks: bool) -> None:
    """Capacities, reports and stats cross processes; the smallest rank's slots count."""
    arguments = {"tensor_parallel_size": 2, "sleep": True, "beside": True}
    check(run_engine(model_folder, "qwen3", arguments, forks=forks), 2)


# -- what is refused ---------------------------------------------------------------------------


def refusal(models: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedError) as caught, engine(models, kv_transfer_config=config):
        pass
    _forget_half_started_engine()
    return str(caught.value)


def test_two_of_ours_are_refused(model_folder: Path) -> None:
    config = multi_config({})
    members = config["kv_connector_extra_config"]["connectors"]
    members.append(members[0])
    message = refusal(model_folder, config)
    assert f"the MultiConnector has 2 members {CONNECTOR}" in message
    assert message.endswith("list it once")


def test_two_policies_for_failed_loads_are_refused(model_folder: Path) -> None:
    config = multi_config({"on_load_failure": "fail"}, kv_load_failure_policy="recompute")
    message = refusal(model_folder, config)
    assert "on_load_failure is 'fail', and kv_load_failure_policy of the MultiConnector" in message
