"""Do no harm: throttles stores where steps become longer by them, on average.

Steps with stores in flight are compared with steps without, of the same kind only: as many tokens,
requests and tokens of context, to within 3 to 12 %. Their means count, without the extremes, and
what the scatter of both could explain is no harm.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from kv_offload.engines.vllm.compat import logger
from kv_offload.scheduler.step_clock import Step

BUSY_STEPS = 32
"""A kind is judged after so many steps with stores since it was last judged."""

CALM_STEPS = 8
"""It is judged by the last steps without stores, if there are at least so many.

Stores are throttled first when two verdicts in succession say so."""

REMEMBERED_STEPS = 64
REMEMBERED_KINDS = 64

CALM_VALID_STEPS = 4096
"""Where none was seen for so many measured steps, steps without stores say nothing any more."""

CERTAINTY = 3.0
"""Harm is what exceeds the bound by more than so many standard errors."""

MIN_HARM_SECONDS = 0.00025
"""Steps shorter than 5 ms may become longer by this, whatever the ratio: to hand over a copy costs
some time on the host."""

DECREASE = 0.25
RECOVERY = 1.5
RECOVERY_STEPS = 256
"""After so many steps without a verdict of harm the share grows by `RECOVERY`."""

MIN_FACTOR = 1 / 1024
"""Stores never end, so that the guard sees when they have stopped doing harm."""

MIN_SHARE = 1 / 16
"""Less than this share of the budget is given as this share in fewer steps: a store costs the step
something, however small it is."""

REST_STEPS = 3
"""Steps that plan no stores, where no step without stores is seen otherwise. With two steps under
way the third is the first whose predecessors' stores have been reported."""

REST_EVERY = 48


class _Kind:
    """Seconds of the last steps of one kind, with and without stores in flight."""

    __slots__ = ("busy", "calm", "last_calm", "suspect", "unjudged", "unjudged_calm")

    def __init__(self) -> None:
        self.busy: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.calm: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.last_calm = 0
        self.unjudged = 0
        self.unjudged_calm = 0
        self.suspect = False


class Guard:
    """Watches the time of steps.

    `max_slowdown` says how many times as long stores may make steps, at least 1; None watches
    nothing. `factor` is the share of its budget that storing may use on average, `share` that of
    the step that is being planned.
    """

    def __init__(self, max_slowdown: float | None) -> None:
        self._max_slowdown = max_slowdown
        self.factor = 1.0
        self.share = 1.0
        self.throttled_steps = 0
        self._kinds: OrderedDict[tuple[int, int, int], _Kind] = OrderedDict()
        self._steps = 0
        self._steps_without_harm = 0
        self._rests_left = 0
        self._steps_since_rest = 0
        self._saved_up = 0.0

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
            kind.unjudged_calm += 1
            kind.last_calm = self._steps
            return
        kind.busy.append(seconds)
        kind.unjudged += 1
        if kind.unjudged >= BUSY_STEPS:
            self._judge(kind, key)

    def begin_step(self) -> None:
        """Set the share of the step that is about to be planned.

        A few steps rest where only steps with stores are seen: what they leave is stored later.
        """
        self._steps_since_rest += 1
        if self._rests_left:
            self._rests_left -= 1
            self._steps_since_rest = 0
            self.share = 0.0
        elif self.factor >= MIN_SHARE:
            self.share = self.factor
        else:
            self._saved_up += self.factor
            self.share = MIN_SHARE if self._saved_up >= MIN_SHARE else 0.0
            self._saved_up -= self.share

    def _judge(self, kind: _Kind, key: tuple[int, int, int]) -> None:
        if self._steps - kind.last_calm > CALM_VALID_STEPS:
            kind.calm.clear()
        if len(kind.calm) < CALM_STEPS:
            if self._steps_since_rest >= REST_EVERY and not self._rests_left:
                self._rests_left = REST_STEPS
            return
        assert self._max_slowdown is not None
        busy_share = kind.unjudged / (kind.unjudged + kind.unjudged_calm)
        kind.unjudged = kind.unjudged_calm = 0
        busy, busy_error = _mean_and_error(kind.busy)
        calm, calm_error = _mean_and_error(kind.calm)
        noise = CERTAINTY * math.hypot(busy_error, calm_error)
        bound = max((self._max_slowdown - 1) * calm, MIN_HARM_SECONDS)
        harm = busy_share * (busy - calm - noise) > bound
        confirmed = kind.suspect or self.factor < 1.0
        kind.suspect = harm
        if not (harm and confirmed):
            return
        if self.factor == 1.0:
            logger.warning(
                "kv-offload: stores are throttled: steps of about %d tokens of %d requests take "
                "%.2f ms without stores in flight and %.2f ms with, as %.0f %% of them are; "
                "max_slowdown is %g",
                key[0],
                key[1],
                calm * 1e3,
                busy * 1e3,
                busy_share * 100,
                self._max_slowdown,
            )
        self.factor = max(MIN_FACTOR, self.factor * DECREASE)
        self._steps_without_harm = 0
        for other in self._kinds.values():
            # Their stores were more than those to come.
            other.busy.clear()
            other.unjudged = other.unjudged_calm = 0

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


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean without the extreme eighths, and its standard error.

    Not the median: a copy often ends early in a step that counts as one with stores, so that half
    of them are longer and half are not. The error is that of a trimmed mean (Tukey and McLaughlin
    1963), from the values with the extremes moved to the bounds. Of few values it is itself
    uncertain, hence half as much again for eight, and less for more.
    """
    count = len(values)
    cut = count // 8
    ordered = sorted(values)
    low, high = ordered[cut], ordered[-1 - cut]
    mean = math.fsum(ordered[cut : count - cut]) / (count - 2 * cut)
    bounded = [min(max(value, low), high) for value in values]
    centre = math.fsum(bounded) / count
    variance = math.fsum((value - centre) ** 2 for value in bounded) / (count - 1)
    error = math.sqrt(variance / count) / (1 - 2 * cut / count)
    return mean, error * (1 + 4 / count)
