"""Engines in separate processes: ranks with different layers, with the same bytes, and replicas."""

from __future__ import annotations

import pytest

from tests.engine import killed_rank_run, pressure_run, replica_run
from tests.engine.multiprocess_run import PIPELINE, check
from tests.support.latents import LATENT
from tests.support.mooncake import PATIENT, Master, environment, require_mooncake
from tests.support.processes import run_module

ROUND_TRIP = "tests.engine.multiprocess_run"


@pytest.mark.slow  # `test_multi_connector.py` has ranks, and `tests/kv_offload/worker` capacities
@pytest.mark.parametrize(("kind", "partition"), [("qwen3", "1,1"), ("gemma3", "3,1")])
def test_stages_of_a_pipeline(model_folder, forks, kind, partition):
    """With `3,1` the stages' blocks have different sizes, and so do their slots."""
    arguments = {**PIPELINE, "sleep": True}
    stages = {"VLLM_PP_LAYER_PARTITION": partition}
    check(run_module(ROUND_TRIP, model_folder, kind, arguments, forks=forks, **stages), ranks=2)


@pytest.mark.slow  # `test_multi_connector.py` has ranks, `tests/kv_offload/worker` what they share
def test_ranks_with_latent_attention_keep_their_bytes_once(model_folder, forks):
    arguments = {"tensor_parallel_size": 2, "sleep": True, **LATENT}
    result = run_module(ROUND_TRIP, model_folder, "deepseek_v2", arguments, forks=forks)
    check(result, ranks=2, sharing=2)


@pytest.mark.slow  # `tests/kv_offload/engines/test_replicas.py` has them without an engine
def test_replicas_of_data_parallelism(model_folder, forks):
    """Replicas of a model with experts step together, with dummy batches; others do not."""
    case = ("deepseek_v2", LATENT)
    replica_run.check(run_module("tests.engine.replica_run", model_folder, *case, forks=forks))


@pytest.mark.slow  # `test_peers.py` has engines of a pool in `make test`
def test_replicas_share_a_host_pool(model_folder, memory_folder):
    case = "qwen3", {"host_pool": str(memory_folder)}
    result = run_module("tests.engine.replica_run", model_folder, *case, forks=True)
    replica_run.check_shared(result)


@pytest.mark.slow  # `test_remote_kinds.py` has engines that share a store in `make test`
def test_replicas_share_a_store(model_folder):
    """Each loads what the other one has computed, even if the machine stalls meanwhile.

    If a request gave the store up or a read failed, as on a busy machine, a run shows nothing and
    is repeated.
    """
    require_mooncake()
    for _ in range(3):
        with Master(lease_seconds=60, client_seconds=60) as master:
            result = run_module(
                *("tests.engine.replica_run", model_folder, "qwen3", {"store": master.address}),
                forks=True,
                **{**environment(), **PATIENT},
            )
        given_up = ("late_lookups", "late_promotions", "lost_tier_slots")
        if not any(sum(result["totals"][name]) for name in given_up):
            break
    replica_run.check_shared(result)


@pytest.mark.slow  # `tests/kv_offload/test_failures.py` has ranks that fail in `make test`
@pytest.mark.parametrize(
    "split",
    [pytest.param({"tensor_parallel_size": 2}, id="TP"), pytest.param(PIPELINE, id="PP")],
)
def test_ranks_whose_copies_fail_or_take_very_long(model_folder, split):
    """All of them or one: no wrong token, and every block is freed."""
    arguments = {**split, "requests": 60}
    run = run_module("tests.engine.pressure_run", model_folder, "qwen3", arguments, forks=True)
    pressure_run.check(run)


@pytest.mark.slow  # `tests/transfer/memory/test_shared.py` has killed processes in `make test`
@pytest.mark.parametrize("sharing", [False, True])
def test_a_rank_that_is_killed_while_it_copies(model_folder, sharing):
    """The engine ends with an error and leaves nothing behind, not even memory that ranks share."""
    kind, more = ("deepseek_v2", LATENT) if sharing else ("qwen3", {})
    arguments = {"tensor_parallel_size": 2, **more}
    run = run_module("tests.engine.killed_rank_run", model_folder, kind, arguments, forks=True)
    killed_rank_run.check(run, sharing=sharing)
