"""Which engines, models and settings can be served: everything else is refused at start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm.halves import callers
from kv_offload.engines.vllm.model.groups import SPECS, STATE_SPEC, has_draft_head
from kv_offload.engines.vllm.start import members
from kv_offload.engines.vllm.versions import layer_specs
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
head they are in the page, between keys and values. The first forward sets them to 1,
and nothing can be loaded before it: only forwards fill host memory."""

ROLES = frozenset({"kv_both", "kv_producer"})
"""Values of `kv_role` with which vLLM calls all hooks that the plugin stores and loads by.

It calls them with `kv_consumer` too, but that says that the KV comes from elsewhere."""

DRAFT_HEADS = frozenset({"eagle", "eagle3", "mtp"})
"""Methods whose draft layers write the KV of a computed token in the same step and for the last
time. That KV depends on the tokens up to the next one.

Beyond the accepted tokens they write guesses, which the next step writes again; stores end before
it. `dflash` and `dspark` write KV of placeholder tokens."""


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
        *_draft_problems(vllm_config),
    ]
    if kv_cache_config is not None:
        problems += _model_problems(vllm_config, kv_cache_config)
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
    stages = parallel.pipeline_parallel_size
    pools = vllm_config.model_config.runner_type == "pooling"
    # Each stage of runner V2 reports; of runner V1 only the last.
    if pools and stages > 1 and not vllm_config.use_v2_model_runner:
        yield (
            f"pipeline_parallel_size is {stages} with a pooling model, whose first request ends "
            "an engine with runner V1 if it has any connector: set it to 1"
        )
    if parallel.enable_fault_tolerance:
        yield (
            "enable_fault_tolerance is on, with which vLLM goes on after an error and tells nobody "
            "which blocks were not computed, so that they would be kept and served: remove "
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
            "engine computed, not of those that host memory brings back: remove "
            "--enable-return-routed-experts"
        )
    if vllm_config.model_config.is_diffusion and vllm_config.scheduler_config.async_scheduling:
        yield (
            "the model is a diffusion model, and with asynchronous scheduling vLLM names blocks of "
            "a canvas that it only reads (diffusion_read_only) and does not compute: set "
            "--no-async-scheduling"
        )
    if version < (0, 32) and not vllm_config.model_config.disable_cascade_attn:
        yield (
            "cascade attention is on, and this vLLM counts the plugin's references as a common "
            "prefix: set disable_cascade_attn"
        )


def _model_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield what of the model's KV cache stands in the way."""
    if not kv_cache_config.kv_cache_groups:
        yield "the model has no KV cache"
    if kv_cache_config.hisparse_host_num_blocks is not None:
        yield "a second block pool in host memory (HiSparse) has ids of its own"
    specs = layer_specs(kv_cache_config).values()
    for kind in sorted({type(spec).__name__ for spec in specs} - SPECS):
        yield f"the model has layers with a {kind}: supported are {', '.join(sorted(SPECS))}"
    states = [spec for spec in specs if type(spec).__name__ == STATE_SPEC]
    if states:
        yield from _state_problems(vllm_config, states)


def _state_problems(vllm_config: VllmConfig, states: Sequence[Any]) -> Iterator[str]:
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    if ranks > 1:
        yield (
            f"decode_context_parallel_size is {ranks}, and states are not split over its ranks: "
            "set it to 1"
        )
    if vllm_config.speculative_config is not None:
        yield (
            f"speculative method {vllm_config.speculative_config.method!r} moves the blocks of "
            "states: remove it"
        )
    for mode in sorted({spec.mamba_cache_mode for spec in states} - {"align", "all"}):
        yield (
            f"mamba_cache_mode is {mode!r}, in which no block of states becomes final: use 'align'"
        )
    block_tokens = vllm_config.cache_config.block_size
    for tokens in sorted({spec.block_size for spec in states} - {block_tokens}):
        yield (
            f"mamba_block_size is {tokens} and block_size {block_tokens}: leave mamba_block_size "
            "unset, so that both are the same"
        )


def _draft_problems(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield what stands in the way of drafts, known before the model is loaded."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    method = speculative.method
    if speculative.parallel_drafting:
        yield (
            f"speculative method {method!r} drafts several tokens in one pass, which writes KV of "
            "placeholders: set parallel_drafting to false, or use 'ngram'"
        )
    elif speculative.use_eagle() and method not in DRAFT_HEADS:
        yield (
            f"speculative method {method!r} writes KV that is not known to be final: use one of "
            f"{', '.join(sorted(DRAFT_HEADS))}, 'ngram' or none"
        )
    if method == "mtp":
        tokens = speculative.num_speculative_tokens
        hf_config = getattr(speculative.draft_model_config, "hf_config", None)
        modules = min(getattr(hf_config, "num_nextn_predict_layers", None) or 1, tokens)
        if modules > 1:
            yield (
                f"the model drafts {tokens} tokens with {modules} MTP modules, which write the KV "
                "of a prompt's last tokens again: set num_speculative_tokens to 1"
            )
    if not has_draft_head(vllm_config):
        return
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, name)
        if size > 1:
            yield (
                f"{name} is {size}, and with speculative method {method!r} only 1 is known to "
                "work: set it to 1, or use 'ngram'"
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
