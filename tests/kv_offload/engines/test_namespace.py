"""What another process has kept is used only if it means the same here."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.model.namespace import describe, reproducible_hashes
from tests.support import block_hashes
from tests.support.configurations import make_kv_cache_config, make_vllm_config, set_layers
from tests.support.played_cases import FULL, WINDOW
from tests.support.processes import run_module

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine's configuration, and that of its KV cache. Hashes are reproducible."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return SimpleNamespace(vllm=make_vllm_config({}), cache=make_kv_cache_config([FULL], 40))


def changed(engine: Any, change: Any) -> set[str]:
    """Return the names of what a change makes different in the description."""
    before = describe(engine.vllm, engine.cache)
    change(engine)
    after = describe(engine.vllm, engine.cache)
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


def setting(path: str, value: Any) -> Any:
    *owners, name = path.split(".")

    def change(engine: Any) -> None:
        owner = engine.vllm
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return change


def groups(*groups: CacheGroup, num_blocks: int = 40) -> Any:
    return lambda engine: setattr(engine, "cache", make_kv_cache_config(groups, num_blocks))


def another_head(engine: Any) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=1, dtype=torch.float32)
    set_layers(engine.cache, {"layer.0": spec})


DIFFERENT = {
    "model": setting("model_config.model", "another/model"),
    "revision": setting("model_config.revision", "v2"),
    "code_revision": setting("model_config.code_revision", "v2"),
    "config": setting("model_config.hf_config.rope_theta", 7.0),
    "dtype": setting("model_config.dtype", torch.bfloat16),
    "quantization": setting("model_config.quantization", "fp8"),
    "quantization_config": setting("model_config.quantization_config", {"ignore": ["lm_head"]}),
    "max_model_len": setting("model_config.max_model_len", 128),
    "implementation": setting("model_config.model_impl", "transformers"),
    "classes": setting("model_config.model_class_overrides", {"Llama": "my.models:Llama"}),
    "inputs": setting("model_config.multimodal_config", MultiModalConfig()),
    "load_format": setting("load_config.load_format", "bitsandbytes"),
    "loader": setting("load_config.model_loader_extra_config", {"pattern": "v2-{rank}-{part}.st"}),
    "lora": setting("lora_config", LoRAConfig(max_lora_rank=8)),
    "attention": setting("attention_config.flash_attn_version", 3),
    "cache_dtype": setting("cache_config.cache_dtype", "fp8_e4m3"),
    "cache_layout": setting("cache_config.kv_cache_layout", "LBNHC"),
    "layers": another_head,
    "hash": setting("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    **{
        name: setting(f"parallel_config.{name}", 2)
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "cp_kv_cache_interleave_size",
        )
    },
}


@pytest.mark.parametrize(("name", "change"), DIFFERENT.items(), ids=DIFFERENT)
def test_what_changes_blocks_changes_the_description(name, change, engine):
    also = {"weights"} if name == "model" else set()  # there is no folder of this name
    assert changed(engine, change) == {name} | also


def test_what_changes_several_things(engine):
    assert changed(engine, groups(WINDOW)) == {"groups", "layers"}
    assert changed(engine, groups(FULL, WINDOW)) == {"groups", "layers"}
    larger = setting("parallel_config.decode_context_parallel_size", 2)
    assert changed(engine, larger) == {"decode_context_parallel_size", "groups"}
    assert changed(engine, setting("load_config.load_format", "dummy")) == {"load_format", "seed"}
    assert changed(engine, setting("model_config.seed", 7)) == {"seed"}


def test_what_becomes_of_an_image_or_video_counts(engine):
    """Its hash, which is in the key, is that of its data."""
    engine.vllm.model_config.multimodal_config = MultiModalConfig()
    for name, value in (
        ("mm_processor_kwargs", {"max_pixels": 1024}),
        ("media_io_kwargs", {"video": {"num_frames": 8}}),
        ("video_pruning_rate", 0.5),
        ("video_pruning_method", "another"),
    ):
        change = setting(f"model_config.multimodal_config.{name}", value)
        assert changed(engine, change) == {"inputs"}, name


def test_drafts_of_a_model_count_and_those_of_the_text_do_not(engine):
    drafts = make_vllm_config({}, drafts=2).speculative_config
    assert changed(engine, setting("speculative_config", drafts)) == set()
    assert {"draft", "draft_model", "draft_weights", "groups"} <= changed(
        engine, setting("speculative_config.method", "eagle")
    )
    assert changed(engine, setting("speculative_config.draft_model_config.model", "x/y")) >= {
        "draft_model"
    }


SAME = {
    "name of the server": setting("model_config.served_model_name", "mine"),
    "tokenizer": setting("model_config.tokenizer", "other/tokenizer"),
    "graphs": setting("model_config.enforce_eager", False),
    "sampling": setting("model_config.max_logprobs", 5),
    "seed of sampling": setting("model_config.seed", 7),
    "memory": setting("cache_config.gpu_memory_utilization", 0.5),
    "blocks of the engine": groups(FULL, num_blocks=41),
    "replicas": setting("parallel_config.data_parallel_size", 2),
    "batches": setting("scheduler_config.max_num_seqs", 7),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_changes_no_block_does_not_count(change, engine):
    assert changed(engine, change) == set()


def test_weights_in_a_folder_are_known_by_name_size_and_time(engine, tmp_path):
    engine.vllm.model_config.model = str(tmp_path)
    weights, nested = tmp_path / "model.safetensors", tmp_path / "more" / "a.bin"
    nested.parent.mkdir()
    steps = [
        (lambda: weights.write_bytes(b"1234"), True),
        (lambda: weights.write_bytes(b"12345"), True),
        (lambda: os.utime(weights, ns=(0, 7)), True),
        (lambda: os.utime(weights, ns=(9, 7)), False),  # somebody has read it
        (lambda: weights.rename(tmp_path / "other.safetensors"), True),
        (lambda: nested.write_bytes(b"1"), True),
        (lambda: (tmp_path / "gone.bin").symlink_to("nowhere"), True),
        (lambda: (tmp_path / "tokenizer.json").write_text("{}"), False),
        (lambda: (tmp_path / ".git").mkdir(), False),
        (lambda: (tmp_path / ".git" / "index").write_text("x"), False),
    ]
    for step, counts in steps:
        assert changed(engine, lambda _, step=step: step()) == ({"weights"} if counts else set())
    engine.vllm.model_config.model = str(nested)  # as of one GGUF file
    assert changed(engine, lambda _: nested.write_bytes(b"22")) == {"weights"}


def test_weights_in_an_object_store_are_known_by_their_address(engine, tmp_path):
    """Each start fetches the configuration anew, into the folder that is then the model's."""
    engine.vllm.model_config.model = str(tmp_path)
    engine.vllm.model_config.model_weights = "s3://bucket/model"
    assert changed(engine, lambda _: (tmp_path / "config.json").write_text("{}")) == set()
    other = setting("model_config.model_weights", "s3://bucket/other")
    assert changed(engine, other) == {"weights"}


