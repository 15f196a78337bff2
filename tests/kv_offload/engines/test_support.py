"""Every refusal has a test: what is not refused here is promised to work."""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import torch
from vllm.config import MultiModalConfig
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from kv_offload.cache.prefix import CacheGroup
from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.model.groups import SPECS, cache_groups, has_draft_head
from kv_offload.engines.vllm.model.support import DRAFT_HEADS
from kv_offload.engines.vllm.start.log import consequences, describe_policy
from kv_offload.engines.vllm.start.support import (
    CACHE_DTYPES,
    check_supported,
)
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

pytestmark = pytest.mark.filterwarnings("default")


class Engine:
    """What an engine tells the connector when it starts, to be spoilt by the tests."""

    def __init__(self, *groups: CacheGroup) -> None:
        self.config = OffloadConfig(cpu_bytes=1 << 20)
        self.vllm = make_vllm_config({})
        self.vllm.cache_config.block_size = 4
        self.cache = make_kv_cache_config(groups or (FULL,), 40)
        self.version = vllm_version()

    def check(self) -> None:
        check_supported(self.config, self.vllm, self.version, (), self.cache)

    def refuse(self, problem: str) -> None:
        """Check the only problem that the check lists; `*` stands for any text."""
        with pytest.raises(UnsupportedError) as caught:
            self.check()
        head = "kv-offload: this engine cannot be served correctly: "
        assert fnmatchcase(str(caught.value), head + problem)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def spec_like(base: type, name: str | None = None) -> Any:
    """Return a spec, or one of a subclass that vLLM may add: same data, other rules."""
    kind = base if name is None else type(name, (base,), {})
    return kind(block_size=4, num_kv_heads=1, head_size=2, dtype=torch.float32)


# -- what is served ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (CacheGroup(0, 4, 9),), (FULL, CHUNKS), (FULL, STATE)]
)
def test_a_real_configuration_is_served(groups: tuple[CacheGroup, ...]) -> None:
    Engine(*groups).check()


@pytest.mark.parametrize("version", [(0, 26), (0, 28), (0, 31), (0, 32), (0, 33)])
def test_every_version_is_served(engine: Engine, version: tuple[int, int]) -> None:
    engine.version = version
    engine.vllm.model_config = SimpleNamespace(disable_cascade_attn=True)
    engine.check()


@pytest.mark.parametrize("dtype", sorted(CACHE_DTYPES))
def test_cache_types_whose_pages_carry_everything(engine: Engine, dtype: str) -> None:
    engine.vllm.cache_config.cache_dtype = dtype
    engine.check()


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_roles_that_are_served(engine: Engine, role: str) -> None:
    engine.vllm.kv_transfer_config.kv_role = role
    engine.check()


def test_latent_attention_is_served(engine: Engine) -> None:
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    set_layers(engine.cache, {"layer.0": spec})
    engine.check()


def test_drafts_from_the_text_are_served(engine: Engine) -> None:
    engine.vllm = make_vllm_config({}, drafts=2)
    assert engine.vllm.speculative_config.method == "ngram"
    engine.check()


def test_ranks_of_every_kind_are_served(engine: Engine) -> None:
    parallel = engine.vllm.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = 4, 2
    parallel.decode_context_parallel_size = parallel.prefill_context_parallel_size = 2
    engine.check()


# -- what is refused ---------------------------------------------------------------------------


def test_a_role_that_only_receives(engine: Engine) -> None:
    engine.vllm.kv_transfer_config.kv_role = "kv_consumer"
    engine.refuse("kv_role is 'kv_consumer': set it to 'kv_both'*")


@pytest.mark.parametrize("part", ["model_config", "aux_output_config"])
def test_experts_of_tokens_that_were_not_computed(engine: Engine, part: str) -> None:
    """vLLM 0.26 and 0.28 have the setting in the first place, 0.32 in the second."""
    setting = SimpleNamespace(enable_return_routed_experts=True, disable_cascade_attn=True)
    setattr(engine.vllm, part, setting)
    engine.refuse(
        "enable_return_routed_experts is on, and vLLM has the experts only*"
        "remove --enable-return-routed-experts"
    )
    setting.enable_return_routed_experts = False
    engine.check()


