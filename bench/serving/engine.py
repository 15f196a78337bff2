"""One engine of the serving bench, in the process that calls it."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.sampling_params import RequestOutputKind

from bench.hook_clock import ConnectorClock
from bench.serving.settings import EngineSettings
from bench.serving.shapes import Shape
from kv_offload.metrics import KINDS
from tests.support.latents import LATENT, cache_prefixes_of_latents

Prompt = dict[str, list[int]]
CAPTURED_BATCHES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
"""Tokens of a step with a CUDA graph. vLLM's own choice has the same largest ones but 51 sizes,
whose capture takes most of a start."""
READY_SECONDS = 180
RESET_SECONDS = 30


class ServingEngine:
    """A vLLM engine with random weights and one connector; the same for all connectors else.

    Prompts are drawn from seeds, so all engines of a run get the same ones.
    """

    def __init__(self, settings: EngineSettings) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.settings, self.shape = settings, settings.shape
        if self.shape.tensor_parallel > 1:
            # A forked rank could not use CUDA, which this process has looked for.
            os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
        self.first_tokens = settings.offloading.first_tokens if settings.offloading else 1
        self.on_gpu = torch.cuda.is_available()
        self.item_bytes = 2 if self.on_gpu else 4
        self.counted: Counter[str] = Counter()
        """What this project's connector has counted."""
        self.gauges: dict[str, float] = {}
        self.clock = ConnectorClock()
        self._time_new_connectors()
        model_config(self.shape).save_pretrained(settings.model)
        self.memory_before = memory_in_use()
        started = time.perf_counter()
        self.llm = LLM(
            **engine_arguments(settings, on_gpu=self.on_gpu),
            tensor_parallel_size=self.shape.tensor_parallel,
            max_num_batched_tokens=settings.step_tokens,
            enforce_eager=not self.on_gpu,
            kv_transfer_config=settings.transfer_config,
            compilation_config=(
                {"cudagraph_capture_sizes": CAPTURED_BATCHES} if self.on_gpu else None
            ),
            **self._of_latents(),
        )
        self.start_seconds = time.perf_counter() - started
        self._filler_seed = 1_000_000
        if settings.is_ours:
            self._count_stats()
            self._wait_for_pool()

    def _of_latents(self) -> dict[str, Any]:
        """Return what vLLM's CPU engine must be told to run latent attention."""
        if self.shape.latent is None or self.on_gpu:
            return {}
        cache_prefixes_of_latents()
        return {name: LATENT[name] for name in LATENT if name != "block_size"}

    def _time_new_connectors(self) -> None:
        """Have every connector that vLLM builds in this process timed."""
        original = KVConnectorFactory.create_connector

        def create_connector(*arguments: Any, **named: Any) -> Any:
            connector = original(*arguments, **named)
            self.clock.put_on(connector)
            return connector

        KVConnectorFactory.create_connector = staticmethod(create_connector)

    def _count_stats(self) -> None:
        """Count what this project's connector reports in a step: all ranks and the scheduler."""
        scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        make_stats = scheduler.make_stats

        def count(drafts: Any = None, connector: Any = None, *others: Any, **more: Any) -> Any:
            self._count(connector)
            return make_stats(drafts, connector, *others, **more)

        scheduler.make_stats = count

    def _count(self, stats: Any) -> None:
        for name, value in stats.data.items() if stats is not None else ():
            if KINDS[name] == "counter":
                self.counted[name] += value
            elif KINDS[name] == "gauge":
                self.gauges[name] = value

    @property
    def pool_bytes(self) -> int | None:
        """Bytes of this project's host memory; None with another connector."""
        if not self.settings.is_ours:
            return None
        kept = self.shape.tensor_parallel // self.shape.sharing_ranks
        return kept * int(self.gauges["pool_slots"] * self.gauges["slot_bytes"])

    def _wait_for_pool(self) -> None:
        """Wait until all of the pool may be used: what is measured is not its growing."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            self.tick()
            if self.gauges.get("slots", 0) >= self.gauges.get("pool_slots", 1):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"host memory is not ready after {READY_SECONDS} s")
            time.sleep(0.2)

    def tick(self) -> None:
        """Run a step or two of a request that no cache can serve, so that reports arrive."""
        self.seconds(self.prompts(0, 1, 2))

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()

    # -- prompts, all at once ------------------------------------------------------------------

    def prompts(self, seed: int, count: int, length: int) -> list[Prompt]:
        """Return random prompts, the same for the same arguments."""
        tokens = np.random.default_rng((seed, count, length)).integers(10, 31000, (count, length))
        return [{"prompt_token_ids": row} for row in tokens.tolist()]

    def seconds(self, batch: list[Prompt], tokens: int = 1) -> float:
        """Send prompts, wait for so many tokens of each, and return the time that took."""
        parameters = self._parameters(tokens)
        begin = time.perf_counter()
        self.llm.generate(batch, parameters, use_tqdm=False)
        return time.perf_counter() - begin

    def rest(self) -> None:
        """Wait until the connector has nothing left to do, as a server does where nobody asks.

        In one process nobody steps an engine after its last answer, so it is stepped here.
        """
        deadline = time.monotonic() + RESET_SECONDS
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            self._check(deadline, "the connector does not come to rest")
            core.step_fn()

    @staticmethod
    def _check(deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} for {RESET_SECONDS} s")

    def reset(self) -> None:
        """Empty the GPU's prefix cache, so that only the connector's memory can serve a prompt.

        vLLM's own connectors need a few steps first: they hold blocks until copies were reported.
        """
        self.rest()
        deadline = time.monotonic() + RESET_SECONDS
        while not self.llm.reset_prefix_cache():
            self._filler_seed += 1
            self.seconds(self.prompts(self._filler_seed, 1, 2 * self.shape.block_tokens))
            self._check(deadline, "the prefix cache cannot be reset")

    def settle(self) -> None:
        """Wait for all kernels and copies on the device; of several ranks for all jobs."""
        if self.shape.tensor_parallel > 1:
            self.rest()
        elif self.on_gpu:
            torch.cuda.synchronize()

    # -- step by step --------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Prompt, max_tokens: int) -> None:
        """Queue one request."""
        self.llm.llm_engine.add_request(request_id, prompt, self._parameters(max_tokens))

    def step(self) -> dict[str, list[int]]:
        """Run one step; return the new tokens of each request that has some."""
        found = {one.request_id: one.outputs[0].token_ids for one in self.llm.llm_engine.step()}
        return {request_id: list(tokens) for request_id, tokens in found.items() if tokens}

    def abort(self, request_ids: list[str]) -> None:
        """End requests, and step until nothing is left."""
        self.llm.llm_engine.abort_request(request_ids)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    @staticmethod
    def _parameters(max_tokens: int) -> Any:
        return SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if max_tokens > 1 else RequestOutputKind.FINAL_ONLY,
        )


def engine_arguments(settings: EngineSettings, *, on_gpu: bool) -> dict[str, Any]:
    """Return what every engine is given: a model with random weights, and the caches' size."""
    shape = settings.shape
    cache_bytes = settings.cache_blocks * shape.block_bytes(2 if on_gpu else 4)
    return {
        "model": settings.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if on_gpu else "float32",
        "block_size": shape.block_tokens,
        "num_gpu_blocks_override": settings.cache_blocks,
        # Two engines may share the device, so neither may measure what is free.
        "kv_cache_memory_bytes": cache_bytes // shape.tensor_parallel,
        "gpu_memory_utilization": 0.4,
        "max_model_len": shape.max_model_len,
    }


