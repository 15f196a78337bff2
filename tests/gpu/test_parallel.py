"""Engines on two GPUs: ranks with different heads, different layers or the same bytes, and
replicas.

The checks are in the modules of `tests/engine` that are run, as on the CPU. The runs are
concurrent, because starting processes takes most of each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.engine import SwapJob
from kv_swap.memory.arena import HostArena
from kv_swap.memory.shared import SharedMemory

from tests.gpu.caches import KIB, LOAD, STORE, finish, make_cache, randomize, torch
from tests.support.mooncake import PATIENT, Master, environment, require_mooncake
from tests.support.processes import run_module

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

from tests.engine import killed_rank_run, multiprocess_run, nixl_run, pressure_run, replica_run
from tests.gpu import lagging_stage_run
from tests.gpu.fault_run import SETTINGS

pytestmark = [
    # In one process: with pytest-xdist several would start all engines of the fixture.
    pytest.mark.xdist_group("two GPUs"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ENVIRONMENT = {
    # Turns off NVLink multicast, in addition to the host's own environment: reductions in the
    # switch need not give every rank the same bits, and a host may not allow it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
ARGUMENTS = {
    "dtype": "bfloat16",
    "block_size": 64,
    # Several engines start at once, and vLLM requires this share of a GPU to be free.
    "gpu_memory_utilization": 0.3,
}
COMPARED = {**ARGUMENTS, "logprobs": 5}
TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
KILLED = {
    **ARGUMENTS,
    **TP,
    "num_gpu_blocks_override": 130,  # of 64 tokens: too few for all requests
}


@dataclass(frozen=True)
class Case:
    """A module to run, its arguments, and the check of its result."""

    module: str
    kind: str
    arguments: dict[str, Any]
    check: Callable[[Any], None]
    environment: Mapping[str, str] = field(default_factory=dict)


def round_trip(kind: str, split: dict[str, Any], sharing: int = 1, **environment: str) -> Case:
    check = partial(multiprocess_run.check, ranks=2, sharing=sharing)
    arguments = {**COMPARED, **split, "sleep": False}
    return Case("tests.engine.multiprocess_run", kind, arguments, check, environment)


def pressure(split: dict[str, Any]) -> Case:
    arguments = {**SETTINGS, **split, "requests": 60}
    module = "tests.engine.pressure_run"
    return Case(module, "llama_wide", arguments, pressure_run.check, BATCH_INVARIANT)


def killed(kind: str, *, sharing: bool) -> Case:
    check = partial(killed_rank_run.check, sharing=sharing)
    return Case("tests.engine.killed_rank_run", kind, KILLED, check)


def lagging(split: dict[str, Any]) -> Case:
    module = "tests.gpu.lagging_stage_run"
    return Case(
        module, "llama_wide", {**SETTINGS, **split}, lagging_stage_run.check, BATCH_INVARIANT
    )


REPLICAS = "tests.engine.replica_run"
CASES = {
    "tensor parallel": round_trip("qwen3", TP),
    "latent attention": round_trip("deepseek_v2", TP, sharing=2),
    "pipeline parallel": round_trip("qwen3", PP),
    "pipeline with uneven stages": round_trip("gemma3", PP, VLLM_PP_LAYER_PARTITION="3,1"),
    "data parallel": Case(REPLICAS, "qwen3", COMPARED, replica_run.check),
    # With experts all replicas step together, with dummy batches.
    "data parallel in step": Case(REPLICAS, "deepseek_v2", COMPARED, replica_run.check),
    "tensor parallel under pressure": pressure(TP),
    "pipeline parallel under pressure": pressure(PP),
    "a stage lags": lagging(PP),
    "a rank is killed": killed("qwen3", sharing=False),
    "a rank is killed that shares memory": killed("deepseek_v2", sharing=True),
}
RUNNERS = {"v1": "0", "v2": "1"}
RUNS = [
    ("tensor parallel under pressure", "v1"),
    ("tensor parallel under pressure", "v2"),
    ("pipeline parallel under pressure", "v1"),
    ("pipeline parallel under pressure", "v2"),
    ("a stage lags", "v1"),
    ("pipeline parallel", "v1"),
    ("pipeline parallel", "v2"),
    ("a rank is killed", "v2"),
    ("a rank is killed that shares memory", "v1"),
    ("pipeline with uneven stages", "v1"),
    ("tensor parallel", "v1"),
    ("tensor parallel", "v2"),
    ("latent attention", "v1"),
    ("latent attention", "v2"),
    ("data parallel", "v2"),
    ("data parallel in step", "v1"),
]
"""The longest come first."""
AT_ONCE = 9
"""More on two GPUs wait for each other: one rank's all-reduce for another's turn on its GPU."""
RUN_SECONDS = 240
BULKY = ("expected", "computed", "stored", "reloaded", "loaded", "corrupted", "rolled", "swapped")
"""Parts of a result that are not shown."""


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[Any]]]:
    """Start the runs of all selected tests."""
    selected = [
        (item.callspec.params["case"], item.callspec.params["runner"])
        for item in request.session.items
        if item.path == request.path and "runs" in item.fixturenames
    ]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {
            (name, runner): threads.submit(
                run_module,
                CASES[name].module,
                tmp_path_factory.mktemp("models"),
                CASES[name].kind,
                CASES[name].arguments,
                timeout_seconds=RUN_SECONDS,
                VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner],
                **ENVIRONMENT,
                **CASES[name].environment,
            )
            for name, runner in selected
        }


@pytest.mark.parametrize(("case", "runner"), RUNS)
def test_blocks_come_back(runs, case, runner):
    result = runs[case, runner].result()
    print({name: value for name, value in result.items() if name not in BULKY})
    CASES[case].check(result)


@pytest.mark.parametrize("runner", RUNNERS)
def test_replicas_share_a_store(tmp_path, runner):
    """Each loads what the other, on another GPU, has computed."""
    require_mooncake()
    with Master() as master:
        arguments = {**COMPARED, "store": master.address}
        result = run_module(
            *("tests.engine.replica_run", tmp_path, "qwen3", arguments),
            timeout_seconds=RUN_SECONDS,
            **{**environment(), **PATIENT, **ENVIRONMENT, "PYTHONHASHSEED": "0"},
            VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner],
        )
    print({name: result[name] for name in ("demoted", "promoted", "totals")})
    replica_run.check_shared(result)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs Nixl: pip install nixl")
def test_nixl_sends_what_one_gpu_has_computed(tmp_path, runner):
    """To an engine on the other GPU; each stores it in its host memory."""
    result = run_module(
        *("tests.engine.nixl_run", tmp_path, "qwen3", ARGUMENTS),
        timeout_seconds=RUN_SECONDS,
        VLLM_USE_V2_MODEL_RUNNER=RUNNERS[runner],
        **ENVIRONMENT,
    )
    print(result)
    nixl_run.check(result)


def test_what_one_gpu_stored_another_loads():
    """Each registers its own mapping of the same memory, as two ranks do."""
    slots, slot_bytes = 64, 20 * KIB
    pages = [(16 * KIB, 16 * KIB), (4 * KIB, 8 * KIB)]
    caches = [make_cache(slots, pages, f"cuda:{device}") for device in range(2)]
    randomize(*(cache.storage for cache in caches))
    torch.cuda.synchronize(1)
    with SharedMemory.create(slots * slot_bytes) as memory:
        engines = [
            CudaSwapEngine(
                cache.layout,
                HostArena(
                    slots, slot_bytes, register=CudaRegistrar(cache.storage.device), shared=memory
                ),
                cache.storage.device,
                [cache.storage],
            )
            for cache in caches
        ]
    pairs = np.stack([np.arange(slots), np.arange(slots)[::-1]], 1).astype(np.int32)
    halves = pairs[: slots // 2], pairs[slots // 2 :]
    expected = [cache.blocks() for cache in caches]
    for engine, half in zip(engines, halves, strict=True):
        engine.submit(SwapJob(1, STORE, half))
    for engine in engines:
        assert [done.error for done in finish(engine)] == [None]
    for cache in caches:
        cache.storage.fill_(0)
        torch.cuda.synchronize(cache.storage.device)
    for engine in engines:
        engine.submit(SwapJob(2, LOAD, pairs))
    for engine, cache in zip(engines, caches, strict=True):
        assert [done.error for done in finish(engine)] == [None]
        assert torch.equal(cache.blocks()[: slots // 2], expected[0][: slots // 2])
        assert torch.equal(cache.blocks()[slots // 2 :], expected[1][slots // 2 :])
        engine.close()
