"""What is read from a config.json, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_offload.errors import ConfigError, UnsupportedError
from kv_offload.tools.sizing.model import Model, read_model
from tests.support.processes import run_code
from tests.support.published_models import PUBLISHED

LLAMA = PUBLISHED["Llama-3.1-8B"]
GRANITE = PUBLISHED["Granite-4.0-H-Small"]
UNNAMED = {"compress_rates": {"a": 4}, "layer_types": [{}]}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(config: Any) -> Model:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path)

    return read


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises


@pytest.mark.parametrize("part", ["text_config", "llm_config", "thinker_config"])
@pytest.mark.usefixtures("without_transformers")
def test_a_model_with_several_parts_has_its_cache_in_the_text_part(read, part):
    assert read({"model_type": "pictures", part: LLAMA}) == read(LLAMA)
    assert read({part: {"text_config": LLAMA}}) == read(LLAMA)


def test_transformers_adds_what_a_file_leaves_to_defaults_or_calls_otherwise(read):
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    assert read(PUBLISHED["gemma-3-27b"]).layers == {"window": 52, "full": 10}
    assert read({"model_type": "llama", "head_dim": None}).head_size == 128
    model = read({"model_type": "gpt2", "n_head": 20, "n_layer": 36, "n_embd": 1280})
    assert (model.layers, model.kv_heads, model.head_size) == ({"full": 36}, 20, 64)
    with pytest.raises(UnsupportedError, match="has layers of different shapes"):
        read({"model_type": "mpt", "attn_config": {"kv_n_heads": 8}})


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA | {"sliding_window": 4096, "model_type": "mistral"}, {"window": 32}),
        (LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, {"full": 32}),
        (LLAMA | {"attn_type_list": [1] * 32, "model_type": "minimax_m2"}, {"full": 32}),
        (LLAMA | {"layer_types": ["chunked_attention"] * 32}, {"chunk": 32}),
        # Granite-4.0-Micro names states, and has none.
        (GRANITE | {"layer_types": ["attention"] * 40}, {"full": 40}),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_kinds_of_layers(read, config, layers):
    assert read(config).layers == layers


REFUSED = [
    ({"mamba_d_state": 16}, "has layers with states"),
    ({"attn_type_list": [0, 1] * 16}, "has layers with states"),
    ({"layer_types": ["linear_attention"] * 32}, "has layers of the type linear_attention"),
    ({"index_topk": 2048}, "has a sparse or compressed cache"),
    ({"block_configs": [{}]}, "has layers of different shapes"),
    ({"num_kv_shared_layers": 10}, "has layers that read the cache of others"),
    ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "has latent attention in a form that is"),
    ({"model_type": "deepseek_v4", "compress_ratios": [8] * 32}, "has latents that cover 8 tokens"),
    ({"model_type": "deepseek_v4", "compress_ratios": [0] * 32}, "has no layer whose latents"),
    ({"v_head_dim": 64}, "has values of another size than keys"),
    (GRANITE | {"layer_types": ["mamba"] * 40}, "has states and no layer with full attention"),
]


@pytest.mark.parametrize(("more", "problem"), REFUSED)
@pytest.mark.usefixtures("without_transformers")
def test_what_the_formula_lacks_is_refused(read, more, problem):
    with pytest.raises(UnsupportedError, match=rf"config.json: \w+ {problem}") as caught:
        read({**LLAMA, **more})
    assert "its log says how many bytes a slot takes" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 6}, "t5 has an encoder"),
        ({"is_encoder_decoder": True, "text_config": LLAMA}, "llama has an encoder"),
        ({**LLAMA, "cross_attention_layers": [3, 8]}, "llama has an encoder"),
        ({**LLAMA, "model_type": "xlm-roberta"}, "xlm-roberta reads each prompt as a whole"),
    ],
)
def test_a_model_that_the_engine_would_refuse_too(read, config, problem):
    """To start the engine, as other messages say, is no advice."""
    with pytest.raises(UnsupportedError, match=problem) as caught:
        read(config)
    assert "Start the engine" not in str(caught.value)


BAD = [
    ("[" * 100_000, "cannot be read as JSON"),
    ("[1]", "holds a list, but a config.json is an object"),
    ({"model_type": "llama2"}, "has no num_attention_heads"),
    (LLAMA | {"num_key_value_heads": [8, 4]}, r"is \[8, 4\], but one positive"),
    (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0, but one positive"),
    (LLAMA | {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, .* 1,000,000 at most"),
    (LLAMA | {"layer_types": ["attention"]}, "layer_types has 1 entries"),
    (LLAMA | {"layer_types": [["full_attention"]]}, "layer_types is .* a list of names is needed"),
    (LLAMA | {"model_type": "nemotron_h", "layers_block_type": 7}, "a list of names is needed"),
    (LLAMA | {"hidden_size": 4000, "num_attention_heads": 24}, "hidden_size is 4000"),
    (LLAMA | {"num_key_value_heads": 5}, "not a multiple of the 5 KV heads"),
    (LLAMA | {"model_type": "deepseek_v4", "compress_ratios": [4]}, "and has \\[4\\]"),
    ({"model_type": "deepseek_v4", "num_hidden_layers": 1, **UNNAMED}, r"and has \[\]"),
    (LLAMA | {"model_type": "gemma3_text", "sliding_window": 9}, "no layer_types says in which"),
]


@pytest.mark.parametrize(("content", "problem"), BAD)
@pytest.mark.usefixtures("without_transformers")
def test_bad_files_are_refused(tmp_path, content, problem):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_model(tmp_path)


@pytest.mark.timeout(120)
def test_transformers_is_not_asked_to_list_more_layers_than_any_model_has(tmp_path):
    config = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000000, but"):
        read_model(tmp_path)


MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("config", "beside", "is_quantized"),
    [
        ({**LLAMA, "quantization_config": {"kv_cache_scheme": None}}, None, False),
        ({**LLAMA, "quantization_config": MODELOPT}, None, True),
        ({"text_config": {**LLAMA, "quantization_config": MODELOPT}}, None, True),
        ({**LLAMA, "quantization_config": [8]}, None, False),  # a form that nobody knows
        (LLAMA, MODELOPT, True),
        (LLAMA, {"quantization": {"kv_cache_quant_algo": ""}}, False),
    ],
)
def test_a_checkpoint_may_ask_for_another_type_of_cache(
    tmp_path, command, read, config, beside, is_quantized
):
    """vLLM takes it from any of these, and 16 bits a number would be twice too many."""
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read(config).cache_is_quantized == is_quantized
    if is_quantized:
        done = command("size", tmp_path)
        assert done.status == 2
        assert "--kv-cache-dtype is auto, and the checkpoint has" in done.err


@pytest.mark.parametrize("config", [{"architectures": ["X"]}, {"model_type": ["llama"]}])
def test_what_is_no_models_file_is_refused_without_importing_transformers(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; from kv_offload.tools.main import main\n"
        f"print(main(['size', {str(tmp_path)!r}]), 'transformers' in sys.modules)"
    )
    assert run_code(code) == "2 False\n"