def model_config(shape: Shape) -> Any:
    """Return a Llama of that shape, for transformers; with latent attention a DeepSeek-V2."""
    from transformers import DeepseekV2Config, LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 65536,
    }
    if shape.latent is None:
        return LlamaConfig(architectures=["LlamaForCausalLM"], head_dim=shape.head_size, **sizes)
    return DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"],
        kv_lora_rank=shape.latent.lora_rank,
        q_lora_rank=None,
        qk_nope_head_dim=shape.head_size,
        qk_rope_head_dim=shape.latent.rope_size,
        v_head_dim=shape.head_size,
        head_dim=shape.latent.rope_size,
        # No layer has experts.
        first_k_dense_replace=shape.layers,
        **sizes,
    )


def memory_in_use() -> dict[str, int]:
    """Return what this process and those that it started hold, and what the machine has left.

    In bytes. What several of them share is once in `Pss_Shmem`, which not every Linux tells, and in
    `RssShmem` once for each.
    """
    machine = Path("/proc/meminfo").read_text()
    family = _family(os.getpid())
    held = [Path(f"/proc/{pid}/status").read_text() for pid in family]
    parts = [path for pid in family if (path := Path(f"/proc/{pid}/smaps_rollup")).exists()]
    found: Counter[str] = Counter()
    for texts, names in (
        (held, ("VmLck", "VmPin", "RssAnon", "RssShmem")),
        ([path.read_text() for path in parts], ("Pss_Shmem",)),
        ([machine], ("MemAvailable",)),
    ):
        for text, name in itertools.product(texts, names):
            match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
            if match:
                found[name] += int(match[1]) << 10
    return dict(found)


def _family(pid: int) -> list[int]:
    """Return a process, and those that it has started, and so on."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(one for child in itertools.chain(*children) for one in _family(int(child)))]