def test_the_setting_of_routed_experts_is_where_it_is_looked_for(engine: Engine) -> None:
    parts = (getattr(engine.vllm, name, None) for name in ("model_config", "aux_output_config"))
    assert any(hasattr(part, "enable_return_routed_experts") for part in parts)


def test_no_prefix_caching(engine: Engine) -> None:
    engine.vllm.cache_config.enable_prefix_caching = False
    engine.refuse("prefix caching is off, *remove --no-enable-prefix-caching*")


def test_ranks_with_a_scheduler_each(engine: Engine) -> None:
    parallel = engine.vllm.parallel_config
    parallel.distributed_executor_backend = "external_launcher"
    engine.check()
    parallel.world_size = 2
    engine.refuse(
        "distributed_executor_backend is 'external_launcher' with 2 ranks, *"
        "start one process, with 'mp' or 'ray'"
    )
    parallel.distributed_executor_backend = "mp"
    engine.check()


@pytest.mark.parametrize("dtype", ["int4_per_token_head", "turboquant_k8v4", "fp8_inc", "nvfp4"])
def test_cache_types_with_data_elsewhere(engine: Engine, dtype: str) -> None:
    engine.vllm.cache_config = SimpleNamespace(enable_prefix_caching=True, cache_dtype=dtype)
    engine.refuse(f"kv_cache_dtype is '{dtype}': supported are auto, bfloat16, *")


def speculative(method: str, **more: Any) -> Any:
    """Return vLLM's own configuration of a method, as far as the checks read it."""
    config = make_vllm_config({}, drafts=3).speculative_config
    config.method = method
    for name, value in more.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("method", sorted(DRAFT_HEADS))
def test_draft_heads_are_served(engine: Engine, method: str) -> None:
    engine.vllm.speculative_config = speculative(method)
    assert engine.vllm.speculative_config.use_eagle()
    engine.check()
    assert has_draft_head(engine.vllm)
    engine.vllm.speculative_config = speculative("ngram")
    assert not has_draft_head(engine.vllm)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_draft_heads_that_write_kv_of_placeholders(engine: Engine, method: str) -> None:
    engine.vllm.speculative_config = speculative(method)
    engine.refuse(
        f"speculative method '{method}' writes KV that is not known to be*"
        "use one of eagle, eagle3, mtp, 'ngram' or none"
    )


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafts_in_one_pass(engine: Engine, method: str) -> None:
    engine.vllm.speculative_config = speculative(method, parallel_drafting=True)
    engine.refuse(
        f"speculative method '{method}' drafts several tokens in one pass*"
        "set parallel_drafting to false, or use 'ngram'"
    )


@pytest.mark.parametrize(
    ("modules", "tokens", "served"), [(1, 3, True), (3, 1, True), (2, 2, False)]
)
def test_several_modules_for_as_many_tokens(
    engine: Engine, modules: int, tokens: int, served: bool
) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=modules))
    engine.vllm.speculative_config = speculative(
        "mtp", num_speculative_tokens=tokens, draft_model_config=model
    )
    if served:
        engine.check()
    else:
        engine.refuse(
            "the model drafts 2 tokens with 2 MTP modules, which write the*"
            "set num_speculative_tokens to 1"
        )


