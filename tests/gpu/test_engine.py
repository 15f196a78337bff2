"""A real vLLM engine on a GPU: blocks are restored bit for bit, with both model runners."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.processes import run_module

BLOCK_TOKENS = 32
"""The block size of `engine_run`, unless a case says otherwise."""

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

OF_TEXT = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
}

OF_MTP = {
    "speculative_config": {
        "method": "mtp",
        "num_speculative_tokens": 2,
        # Without this, an engine of vLLM 0.33 that has no connector cuts prompts elsewhere.
        "disable_lookahead_block_hashes": True,
    }
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "graphs": ("qwen3", {"enforce_eager": False}),
    "synchronous": ("qwen3", {"async_scheduling": False}),
    "before_compute": ("qwen3", {"synchronous_loads": True, "enforce_eager": False}),
    "before_compute, eager": ("qwen3", {"synchronous_loads": True}),
    "before_compute, full graphs": (
        "qwen3",
        {
            "synchronous_loads": True,
            "enforce_eager": False,
            "compilation_config": {"cudagraph_mode": "FULL"},
        },
    ),
    "chunked": ("qwen3", {"max_num_batched_tokens": 256, "max_num_seqs": 8}),
    "windows": ("gemma3", {}),
    "mla": ("deepseek_v2", {"block_size": 64}),
    "mla, graphs": ("deepseek_v2", {"block_size": 64, "enforce_eager": False}),
    # When a prompt is loaded, all free blocks are filled with 0x7F, including those of open
    # latents, which are not loaded.
    "open latents": ("deepseek_v4", {"block_size": 256, "blocks": 8000}),
    "gates": ("qwen3", {"gates": True}),
    "gates, graphs": ("qwen3", {"gates": True, "enforce_eager": False}),
    "before_compute, gates": (
        "qwen3",
        {"gates": True, "synchronous_loads": True, "enforce_eager": False},
    ),
    "packed": ("qwen3", {"pack_kv": True, "block_size": 128}),
    "packed, graphs": ("qwen3", {"pack_kv": True, "block_size": 128, "enforce_eager": False}),
    "before_compute, packed": (
        "qwen3",
        {"pack_kv": True, "block_size": 128, "synchronous_loads": True},
    ),
    "packed, windows": ("gemma3", {"pack_kv": True, "block_size": 128}),
    "packed, mla": ("deepseek_v2", {"pack_kv": True, "block_size": 64}),
    "fp8": ("qwen3", {"kv_cache_dtype": "fp8"}),
    "fp8 scale per token and head": ("qwen3", {"kv_cache_dtype": "fp8_per_token_head"}),
    "int8 scale per token and head": ("qwen3", {"kv_cache_dtype": "int8_per_token_head"}),
    "blocks of 16": ("qwen3", {"block_size": 16}),
    "blocks of 64": ("qwen3", {"block_size": 64}),
    "blocks of 128": ("gemma3", {"block_size": 128}),
    "chunks": ("llama4", {}),
    # Its default mode makes blocks of 2,048 tokens, more than these prompts have.
    "Mamba 1": ("jamba", {"enable_prefix_caching": True, "mamba_cache_mode": "align"}),
    "Mamba 2": ("falcon_h1", {"enable_prefix_caching": True}),
    "Mamba 2, aligned": ("falcon_h1", {"enable_prefix_caching": True, "mamba_cache_mode": "align"}),
    "Mamba 2, fp8": ("falcon_h1", {"enable_prefix_caching": True, "kv_cache_dtype": "fp8"}),
    "gated delta nets": (
        "qwen3_next",
        {"enable_prefix_caching": True, "gdn_prefill_backend": "triton"},
    ),
    "Mamba 2, drafts of text": (
        "falcon_h1",
        {"enable_prefix_caching": True, "mamba_cache_mode": "align", **OF_TEXT},
    ),
    "gated delta nets, drafts of text": (
        "qwen3_next",
        {"enable_prefix_caching": True, "gdn_prefill_backend": "triton", **OF_TEXT},
    ),
    "Mamba 2, MTP": (
        "nemotron_h_mtp",
        {"enable_prefix_caching": True, "mamba_cache_mode": "align", **OF_MTP},
    ),
    "gated delta nets, MTP": (
        "qwen3_next_mtp",
        {"enable_prefix_caching": True, "gdn_prefill_backend": "triton", **OF_MTP},
    ),
    "gated delta nets, MTP, graphs": (
        "qwen3_next_mtp",
        {
            "enable_prefix_caching": True,
            "gdn_prefill_backend": "triton",
            "enforce_eager": False,
            "max_num_seqs": 64,  # a graph of this size needs a state for each
            **OF_MTP,
        },
    ),
    # vLLM 0.33 sometimes computes one of these prompts differently, also without the plugin. From
    # the same KV it gives the same answers.
    "int4 scale per token and head": (
        "llama_wide",
        {"kv_cache_dtype": "int4_per_token_head", "expects_own_cache": True},
    ),
    "nvfp4": ("llama_wide", {"kv_cache_dtype": "nvfp4"}),
    "nvfp4, graphs": ("llama_wide", {"kv_cache_dtype": "nvfp4", "enforce_eager": False}),
    "codes of 4 bits": ("llama_wide", {"kv_cache_dtype": "turboquant_4bit_nc"}),
    "fp8 keys, codes of 4 bits": ("llama_wide", {"kv_cache_dtype": "turboquant_k8v4"}),
    "draft head": ("llama", {"draft_head": True}),
    "draft head, graphs": ("llama", {"draft_head": True, "enforce_eager": False}),
    "sleep": ("qwen3", {"enable_sleep_mode": True}),
}
WITH_WAVES = {
    "before_compute",
    "before_compute, eager",
    "before_compute, gates",
    "before_compute, packed",
}
"""The cases whose layers can wait one by one. A replayed graph cannot be made to wait inside."""


ONE_AT_A_TIME = {("gated delta nets, MTP, graphs", "v1")}
"""Cases in which several prompts at once end an engine of vLLM 0.33 with an illegal memory access,
with its own connector, too."""


def has_flash_attention_2() -> bool:
    from vllm.vllm_flash_attn.flash_attn_interface import FA2_AVAILABLE

    return bool(FA2_AVAILABLE)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_come_back(tmp_path, case, runner):
    kind, arguments = CASES[case]
    cache_type = arguments.get("kv_cache_dtype", "")
    if "turboquant" in cache_type and not has_flash_attention_2():
        pytest.skip("TurboQuant needs FlashAttention 2, which this build of vLLM lacks")
    if cache_type == "nvfp4" and find_spec("flashinfer") is None:
        pytest.skip("vLLM reads nvfp4 with FlashInfer, which is not installed")
    if kind == "deepseek_v4" and find_spec("vllm._flashmla_C") is None:
        pytest.skip("DeepSeek V4 needs FlashMLA, which this build of vLLM lacks")
    result = run_module(
        "tests.gpu.engine_run",
        tmp_path,
        kind,
        {**arguments, "all_at_once": (case, runner) not in ONE_AT_A_TIME},
        timeout_seconds=550,
        VLLM_USE_V2_MODEL_RUNNER="1" if runner == "v2" else "0",
    )
    print({k: v for k, v in result.items() if not isinstance(v, list)})
    assert result["loaded_blocks"] > 0
    assert result["compared_blocks"] >= 5
    assert result["different_blocks"] == 0
    assert result["answers"] == result["expected"]
    corrupted, reloaded = result["corrupted"], result["answers"][1]
    assert sum(a != b for a, b in zip(corrupted, reloaded, strict=True)) == len(reloaded)
    assert bool(result["packed_tiles"]) == ("pack_kv" in arguments)
    assert result["copies_with"] == ("gates" if "gates" in case else "kernels")
    assert bool(result["synchronous_loads"]) == case.startswith("before_compute")
    if case in WITH_WAVES:  # at most the first load is used for learning
        assert result["loads_in_waves"] >= max(1, result["loads"] - result["whole_loads"] - 1)
    else:
        assert result["loads_in_waves"] <= case.startswith("before_compute") < result["loads"]
    # The last prompt, if the device lacks more than a block (64 tokens) of it.
    whole = kind in ("qwen3", "llama_wide") and arguments.get("block_size", BLOCK_TOKENS) < 64
    assert result["whole_loads"] == whole
    # vLLM itself may keep some, but not one more with us.
    assert set(result["kept"]) <= set(result["kept_without_us"])
    if runner == "v2":
        assert result["output_copy_stream"]
    # Wrong KV of a draft head changes no token, only how many drafts are accepted.
    assert result["drafts"] == result["expected_drafts"]
    if "draft_head" in arguments:
        assert result["layers"] == 4, "two of the model, two of its head"
        assert result["drafts"][1] > 0, "drafts were accepted"
    if kind == "deepseek_v4":
        assert result["without_overlap"] != reloaded
    if case == "sleep":
        assert result["pending_at_sleep"], "the test must sleep with a store under way"
        assert result["after_sleep"] == result["expected"]
        assert result["loaded_after_sleep"] > 0
