"""Configurations, specs and requests of vLLM's own classes, small enough to count by hand.

Without vLLM, modules of tests that import this or a played engine are skipped.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.model.groups import COMPRESSOR_STATES
from tests.support.inputs import transfer_config as ours

Options = dict[str, Any]

RETENTION = "prefix_cache_retention_interval"
"""vLLM's interval for keeping windows. With its default of 0 only those at prompt ends are kept."""

PAGE_WORDS = 8
"""Words of 8 bytes in a block of any group, whatever its tokens: vLLM makes pages equal."""


@functools.cache
def block_hasher(hash_block_tokens: int) -> Callable[[Request], list[Any]]:
    """Return vLLM's own block hasher, made as its engine core makes it."""
    return get_request_block_hasher(hash_block_tokens, _hash_function())


@functools.cache
def _hash_function() -> Any:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)  # draws a new seed, so only once per process
    return hash_function


def make_request(
    request_id: str,
    prompt: Sequence[int],
    hash_block_tokens: int,
    max_tokens: int = 4,
    priority: int = 0,
    cache_salt: str | None = None,
    resumable: bool = False,
    **sampling: Any,
) -> Request:
    """Return a real request with its block hashes; if it is `resumable`, it begins a session."""
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Request(
        request_id,
        list(prompt),
        parameters,
        pooling_params=None,
        priority=priority,
        cache_salt=cache_salt,
        resumable=resumable,
        block_hasher=block_hasher(hash_block_tokens),
    )


def spans_blocks(block_tokens: int, chunk_tokens: int | None) -> bool:
    """Return whether scratch keeps the tokens of a chunk in several blocks, unlike a ring."""
    return chunk_tokens is not None and chunk_tokens > block_tokens


def make_spec(
    block_tokens: int,
    window_tokens: int | None = None,
    chunk_tokens: int | None = None,
    holds_state: bool = False,
    is_scratch: bool = False,
    drafts: int = 0,
    checkpoints: int = 0,
    modules: int = 1,
) -> Any:
    """Return a spec whose page has `PAGE_WORDS` words.

    Scratch with a window is replayed after a hit. With chunks that span blocks, it keeps tokens
    until a latent covers their chunk. Otherwise it is a ring.
    """
    if holds_state:
        return MambaSpec(
            block_size=block_tokens,
            shapes=((PAGE_WORDS // 2,), (PAGE_WORDS // 4, 2)),
            dtypes=(torch.int32, torch.int64),
            page_size_padded=PAGE_WORDS * 8,
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
            num_prefill_checkpoint_blocks=checkpoints,
            prefill_checkpoint_alignment=checkpoints or None,
        )
    shape = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": PAGE_WORDS // block_tokens,
        "dtype": torch.float32,
    }
    if is_scratch and window_tokens is None and not spans_blocks(block_tokens, chunk_tokens):
        return CircularBufferSpec(**shape, dcp_sharded=False)
    if is_scratch:
        shape["head_size"] *= 2  # one latent vector instead of a key and a value
        return SlidingWindowMLASpec(
            **shape,
            sliding_window=window_tokens or chunk_tokens,
            bounded_replay=window_tokens is not None,
        )
    if chunk_tokens is not None:
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk_tokens)
    if window_tokens is None:
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(
        **shape, sliding_window=window_tokens, extra_retained_tokens=modules - 1
    )


def set_layers(kv_cache_config: Any, specs: dict[str, Any]) -> None:
    """Give the only group of a configuration these layers; several make its spec a uniform one."""
    (group,) = kv_cache_config.kv_cache_groups
    group.layer_names = list(specs)
    first = group.kv_cache_spec = next(iter(specs.values()))
    if len(specs) > 1:
        group.kv_cache_spec = UniformTypeKVCacheSpecs(
            block_size=first.block_size, kv_cache_specs=specs
        )


def make_tensor(size: int, layers: list[str], page_bytes: int) -> KVCacheTensor:
    """Return the description of one allocation, in the format of the installed vLLM."""
    if "layers" in {field.name for field in dataclasses.fields(KVCacheTensor)}:
        return KVCacheTensor(
            size=size, layers=layers[:1], layer_stride=size, block_stride=page_bytes
        )
    return KVCacheTensor(size=size, shared_by=layers)


def _name_of(group: CacheGroup) -> str:
    spans = spans_blocks(group.block_tokens, group.chunk_tokens)
    return COMPRESSOR_STATES if group.is_scratch and spans else ""


