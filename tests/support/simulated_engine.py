"""A played engine with a simulated clock: how long requests wait, without a device.

vLLM's scheduler and both sides of our connector are real. The durations of steps and copies are
calculated, with the rates of one H200 and a model of 8 billion parameters (32 layers, 8 KV heads).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kv_swap.engine import Completion, Direction, SwapJob

from kv_offload.worker.forward_loads import WAVES_FROM_BYTES
from kv_offload.worker.waves import WEIGHTS
from tests.support.configurations import make_request
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import Tokens

DECODE_SECONDS = 0.0083
"""A step of decodes, and the part of any step that does not depend on its prompts."""
PROMPT_TOKENS_PER_SECOND = 38_000
TOKEN_BYTES = 1 << 17
LINK_BYTES_PER_SECOND = 46e9
"""In each direction."""
HOST_SECONDS = 0.002
"""Planning and launching a step."""
LAUNCH_SECONDS = 0.0005
"""From the submission of copies to the start of the first."""


class Clock:
    """Replaces `time.monotonic`; in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Copies:
    """A rank's copies: serial within a direction, concurrent with the other direction."""

    def __init__(self, copies: Any, clock: Clock, block_tokens: int) -> None:
        self._clock = clock
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._page_bytes = copies.layout.slot_bytes
        self.bytes_per_second = LINK_BYTES_PER_SECOND * self._page_bytes / self._block_bytes
        """In bytes of the played blocks, which are smaller than the model's."""
        self._free = dict.fromkeys(Direction, 0.0)
        self._under_way: list[tuple[float, Completion]] = []
        self.computed = 0.0
        """When all launched steps will have been computed: stores start afterwards."""
        self.awaited: tuple[float, float] | None = None
        """When the loads that the next forward waits for start and end."""
        self.in_waves = False
        copies.submit, copies.poll = self.submit, self.poll

    def submit(self, job: SwapJob) -> None:
        stored = job.direction is Direction.STORE
        start = self.computed if stored or job.after_compute else 0.0
        begin = max(self._clock.now + LAUNCH_SECONDS, self._free[job.direction], start)
        nbytes = len(job.pairs) * self._block_bytes
        end = begin + nbytes / LINK_BYTES_PER_SECOND
        self._free[job.direction] = end
        done = Completion(
            job.job_id, job.direction, len(job.pairs) * self._page_bytes, end - begin, None
        )
        self._under_way.append((end, done))
        if job.before_compute:
            self.awaited, self.in_waves = (begin, end), nbytes >= WAVES_FROM_BYTES

    def poll(self) -> list[Completion]:
        ended = [done for end, done in self._under_way if end <= self._clock.now]
        self._under_way = [entry for entry in self._under_way if entry[0] > self._clock.now]
        return ended


class SimulatedEngine(PlayedEngine):
    """Keeps two steps in flight, as vLLM's engine core does. `clock` must be `time.monotonic`.

    No KV is copied and no answer is checked. Every layer is assumed to wait for its part of a load.
    """

    beside = True

    def __init__(self, clock: Clock, **arguments: Any) -> None:
        super().__init__(async_scheduling=True, synchronous_loads=True, **arguments)
        self.clock = clock
        self._copies = Copies(self.ranks[0].copies, clock, self.groups[0].block_tokens)
        self._ends: deque[float] = deque()
        for _ in range(20):  # a load of this few bytes is not measured
            self.offload.watch.load_rate.learn(self._copies.bytes_per_second)
        self.model.follow = lambda _output: None  # type: ignore[method-assign]

    def ask(self, request_id: str, prompt: Tokens, max_tokens: int) -> None:
        """Add a request."""
        self.scheduler.add_request(
            make_request(request_id, prompt, self.hash_block_tokens, max_tokens)
        )

    def forward(self, output: Any) -> list[Tokens]:
        """Sample the same token for each request whose prompt has been computed."""
        running = self.scheduler.requests
        return [
            []
            if (request := running.get(request_id)) is not None
            and request.num_computed_tokens < request.num_tokens
            else [7]
            for request_id in output.num_scheduled_tokens
        ]

    def check_answer(self, request_id: str) -> None:
        """Do nothing: no KV is computed."""

    def check_host_memory(self) -> None:
        """Do nothing: no KV is copied."""

    def pass_step(self) -> dict[str, Tokens]:
        """Launch steps until two are in flight, wait for the older one, and return its tokens."""
        while len(self._ends) < 2 and self.scheduler.has_requests():
            output = self.schedule()
            self.clock.now += HOST_SECONDS / 2
            self._copies.awaited = None
            self.execute()
            self.clock.now += HOST_SECONDS / 2
            self._copies.computed = self._computed(output)
            self._ends.append(max(self._copies.computed, self.clock.now))
        self.clock.now = max(self.clock.now, self._ends.popleft())
        self.answers.clear()  # `process` appends to it, and nothing else reads it
        self.process()
        return dict(self.answers)

    def _computed(self, output: Any) -> float:
        """Return when a step that is launched now will have been computed."""
        if not output.num_scheduled_tokens:
            return self._copies.computed
        prompts = sum(tokens for tokens in output.num_scheduled_tokens.values() if tokens > 1)
        seconds = DECODE_SECONDS + prompts / PROMPT_TOKENS_PER_SECOND
        now = max(self.clock.now, self._copies.computed)
        if self._copies.awaited is None:
            return now + seconds
        begin, end = self._copies.awaited
        # Such short prompts replay a CUDA graph, whose layers do not wait one by one.
        weights = WEIGHTS if self._copies.in_waves and prompts > 512 else (1,)
        arrived = begin
        for weight in weights:
            arrived += (end - begin) * weight / sum(weights)
            now = max(now, arrived) + seconds * weight / sum(weights)
        return now
