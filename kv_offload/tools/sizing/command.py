"""`kv-offload size MODEL`: the host memory that a model's tokens take."""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from kv_swap.packing.format import TILE_BYTES

from kv_offload.config.file import show
from kv_offload.config.host_memory import read_host_memory
from kv_offload.config.sizes import format_size, parse_size
from kv_offload.errors import ConfigError
from kv_offload.tools.arguments import add_count
from kv_offload.tools.output import COLUMNS, Report, as_fields, make_progress
from kv_offload.tools.sizing.model import Model, read_model
from kv_offload.tools.sizing.slots import (
    CACHE_DTYPES,
    ENDS,
    NUMBER_BITS,
    PACKED_LATENT_BYTES,
    SlotSize,
    scale_bytes,
    slot_size,
)

GIB = 1 << 30
NAMES = {"full": "full attention", "window": "windows", "chunk": "chunks", "state": "states"}
KINDS = {**NAMES, "window": "windows of {} tokens"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload size MODEL`."""
    parser.description = (
        "Show how many bytes a token and a block of a model take in host memory, and how many of "
        "them fit. Reads the model's config.json only, and downloads nothing. The exit status is 2 "
        "if the file or an argument is wrong, else 0."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name in the local Hugging Face cache (Qwen/Qwen3-8B), the folder of a config.json, "
        "or the file",
    )
    parser.add_argument("--cpu-bytes", metavar="SIZE", help="as in the configuration: 48GiB, 25%%")
    add_shape(parser)
    add_count(parser, "--block-size", of="tokens in a block of vLLM", metavar="TOKENS", default=16)
    parser.set_defaults(run=_run)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options that determine the size of a model's tokens, along with its config.json."""
    add_count(parser, "--tensor-parallel-size", "-tp", of="ranks that share the KV heads")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        default="auto",
        metavar="TYPE",
        help=f"{', '.join(CACHE_DTYPES)}; auto is 2 bytes a number (default: auto)",
    )


def read_size(model: str, arguments: argparse.Namespace, block_tokens: int) -> SlotSize:
    """Return a model's slot size, given the arguments of `add_shape`."""
    with make_progress() as progress:
        progress.add_task("reading the model's configuration", total=None)
        shape = read_model(model)  # takes seconds if it loads transformers
    return slot_size(
        shape,
        tensor_parallel_size=arguments.tensor_parallel_size,
        cache_dtype=arguments.kv_cache_dtype,
        block_tokens=block_tokens,
    )


def parse_cpu_bytes(text: str, whole_bytes: int | None, give: str) -> int:
    """Return the value of `--cpu-bytes` in bytes. Raises `ConfigError` with the remedy `give`."""
    try:
        return parse_size(int(text) if re.fullmatch("[0-9]{1,40}", text) else text, whole_bytes)
    except ValueError as error:
        raise ConfigError(f"--cpu-bytes is {show(text)}: {error} Give {give}") from error


def _run(arguments: argparse.Namespace) -> Report:
    cpu_bytes = None
    if arguments.cpu_bytes is not None:
        give = "bytes, a size (48GiB), or a share of this machine's memory (25%)"
        cpu_bytes = parse_cpu_bytes(arguments.cpu_bytes, read_host_memory().size_bytes, give)
    size = read_size(arguments.model, arguments, arguments.block_size)
    model = size.model
    tokens = f"{size.block_tokens} tokens"
    rows = [
        ("model", f"{model.model_type}, {_describe_layers(model)}"),
        ("bytes per token", f"{size.token_bytes:,} = {_formula(size)}"),
        ("bytes per block", f"{size.block_bytes:,}, {tokens}"),
        ("bytes per slot", f"{size.slot_bytes:,} on a rank, with blocks of {tokens}"),
        ("in 1 GiB", _fitting(size, GIB)),
    ]
    if cpu_bytes not in (None, GIB):
        rows.append((f"in {format_size(cpu_bytes)}", _fitting(size, cpu_bytes)))
    if size.may_pack:
        rows.append(("with pack_kv", _packed(size, cpu_bytes or GIB)))
    if size.prompt_bytes:
        rows.insert(2, ("bytes per prompt", _prompt(size)))
    page, notes = as_fields(rows), [*_notes(size)]
    if notes:
        page += "\n\n" + textwrap.fill(" ".join(notes), COLUMNS)
    return Report(_as_data(size, cpu_bytes, notes), page)


def _as_data(size: SlotSize, cpu_bytes: int | None, notes: list[str]) -> dict[str, Any]:
    """Return the page's values in bytes, blocks and tokens."""
    names = ("block_tokens", "token_bytes", "block_bytes", "slot_bytes", "prompt_bytes")
    data: dict[str, Any] = {name: getattr(size, name) for name in names}
    data["model"] = dataclasses.asdict(size.model)
    data["packed_slot_bytes"] = size.packed_slot_bytes if size.may_pack else None
    for given in {GIB, cpu_bytes or GIB}:
        blocks = size.blocks_in(given)
        data.setdefault("fits", []).append(
            {"cpu_bytes": given, "blocks": blocks, "tokens": blocks * size.block_tokens}
        )
    return {**data, "notes": notes}


def _packed(size: SlotSize, cpu_bytes: int) -> str:
    if size.page_bytes < TILE_BYTES:
        tokens = -(-TILE_BYTES * size.block_tokens // size.page_bytes // 16) * 16
        return (
            f"the same: a page of keys has {size.page_bytes:,} bytes, and needs {TILE_BYTES:,}. "
            f"With --block-size {tokens} it has them"
        )
    ratio = size.slot_bytes / size.packed_slot_bytes
    return (
        f"{size.packed_slot_bytes:,} bytes per slot, {ratio:.2f} times as many slots; in "
        f"{format_size(cpu_bytes)} {_fitting(size, cpu_bytes, packed=True)}"
    )


def _prompt(size: SlotSize) -> str:
    as_tokens = -(-size.prompt_bytes * size.block_tokens // size.block_bytes)
    if size.keeps_ends_only:
        return f"{size.prompt_bytes:,} at most, its last {as_tokens:,} tokens"
    return f"{size.prompt_bytes:,} more for {_ends(size)}, as {as_tokens:,} tokens take"


def _ends(size: SlotSize) -> str:
    """Name the kinds of layers that keep only the end of a prompt."""
    return " and ".join(NAMES[kind] for kind in ENDS if kind in size.groups)


def _describe_layers(model: Model) -> str:
    if model.ratios:
        kept = " and ".join(
            f"{model.ratios.count(ratio)} with a latent of every {ratio} tokens"
            for ratio in sorted({*model.ratios} - {0})
        )
        return f"{len(model.ratios)} layers with windows of {model.window_tokens} tokens, {kept}"
    shape = "one latent head" if model.latent else f"{model.kv_heads} KV heads"
    kinds = " and ".join(
        f"{count} layers with {KINDS[kind].format(model.window_tokens)}"
        for kind, count in model.layers.items()
    )
    return f"{kinds}, {shape} of {model.head_size}"


def _formula(size: SlotSize) -> str:
    model = size.model
    if model.ratios:
        return f"{size.slot_bytes:,} bytes of a block / {size.block_tokens} tokens"
    layers = f"{size.block_slots * size.group_layers} layers"
    if size.cache_dtype in PACKED_LATENT_BYTES:
        text = f"{layers} x {size.layer_bytes} bytes"
    else:
        text = f"{layers} x {model.head_size}"
        if not model.latent:
            heads = max(model.kv_heads, size.tensor_parallel_size)
            text = f"2 x {layers} x {heads} KV heads x {model.head_size}"
        number_bytes = NUMBER_BITS[size.cache_dtype] / 8
        text += f" x {number_bytes:g} {'byte' if number_bytes == 1 else 'bytes'}"
    if model.index_bytes:
        text += f" + {model.indexes} layers x {model.index_bytes} bytes of the index"
    return f"{text} + scales" if scale_bytes(size.cache_dtype, model.head_size) else text


def _fitting(size: SlotSize, cpu_bytes: int, *, packed: bool = False) -> str:
    blocks = size.blocks_in(cpu_bytes, packed=packed)
    fitting = f"{blocks * size.block_tokens:,} tokens, {blocks:,} blocks"
    if size.keeps_ends_only:
        return f"{fitting} of windows"
    return f"{fitting}, less what {_ends(size)} take" if size.prompt_bytes else fitting


def _notes(size: SlotSize) -> Iterator[str]:
    """Yield other facts that affect how much fits, and values that were assumed."""
    if size.model.assumed:
        yield (
            "The file does not say all, and this Python has no transformers that knows the "
            f"defaults of {size.model.model_type}. Assumed: {'; '.join(size.model.assumed)}."
        )
    if size.model.ratios:
        yield (
            f"Windows, and tokens from which the next latents are also made, take {size.end_slots} "
            "slots where a prompt ends, whose blocks are smaller than a slot."
        )
    elif len(size.groups) > 1:
        padding = sum(size.groups.values()) * size.group_layers - sum(size.model.layers.values())
        kinds = " and ".join(f"{count} with {NAMES[kind]}" for kind, count in size.groups.items())
        yield (
            f"vLLM makes cache groups of {size.group_layers} layers: {kinds}"
            f"{f'; {padding} layers are padding' if padding else ''}."
        )
    if size.state_bytes:
        yield (
            f"A block has {size.block_tokens} tokens, so that it has room for a state, which takes "
            f"{size.state_bytes:,} bytes of a layer on a rank. vLLM keeps one state of a prompt, "
            "at its last full block, and hits end there."
        )
    if "window" in size.groups:
        yield "vLLM keeps windows only where a prompt ends, and hits end there."
    ranks = size.tensor_parallel_size
    if ranks > 1 and size.model.latent:
        yield f"The {ranks} ranks hold equal bytes and keep them once."
    elif ranks > 1:
        copies = max(1, ranks // size.model.kv_heads)
        kept = f", and {copies} ranks each keep the same KV head" if copies > 1 else ""
        yield f"Bytes per token, block and prompt are those of all {ranks} ranks together{kept}."