@pytest.mark.parametrize("ranks", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_draft_heads_beside_context_parallelism(engine: Engine, ranks: str) -> None:
    engine.vllm.speculative_config = speculative("eagle3")
    setattr(engine.vllm.parallel_config, ranks, 2)
    engine.refuse(f"{ranks} is 2, and with speculative method 'eagle3' only 1 is known*")
    engine.vllm.speculative_config = speculative("ngram")
    engine.check()


def test_cascade_attention_where_pins_confuse_it(engine: Engine) -> None:
    engine.vllm.model_config = SimpleNamespace(disable_cascade_attn=False)
    engine.version = (0, 32)
    engine.check()
    engine.version = (0, 31)
    engine.refuse("cascade attention is on, *set disable_cascade_attn*")


def test_failing_requests_of_several_groups_where_the_engine_cannot() -> None:
    engine = Engine(FULL, WINDOW)
    engine.vllm.model_config = SimpleNamespace(disable_cascade_attn=True)
    engine.config = dataclasses.replace(engine.config, on_load_failure="fail")
    engine.version = (0, 32)
    engine.check()
    engine.version = (0, 31)
    engine.refuse("on_load_failure is 'fail', *a model with 2 KV-cache groups: use 'recompute'*")
    engine.cache = make_kv_cache_config((FULL,), 40)
    engine.check()


def test_a_model_without_a_kv_cache(engine: Engine) -> None:
    engine.cache.kv_cache_groups = []
    engine.refuse("the model has no KV cache")


def test_a_second_pool_of_blocks(engine: Engine) -> None:
    groups = engine.cache.kv_cache_groups
    engine.cache = SimpleNamespace(kv_cache_groups=groups, hisparse_host_num_blocks=100)
    engine.refuse("a second *(HiSparse) has ids of its own*")
    engine.cache.hisparse_host_num_blocks = None
    engine.check()


def with_state(mode: str, block_tokens: int = 4) -> Engine:
    """Return an engine with a group of states beside full attention."""
    engine = Engine(FULL, STATE)
    engine.cache.kv_cache_groups[1].kv_cache_spec = MambaSpec(
        block_size=block_tokens,
        shapes=((2, 2),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
    )
    return engine


@pytest.mark.parametrize("mode", ["align", "all"])
def test_states_at_block_boundaries_are_served(mode: str) -> None:
    with_state(mode).check()


def test_states_that_stay_in_place() -> None:
    with_state("none").refuse("mamba_cache_mode is 'none', in which no block of states becomes*")


def test_states_with_blocks_of_their_own() -> None:
    with_state("align", block_tokens=8).refuse(
        "mamba_block_size is 8 and block_size 4: leave mamba_block_size*"
    )


def test_states_beside_split_attention() -> None:
    engine = Engine(FULL, STATE)
    engine.vllm.parallel_config.decode_context_parallel_size = 2
    engine.refuse("decode_context_parallel_size is 2, and states are not split*")


def test_states_beside_drafts() -> None:
    engine = Engine(FULL, STATE)
    engine.vllm = make_vllm_config({}, drafts=2)
    engine.vllm.cache_config.block_size = 4
    engine.refuse("speculative method 'ngram' moves the blocks of states: remove it")


@pytest.mark.parametrize(
    "spec",
    [
        spec_like(CrossAttentionSpec),
        spec_like(EncoderOnlyAttentionSpec),
        spec_like(FullAttentionSpec, "SinkFullAttentionSpec"),
        spec_like(FullAttentionSpec, "SomethingNewSpec"),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_layers_whose_blocks_follow_other_rules(engine: Engine, spec: Any) -> None:
    set_layers(engine.cache, {"layer.0": spec})
    supported = ", ".join(sorted(SPECS))
    engine.refuse(f"the model has layers with a {type(spec).__name__}: supported are {supported}")


def test_encoder_only_layers_beside_a_decoder_are_left_out(engine: Engine) -> None:
    """vLLM makes no KV cache for them, so they are in no group that it plans for this model."""

    class Encoder(torch.nn.Module):
        get_kv_cache_spec = EncoderOnlyAttention.get_kv_cache_spec

    class Decoder(torch.nn.Module):
        def get_kv_cache_spec(self, _config: Any) -> Any:
            return make_spec(4)

    layers = {"encoder.0": Encoder(), "decoder.0": Decoder()}
    asked = {name: layer.get_kv_cache_spec(engine.vllm) for name, layer in layers.items()}
    specs = {name: spec for name, spec in asked.items() if spec is not None}
    engine.cache.kv_cache_groups = get_kv_cache_groups(engine.vllm, specs)
    (group,) = engine.cache.kv_cache_groups
    assert group.layer_names == ["decoder.0"]
    engine.check()
    assert cache_groups(engine.cache) == (FULL,)


def test_one_layer_of_a_uniform_group_is_enough_to_refuse(engine: Engine) -> None:
    other = spec_like(FullAttentionSpec, "OtherSpec")
    set_layers(engine.cache, {"layer.0": make_spec(4), "layer.1": other})
    engine.refuse("the model has layers with a OtherSpec*")


def test_two_policies_for_failed_loads_that_differ(engine: Engine) -> None:
    """The other way round is vLLM's default, `fail`, beside ours: only said, not refused."""
    engine.check()
    engine.config = dataclasses.replace(engine.config, on_load_failure="fail")
    engine.check()
    engine.vllm.kv_transfer_config.kv_load_failure_policy = "recompute"
    engine.refuse(
        "on_load_failure is 'fail', and kv_load_failure_policy is 'recompute': remove one of the "
        "two"
    )


@pytest.mark.parametrize(
    ("policy", "done", "other"),
    [("recompute", "computed again", "fail"), ("fail", "failed", "recompute")],
)
def test_the_start_says_which_policy_for_failed_loads_counts(
    engine: Engine, policy: Any, done: str, other: str
) -> None:
    config = dataclasses.replace(engine.config, on_load_failure=policy)
    assert describe_policy(config) == (
        f"a request whose load fails is {done} (on_load_failure: {policy}); vLLM's own "
        "kv_load_failure_policy is not read: for the other choice set on_load_failure: "
        f"{other}"
    )


def test_everything_that_stands_in_the_way_is_listed_at_once(engine: Engine) -> None:
    engine.vllm.kv_transfer_config.kv_role = "kv_consumer"
    engine.vllm.cache_config.enable_prefix_caching = False
    set_layers(engine.cache, {"layer.0": spec_like(FullAttentionSpec, "OtherSpec")})
    engine.vllm.speculative_config = speculative("dflash")
    with pytest.raises(UnsupportedError) as caught:
        engine.check()
    message = str(caught.value)
    assert "\n" not in message, "one line of a log, which a search for kv-offload: finds"
    _, *problems = re.split(r"\(\d\) ", message)
    beginnings = "kv_role is ", "prefix caching is off", "speculative method", "the model has"
    for problem, beginning in zip(problems, beginnings, strict=True):
        assert problem.startswith(beginning)


# -- what is said of what is served ------------------------------------------------------------


def takes_images(engine: Engine, role: str, *, asked: bool = False) -> list[str]:
    """Have vLLM resolve the inputs of a multimodal model; return what the plugin says of them."""
    engine.vllm.model_config.multimodal_config = MultiModalConfig(enable_mm_embeds=asked)
    engine.vllm.kv_transfer_config.kv_role = role
    for resolve in ("_resolve_mm_embedding_inputs", "_resolve_allow_missing_mm_embeddings"):
        getattr(engine.vllm, resolve, lambda: None)()
    return list(consequences(engine.config, engine.vllm, ()))


def test_a_role_that_opens_embeddings_is_named(engine: Engine) -> None:
    said = takes_images(engine, "kv_both")
    opened = engine.vllm.model_config.multimodal_config.enable_mm_embeds
    assert opened == (engine.version >= (0, 32)), "a vLLM between: does the role open them?"
    assert len(said) == opened
    for message in said:
        assert message.startswith("kv_role is 'kv_both', with which vLLM accepts embeddings in")
        assert "set kv_role to 'kv_producer'" in message


def test_a_role_that_opens_none_is_not(engine: Engine) -> None:
    assert takes_images(engine, "kv_producer") == []
    inputs = engine.vllm.model_config.multimodal_config
    assert not inputs.enable_mm_embeds
    assert not getattr(inputs, "allow_missing_mm_embeddings", False)


def test_embeddings_that_the_user_asked_for_are_not_the_roles(engine: Engine) -> None:
    """Up to vLLM 0.28 the role does not touch the setting; later nobody can tell whose it is."""
    assert takes_images(engine, "kv_producer", asked=True) == []
    assert engine.vllm.model_config.multimodal_config.enable_mm_embeds
    if engine.version < (0, 29):
        assert takes_images(engine, "kv_both", asked=True) == []


def test_a_model_that_takes_text_only_opens_nothing(engine: Engine) -> None:
    assert engine.vllm.model_config.multimodal_config is None
    assert list(consequences(engine.config, engine.vllm, ())) == []


def test_no_connector_is_built_for_an_engine_that_cannot_be_served() -> None:
    with pytest.raises(UnsupportedError, match="decode_context_parallel_size is 2"):
        PlayedEngine(drafts=2, draft_head=True, context_ranks=2)
