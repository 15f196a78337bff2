"""What is read from a config.json, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_offload.errors import ConfigError, UnsupportedError
from kv_offload.tools.sizing.model import Model, read_model
from tests.support.processes import run_code
from tests.support.published_models import PUBLISHED

LLAMA = PUBLISHED["Llama-3.1-8B"]


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(config: Any) -> Model:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path)

    return read


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_size", "latent"),
    [
        ("Llama-3.1-8B", {"full": 32}, 8, 128, False),
        ("Qwen3-32B", {"full": 64}, 8, 128, False),
        ("gpt-oss-120b", {"window": 18, "full": 18}, 8, 64, False),
        ("DeepSeek-V3", {"full": 61}, 1, 576, True),
        ("DeepSeek-V3.2", {"full": 61}, 1, 576, True),
        ("Granite-4.0-H-Small", {"state": 36, "full": 4}, 8, 128, False),
        ("Qwen3-Next-80B-A3B", {"state": 36, "full": 12}, 2, 256, False),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_the_shape_of_a_model(
    read: Any, name: str, layers: dict[str, int], kv_heads: int, head_size: int, latent: bool
) -> None:
    model = read(PUBLISHED[name])
    assert model.layers == layers
    assert (model.kv_heads, model.head_size, model.latent) == (kv_heads, head_size, latent)


@pytest.mark.parametrize("part", ["text_config", "llm_config", "thinker_config"])
@pytest.mark.usefixtures("without_transformers")
def test_a_model_with_several_parts_has_its_cache_in_the_text_part(read: Any, part: str) -> None:
    assert read({"model_type": "pictures", part: LLAMA}) == read(LLAMA)
    assert read({part: {"text_config": LLAMA}}) == read(LLAMA)


def test_the_file_itself_may_be_named(tmp_path: Path, read: Any) -> None:
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert read_model(tmp_path / "other.json") == read(LLAMA)


def test_transformers_adds_what_a_file_leaves_to_defaults(read: Any) -> None:
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    assert read(PUBLISHED["gemma-3-27b"]).layers == {"window": 52, "full": 10}
    assert read({"model_type": "llama", "head_dim": None}).head_size == 128


def test_values_under_other_names_are_those_that_transformers_knows(read: Any) -> None:
    """GPT-2 was called a model that generates no text."""
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    model = read({"model_type": "gpt2", "n_head": 20, "n_layer": 36, "n_embd": 1280})
    assert (model.layers, model.kv_heads, model.head_size) == ({"full": 36}, 20, 64)
    with pytest.raises(UnsupportedError, match="has layers of different shapes"):
        read({"model_type": "mpt", "attn_config": {"kv_n_heads": 8}})


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("gpt-oss-120b", "GptOssConfig"),
        ("DeepSeek-V3", "DeepseekV3Config"),
        ("DeepSeek-V3.2", "DeepseekV32Config"),
        ("Qwen3-Next-80B-A3B", "Qwen3NextConfig"),
        ("Mistral-7B-v0.1", "MistralConfig"),
    ],
)
def test_the_defaults_of_transformers_are_these_models(name: str, class_name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    defaults = getattr(transformers, class_name)().to_dict()
    assert {key: defaults.get(key) for key in PUBLISHED[name]} == {
        **PUBLISHED[name],
        "torch_dtype": None,  # says how the weights are kept, which a class does not know
    }


@pytest.mark.parametrize("name", ["gemma-3-27b", "Qwen3-Next-80B-A3B"])
@pytest.mark.usefixtures("without_transformers")
def test_without_transformers_a_file_must_say_which_layers_are_which(read: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="no layer_types says in which layers"):
        read({key: value for key, value in PUBLISHED[name].items() if key != "layer_types"})


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({"sliding_window": 4096, "model_type": "mistral"}, {"window": 32}),
        ({"sliding_window": None, "model_type": "mistral"}, {"full": 32}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"full": 32}),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 4096}, {"full": 32}),
        ({"attn_type_list": [1] * 32, "model_type": "minimax_m2"}, {"full": 32}),
        ({"layer_types": ["chunked_attention", "full_attention"] * 16}, {"chunk": 16, "full": 16}),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_kinds_of_layers(read: Any, more: dict[str, Any], layers: dict[str, int]) -> None:
    assert read({**LLAMA, **more}).layers == layers


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"mamba_d_state": 16}, "has layers with states"),
        ({"linear_num_key_heads": 2}, "has layers with states"),
        ({"attn_type_list": [0, 1] * 16}, "has layers with states"),
        ({"attn_type_list": [{}]}, "has layers with states"),
        ({"layer_types": ["linear_attention"] * 32}, "has layers of the type linear_attention"),
        ({"index_topk": 2048}, "has a sparse or compressed cache"),
        ({"block_configs": [{}]}, "has layers of different shapes"),
        ({"num_kv_shared_layers": 10}, "has layers that read the cache of others"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "has latent attention in a form that is"),
        ({"v_head_dim": 64}, "has values of another size than keys"),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_what_the_formula_lacks_is_refused(read: Any, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedError, match=f"config.json: llama {problem}") as caught:
        read({**LLAMA, **more})
    assert "its log says how many bytes a slot takes" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "num_layers": 6}, "t5"),
        ({"model_type": "whisper", "is_encoder_decoder": True, "decoder_layers": 4}, "whisper"),
        ({"is_encoder_decoder": True, "text_config": LLAMA}, "llama"),
        ({**LLAMA, "cross_attention_layers": [3, 8]}, "llama"),
    ],
)
def test_a_model_with_an_encoder_is_not_served(read: Any, config: Any, kind: str) -> None:
    """The engine would be refused: to start it, as other messages say, is no advice."""
    with pytest.raises(UnsupportedError, match=f"{kind} has an encoder") as caught:
        read(config)
    assert "kv-offload refuses such a model" in str(caught.value)
    assert "Start the engine" not in str(caught.value)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_a_model_without_a_cache_is_refused(read: Any, kind: str) -> None:
    shape = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
    with pytest.raises(UnsupportedError, match=f"{kind} reads each prompt as a whole"):
        read({"model_type": kind, **shape})


@pytest.mark.parametrize("kind", ["jamba", "falcon_h1"])
def test_models_with_other_states_are_refused(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    from tests.support.small_models import config

    config(kind).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="layers with states"):
        read_model(tmp_path)


@pytest.mark.usefixtures("without_transformers")
def test_layers_with_states_only_where_the_file_says_so(read: Any) -> None:
    """Granite-4.0-Micro names states, and has none."""
    granite = PUBLISHED["Granite-4.0-H-Small"]
    assert read({**granite, "layer_types": ["attention"] * 40}).layers == {"full": 40}
    with pytest.raises(UnsupportedError, match="has states and no layer with full attention"):
        read({**granite, "layer_types": ["mamba"] * 40})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a list, but a config.json is an object"),
        ('{"model_type": "llama2"}', "has no num_attention_heads"),
        (json.dumps({**LLAMA, "num_key_value_heads": [8, 4]}), r"is \[8, 4\], but one positive"),
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), "num_hidden_layers is 0, but one positive"),
        (json.dumps({**LLAMA, "layer_types": ["sliding_attention"] * 32}), "no sliding_window"),
        (json.dumps({**LLAMA, "layer_types": ["attention"]}), "layer_types has 1 entries"),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_bad_files_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"layer_types": 5}, "layer_types is 5, but a list of names is needed"),
        ({"layer_types": [["full_attention"]]}, "layer_types is .* a list of names is needed"),
        ({"hidden_size": 1, "head_dim": None}, "hidden_size is 1, not a multiple of 32 heads"),
        ({"hidden_size": 4000, "head_dim": None, "num_attention_heads": 24}, "hidden_size is 4000"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32, not a multiple of the 5 KV heads"),
        ({"num_key_value_heads": 64}, "not a multiple of the 64 KV heads"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000.*of at most 2,147,483,648"),
    ],
)
def test_values_that_no_model_has_are_refused(
    read: Any, more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        read({**LLAMA, **more})
    assert len(str(caught.value)) < 300


OF_8_BITS = {"kv_cache_scheme": {"num_bits": 8}}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
MODELOPT_WITHOUT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": ""}}


@pytest.mark.parametrize(
    ("config", "is_quantized"),
    [
        ({**LLAMA, "quantization_config": OF_8_BITS}, True),
        ({**LLAMA, "quantization_config": {"kv_cache_scheme": None}}, False),
        ({**LLAMA, "quantization_config": MODELOPT}, True),
        ({**LLAMA, "compression_config": MODELOPT}, True),
        ({"text_config": {**LLAMA, "quantization_config": OF_8_BITS}}, True),
        ({**LLAMA, "quantization_config": [8]}, False),  # a form that nobody knows
    ],
)
def test_a_checkpoint_may_ask_for_another_type_of_cache(
    read: Any, config: dict[str, Any], is_quantized: bool
) -> None:
    """vLLM takes it from any of these, and 16 bits a number would be twice too many."""
    assert read(config).cache_is_quantized == is_quantized


def test_a_type_of_cache_may_stand_in_a_file_of_its_own(tmp_path: Path, read: Any) -> None:
    for content, is_quantized in ((MODELOPT, True), (MODELOPT_WITHOUT, False)):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
        assert read(LLAMA).cache_is_quantized == is_quantized
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: cannot be read as JSON"):
        read(LLAMA)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pipe", "it is not a regular file"),
        ("model.safetensors", "it has 5,368,709,120 bytes, but a config"),
        ("deep.json", ""),
        ("", r"\[Errno 2\] No such file or directory: '.*/config\.json'"),
    ],
)
def test_what_is_no_file_of_that_kind_is_not_read(tmp_path: Path, name: str, problem: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(5 << 30)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    file = name or "config.json"
    with pytest.raises(ConfigError, match=f"{file}: cannot be read as JSON: {problem}"):
        read_model(tmp_path / name)


@pytest.mark.parametrize("config", [{"architectures": ["X"]}, {"model_type": ["llama"]}])
def test_what_is_no_models_file_is_refused_without_importing_transformers(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """The import takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; from kv_offload.tools.main import main\n"
        f"print(main(['size', {str(tmp_path)!r}]), 'transformers' in sys.modules)"
    )
    assert run_code(code) == "2 False\n"
