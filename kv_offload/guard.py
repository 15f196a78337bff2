"""Do no harm: throttles stores where steps with stores in flight take longer than steps without.

Only steps of the same kind are compared: as many tokens, requests and tokens of context, to within
3 to 12 %. Their medians count, and what the scatter of both could explain is no harm.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from kv_offload.engine_compat import logger
from kv_offload.step_clock import Step

BUSY_STEPS = 16
"""A kind is judged after so many steps with stores since it was last judged."""

CALM_STEPS = 8
"""It is judged by the last steps without stores, if there are at least so many.

Stores are throttled first when two verdicts in succession, of other steps with stores, say so."""

REMEMBERED_STEPS = 32
REMEMBERED_KINDS = 64

CALM_VALID_STEPS = 4096
"""Where none was seen for so many measured steps, steps without stores say nothing any more."""

CERTAINTY = 3.0
"""How many standard errors of the ratio are not enough to call stores harmful."""

DECREASE = 0.25
RECOVERY = 1.5
RECOVERY_STEPS = 256
"""After so many steps without a verdict of harm the share grows by `RECOVERY`."""

MIN_FACTOR = 1 / 1024
"""Stores never end, so that the guard sees when they have stopped doing harm."""

REST_STEPS = 3
"""Steps that plan no stores, where no step without stores is seen otherwise. With two steps under
way the third is the first whose predecessors' stores have been reported."""

REST_EVERY = 48


class _Kind:
    """Seconds of the last steps of one kind, with and without stores in flight."""

    __slots__ = ("busy", "calm", "last_calm", "suspect", "unjudged")

    def __init__(self) -> None:
        self.busy: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.calm: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.last_calm = 0
        self.unjudged = 0
        self.suspect = False


class Guard:
    """Watches the time of steps. `factor` is the share of its budget that storing may use.

    `max_slowdown` is the ratio of step times that is tolerated, at least 1; None watches nothing.
    """

    def __init__(self, max_slowdown: float | None) -> None:
        self._max_slowdown = max_slowdown
        self.factor = 1.0
        self.throttled_steps = 0
        self._kinds: OrderedDict[tuple[int, int, int], _Kind] = OrderedDict()
        self._steps = 0
        self._steps_without_harm = 0
        self._rests_left = 0
        self._steps_since_rest = 0

    def observe(self, step: Step, seconds: float) -> None:
        """Take a step that computed something, and how long it took."""
        if self._max_slowdown is None:
            return
        self._steps += 1
        if self.factor < 1.0:
            self.throttled_steps += 1
            self._recover()
        if step.loads:
            return  # what they cost is not the fault of stores
        key = (
            _rounded(step.tokens, 5),
            _rounded(step.requests, 4),
            _rounded(step.context_tokens, 4),
        )
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
            if len(self._kinds) > REMEMBERED_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(key)
        if not step.stores:
            kind.calm.append(seconds)
            kind.last_calm = self._steps
            return
        kind.busy.append(seconds)
        kind.unjudged += 1
        if kind.unjudged >= BUSY_STEPS:
            self._judge(kind, key)

    def plans_stores(self) -> bool:
        """Say whether the next step may plan stores; asked once a step.

        A few steps may not where only steps with stores are seen: what they leave is stored later.
        """
        self._steps_since_rest += 1
        if not self._rests_left:
            return True
        self._rests_left -= 1
        self._steps_since_rest = 0
        return False

    def _judge(self, kind: _Kind, key: tuple[int, int, int]) -> None:
        if self._steps - kind.last_calm > CALM_VALID_STEPS:
            kind.calm.clear()
        if len(kind.calm) < CALM_STEPS:
            if self._steps_since_rest >= REST_EVERY and not self._rests_left:
                self._rests_left = REST_STEPS
            return
        kind.unjudged = 0
        assert self._max_slowdown is not None
        busy, busy_error = _median_and_error(kind.busy)
        calm, calm_error = _median_and_error(kind.calm)
        slowdown = busy / calm
        noise = CERTAINTY * math.hypot(busy_error, calm_error)
        harm = slowdown > self._max_slowdown * (1 + noise)
        confirmed = kind.suspect or self.factor < 1.0
        kind.suspect = harm
        if not harm:
            return
        if not confirmed:
            kind.busy.clear()
            return
        if self.factor == 1.0:
            logger.warning(
                "kv-offload: stores are throttled: steps of about %d tokens of %d requests take "
                "%.1f ms with stores in flight, %.2f times as long as without; max_slowdown is %g",
                key[0],
                key[1],
                busy * 1e3,
                slowdown,
                self._max_slowdown,
            )
        self.factor = max(MIN_FACTOR, self.factor * DECREASE)
        self._steps_without_harm = 0
        for other in self._kinds.values():
            # Their stores were more than those to come.
            other.busy.clear()
            other.unjudged = 0

    def _recover(self) -> None:
        self._steps_without_harm += 1
        if self._steps_without_harm < RECOVERY_STEPS:
            return
        self._steps_without_harm = 0
        self.factor = min(1.0, self.factor * RECOVERY)
        if self.factor == 1.0:
            logger.info("kv-offload: stores are no longer throttled")


def _rounded(value: int, bits: int) -> int:
    """Return `value` with only its first `bits` binary digits."""
    shift = value.bit_length() - bits
    return value >> shift << shift if shift > 0 else value


def _median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and its relative standard error, from the median deviation.

    For normal values the standard deviation is 1.48 times that, and the error of the median 1.25
    times the deviation by the root of their number. Of few values the deviation itself is
    uncertain, hence half as much again for eight, and less for more.
    """
    ordered = sorted(values)
    median = ordered[len(ordered) // 2]
    deviations = sorted(abs(value - median) for value in ordered)
    deviation = deviations[len(deviations) // 2]
    error = 1.25 * 1.48 * deviation / math.sqrt(len(ordered)) * (1 + 4 / len(ordered))
    return median, error / median
