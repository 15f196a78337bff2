"""Which models can be served: what of their KV cache, or of a draft model's, stands in the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm.model.groups import SPECS, STATE_SPEC, has_draft_head
from kv_offload.engines.vllm.versions import layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DRAFT_HEADS = frozenset({"eagle", "eagle3", "mtp"})
"""Methods whose draft layers write the KV of a computed token in the same step and for the last
time. That KV depends on the tokens up to the next one.

Beyond the accepted tokens they write guesses, which the next step writes again; stores end before
it. `dflash` and `dspark` write KV of placeholder tokens."""


def model_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield what of the model's KV cache stands in the way."""
    if not kv_cache_config.kv_cache_groups:
        yield "the model has no KV cache"
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
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


def draft_problems(vllm_config: VllmConfig) -> Iterator[str]:
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
