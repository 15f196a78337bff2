"""vLLM's own registry, cache types, drafts and specs: what is new there has no verdict yet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from vllm.config import speculative
from vllm.config.cache import CacheDType
from vllm.model_executor.models import registry
from vllm.v1 import kv_cache_interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

from kv_offload.engines.vllm.model.groups import SPECS
from kv_offload.engines.vllm.start.support import CACHE_DTYPES, REFUSED_SPECS

KNOWN = Path(__file__).parents[2] / "support/architectures.txt"
CLASS = r"^class (\w+)\((\w+)"

SCRATCH = {"CircularBufferSpec", "KpoolTailSpec", "HiSparseHotSpec", "HiSparseResidentSpec"}
"""Specs whose blocks vLLM serves to no other request."""

NO_LAYERS = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs", "EncoderOnlyAttentionSpec"}
"""Bases, several specs together, and layers that keep nothing."""

METHODS = {
    # Their layers keep what decides how many drafts are accepted, and no token.
    *("eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "custom_class"),
    # They keep nothing.
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"),
    # It drafts nothing, and keeps hidden states as latents are kept.
    "extract_hidden_states",
}


def spec_names() -> set[str]:
    """Return the specs that vLLM defines anywhere: no module of a model is imported for that."""
    files = Path(kv_cache_interface.__file__).parents[1].rglob("*.py")
    classes = [c for file in files for c in re.findall(CLASS, file.read_text(), re.MULTILINE)]
    found, before = {"KVCacheSpec"}, set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, base in classes if base in found}
    return found


def test_every_architecture_was_read():
    lists = (
        registry._TEXT_GENERATION_MODELS,
        registry._MULTIMODAL_MODELS,
        registry._SPECULATIVE_DECODING_MODELS,
        registry._TRANSFORMERS_BACKEND_MODELS,
    )
    names = set[str]().union(*lists)
    assert len(names) > 200
    new = sorted(names - set(KNOWN.read_text().split()))
    assert not new, f"what do the layers of {new} keep? Add them to {KNOWN.name} if SPECS has it"


def test_every_spec_is_known():
    names = spec_names()
    assert {"MambaSpec", "SlidingWindowMLASpec"} <= names
    new = sorted(names - SPECS - SCRATCH - NO_LAYERS - REFUSED_SPECS.keys())
    assert not new, f"what does a hit need of {new}? See docs/design/cache_groups.md"


def test_every_cache_type_is_known():
    new = sorted(set(get_args(CacheDType)) - CACHE_DTYPES)
    assert not new, f"is all that reads {new} in the page, or constant?"


def test_every_way_to_draft_is_known():
    def names(literal: Any) -> set[str]:
        parts = [{part} if isinstance(part, str) else names(part) for part in get_args(literal)]
        return set().union(*parts)

    heads = names(speculative.MTPModelTypes) - {"mtp"}  # which vLLM calls `mtp`
    new = sorted(names(speculative.SpeculativeMethod) - heads - METHODS)
    assert not new, f"does what {new} keeps decide tokens?"


def test_vllm_cannot_plan_sinks():
    """Once it can, what a hit needs of them is to be thought through."""
    shape = {"block_size": 4, "num_kv_heads": 1, "head_size": 2, "dtype": torch.float32}
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        get_manager_for_kv_cache_spec(
            SinkFullAttentionSpec(**shape, sink_len=4),
            max_in_flight_tokens=16,
            max_model_len=64,
            block_pool=BlockPool(8, True, 4),
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=4,
            needs_kv_cache_zeroing=False,
        )
