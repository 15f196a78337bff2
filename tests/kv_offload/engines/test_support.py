"""Every refusal has a test: what is not refused here is promised to work."""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.model.groups import SPECS, cache_groups, drops_last_block
from kv_offload.engines.vllm.start import log
from kv_offload.engines.vllm.start.support import CACHE_DTYPES, REFUSED_SPECS, check_supported
from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.errors import UnsupportedError
from tests.support.configurations import (
    make_kv_cache_config,
    make_spec,
    make_vllm_config,
    set_layers,
)
from tests.support.planning import get_kv_cache_groups
from tests.support.played_cases import CHUNKS, FULL, STATE, WINDOW
from tests.support.played_engine import PlayedEngine

OTHER_PARTS = {"groups": (FULL,), "drafts": 0, "layers": {}}
"""Names in a test's settings that are no attributes of vLLM's configuration."""


class Engine:
    """What an engine tells the connector when it starts.

    `settings` has values by the path of the attribute that gets them, such as
    `cache_config.block_size`, and may have what is in `OTHER_PARTS`, `fail` for
    `on_load_failure`, and `version`.
    """

    def __init__(self, **settings: Any) -> None:
        parts = {name: settings.pop(name, value) for name, value in OTHER_PARTS.items()}
        failure = "fail" if settings.pop("fail", False) else "recompute"
        self.config = OffloadConfig(cpu_bytes=1 << 20, on_load_failure=failure)
        self.vllm = make_vllm_config({}, drafts=parts["drafts"])
        self.vllm.cache_config.block_size = 4
        self.cache = make_kv_cache_config(parts["groups"], 40)
        if parts["layers"]:
            set_layers(self.cache, parts["layers"])
        self.version = settings.pop("version", vllm_version())
        for path, value in settings.items():
            *owners, name = path.split(".")
            owner = self.vllm
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, name, value)

    def check(self) -> None:
        check_supported(self.vllm, self.version, (), self.cache)


def spec_like(base: type, name: str | None = None) -> Any:
    """Return a spec, or one of a subclass that vLLM may add: same data, other rules."""
    kind = base if name is None else type(name, (base,), {})
    return kind(block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32)


def state_spec(mode: str, block_tokens: int = 4) -> MambaSpec:
    return MambaSpec(
        block_size=block_tokens, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def window_of_latents() -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32, sliding_window=8
    )


METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Of drafts that read the model's states."""


