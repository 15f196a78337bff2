"""Small random models whose answers depend on their KV cache, for tests, the demo and benches.

`initializer_range=0.3` makes attention matter: with the default, or with an engine's dummy weights,
the tokens stay the same when the KV is zeroed, and a comparison proves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512

_COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # tied, a random model repeats its input whatever its KV
}


def _model(model_type: str, architecture: str, *changes: dict[str, Any]) -> dict[str, Any]:
    architectures = [f"{architecture}ForCausalLM"]
    found = {**_COMMON, "model_type": model_type, "architectures": architectures}
    for change in changes:
        found |= change
    return found


_QWEN3 = _model("qwen3", "Qwen3")
_LLAMA = _model("llama", "Llama")
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN3_NEXT = _model(
    "qwen3_next",
    "Qwen3Next",
    {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4},
    {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    {"num_experts": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64},
    _EXPERTS,
)
_MAMBA_2 = {"mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_d_head": 32}

MODELS: dict[str, dict[str, Any]] = {
    # Dense, grouped-query attention.
    "qwen3": _QWEN3,
    "qwen3_deep": {**_QWEN3, "num_hidden_layers": 4},
    # The same, as the draft head of `write_draft_head` expects it.
    "llama": _LLAMA,
    # With heads of 128: in vLLM's batch-invariant mode its tokens do not depend on the batch. With
    # heads of 32 and 64 FlashAttention 3 splits prompts and decodes in other places: 13 and 10 of
    # 428 answers changed with the batch (vLLM 0.26, H100, 23 Nov 2026), and none with 128.
    "llama_wide": {**_LLAMA, "head_dim": 128, "hidden_size": 512, "intermediate_size": 1024},
    # Sliding windows of 96 tokens interleaved with full attention: two cache groups.
    "gemma3": _model(
        "gemma3_text",
        "Gemma3",
        {"num_hidden_layers": 4, "query_pre_attn_scalar": 32, "sliding_window": 96},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    # Sliding windows of 96 tokens in all layers.
    "mistral": _model("mistral", "Mistral", {"sliding_window": 96}),
    # Multi-head latent attention: one compressed KV head of 512 + 64, as in DeepSeek-V2-Lite.
    "deepseek_v2": _model(
        "deepseek_v2",
        "DeepseekV2",
        {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1},
        {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64},
        {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128},
        {"qk_rope_head_dim": 64, "v_head_dim": 128},
        {"first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 1, **_EXPERTS},
    ),
    # A window of 128 tokens in all layers; in all but the first also latents of 4 or of 128 tokens.
    # The indexer takes all latents of up to 2,048 tokens.
    "deepseek_v4": _model(
        "deepseek_v4",
        "DeepseekV4",
        {"hidden_size": 256, "num_hidden_layers": 3, "initializer_range": 0.1, "head_dim": 512},
        {"intermediate_size": 64},
        {"compress_ratios": [0, 4, 128], "num_hash_layers": 0, "qk_rope_head_dim": 64},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "q_lora_rank": 64},
        {"o_groups": 2, "o_lora_rank": 64, "index_n_heads": 64, "topk_method": "noaux_tc"},
        {"n_routed_experts": 16, "num_nextn_predict_layers": 0, **_EXPERTS},
    ),
    # Chunked-local attention in chunks of 128 tokens, interleaved with full attention.
    "llama4": _model(
        "llama4_text",
        "Llama4",
        {"num_hidden_layers": 4, "intermediate_size": 128, "intermediate_size_mlp": 256},
        {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": [0, 1, 2, 3]},
        {"attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 0], "use_qk_norm": False},
    ),
    # Mamba 1 interleaved with full attention.
    "jamba": _model(
        "jamba",
        "Jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8},
        {"num_experts": 1, "num_experts_per_tok": 1},
    ),
    # Attention and Mamba 2 in parallel in every layer.
    "falcon_h1": _model(
        "falcon_h1",
        "FalconH1",
        {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_expand": 1, "mamba_chunk_size": 64},
        _MAMBA_2,
    ),
    # Mamba 2 interleaved with full attention, as in Granite 4.0 H.
    "granitemoehybrid": _model(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
        {"mamba_n_heads": 8, "mamba_expand": 2, **_MAMBA_2},
        {"num_local_experts": 0, "shared_intermediate_size": 256},
    ),
    # Gated delta nets interleaved with full attention, and experts.
    "qwen3_next": _QWEN3_NEXT,
    # With a module that drafts tokens.
    "qwen3_next_mtp": {**_QWEN3_NEXT, "num_nextn_predict_layers": 1},
    # Mamba 2 below full attention, as in Nemotron-H, with a module that drafts tokens.
    "nemotron_h_mtp": _model(
        "nemotron_h",
        "NemotronH",
        {"layers_block_type": ["linear_attention", "linear_attention", "full_attention"]},
        {"num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1},
        {"ssm_state_size": 32, "conv_kernel": 4, "chunk_size": 64, "expand": 2},
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention"]},
    ),
}
"""Hugging Face configurations by kind, as in a `config.json`."""


def config(kind: str, **changes: Any) -> Any:
    """Return the transformers configuration of a kind of `MODELS`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**MODELS[kind] | changes)


