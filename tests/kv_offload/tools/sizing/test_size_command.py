"""`kv-offload size` as a user runs it, and the figures of docs/use/sizing.md, which are its own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_offload.config.file import show
from tests.kv_offload.tools.conftest import Command
from tests.support.published_models import PUBLISHED

DOCS = Path(__file__).parents[4] / "docs/use/sizing.md"


@pytest.fixture
def size(tmp_path: Path, command: Command) -> Command:
    def run(model: str | dict[str, Any], *options: str) -> Any:
        config = PUBLISHED[model] if isinstance(model, str) else model
        (tmp_path / "config.json").write_text(json.dumps(config))
        return command("size", tmp_path, *options)

    return run


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("Llama-3.1-8B", "--kv-cache-dtype int8_per_token_head", "x 1 byte + scales"),
        ("Llama-3.1-8B", "--cpu-bytes 2097152", "in 2 MiB         16 tokens, 1 blocks"),
        ("Llama-3.1-8B", "--kv-cache-dtype float32", "bytes per token  262,144 = "),
        ("Llama-3.1-8B", "-tp 4", "bytes per slot   524,288 on a rank"),
        ("Llama-3.1-8B", "-tp 4", "Bytes per token, block and prompt are those of all 4 ranks"),
        ("Llama-3.1-8B", "-tp 16", "2 x 32 layers x 16 KV heads x 128 x 2 bytes"),
        ("Llama-3.1-8B", "-tp 16", "and 2 ranks each keep the same\nKV head.\n"),
        ("Llama-3.1-8B", "--block-size 32", "bytes per block  4,194,304, 32 tokens"),
        ("DeepSeek-V3", "-tp 8", "bytes per token  70,272 = 61 layers x 576 x 2 bytes"),
        ("DeepSeek-V3", "-tp 8", "The 8 ranks hold equal bytes and keep them once."),
        ("DeepSeek-V3.2", "", "61 layers x 576 x 2 bytes + 61 layers x 132 bytes of the index"),
        ("Mistral-7B-v0.1", "", "bytes per prompt  536,870,912 at most, its last 4,096 tokens"),
        ("Mistral-7B-v0.1", "", "in 1 GiB          8,192 tokens, 512 blocks of windows"),
        ("Granite-4.0-H-Small", "", "77,856,768 more for states, as 4,752 tokens take"),
        ("Granite-4.0-H-Small", "", "A block has 528"),
        ("Llama-3.1-8B", "", " bytes per slot, 1.29 times as many slots; in 1 GiB 10,"),
        ("Llama-3.1-8B", "--cpu-bytes 64GiB", "slots; in 64 GiB 67"),
        ("Llama-3.1-8B", "-tp 4", "the same: a page of keys has 8,192 bytes, and needs 16,384."),
        ("Llama-3.1-8B", "-tp 4", "With --block-size 32 it"),
        ("DeepSeek-V3", "", " bytes per slot, 1.25 times as many slots"),
        ("Qwen3-Next-80B-A3B", "-tp 4", "blocks of 272 tokens"),
        ("Llama-3.1-8B", "--kv-cache-dtype nvfp4", "8 KV heads x 128 x 0.5 bytes + scales"),
        ("DeepSeek-V3.2", "--kv-cache-dtype fp8_ds_mla", "48,068 = 61 layers x 656 bytes + 61"),
        ("DeepSeek-V4-Flash", "-tp 8", "take 6 slots where a prompt ends"),
        ("DeepSeek-V4-Flash", "-tp 8", "hold equal bytes and keep them once."),
    ],
)
def test_what_else_decides(size, name, options, shown):
    done = size(name, *options.split())
    assert done.status == 0
    assert " ".join(shown.split()) in " ".join(done.out.split())
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("Llama-3.1-8B", f"--kv-cache-dtype {name}") for name in ("float16", "fp8", "float32")),
        ("Granite-4.0-H-Small", ""),
    ],
)
def test_what_cannot_be_packed_has_no_packed_size(size, name, options):
    done = size(name, *options.split())
    assert done.status == 0
    assert "pack_kv" not in done.out


def test_what_was_not_read_is_said(size, monkeypatch):
    """The default of Mistral is 8 KV heads, so that the figure is four times too large."""
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises
    output = " ".join(size({"model_type": "mistral", **shape}).out.split())
    assert "Assumed: num_key_value_heads is num_attention_heads; head_dim is hidden_size" in output
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    done = size({"model_type": "mistral", **shape, **heads})
    assert done.status == 0
    assert "Assumed" not in done.out


def test_a_downloaded_model_is_found_by_its_name(tmp_path, command, monkeypatch):
    """In the cache of the Hugging Face library, as that library lays it out; nothing is asked."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    missing = command("size", "Qwen/Qwen3-8B")
    assert missing.status == 2
    assert f"nor such a model in {tmp_path}" in missing.err
    assert "hf download Qwen/Qwen3-8B config.json" in missing.err
    folder = tmp_path / "models--Qwen--Qwen3-8B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "snapshots/abc/config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"]))
    assert "bytes per token  147,456" in command("size", "Qwen/Qwen3-8B").out
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    (tmp_path / "Qwen/Qwen3-8B/config.json").write_text(json.dumps(PUBLISHED["Qwen3-32B"]))
    assert "bytes per token  262,144" in command("size", "Qwen/Qwen3-8B").out, "a folder here wins"