def speculative(method: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a method, as far as the checks read them."""
    values = {"method": method, **more}
    return {"drafts": 3, **{f"speculative_config.{name}": v for name, v in values.items()}}


def mtp(modules: int, tokens: int) -> dict[str, Any]:
    model = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=modules))
    return speculative("mtp", num_speculative_tokens=tokens, draft_model_config=model)


ROLE = "kv_transfer_config.kv_role"
BACKEND = "parallel_config.distributed_executor_backend"
STAGES, ASYNC = "parallel_config.pipeline_parallel_size", "scheduler_config.async_scheduling"
WORLD, DCP = "parallel_config.world_size", "parallel_config.decode_context_parallel_size"
PCP = "parallel_config.prefill_context_parallel_size"
CASCADE = {"model_config.disable_cascade_attn": False}
OLD, NEW = {"version": (0, 31)}, {"version": (0, 32)}


EXPERTS = "aux_output_config.enable_return_routed_experts"


def diffusion(*, async_scheduling: bool) -> dict[str, Any]:
    model = SimpleNamespace(is_diffusion=True, disable_cascade_attn=True, runner_type="generate")
    return {"model_config": model, "scheduler_config.async_scheduling": async_scheduling}


SERVED: dict[str, dict[str, Any]] = {
    **{
        f"groups {index}": {"groups": groups}
        for index, groups in enumerate(
            [(FULL, WINDOW), (CacheGroup(0, 4, 9),), (FULL, CHUNKS), (FULL, STATE)]
        )
    },
    **{f"vLLM {version}": {"version": version} for version in ((0, 31), (0, 32), (0, 33))},
    **{f"cache of {dtype}": {"cache_config.cache_dtype": dtype} for dtype in sorted(CACHE_DTYPES)},
    "kv_producer": {ROLE: "kv_producer"},
    "latent attention": {"layers": {"layer.0": spec_like(MLAAttentionSpec)}},
    "states at every block": {"layers": {"layer.0": state_spec("all")}},
    "drafts from the text": {"drafts": 2},
    **{f"drafts of {method}": speculative(method) for method in METHODS},
    **{
        f"drafts of {method} in one pass": speculative(method, parallel_drafting=True)
        for method in ("eagle", "draft_model")
    },
    "one MTP module": mtp(1, 3),
    "one token of several MTP modules": mtp(3, 1),
    "several MTP modules": mtp(4, 4),
    "states beside drafts": {"groups": (FULL, STATE), "drafts": 2},
    "states beside split attention": {"groups": (FULL, STATE), DCP: 2},
    "states, drafts of a head and split attention": {
        **speculative("eagle"),
        "groups": (FULL, STATE),
        DCP: 2,
    },
    **{f"a draft head with {path}": {**speculative("eagle3"), path: 2} for path in (DCP, PCP)},
    "a window without keys and values": {"layers": {"layer.0": window_of_latents()}},
    "hidden states": {"layers": {"layer.0": spec_like(HiddenStateCacheSpec)}},
    "scratch of a kind that nobody knows": {
        "layers": {"layer.0": spec_like(CircularBufferSpec, "NewRingSpec")}
    },
    "ranks of every kind": {
        "parallel_config.tensor_parallel_size": 4,
        STAGES: 2,
        DCP: 2,
        PCP: 2,
    },
    "drafts in a pipeline": {"drafts": 2, STAGES: 2, ASYNC: True},
    "one rank of an external launcher": {BACKEND: "external_launcher"},
    "cascade attention of 0.32": {**CASCADE, **NEW},
    "failing requests": {"fail": True},
    "failing requests of two groups": {"fail": True, "groups": (FULL, WINDOW)},
    "experts that are not returned": {EXPERTS: False},
    "a diffusion model": diffusion(async_scheduling=False),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a role that only receives": (
        {ROLE: "kv_consumer"},
        "kv_role is 'kv_consumer': set it to 'kv_both'*",
    ),
    "experts of tokens that were not computed": (
        {EXPERTS: True},
        "enable_return_routed_experts is on, and vLLM has the experts only*"
        "remove --enable-return-routed-experts",
    ),
    "no prefix caching": (
        {"cache_config.enable_prefix_caching": False},
        "prefix caching is off, *remove --no-enable-prefix-caching*",
    ),
    "ranks with a scheduler each": (
        {BACKEND: "external_launcher", WORLD: 2},
        "distributed_executor_backend is 'external_launcher' with 2 ranks, *"
        "start one process, with 'mp' or 'ray'",
    ),
    "drafts in a pipeline whose sampled tokens come late": (
        {"drafts": 2, STAGES: 2, ASYNC: False},
        "pipeline_parallel_size is 2 with drafts and without asynchronous scheduling, *",
    ),
    # After such an error vLLM drops the outputs of the steps under way, with what ranks report.
    "going on after an error": (
        {"parallel_config.enable_fault_tolerance": True},
        "enable_fault_tolerance is on, *remove --enable-fault-tolerance",
    ),
    **{
        f"data of {dtype} elsewhere": (
            {"cache_config": SimpleNamespace(enable_prefix_caching=True, cache_dtype=dtype)},
            f"kv_cache_dtype is '{dtype}': supported are auto, bfloat16, *",
        )
        for dtype in ("something_new", "nvfp4_of_somebody")
    },
    "more MTP modules than a block holds tokens": (
        mtp(5, 5),
        "the model drafts with 5 MTP modules, *holds 4: set num_speculative_tokens to 4 or less, *",
    ),
    "canvases that are only read": (
        diffusion(async_scheduling=True),
        "the model is a diffusion model, *set --no-async-scheduling",
    ),
    "cascade attention where pins confuse it": (
        {**CASCADE, **OLD},
        "cascade attention is on, *set disable_cascade_attn*",
    ),
    "no KV cache": ({"groups": ()}, "the model has no KV cache"),
    "states that stay in place": (
        {"layers": {"layer.0": state_spec("none")}},
        "mamba_cache_mode is 'none', in which no block of states becomes*",
    ),
    "states with blocks of their own": (
        {"layers": {"layer.0": state_spec("align", block_tokens=8)}},
        "blocks of states hold 8 tokens, and block_size is 4, *leave mamba_block_size unset, *",
    ),
    "drafts beside states at every block": (
        {"drafts": 2, "layers": {"layer.0": state_spec("all")}},
        "mamba_cache_mode is 'all' with speculative method 'ngram', *use 'align'",
    ),
    **{
        f"layers of {kind}, whose reason is known": (
            {"layers": {"layer.0": make_spec(4), "layer.1": spec_like(FullAttentionSpec, kind)}},
            f"the model has layers with a {kind}: {reason}",
        )
        for kind, reason in REFUSED_SPECS.items()
    },
    **{
        f"layers of {type(spec).__name__}": (
            {"layers": {"layer.0": make_spec(4), "layer.1": spec}},
            f"the model has layers with a {type(spec).__name__}: supported are "
            + ", ".join(sorted(SPECS)),
        )
        for spec in (
            spec_like(EncoderOnlyAttentionSpec),
            spec_like(FullAttentionSpec, "SomethingNewSpec"),
        )
    },
}
HEAD = "kv-offload: this engine cannot be served correctly: "


@pytest.mark.parametrize("settings", SERVED.values(), ids=SERVED)
def test_what_is_served(settings):
    Engine(**settings).check()


@pytest.mark.parametrize(("settings", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(settings, problem):
    with pytest.raises(UnsupportedError) as caught:
        Engine(**settings).check()
    assert fnmatchcase(str(caught.value), HEAD + problem), "it is the only problem"


@pytest.mark.parametrize(
    ("stages", "runner", "served"), [(1, 1, True), (2, 1, False), (2, 2, True)]
)
def test_stages_of_a_pooling_model(stages, runner, served, monkeypatch):
    """Of runner V1 only the last stage reports to vLLM, which then ends the engine."""
    engine = Engine(**{"model_config.runner_type": "pooling", STAGES: stages})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(runner - 1))
    if served:
        engine.check()
        return
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size is 2 with a pooling model"):
        engine.check()


def test_a_second_pool_of_blocks_is_refused():
    engine = Engine()
    groups = engine.cache.kv_cache_groups
    engine.cache = SimpleNamespace(kv_cache_groups=groups, hisparse_host_num_blocks=100)
    with pytest.raises(UnsupportedError, match="HiSparse keeps blocks in host memory"):
        engine.check()


def test_everything_that_stands_in_the_way_is_listed_at_once():
    engine = Engine(
        **{ROLE: "kv_consumer", "cache_config.enable_prefix_caching": False},
        **mtp(5, 5),
        layers={"layer.0": spec_like(FullAttentionSpec, "OtherSpec")},
    )
    with pytest.raises(UnsupportedError) as caught:
        engine.check()
    message = str(caught.value)
    assert "\n" not in message, "one line of a log, which a search for kv-offload: finds"
    _, *problems = re.split(r"\(\d\) ", message)
    beginnings = "kv_role is ", "prefix caching is off", "the model has", "the model drafts"
    for problem, beginning in zip(problems, beginnings, strict=True):
        assert problem.startswith(beginning)


def test_no_connector_is_built_for_a_model_that_cannot_be_served():
    with pytest.raises(UnsupportedError, match="blocks of states hold 8 tokens"):
        PlayedEngine((FULL, dataclasses.replace(STATE, block_tokens=8)))


def test_the_settings_are_where_they_are_looked_for():
    engine = Engine()
    assert engine.vllm.model_config.runner_type == "generate"
    assert not engine.vllm.aux_output_config.enable_return_routed_experts
    assert not engine.vllm.model_config.is_diffusion
    assert drops_last_block(Engine(**speculative("eagle")).vllm)
    assert not drops_last_block(Engine(drafts=2).vllm)


def test_encoder_only_layers_beside_a_decoder_are_left_out():
    """vLLM makes no KV cache for them, so they are in no group that it plans for this model."""

    class Encoder(torch.nn.Module):
        get_kv_cache_spec = EncoderOnlyAttention.get_kv_cache_spec

    engine = Engine()
    asked = {"encoder.0": Encoder().get_kv_cache_spec(engine.vllm), "decoder.0": make_spec(4)}
    specs = {name: spec for name, spec in asked.items() if spec is not None}
    engine.cache.kv_cache_groups = get_kv_cache_groups(engine.vllm, specs)
    assert [group.layer_names for group in engine.cache.kv_cache_groups] == [["decoder.0"]]
    engine.check()
    assert cache_groups(engine.cache) == (FULL,)


@pytest.mark.parametrize(
    ("role", "asked"), [("both", False), ("producer", False), ("producer", True)]
)
def test_a_role_that_opens_embeddings_is_named(role, asked, monkeypatch):
    """vLLM does not say whether the role or the user has set it."""
    said: list[str] = []
    monkeypatch.setattr(log.logger, "warning", lambda text, *args: said.append(text % args))
    engine = Engine(**{ROLE: f"kv_{role}"})
    traced: Any = SimpleNamespace(warnings=())
    log.log_warnings(traced, engine.vllm, ())
    assert said == [], "a model of text alone"
    inputs = MultiModalConfig(enable_mm_embeds=asked)
    engine.vllm.model_config.multimodal_config = inputs
    engine.vllm._resolve_mm_embedding_inputs()
    opened = role == "both"
    assert inputs.enable_mm_embeds == (asked or opened)
    log.log_warnings(traced, engine.vllm, ())
    assert len(said) == opened
    for message in said:
        assert message.startswith("kv-offload: kv_role 'kv_both' makes vLLM accept embeddings")
        assert "set 'kv_producer'" in message
