"""What a waiting request gets: the answer to a look-up, blocks, and the load that fills them."""

from __future__ import annotations

from dataclasses import dataclass

from kv_offload.cache.prefix import PrefixMap
from kv_offload.engine import AllocatedBlocks, Request
from kv_offload.scheduler.load_jobs import LoadJobs
from kv_offload.scheduler.loads import LoadChoice, LoadMode
from kv_offload.scheduler.lookups import Lookups
from kv_offload.scheduler.request import Answer, Phase, RequestTable
from kv_offload.scheduler.statistics import Statistics


@dataclass(eq=False, repr=False)
class Admissions:
    """Follows a request from its first look-up until it is scheduled."""

    _requests: RequestTable
    _prefixes: PrefixMap
    _lookups: Lookups
    _choice: LoadChoice
    _mode: LoadMode
    _loads: LoadJobs
    _statistics: Statistics

    def __post_init__(self) -> None:
        groups = self._prefixes.groups
        # vLLM may ask for less than it was offered; of several groups a window lacks blocks then.
        # States are moved from block to block before the forward that waits for a load.
        self._may_be_synchronous = len(groups) == 1 and not groups[0].holds_state

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the local hit, and whether asynchronously.

        None instead of tokens asks to be asked again.
        """
        tracked = self._requests.track(request)
        if tracked is None or tracked.report_due or tracked.held is not None:
            # A load of this request has a report on its way. Reports name requests, and that of the
            # first load must not be taken for one of a second.
            return None, False
        tracked.phase = Phase.WAITING
        tracked.answer = None
        if request.skip_reading_prefix_cache or tracked.load_failed:
            self._lookups.settle(tracked)
            return 0, False
        start = num_computed_tokens
        tokens = self._lookups.match(tracked, start)
        if not tokens:
            tracked.answer = None if tokens is None else Answer(start)
            return tokens, False
        slots = self._prefixes.count_slots(start, start + tokens)
        idle = self._requests.admitted == (tracked.cursor is not None)
        synchronous = self._may_be_synchronous and self._mode.is_synchronous(
            slots,
            request.num_tokens - (start + tokens),
            idle=idle,
            queued_seconds=self._choice.queued_seconds(),
        )
        if not self._choice.loads(start, tokens, slots, synchronous=synchronous):
            tracked.answer = Answer(start, declined_tokens=tokens)
            return 0, False
        end = start + tokens
        if synchronous and end == request.num_tokens:
            if self._mode.brings_last_slot(slots, idle=idle):
                tokens -= 1
            else:
                end -= self._prefixes.alignment_tokens
                tokens = end - start
        tracked.answer = Answer(start, tokens, end, synchronous)
        return tokens, not synchronous

    def allocated(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks that the engine gave a waiting request, and plan its load if it has one.

        Called again, with no external tokens, when a loaded request is scheduled; then the step's
        plan has its blocks.
        """
        tracked = self._requests.track(request)
        if tracked is None:
            return
        self._lookups.settle(tracked)
        if tracked.phase is not Phase.WAITING and tracked.loaded is not None:
            return
        answer = tracked.answer or Answer(request.num_computed_tokens)
        asynchronous = num_external_tokens > 0 and not answer.synchronous
        phase = Phase.LOADING if asynchronous else Phase.READY
        self._requests.admit(tracked, phase, blocks.get_block_ids())
        start, end = answer.start_tokens, answer.start_tokens + num_external_tokens
        self._choice.admitted(tracked, end)
        if tracked.answer is not None:
            self._statistics.count("lookup_tokens", request.num_tokens - start)
            self._statistics.count("hit_tokens", num_external_tokens)
        if answer.declined_tokens:
            self._statistics.count("recomputed_tokens", answer.declined_tokens)
            self._choice.declined()
        if num_external_tokens:
            self._statistics.observe("request_hit_tokens", num_external_tokens)
            self._choice.loaded()
            if answer.tokens == num_external_tokens:
                end = answer.end_tokens
            tracked.loaded = (start, end)
            keys = self._loads.add(tracked, start, end, synchronous=answer.synchronous)
            if asynchronous:
                self._lookups.expect(tracked, keys)
            else:
                # The engine's own prefix cache knows its blocks from this step on.
                self._statistics.count("synchronous_loads", 1)
        if not asynchronous:
            slots = self._prefixes.count_slots(start, end) if num_external_tokens else 0
            self._mode.count(slots, request.num_tokens - end)
        tracked.answer = None

    def go_on_without(self, request: Request) -> None:
        """Answer nothing more for a request, of which a hook has failed."""
        tracked = self._requests.track(request)
        if tracked is not None:
            tracked.load_failed = True
            tracked.answer = None

    def allocation_failed(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Let the load that the engine counts on fail, since `allocated` has."""
        tracked = self._requests.track(request)
        if tracked is None:
            return
        answer = tracked.answer
        self.go_on_without(request)
        if tracked.phase is Phase.WAITING:
            # Its blocks count among those that `lose` looks at, whatever has failed.
            self._requests.admit(tracked, Phase.READY, blocks.get_block_ids())
        if num_external_tokens and answer is not None:
            start = answer.start_tokens
            tracked.loaded = (start, start + num_external_tokens)
            tracked.phase = Phase.READY if answer.synchronous else Phase.LOADING
            self._loads.add_failure(tracked, start, synchronous=answer.synchronous)
