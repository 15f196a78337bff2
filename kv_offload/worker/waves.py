"""Lets the forward begin while later layers of a load are still arriving, where that is safe.

Each wave of a load is the KV of some consecutive layers. The compute stream waits for the first
wave before the forward, and for each other wave when its first layer runs: vLLM calls the connector
before an attention layer touches its KV. But a full CUDA graph is replayed without calls, and
state-space layers, indexers and others read their KV without a call. So:

- A layer's KV may arrive late only if the layer has called in an earlier forward of the same kind.
  Only forwards of the target model count; a draft head runs in a separate context.
- A page that any other layer shares or reads is in the first wave.
- If the kind of forward is unknown, or no graph breaks at the layers, the forward waits for the
  whole load. So does every forward until the first one has been learned from.
- A late layer that did not call is detected at the end of the step: it may have read anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

WEIGHTS = (3, 6, 6, 3, 2)
"""Shares of a load in its waves. The first and the last wave are small: the first delays the
forward, and the layers of the last are computed after the load. There are few waves, because each
costs a launch."""

LEAST_WAVE_BYTES = 512 << 10
"""Minimum bytes of a block for each wave after the first: more would cost more time than they hide.

When loading a single prompt of 2,048, 8,192 or 32,768 tokens (0.25, 1 or 4 GiB), time to first
token was 9.5, 26.6 or 97.6 ms with five launches; 11.9, 28.9 or 97.7 with two; 12.2, 30.1 or 102.9
with one (slots of 2 MiB, H200, PCIe Gen5 x16, 23 Nov 2026)."""

Forward = tuple[object, Hashable]
"""A forward whose attention layers call the connector: its context in vLLM, and its kind."""


@dataclass(frozen=True)
class WaveCut:
    """Assigns regions to waves, and late layers to the wave that they need.

    Layers that are not in `wave_of` need only the first wave, for which the whole forward waits.
    """

    waves: tuple[tuple[int, ...], ...]
    wave_of: Mapping[str, int]


def cut_waves(
    order: Sequence[str], regions_of: Mapping[str, frozenset[int]], page_bytes: Sequence[int]
) -> WaveCut | None:
    """Cut the regions into waves for layers that call in this order; None if there is only one.

    With small blocks, the first waves are joined (`LEAST_WAVE_BYTES`). `regions_of` has the regions
    that each layer of the cache reads, `page_bytes` the page size of each region. A region belongs
    to the wave of the first layer that reads it, and to the first wave if a layer outside `order`
    reads it.
    """
    owned = {region for layer in order for region in regions_of.get(layer, ())}
    unasked = {region for layer in regions_of.keys() - set(order) for region in regions_of[layer]}
    placed = unasked | (set(range(len(page_bytes))) - owned)
    first = sorted(placed)
    steps: list[list[int]] = []
    for layer in order:
        fresh = sorted(regions_of.get(layer, frozenset()) - placed)
        if fresh:
            placed.update(fresh)
            steps.append(fresh)
    sizes = [sum(page_bytes[region] for region in step) for step in steps]
    bounds = [sum(sizes) * share / sum(WEIGHTS) for share in accumulate(WEIGHTS)]
    by_share: dict[int, list[int]] = {}
    for step, nbytes, end in zip(steps, sizes, accumulate(sizes), strict=True):
        # There are few steps, and none is split: each goes to the wave in which its middle is.
        by_share.setdefault(bisect_right(bounds, end - nbytes / 2), []).extend(step)
    waves = list(by_share.values())
    joined = len(waves) - sum(page_bytes) // LEAST_WAVE_BYTES
    if joined > 1:
        waves = [list(chain(*waves[:joined])), *waves[joined:]]
    if len(waves) < 2:
        return None
    waves[0] = first + waves[0]
    arrives = {region: index for index, wave in enumerate(waves) for region in wave}
    needed = {
        layer: max(map(arrives.__getitem__, regions)) for layer, regions in regions_of.items()
    }
    return WaveCut(
        tuple(map(tuple, waves)), {layer: wave for layer, wave in needed.items() if wave}
    )


class LayerWaves:
    """Learns which layers call, and records the calls of the current forward.

    Call `forward_follows` before a forward, `learn` or `called` for every call of a layer, and
    `forward_ended` after the forward. `regions_of` and `page_bytes` are as in `cut_waves`, and
    every layer reads at least one region.
    """

    def __init__(self, regions_of: Mapping[str, frozenset[int]], page_bytes: Sequence[int]) -> None:
        self.cut: WaveCut | None = None
        """The cut of loads into waves; None until it is learned, or if it is not possible."""
        self._regions_of = regions_of
        self._page_bytes = page_bytes
        self._learned: dict[Hashable, frozenset[str]] = {}
        self._forward: Forward | None = None
        self._order: dict[str, None] = {}
        self._late: set[str] = set()
        self._given_up = False

    def forward_follows(self, forward: Forward | None) -> None:
        """Announce the next forward; None if its layers are not known to call."""
        self._forward = None if self._given_up else forward
        self._order = {}

    @property
    def learning(self) -> bool:
        """True if the calls of this step's forward are yet to be learned."""
        return self._forward is not None and self._forward[1] not in self._learned

    @property
    def possible(self) -> bool:
        """True if a load of this step may arrive in waves."""
        if self.cut is None or self._forward is None:
            return False
        return self.cut.wave_of.keys() <= self._learned.get(self._forward[1], frozenset())

    def learn(self, layer: str, context: object) -> None:
        """Record a call of `layer` in a context, which may be that of a draft head."""
        if self._forward is not None and context is self._forward[0]:
            self._order[layer] = None

    def expect(self) -> None:
        """Expect every late layer to call in this step."""
        assert self.cut is not None
        self._late = set(self.cut.wave_of)

    def called(self, layer: str) -> int:
        """Record a call, and return the wave that the layer needs.

        A layer whose cache was not described needs all waves.
        """
        assert self.cut is not None
        self._late.discard(layer)
        if layer not in self._regions_of:
            return len(self.cut.waves) - 1
        return self.cut.wave_of.get(layer, 0)

    def forward_ended(self) -> WaveCut | None:
        """Learn from the forward that has ended; return the cut if this yields the first one."""
        forward, self._forward = self._forward, None
        if forward is None or forward[1] in self._learned:
            return None
        self._learned[forward[1]] = frozenset(self._order)
        if self.cut is not None:
            return None
        self.cut = cut_waves(list(self._order), self._regions_of, self._page_bytes)
        return self.cut

    def missed(self) -> list[str]:
        """Return the late layers that did not call, and clear them."""
        missed, self._late = sorted(self._late), set()
        return missed

    def give_up(self) -> None:
        """Stop loading in waves for good."""
        self.cut = None
        self._given_up = True
