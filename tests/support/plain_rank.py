"""An engine's rank that is no vLLM: what a worker's half asks of it, over tensors of a test."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from kv_swap.layout import KVLayout, TensorDescription

from kv_offload.engine import KVCaches
from kv_offload.errors import UnsupportedError

PAGE_WORDS = 8
"""Words of 8 bytes in a block of a layer."""


class PlainRank:
    """Describes tensors whose first dimension is the block; tests set what it answers besides."""

    def __init__(self) -> None:
        self.gives_idle_blocks = False
        self.weight_loads = 0
        self.context: object | None = None
        self.forward: tuple[object, Hashable] | None = None

    def describe_kv_caches(self, kv_caches: Mapping[str, Any]) -> KVCaches:
        unknown = [name for name in kv_caches if not name.startswith("layer.")]
        if unknown:
            raise UnsupportedError(f"layer {unknown[0]} is not known")
        num_blocks = len(next(iter(kv_caches.values())))
        layout = KVLayout.from_tensors(
            num_blocks,
            [TensorDescription.of(name, kv, num_blocks) for name, kv in kv_caches.items()],
        )
        regions = {
            name: frozenset(i for i, region in enumerate(layout.regions) if name in region.tensors)
            for name in kv_caches
        }
        return KVCaches(layout, list(kv_caches.values()), regions)

    def find_output_copy_stream(self) -> None:
        """There is none on a CPU."""

    def count_weight_loads(self) -> Callable[[], int]:
        return lambda: self.weight_loads

    def forward_context(self) -> object | None:
        return self.context

    def forward_with_layer_calls(self) -> tuple[object, Hashable] | None:
        return self.forward
