"""Identifies the model: its weights, its configuration, and how both are used.

Weights from a repository are identified by its commit, weights in a folder by the names, sizes and
times of the files, because reading them twice would take too long. Replacing a file with another of
the same size and time goes unnoticed. Weights that a loader fetches from elsewhere are identified
by their address.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, MultiModalConfig, VllmConfig

IRRELEVANT_PREFIXES = ("tokenizer", "generation_config", "README", "LICENSE", "__pycache__", ".")
"""Name prefixes of files and folders that do not affect the KV of given tokens."""

TENSORIZED = ("tensorizer_uri", "tensorizer_dir")
"""Options of the loader `tensorizer`: the file of weights, or the folder that contains it."""


def describe_model(model: ModelConfig, download_dir: str | None) -> dict[str, str]:
    """Return, by name, everything in the model that determines the KV of given tokens and images.

    `download_dir` is the cache folder for repositories; None is the default one.
    """
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    inputs = model.multimodal_config
    return {
        "model": str(model.model),
        "revision": str(model.revision or "main"),
        "code_revision": str(model.code_revision),
        "commit": str(_find_commit(str(model.model), model.revision, download_dir)),
        # The address of weights streamed from an object store; its small files are fetched at every
        # start.
        "weights": model.model_weights or _describe_folder(Path(model.model)),
        "architecture": str(model.architecture),
        "config": digest(config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        # How weights are quantized during loading.
        "quantization_config": digest(model.quantization_config),
        "max_model_len": str(model.max_model_len),  # selects the factors of some position encodings
        "implementation": str(model.model_impl),
        "classes": digest(model.model_class_overrides),
        "inputs": "text" if inputs is None else _describe_inputs(inputs),
    }


def _find_commit(model: str, revision: str | None, download_dir: str | None) -> str | None:
    """Return the commit that was loaded from a repository; None for a folder, or if unknown.

    vLLM 0.32 and 0.33 keep the resolved commit in the revision. Otherwise the cache records the
    commit that was loaded last; transformers 5 does not record it in the configuration.
    """
    from huggingface_hub import constants

    resolved: str | None = getattr(revision, "resolved", None)
    if resolved:
        return resolved
    repository = model.partition(":")[0]  # the name of a GGUF file may follow
    name = "--".join(["models", *repository.split("/")])
    folder = Path(download_dir or constants.HF_HUB_CACHE, name)
    try:
        return (folder / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        return None


def _describe_inputs(inputs: MultiModalConfig) -> str:
    """Describe how images and videos are processed: a key covers only the hash of their data."""
    # Videos that are pruned differently begin with the same tokens.
    pruning = [inputs.video_pruning_rate, inputs.video_pruning_method]
    kwargs = [inputs.mm_processor_kwargs, inputs.media_io_kwargs]
    return digest([inputs.compute_hash(), *kwargs, *pruning])


def describe_loading(vllm_config: VllmConfig) -> dict[str, str]:
    """Return, by name, how and from where weights are loaded, or how dummy weights are made."""
    load_format = str(vllm_config.load_config.load_format)
    dummy = {"seed": str(vllm_config.model_config.seed)} if load_format == "dummy" else {}
    options = vllm_config.load_config.model_loader_extra_config or {}
    return {"load_format": load_format, "loader": _describe_loader(options), **dummy}


def _describe_loader(options: Mapping[str, Any]) -> str:
    """Describe a loader's options, and any local files that Tensorizer reads."""
    tensorizer = options.get("tensorizer_config") or options
    paths = [Path(path) for name in TENSORIZED if (path := tensorizer.get(name))]
    # Each rank of a sharded model inserts its rank number into the name.
    paths = [path.parent if "%" in path.name else path for path in paths]
    return digest([{**options}, *map(_describe_folder, paths)])


def _describe_folder(path: Path) -> str:
    """Describe the files of a model by name, size and time; "" if `path` is not a local path."""
    if path.is_file():
        return digest(_describe_file(path, path.name))
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(IRRELEVANT_PREFIXES)]
        within = Path(folder)
        found += [
            _describe_file(within / name, str((within / name).relative_to(path)))
            for name in files
            if not name.startswith(IRRELEVANT_PREFIXES)
        ]
    return digest(sorted(found)) if found else ""


def _describe_file(path: Path, name: str) -> tuple[str, int, int]:
    try:
        found = path.stat()  # of the link's target
    except FileNotFoundError:
        return name, -1, -1
    return name, found.st_size, found.st_mtime_ns


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that depend on a value of any type."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