@pytest.mark.parametrize("revision", [None, "v2"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_weights_of_a_repository_are_known_by_its_commit(
    revision, elsewhere, engine, tmp_path, monkeypatch
):
    """Both the model's own and a draft's. A machine may have another one than the rest."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cache = tmp_path / ("elsewhere" if elsewhere else "cache")
    folder = cache / "models--some--model"
    model = engine.vllm.model_config
    model.model, model.revision = "some/model", revision
    engine.vllm.load_config.download_dir = str(cache) if elsewhere else None

    def download(commit: str) -> None:
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / (revision or "main")).write_text(commit)
        loaded = snapshot_download(
            "some/model", revision=revision, cache_dir=cache, local_files_only=True
        )
        assert Path(loaded).name == commit

    download("a" * 40)
    assert changed(engine, lambda _: download("b" * 40)) == {"commit"}
    assert describe(engine.vllm, engine.cache)["commit"] == "b" * 40
    model.model = "some/model:Q4_K_M"
    assert describe(engine.vllm, engine.cache)["commit"] == "b" * 40
    drafts = SimpleNamespace(
        method="eagle",
        draft_model_config=copy.copy(model),
        draft_load_config=None,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
    )
    model.model, engine.vllm.speculative_config = str(tmp_path), drafts
    assert changed(engine, lambda _: download("c" * 40)) == {"draft_commit", "weights"}


def test_a_commit_that_was_looked_up_counts(engine, tmp_path, monkeypatch):
    """As vLLM 0.32 does: the revision is still what the user gave, and knows what it stood for."""
    of_hub = pytest.importorskip("huggingface_hub._revision", reason="this one looks up nothing")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = engine.vllm.model_config
    model.model, model.revision = "some/model", None

    def look_up(commit: str) -> Any:
        revision = of_hub.ResolvedRevision(commit, initial=None)
        # To the process of the engine core.
        return setting("model_config.revision", pickle.loads(pickle.dumps(revision)))

    assert changed(engine, look_up("a" * 40)) == {"commit"}
    assert changed(engine, look_up("b" * 40)) == {"commit"}


@pytest.mark.parametrize("name", ["tensorizer_uri", "tensorizer_dir"])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_a_loader_takes_from_elsewhere_are_known_by_size_and_time(
    name, nested, engine, tmp_path
):
    file = tmp_path / "model.tensors"
    options: dict[str, Any] = {name: str(file if name == "tensorizer_uri" else tmp_path)}
    options = {"tensorizer_config": options} if nested else options
    engine.vllm.load_config.model_loader_extra_config = options
    assert changed(engine, lambda _: file.write_bytes(b"1234")) == {"loader"}
    assert changed(engine, lambda _: os.utime(file, ns=(0, 7))) == {"loader"}
    assert changed(engine, lambda _: os.utime(file, ns=(9, 7))) == set()


@pytest.mark.slow
def test_keys_of_two_processes_are_equal_exactly_if_they_are_said_to_be():
    """Both processes are started without a seed; they set one for each of the cases."""
    environ = {"VLLM_LOGGING_LEVEL": "ERROR"}
    one, other = (run_module("tests.support.block_hashes", **environ) for _ in range(2))
    assert len(one) == len(block_hashes.ALGORITHMS) * len(block_hashes.SEEDS)
    for case, (keys, problem) in one.items():
        assert len(keys) == 5
        assert (keys == other[case][0]) == (problem is None), case
    free = {case for case, (_, problem) in one.items() if problem is None and "None" in case}
    assert free == {"sha256 None", "sha256_cbor None"}


def test_why_hashes_are_not_reproducible_is_said_with_the_remedy(engine, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    engine.vllm.cache_config.prefix_caching_hash_algo = "xxhash"
    said = reproducible_hashes(engine.vllm)
    assert said is not None
    assert said.startswith("with prefix_caching_hash_algo 'xxhash' and without PYTHONHASHSEED")
    assert "algo to sha256" in said
    assert changed(engine, lambda _: None) == {"hash_seed"}, "no two descriptions are equal"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert reproducible_hashes(engine.vllm) is None
    assert changed(engine, lambda _: monkeypatch.setenv("PYTHONHASHSEED", "8")) == {"hash_seed"}