def test_the_json_has_the_figures_of_the_page(size):
    found = json.loads(size("gpt-oss-120b", "--cpu-bytes", "64GiB", "--json").out)
    assert (found["token_bytes"], found["prompt_bytes"]) == (36_864, 4_718_592)
    assert {"cpu_bytes": 64 << 30, "blocks": 116_508, "tokens": 1_864_128} in found["fits"]
    assert found["model"]["layers"] == {"window": 18, "full": 18}


def test_a_path_that_leads_nowhere_is_one_message(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("~nobody-of-this-name/model", "a" * 5000, ""):
        done = command("size", path)
        assert done.status == 2
        assert ": cannot be read as JSON: " in done.err
        assert "Give a model's config.json" in done.err


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        *(
            ("Llama-3.1-8B", f"--cpu-bytes={size}", f"kv-offload: --cpu-bytes is {show(size)}: ")
            for size in ("9" * 5000, "", "-1", "64", "²")
        ),
        ("Llama-3.1-8B", "--cpu-bytes=64", "Give bytes, a size (48GiB), or a share"),
        ("Llama-3.1-8B", "-tp=3", "-size is 3, and the model has 8 KV heads: one must be"),
        ("Granite-4.0-H-Small", "-tp=256", "the states have 128 heads: give a divisor of 128"),
        ("DeepSeek-V3", "--kv-cache-dtype=fp8_per_token_head", "not have for latent attention"),
        ("DeepSeek-V3.2", "--kv-cache-dtype=fp8", "attention keeps then depends on the GPU. Give"),
        ("DeepSeek-V4-Flash", "--kv-cache-dtype=bfloat16", "is not known for deepseek_v4: give"),
        ("Llama-3.1-8B", "--kv-cache-dtype=fp8_ds_mla", "is for latents of 576 numbers"),
    ],
)
def test_settings_that_do_not_fit(size, name, option, message):
    done = size(name, option)
    assert done.status == 2
    assert message in done.err
    assert "digits" not in done.err, "a limit of Python's"


@pytest.mark.parametrize("option", ["-tp=0", "--block-size=one", "--kv-cache-dtype=fp4"])
def test_a_wrong_argument_is_refused_before_the_model_is_read(tmp_path, command, option):
    """To read it may take seconds: transformers is imported for the defaults of its kind."""
    done = command("size", tmp_path, option)
    assert done.status == 2
    assert option.partition("=")[0] in done.err


def test_a_size_of_1_gib_has_one_line(size):
    assert size("Llama-3.1-8B", "--cpu-bytes", "1GiB").out.count("in 1 GiB ") == 1


def test_a_terminal_sees_that_it_reads(size, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "reading the model's configuration" in size("Llama-3.1-8B").err


def table() -> dict[str, list[str]]:
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\|.*\|$", DOCS.read_text(), re.MULTILINE)]
    cells = [[re.sub("at most | in all", "", cell.strip()) for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells if row[0] in PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_documented_table_is_what_the_command_prints(size, name):
    if name == "gemma-3-27b":
        pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    printed = dict(re.findall(r"^(bytes per \w+|in 1 GiB) +([0-9,]+)", size(name).out, re.M))
    row = [printed["bytes per token"], printed.get("bytes per prompt", "0"), printed["in 1 GiB"]]
    assert table()[name] == row


def test_the_documented_run_is_real(size):
    (printed,) = re.findall(r"```\n(model  .*?)```", DOCS.read_text(), re.DOTALL)
    assert size("gpt-oss-120b", "--cpu-bytes", "64GiB").out == printed
