"""Refuses engines, models and settings at start that are not supported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm.locate import callers
from kv_offload.engines.vllm.model.groups import (
    SPECS,
    STATE_SPEC,
    engine_groups,
    scratch_layers,
)
from kv_offload.engines.vllm.start import members
from kv_offload.engines.vllm.versions import layer_specs
from kv_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

CACHE_DTYPES = {
    *("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
    *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
    *("fp8_ds_mla", "nvfp4_ds_mla", "nvfp4", "nvfp4_4over6"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
    *("octave_k3v4", "octave_k3v3", "octave_k3v3_compact", "ultraquant_4bit"),
}
"""Cache types whose pages contain everything needed to read them back.

With one scale per tensor, scales belong to the layer and never change. Scales per token, head or
group of values are in the page; the first forward pass sets them to 1, and nothing can be loaded
before it, because only forward passes fill host memory. Rotations, signs and codebooks are
constants in vLLM's source. Types that other plugins register may keep such data elsewhere."""

REFUSED_SPECS = {
    "CrossAttentionSpec": "encoder-decoder models have no prefix that another request shares",
    "RSWASpec": (
        "the KV of an answer depends on where its prompt ended, which the hash of a block does not "
        "cover, so a longer prompt would be served KV that it would never compute"
    ),
    "SinkFullAttentionSpec": "this vLLM cannot plan a prefix cache for it",
}
"""Reasons for refusing specs. Unknown specs are refused, too, since a hit's needs are unknown."""

ROLES = frozenset({"kv_both", "kv_producer"})
"""Values of `kv_role` for which vLLM calls all hooks that the plugin needs to store and load.

It also does for `kv_consumer`, but with that role the KV comes from elsewhere."""


def check_supported(
    vllm_config: VllmConfig,
    version: tuple[int, int],
    enclosing: Sequence[KVTransferConfig] = (),
    kv_cache_config: KVCacheConfig | None = None,
) -> None:
    """Raise one `UnsupportedError` that lists all problems.

    Without `kv_cache_config`, which is unknown before the engine loads its weights, reports only
    problems that do not depend on the model's KV cache.
    """
    problems = [
        *_engine_problems(vllm_config, version),
        *members.problems(vllm_config, enclosing),
    ]
    if kv_cache_config is not None:
        problems += _model_problems(vllm_config, kv_cache_config)
    if problems:
        listed = UnsupportedError(*problems).message
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
            "each rank has a separate scheduler, so no block in host memory would ever become "
            "readable: start one process, with 'mp' or 'ray'"
        )
    stages = parallel.pipeline_parallel_size
    pools = vllm_config.model_config.runner_type == "pooling"
    # With runner V2 every stage reports, with runner V1 only the last one.
    if pools and stages > 1 and not vllm_config.use_v2_model_runner:
        yield (
            f"pipeline_parallel_size is {stages} with a pooling model, whose first request ends "
            "an engine with runner V1 if it has any connector: set it to 1"
        )
    if (
        stages > 1
        and vllm_config.speculative_config is not None
        and not vllm_config.scheduler_config.async_scheduling
    ):  # vllm-project/vllm issue 52071
        yield (
            f"pipeline_parallel_size is {stages} with drafts and without asynchronous scheduling, "
            "where vLLM schedules drafts in place of a sampled token, so that tokens and KV are "
            "wrong: remove --no-async-scheduling, use runner V2, or remove --speculative-config"
        )
    if parallel.enable_fault_tolerance:
        yield (
            "enable_fault_tolerance is on, with which vLLM continues after an error and does not "
            "report which blocks were not computed, so that they would be kept and served: remove "
            "--enable-fault-tolerance"
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
    if vllm_config.aux_output_config.enable_return_routed_experts:
        yield (
            "enable_return_routed_experts is on, and vLLM has the experts only of tokens that this "
            "engine computed, not of tokens loaded from host memory: remove "
            "--enable-return-routed-experts"
        )
    if vllm_config.model_config.is_diffusion and vllm_config.scheduler_config.async_scheduling:
        yield (
            "the model is a diffusion model, and with asynchronous scheduling vLLM hashes blocks "
            "of a canvas that it only reads (diffusion_read_only) and does not compute: set "
            "--no-async-scheduling"
        )
    if version < (0, 32) and not vllm_config.model_config.disable_cascade_attn:
        yield (
            "cascade attention is on, and this vLLM counts the plugin's references as a common "
            "prefix: set disable_cascade_attn"
        )


def _model_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield the problems of the model's KV cache."""
    if not kv_cache_config.kv_cache_groups:
        yield "the model has no KV cache"
    if kv_cache_config.hisparse_host_num_blocks is not None:
        yield (
            "HiSparse keeps blocks in host memory, in a second pool whose ids are also those of "
            "GPU blocks: run it without kv-offload, or kv-offload without HiSparse"
        )
    scratch = scratch_layers(kv_cache_config)
    specs = [spec for name, spec in layer_specs(kv_cache_config).items() if name not in scratch]
    for kind in sorted({type(spec).__name__ for spec in specs} - SPECS):
        reason = REFUSED_SPECS.get(kind, f"supported are {', '.join(sorted(SPECS))}")
        yield f"the model has layers with a {kind}: {reason}"
    states = [spec for spec in specs if type(spec).__name__ == STATE_SPEC]
    if states:
        yield from _state_problems(vllm_config, states)
    if vllm_config.speculative_config is not None:
        yield from _draft_problems(vllm_config, kv_cache_config)


def _state_problems(vllm_config: VllmConfig, states: Sequence[Any]) -> Iterator[str]:
    modes = {spec.mamba_cache_mode for spec in states}
    for mode in sorted(modes - {"align", "all"}):
        yield (
            f"mamba_cache_mode is {mode!r}, in which no block of states becomes final: use 'align'"
        )
    # vLLM ends a prompt's chunks at multiples of block_size, and would hash uncomputed states.
    block_tokens = vllm_config.cache_config.block_size
    for tokens in sorted({spec.block_size for spec in states} - {block_tokens}):
        yield (
            f"blocks of states hold {tokens} tokens, and block_size is {block_tokens}, the least "
            "of all groups: leave mamba_block_size unset, and use no draft model with smaller "
            "blocks, so that both are the same"
        )
    if "all" in modes and vllm_config.speculative_config is not None:  # possible in vLLM 0.31
        yield (
            f"mamba_cache_mode is 'all' with speculative method "
            f"{vllm_config.speculative_config.method!r}, for which it is unknown when states are "
            "final: use 'align'"
        )


def _draft_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield the problems of drafts. Their layers' KV affects only how many drafts are accepted."""
    ahead = vllm_config.num_prefill_lookahead_tokens
    groups = engine_groups(vllm_config, kv_cache_config)
    for tokens in sorted({g.block_tokens for g in groups if g.sees_next_token}):
        if tokens < ahead:
            yield (
                f"the model drafts with {ahead} MTP modules, whose KV depends on as many tokens "
                f"ahead, and a block of theirs holds {tokens}: set num_speculative_tokens to "
                f"{tokens} or less, or --block-size to {ahead} or more"
            )


def check_keep_on_sleep() -> None:
    """Raise `UnsupportedError` if a change of weights could go unnoticed.

    Must be called while the engine core builds its scheduler: it is found on the call stack.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    core = next((caller for caller in callers() if isinstance(caller, EngineCore)), None)
    if not isinstance(core, EngineCoreProc):
        raise UnsupportedError(
            "keep_on_sleep is true, but the engine core runs in the process of its user, who can "
            "change weights without a call that the plugin sees; set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=1, or leave keep_on_sleep at false"
        )