def write_model(kind: str, folder: Path, dtype: str = "float32") -> Path:
    """Write a model with fixed random weights and a tokenizer, if they do not exist.

    Returns `folder`. From 3 on, token `i` is the word `t<i>`, so texts are easy to make and read.
    """
    if not (folder / "tokenizer.json").exists():
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(kind))
        if kind == "llama" or kind in _MTP_MODULES:
            _scale_embeddings(model)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        if kind == "nemotron_h_mtp":
            _leave_out_dtype(folder)
        if kind in _MTP_MODULES:
            _write_mtp_module(folder, *_MTP_MODULES[kind])
        if kind == "deepseek_v4":
            _publish_v4(folder)
        _write_tokenizer(folder)
    return folder


def _scale_embeddings(model: Any) -> None:
    """Give every embedding a root mean square of 1, so that the first norm changes nothing."""
    import torch

    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight /= weight.square().mean(dim=-1, keepdim=True).sqrt()


def write_draft_head(model: Path, folder: Path) -> Path:
    """Write an EAGLE head that drafts what a `llama` model in `model` will mostly sample.

    Its layers are the model's own, and it ignores the model's states: it runs the same network on
    the same tokens except the first, which it never sees, because every token is paired with the
    state before it. So its KV decides which drafts are accepted. Returns `folder`.
    """
    if not (folder / "model.safetensors").exists():
        import torch
        from safetensors.torch import load_file, save_file

        source = load_file(model / "model.safetensors")
        weights = {
            name.removeprefix("model."): weight.clone()
            for name, weight in source.items()
            if name.startswith("model.layers.") and "layers.0.input_layernorm" not in name
        }
        embeddings = source["model.embed_tokens.weight"]
        size = embeddings.shape[1]
        eye = torch.eye(size, dtype=embeddings.dtype)
        weights["fc.weight"] = torch.cat((eye, torch.zeros_like(eye)), dim=1)
        dtype = str(embeddings.dtype).removeprefix("torch.")
        config("llama", dtype=dtype).save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _leave_out_dtype(folder: Path) -> None:
    """Omit the weights' data type, which vLLM 0.33 gives the module whatever type it runs in."""
    file = folder / "config.json"
    published = json.loads(file.read_text())
    del published["dtype"]
    file.write_text(json.dumps(published))


_MTP_MODULES = {
    "qwen3_next_mtp": (
        0.01,
        ("model.layers.3.", "model.norm"),
        ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    ),
    "nemotron_h_mtp": (
        0.1,
        ("backbone.layers.2.", "backbone.norm_f"),
        tuple(f"mtp.layers.0.{name}" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")),
    ),
}
"""How much of the layers below the last one is left, and names of weights: of a model's last layer
and norm, of its module's projection and norms."""

_OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
"""Name endings of weights at the end of a part of a layer."""


def _write_mtp_module(
    folder: Path, share: float, model: tuple[str, str], module: tuple[str, ...]
) -> None:
    """Give a model with written weights a module that drafts.

    The module is the last layer again, on embeddings alone. The layers below that add little to
    these, so some of its drafts are right.
    """
    import torch
    from safetensors.torch import load_file, save_file

    file, (layer, last_norm), (projection, *norms) = folder / "model.safetensors", model, module
    weights = load_file(file)
    added = {}
    for name, weight in weights.items():
        if name.startswith(layer):
            added[name.replace(layer, "mtp.layers.0.")] = weight.clone()
        elif name.endswith(_OUTPUTS):
            weight *= share
    norm = weights[f"{last_norm}.weight"]
    eye = torch.eye(len(norm), dtype=norm.dtype)
    added[f"{projection}.weight"] = torch.cat((eye, torch.zeros_like(eye)), dim=1)
    added |= {f"{name}.weight": norm.clone() for name in norms}
    save_file(weights | added, file, {"format": "pt"})


def _publish_v4(folder: Path) -> None:
    """Give a `deepseek_v4` model the weight names of the published checkpoints.

    transformers reads these and writes its own, which vLLM 0.31 to 0.33 do not know.
    """
    from safetensors.torch import load_file, save_file

    weights = {
        name.replace(".attn.norm.", ".attn.kv_norm.").replace(".hc_head.hc_", ".hc_head_"): weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del settings[name]
    (folder / "config.json").write_text(json.dumps(settings | MODELS["deepseek_v4"]))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]  # not words: they are found inside other words
    vocabulary = {word: i for i, word in enumerate(special)}
    vocabulary.update({f"t{i}": i for i in range(len(special), VOCABULARY)})
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    ).save_pretrained(folder)
