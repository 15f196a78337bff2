"""Questions to shared tiers, each asked once for all requests that share a prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kv_offload.cache.prefix import SlotKey
from kv_offload.scheduler.core import Core
from kv_offload.tiers.base import Tier
from kv_offload.tiers.directory import Question


class Questions:
    """The open questions, by the prefixes that they are about."""

    def __init__(self, core: Core) -> None:
        self._prefixes, self._host = core.prefixes, core.manager
        self._lookups = core.lookups
        self._by_key: dict[SlotKey, Question] = {}
        # In the order of asking, which is also the order of the answers; with their keys.
        self._queue: deque[tuple[Question, list[SlotKey]]] = deque()

    @property
    def any_open(self) -> bool:
        """True while an answer is pending."""
        self.drop_closed()
        return bool(self._queue)

    def ask(
        self, tier: Tier, hashes: Sequence[bytes], start: int, end: int, tiers: Sequence[Tier]
    ) -> list[Question]:
        """Ask a tier for the blocks of a prefix that neither host memory nor unshared `tiers` have.

        It covers tokens `start` to `end`, except those that an open question covers. Returns all
        questions whose answers the request needs.
        """
        prefixes, questions = self._prefixes, []
        self.drop_closed()
        asked_end = prefixes.end_within(self._by_key, hashes, start, end)
        if asked_end > start:
            questions.append(self._by_key[prefixes.chain_key(hashes, asked_end)])
        keys: list[SlotKey] = []
        for group in prefixes.groups:
            slots = range(asked_end // group.block_tokens, end // group.block_tokens)
            # One more slot can be the proof of a draft head's hit.
            keys += prefixes.slot_keys(hashes, group, slots.start, slots.stop + 1)
        self._lookups.spend(len(keys))
        missing = self._host.lacks(keys)
        for other in tiers:
            if not other.is_shared and missing.any():
                missing &= ~other.readable(keys)
        question = tier.ask(
            [key for key, absent in zip(keys, missing.tolist(), strict=True) if absent],
            are_chained=len(prefixes.groups) == 1 and prefixes.reads_all,
        )
        if question is not None:
            questions.append(question)
            chain_keys = prefixes.chain_keys(hashes, asked_end, end)
            self._by_key.update(dict.fromkeys(chain_keys, question))
            self._queue.append((question, chain_keys))
        return questions

    def drop_closed(self) -> None:
        """Drop the questions that are answered or late."""
        while self._queue and not self._queue[0][0].is_open():
            question, keys = self._queue.popleft()
            for key in keys:
                if self._by_key.get(key) is question:
                    del self._by_key[key]

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a prefix has a question that is not in the queue."""
        assert self._by_key.keys() <= {key for _, keys in self._queue for key in keys}
