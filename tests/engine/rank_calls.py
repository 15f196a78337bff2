"""Calls for `LLM.collective_rpc` that digest, poison and mix up the memory of every rank.

They work on any device, between steps, with no request alive. Calls of other functions empty host
memory, since they may change weights; if this module is imported, its functions and those of
`rank_faults` do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from kv_swap.engine import Direction, SwapJob

from kv_offload.engines.vllm.locate import worker_of_process
from kv_offload.engines.vllm.patches import weights
from kv_offload.engines.vllm.start.ranks import gather_over_ranks


def watch(_worker: Any) -> dict[str, Any]:
    """Record stores and loads from now on; return a description of this rank."""
    half = worker_of_process()
    half.noted = {"stored": {}, "loaded": {}, "copied": 0}
    if not hasattr(half, "submit_unwatched"):
        prepare_store_kv, drain = half.prepare_store_kv, half.drain
        half.submit_unwatched = half.transfer.submit

        def note(stores: Any) -> None:
            for job in stores:
                half.noted["stored"].update((int(slot), int(block)) for block, slot in job.pairs)

        def watched_prepare_store_kv(metadata: Any) -> None:
            note(metadata.stores)
            prepare_store_kv(metadata)

        def watched_drain(plan: Any) -> Any:
            note(plan.stores)
            return drain(plan)

        def submit(job: SwapJob) -> None:
            if job.direction is Direction.LOAD:
                half.noted["loaded"].update((int(slot), int(block)) for block, slot in job.pairs)
            else:
                half.noted["copied"] += len(job.pairs)
            half.submit_unwatched(job)

        half.prepare_store_kv, half.drain = watched_prepare_store_kv, watched_drain
        half.transfer.submit = submit
    return {
        "rank": half.rank,
        "slots": half.num_slots,
        "slot_bytes": half.transfer.layout.slot_bytes,
        "block_bytes": half.transfer.layout.block_bytes,
        "sharing": half.sharing_ranks,
        "replica": gather_over_ranks(half.rank),
    }


def digests(_worker: Any, kind: str) -> dict[str, Any]:
    """Return the current digest of every block that was `stored` or `loaded`, by slot."""
    half = worker_of_process()
    assert half.transfer.wait(120)
    found = {}
    for slot, block in half.noted[kind].items():
        digest = hashlib.sha256()
        for page in pages(half, block):
            digest.update(page.cpu().numpy())
        found[slot] = digest.hexdigest()[:16]
    return {"rank": half.rank, "blocks": found, "copied": half.noted["copied"]}


def poison(_worker: Any) -> None:
    """Overwrite the whole KV cache of this rank."""
    half = worker_of_process()
    assert half.transfer.wait(120)
    for memory in kv_memory(half):
        memory.fill_(0x7F)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def roll(_worker: Any, ranks: list[int], kind: str = "stored") -> None:
    """Rotate the blocks of one kind in the host memory of these ranks.

    Blocks loaded from a peer are moved in the peer's memory.
    """
    half = worker_of_process()
    if half.rank in ranks:
        slots = [slot_bytes(half, number) for number in sorted(half.noted[kind])]
        moved = [slot.copy() for slot in slots]
        for number, slot in enumerate(slots):
            slot[:] = moved[number - 7 % len(slots)]


def slot_bytes(half: Any, number: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a slot, by the number that copies use for it."""
    own = half.transfer._state.arena.view()
    if number < len(own):
        return own[number]
    window, slot = divmod(number, half.transfer.windows.window_slots)
    return np.memmap(half._peers._paths[window - 1], np.uint8, "r+", shape=own.shape)[slot]


def kv_memory(half: Any) -> list[torch.Tensor]:
    """Return the bytes of every storage of the KV cache, each once."""
    tensors = half.transfer._state.keep_alive
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return [
        torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        for tensor in found.values()
    ]


def pages(half: Any, block: int) -> Iterator[torch.Tensor]:
    """Yield writable views of a block's bytes in each region."""
    memory = kv_memory(half)
    for region in half.transfer.layout.regions:
        address = region.address + block * region.block_stride_bytes
        whole = next(part for part in memory if 0 <= address - part.data_ptr() < len(part))
        yield whole[address - whole.data_ptr() :][: region.page_bytes]


# The engine core imports this module before it makes the call.
_may_change_weights = weights.may_change_weights
weights.may_change_weights = lambda method: (
    getattr(method, "__module__", "") not in ("tests.engine.rank_calls", "tests.engine.rank_faults")
    and _may_change_weights(method)
)