def make_kv_cache_config(
    groups: Sequence[CacheGroup],
    num_blocks: int,
    *,
    drafts: int = 0,
    checkpoints: int = 0,
    modules: int = 1,
) -> KVCacheConfig:
    """Return a configuration with one layer per group, all of which overlay the same bytes.

    Groups that see the next token are those of a draft head that vLLM can distinguish from the
    model. States have a block for each of `drafts`, and of `checkpoints` within a prefill. With
    several MTP `modules`, vLLM keeps more tokens than a window has.
    """
    retention = {g.retention_tokens for g in groups} - {None}
    layers = [f"layer.{group.group_id}{_name_of(group)}" for group in groups]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[make_tensor(num_blocks * PAGE_WORDS * 8, layers, PAGE_WORDS * 8)],
        kv_cache_groups=[
            KVCacheGroupSpec(
                [layer],
                make_spec(
                    *(group.block_tokens, group.window_tokens, group.chunk_tokens),
                    holds_state=group.holds_state,
                    is_scratch=group.is_scratch,
                    drafts=drafts,
                    checkpoints=checkpoints,
                    modules=modules,
                ),
                **({"is_eagle_group": True} if group.sees_next_token else {}),
            )
            for layer, group in zip(layers, groups, strict=True)
        ],
        **({RETENTION: retention.pop()} if retention else {}),
    )


@functools.cache
def _scheduled_only() -> tuple[tempfile.TemporaryDirectory[str], str]:
    """Write the configuration of a small model that only the scheduler uses.

    Return its folder and a config format that vLLM has already read, which saves a fifth of a
    played engine's start. The architecture is not one of vLLM's: to inspect one of those, vLLM
    starts a process.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import register_config_parser
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

    from tests.support import small_models

    class ScheduledOnly(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            raise NotImplementedError

        def embed_input_ids(self, input_ids: Any) -> Any:
            raise NotImplementedError

        def forward(self, input_ids: Any, positions: Any) -> Any:
            raise NotImplementedError

        def compute_logits(self, hidden_states: Any) -> Any:
            raise NotImplementedError

    ModelRegistry.register_model("ScheduledOnly", ScheduledOnly)
    config = small_models.config("qwen3", architectures=["ScheduledOnly"])

    class Parser(ConfigParserBase):
        def parse(self, *_arguments: Any, **_more: Any) -> Any:
            return config.to_dict(), copy.deepcopy(config)

    register_config_parser("scheduled_only")(Parser)
    folder = tempfile.TemporaryDirectory()
    config.save_pretrained(folder.name)
    return folder, "scheduled_only"


def around(*members: Options, role: str = "kv_both", **outer: Any) -> Options:
    """Return the transfer configuration of a MultiConnector with these members."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": list(members)},
        **outer,
    }


def _set_options(connector: str, extra_config: Options, options: Options) -> None:
    """Set options of the plugin in a transfer configuration, or in a MultiConnector's member."""
    if connector == CONNECTOR:
        extra_config.update(options)
    for member in extra_config.get("connectors", ()):
        _set_options(member["kv_connector"], member["kv_connector_extra_config"], options)


def make_vllm_config(
    plugin: Options,
    *,
    max_model_len: int = 96,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 4,
    drafts: int = 0,
    draft_head: bool = False,
    modules: int = 1,
    async_scheduling: bool = False,
    scheduling_policy: str = "fcfs",
    long_prefill_token_threshold: int = 0,
    ranks: int = 1,
    replicas: int = 1,
    events: bool = False,
    traces: str | None = None,
    transfer_config: Callable[[Options], Options] = ours,
) -> Any:
    """Return the configuration that vLLM's front end makes from a user's arguments.

    Drafts come from the text, or from a head whose method is set afterwards, since there is no
    model. With `modules` above 1 the method is MTP. `events` turns on KV events, which are
    published nowhere. `traces` is the endpoint for spans. `transfer_config` makes the transfer
    configuration from the plugin's options.
    """
    plugin = {"cpu_bytes": 1 << 20, **plugin}
    # An engine would refuse to start with the few small slots of a played pool.
    exact: Options = {}
    if re.fullmatch(r"\d+B", str(plugin["cpu_bytes"])):
        exact["cpu_bytes"], plugin["cpu_bytes"] = plugin["cpu_bytes"], "1MiB"
    if "disk" in plugin and re.fullmatch(r"\d+B", plugin["disk"]["bytes"]):
        exact["disk"], plugin["disk"] = plugin["disk"], {**plugin["disk"], "bytes": "1MiB"}
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    folder, config_format = _scheduled_only()
    config = EngineArgs(
        model=folder.name,
        config_format=config_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        scheduling_policy=scheduling_policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
        data_parallel_size=replicas,
        speculative_config=speculative if drafts else None,
        kv_transfer_config=transfer_config(plugin),
        kv_events_config=KVEventsConfig(True, "null") if events else None,
        otlp_traces_endpoint=traces,
    ).create_engine_config()
    transfer = config.kv_transfer_config
    if transfer is not None:  # None asks for an engine without a connector
        _set_options(transfer.kv_connector, transfer.kv_connector_extra_config, exact)
    if draft_head:
        config.speculative_config.method = "eagle" if modules == 1 else "mtp"
        model = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=modules))
        config.speculative_config.draft_model_config = model
    # The CPU platform turns this off and allows only one rank; the scheduler does not mind.
    config.scheduler_config.async_scheduling = async_scheduling
    config.parallel_config.world_size = ranks
    return config
