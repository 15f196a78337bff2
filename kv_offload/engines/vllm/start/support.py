"""Which engines, models and settings can be served: everything else is refused at start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kv_offload.engines.vllm.call_stack import callers
from kv_offload.engines.vllm.model.support import draft_problems, model_problems
from kv_offload.engines.vllm.start import members
from kv_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

CACHE_DTYPES = {
    *("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_per_token_head", "int8_per_token_head"),
}
"""Cache types whose pages carry all that is needed to read them back.

With one scale per tensor the scales are the layer's own and never change. With one per token and
head they lie in the page, between keys and values (0.26 to 0.33). The first forward sets them to 1,
and nothing can be loaded before it: only forwards fill host memory."""

ROLES = frozenset({"kv_both", "kv_producer"})
"""Values of `kv_role` with which vLLM calls all hooks that the plugin stores and loads by.

It calls them with `kv_consumer` too, but that says that the KV comes from elsewhere. With a role
that consumes, vLLM also keeps freed blocks back while steps are in flight. Only then do the
plugin's loads not wait for these (`ordering`), so `kv_producer` is enough."""


def check_supported(
    vllm_config: VllmConfig,
    version: tuple[int, int],
    enclosing: Sequence[KVTransferConfig] = (),
    kv_cache_config: KVCacheConfig | None = None,
) -> None:
    """Raise one `UnsupportedError` that lists everything that stands in the way.

    Without `kv_cache_config`, which is not known before the engine loads its weights: what stands
    in the way of any model.
    """
    problems = [
        *_engine_problems(vllm_config, version),
        *members.problems(vllm_config, enclosing),
        *draft_problems(vllm_config),
    ]
    if kv_cache_config is not None:
        problems += model_problems(vllm_config, kv_cache_config)
    if problems:
        # One line, so that whoever looks for `kv-offload:` in a log finds all of it.
        numbered = [f"({number}) {problem}" for number, problem in enumerate(problems, 1)]
        listed = " ".join(numbered) if len(problems) > 1 else problems[0]
        raise UnsupportedError(f"this engine cannot be served correctly: {listed}")


def _engine_problems(vllm_config: VllmConfig, version: tuple[int, int]) -> Iterator[str]:
    cache = vllm_config.cache_config
    role = vllm_config.kv_transfer_config.kv_role
    if role not in ROLES:
        yield f"kv_role is {role!r}: set it to 'kv_both', the plugin stores and loads"
    parallel = vllm_config.parallel_config
    backend, world_size = parallel.distributed_executor_backend, parallel.world_size
    if backend == "external_launcher" and world_size > 1:
        yield (
            f"distributed_executor_backend is 'external_launcher' with {world_size} ranks, where "
            "each rank has a scheduler that hears of no other, so no block in host memory would "
            "ever become readable: start one process, with 'mp' or 'ray'"
        )
    if not cache.enable_prefix_caching:
        yield (
            "prefix caching is off, and blocks are found by their prefix hash: remove "
            "--no-enable-prefix-caching"
        )
    if cache.cache_dtype not in CACHE_DTYPES:
        yield (
            f"kv_cache_dtype is {cache.cache_dtype!r}: supported are "
            f"{', '.join(sorted(CACHE_DTYPES))}"
        )
    # Up to vLLM 0.28 `model_config` has this setting, in 0.32 `aux_output_config`.
    parts = (getattr(vllm_config, part, None) for part in ("model_config", "aux_output_config"))
    if any(getattr(part, "enable_return_routed_experts", False) for part in parts):
        yield (
            "enable_return_routed_experts is on, and vLLM has the experts only of tokens that this "
            "engine computed, not of those that host memory brings back: remove "
            "--enable-return-routed-experts"
        )
    if version < (0, 32) and not vllm_config.model_config.disable_cascade_attn:
        yield (
            "cascade attention is on, and this vLLM counts the plugin's references as a common "
            "prefix: set disable_cascade_attn"
        )


def check_keep_on_sleep() -> None:
    """Raise `UnsupportedError` where a change of weights could pass unseen.

    Must be called while the engine core builds its scheduler: it is looked for on the call stack.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    core = next((caller for caller in callers() if isinstance(caller, EngineCore)), None)
    if not isinstance(core, EngineCoreProc):
        raise UnsupportedError(
            "keep_on_sleep is true, but the engine core runs in the process of its user, who can "
            "change weights without a call that the plugin sees; set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=1, or leave keep_on_sleep at false"
        )
