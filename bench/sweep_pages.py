"""Which store ring is best at which page size: bandwidth and slowdown of a product at each.

`python bench/sweep_pages.py OUT.json` needs a CUDA device of sm_90 or newer. Every ring's
bytes are compared once a page size. Rings are written as in sweep_swap.py.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv_swap.cuda.swap import LIST_BYTES, SwapKernel
from kv_swap.engine import Direction

from bench.disturbance import beside, make_workloads
from bench.sweep_swap import JOB_BYTES, LAYERS, PAGES, Bed, family_of

RINGS = [
    "2x5x10/2",
    "2x4x16/2",
    "2x4x14/2",
    "2x4x12/2",
    "2x5x12/2",
    "2x6x10/2",
    "2x5x16/2",
    "2x3x16/1",
]
MEASURED = ["8k", "16k", "64k", "2m"]


def main() -> None:
    started = time.perf_counter()
    bed = Bed()
    product = make_workloads(torch)[0]
    families = {ring: family_of(Direction.STORE, ring) for ring in RINGS}
    with ThreadPoolExecutor(8) as pool:  # compile at once; CuPy keeps the results on disk
        list(pool.map(lambda family: bed.kernel(4096, family), families.values()))
    rows = []
    for page in MEASURED:
        entry = list(PAGES).index(page)
        for ring, family in families.items():
            kernel = bed.kernel(PAGES[page], family)
            rows.append(measure(bed, kernel, entry, product) | {"page": page, "ring": ring})
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    print(as_table(rows))
    print(f"{time.perf_counter() - started:.0f} s")
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


def measure(bed: Bed, kernel: SwapKernel, entry: int, product: Any) -> dict[str, Any]:
    address = bed.lists.address + entry * LIST_BYTES

    def copy() -> Any:
        kernel.launch(Direction.STORE, address, bed.stream)
        return bed.stream

    right = stores_the_right_bytes(bed, copy, entry)
    seconds = bed.seconds(kernel, Direction.STORE, entry, 9)
    return {
        "gbps": round(JOB_BYTES / seconds / 1e9, 2),
        "product": round(beside(torch, product, copy, seconds, 7)[0], 4),
        "right": right,
    }


def stores_the_right_bytes(bed: Bed, copy: Any, entry: int) -> bool:
    """Whether all slots hold what they must: those of the job its blocks, others what they held."""
    page_bytes = list(PAGES.values())[entry]
    words = bed.lists.view()[entry].view(np.int32)
    pairs = torch.from_numpy(words[4 : 4 + 2 * words[0]].astype(np.int64)).view(-1, 2).cuda()
    bed.host.fill_(7)
    copy()
    torch.cuda.synchronize()
    blocks = bed.memory.view(LAYERS, -1, page_bytes)[:, pairs[:, 0]].transpose(0, 1)
    slots = bed.host.cuda().view(-1, LAYERS * page_bytes)
    right = torch.equal(slots[pairs[:, 1]], blocks.reshape(len(pairs), -1))
    slots[pairs[:, 1]] = 7
    return right and bool((slots == 7).all())


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'ring':10}" + "".join(f"{page:>18}" for page in MEASURED)]
    for ring in RINGS:
        cells = [row for row in rows if row["ring"] == ring]
        text = [
            f"{row['gbps']:8.1f} GB/s {row['product']:.3f}{'' if row['right'] else ' WRONG'}"
            for row in cells
        ]
        lines.append(f"{ring:10}" + "".join(f"{cell:>20}" for cell in text))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
