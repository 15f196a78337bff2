"""Which of the blocks that a step looks at are worth storing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.cache.slots import Run
from kv_offload.engine import BlockPool
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.candidates import Span


@dataclass(slots=True)
class Chosen:
    """New keys with their blocks, and slots of the same prefixes that are known."""

    slots_left: int
    new: dict[SlotKey, None] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    runs: list[Span] = field(default_factory=list)
    """Where the new keys are from, in order: the first slot of each, and as many slots as it has of
    them. Empty if nobody reads them."""
    along: list[int] = field(default_factory=list)
    cut: list[tuple[Span, int]] = field(default_factory=list)
    """Spans for which too few slots were left, each with how many of its slots were passed."""


@dataclass(eq=False, repr=False)
class StoreChoice:
    """Chooses blocks that host memory does not have and that are valid.

    A block is valid while the pool knows it under exactly the key that it is expected to have:
    requests have their hashes before the KV exists, and remembered ids go stale when a window moves
    on or a request is preempted.

    A block that did not fit a packed slot is not chosen again: it would not fit, and every request
    with its prefix would try it.
    """

    _prefixes: PrefixMap
    _pool: BlockPool
    _statistics: Statistics
    _refused: Collection[SlotKey]
    tells_runs: bool
    """Whether somebody reads the runs of what is chosen."""

    def choose(
        self,
        spans: Sequence[Span],
        keys: Sequence[SlotKey],
        slots: Sequence[int],
        slots_left: int,
    ) -> Chosen:
        """Choose at most `slots_left` of the slots of `spans`.

        `keys` are those of all spans in order, and `slots` what the cache manager says of each: its
        slot, or -1 where it has none.
        """
        chosen = Chosen(slots_left)
        new, pool_blocks = chosen.new, self._pool.blocks
        behind_key = self._prefixes.behind_slot_key
        # A span of one slot is what decodes have; most of these are chosen without further ado.
        tells_runs = self.tells_runs
        at = 0
        for span in spans:
            cursor, position, first, last = span
            if last - first == 1 and slots[at] < 0 < chosen.slots_left:
                key, block = keys[at], cursor.block_ids[position][first]
                valid = pool_blocks[block].block_hash == key + behind_key[position]
                if valid and key not in new and key not in self._refused:
                    chosen.slots_left -= 1
                    new[key] = None
                    chosen.blocks.append(block)
                    if tells_runs:
                        chosen.runs.append(span)
                    at += 1
                    continue
            end = at + last - first
            before = len(new)
            passed = self._choose(chosen, span, keys[at:end], slots[at:end])
            if tells_runs and len(new) > before:
                start = first + slots.index(-1, at) - at
                chosen.runs.append((cursor, position, start, start + len(new) - before))
            if passed < end - at:
                chosen.cut.append((span, passed))
            at = end
        return chosen

    def _choose(
        self, chosen: Chosen, span: Span, keys: Sequence[SlotKey], slots: Sequence[int]
    ) -> int:
        """Choose from one span; return how many of its slots were passed."""
        cursor, position, first, last = span
        group = self._prefixes.groups[position]
        num_unknown = slots.count(-1)
        unknown: Sequence[int] = range(slots.index(-1) if num_unknown else len(slots), len(slots))
        if num_unknown < len(unknown):  # mostly nothing is known behind what is not
            unknown = [index for index in unknown if slots[index] < 0]
        if self._refused:
            unknown = [index for index in unknown if keys[index] not in self._refused]
        passed = len(keys)
        gone: list[int] = []
        if unknown:
            start = first + unknown[0]
            expected = self._prefixes.pool_keys(cursor.request.block_hashes, group, start, last)
            blocks = cursor.block_ids[position][start:last]
            pool_blocks = self._pool.blocks
            null = self._pool.null_block.block_id  # stands for a block that the request never had
            found = [pool_blocks[block].block_hash for block in blocks]
            all_valid = found == expected
            new = keys[unknown[0] :]
            if (
                all_valid
                and len(new) == len(unknown)
                and (not chosen.new or chosen.new.keys().isdisjoint(new))
            ):
                # What is mostly met: of the rest of a prompt nothing is known, and all is valid.
                taken = max(0, min(len(new), chosen.slots_left))
                chosen.slots_left -= taken
                chosen.new.update(dict.fromkeys(new[:taken]))
                chosen.blocks += blocks[:taken]
                passed = unknown[0] + taken
                unknown = ()
        for index in unknown:
            key = keys[index]
            if key in chosen.new:
                continue  # another request of this step has the same prefix
            at = index - unknown[0]
            if not all_valid and found[at] != expected[at]:
                if blocks[at] != null:
                    gone.append(first + index)
            elif chosen.slots_left <= 0:
                passed = index
                break
            else:
                chosen.slots_left -= 1
                chosen.new[key] = None
                chosen.blocks.append(blocks[at])
        if gone:  # what the engine never names was not lost
            prompt_tokens = cursor.request.num_prompt_tokens
            moved_on = self._prefixes.count_named(group, gone, prompt_tokens)
            self._statistics.skipped("moved_on", moved_on)
        if num_unknown < len(slots):
            chosen.along += [slot for slot in slots[:passed] if slot >= 0]
        return passed

    def runs_of(self, chosen: Chosen) -> list[Run]:
        """Say of which requests new keys are; what these wish to retain must be stored."""
        key_before = self._prefixes.key_before
        return [
            Run(
                last - first,
                cursor.request.num_prompt_tokens,
                cursor.wishes.keep is not None,
                key_before(cursor.request.block_hashes, position, first),
                cursor.tail_at[position],
            )
            for cursor, position, first, last in chosen.runs
        ]
