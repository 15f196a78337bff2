"""One engine of the serving benchmark, in the calling process."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.config
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.sampling_params import RequestOutputKind

from bench.hook_clock import ConnectorClock
from bench.serving.settings import IN_GPU, OFF, EngineSettings
from bench.serving.shapes import Shape
from kv_offload.metrics import KINDS

Prompt = dict[str, list[int]]
CAPTURED_BATCHES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
"""Token counts of steps with a CUDA graph. vLLM's own list has the same maximum but 51 sizes, whose
capture takes most of the startup time."""
READY_SECONDS = 180
RESET_SECONDS = 30


class ServingEngine:
    """A vLLM engine with random weights and one connector, otherwise the same for all connectors.

    Prompts are drawn from seeds, so all engines of a run get the same prompts.
    """

    def __init__(self, settings: EngineSettings) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.settings, self.shape = settings, settings.shape
        self.keeps_prompts = settings.column != OFF
        """True if a prompt that is sent again after `reset` is not computed again."""
        self.on_gpu = torch.cuda.is_available()
        self.item_bytes = 2 if self.on_gpu else 4
        self.counted: Counter[str] = Counter()
        """The counters of this project's connector."""
        self.gauges: dict[str, float] = {}
        self.clock = ConnectorClock()
        self._time_new_connectors()
        write_model(self.shape, Path(settings.model))
        began = time.perf_counter()
        self.llm = LLM(
            **engine_arguments(settings, on_gpu=self.on_gpu),
            enforce_eager=not self.on_gpu,
            kv_transfer_config=settings.transfer_config,
            **(_faster_start() if self.on_gpu else {}),
        )
        self.start_seconds = time.perf_counter() - began
        self._filler_seed = 1_000_000
        if settings.is_ours:
            self._count_stats()

    def _time_new_connectors(self) -> None:
        """Time every connector that vLLM builds in this process."""
        original = KVConnectorFactory.create_connector

        def create_connector(*arguments: Any, **named: Any) -> Any:
            connector = original(*arguments, **named)
            self.clock.put_on(connector)
            return connector

        KVConnectorFactory.create_connector = staticmethod(create_connector)

    def _count_stats(self) -> None:
        """Add up the counters reported by this project's connector, worker and scheduler."""
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
    def pool_share(self) -> float:
        """Return the share of the plugin's host memory that is ready, from its last report."""
        return self.gauges.get("slots", 0) / self.gauges.get("pool_slots", 1)

    def wait_for_pool(self) -> None:
        """Wait until all host memory is ready, as other connectors' is from the start."""
        deadline = time.monotonic() + READY_SECONDS
        while self.settings.is_ours and self.pool_share < 1:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.pool_share:.0%} of host memory is ready after {READY_SECONDS} s"
                )
            time.sleep(0.2)
            self.tick()

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
        """Send prompts, wait for `tokens` tokens of each, and return the seconds it took."""
        return self.serve(batch, tokens)[0]

    def serve(self, batch: list[Prompt], tokens: int = 1) -> tuple[float, int]:
        """Like `seconds`, but also return the number of prompt tokens that were not computed."""
        parameters = self._parameters(tokens)
        begin = time.perf_counter()
        outputs = self.llm.generate(batch, parameters, use_tqdm=False)
        took = time.perf_counter() - begin
        return took, sum(output.num_cached_tokens or 0 for output in outputs)

    def rest(self) -> None:
        """Wait until the connector has nothing left to do, as on an idle server.

        In a single process, no thread steps the engine after its last answer, so this does.
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

        Does nothing if the GPU's prefix cache is to be measured. Runs steps until a reset succeeds:
        vLLM's own connectors hold blocks until copies are reported.
        """
        if self.settings.column == IN_GPU:
            return
        self.rest()
        deadline = time.monotonic() + RESET_SECONDS
        while not self.llm.reset_prefix_cache():
            self._filler_seed += 1
            self.seconds(self.prompts(self._filler_seed, 1, 2 * self.shape.block_tokens))
            self._check(deadline, "the prefix cache cannot be reset")

    # -- step by step --------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Prompt, max_tokens: int) -> None:
        """Queue one request."""
        self.llm.llm_engine.add_request(request_id, prompt, self._parameters(max_tokens))

    def step(self) -> dict[str, list[int]]:
        """Run one step; return the new tokens by request, without requests that got none."""
        found = {one.request_id: one.outputs[0].token_ids for one in self.llm.llm_engine.step()}
        return {request_id: list(tokens) for request_id, tokens in found.items() if tokens}

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests, and step until none is left."""
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
    """Return the arguments of every engine: a model with random weights, and cache sizes."""
    shape = settings.shape
    cache_bytes = settings.gpu_blocks * shape.block_bytes(2 if on_gpu else 4)
    return {
        "model": settings.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if on_gpu else "float32",
        "block_size": shape.block_tokens,
        "num_gpu_blocks_override": settings.gpu_blocks,
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": 0.4,
        "max_model_len": shape.max_model_len,
    }


def _faster_start() -> dict[str, Any]:
    """Return arguments that make a GPU engine start faster: fewer CUDA graphs, lazy compilation."""
    found: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": CAPTURED_BATCHES}}
    kernels = getattr(vllm.config, "KernelConfig", None)  # exists since 0.32
    if "enable_jit_warmup" in getattr(kernels, "__dataclass_fields__", ()):
        found["kernel_config"] = {"enable_jit_warmup": False}
    return found


def write_model(shape: Shape, folder: Path) -> None:
    """Write a model's configuration, even while another engine reads it."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        model_config(shape).save_pretrained(new)
        for file in Path(new).iterdir():
            file.replace(folder / file.name)


def model_config(shape: Shape) -> Any:
    """Return the transformers configuration of a Llama with this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        head_dim=shape.head_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=32000,
        max_position_embeddings=65536,
    )
