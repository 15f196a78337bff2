"""Users who come back, each time with a longer prompt, while others are served.

The load of a test on a calculated device. There is no engine here and no clock: `Talk` says what to
send next, and is told which tokens came when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Conversations:
    """`count` conversations of `turns` questions each, `at_once` of them open at a time.

    Each begins with the same `system_tokens` and a history of its own. Each turn adds `new_tokens`
    and an answer. Lengths of histories and answers are random; both ends of a range are in it.
    """

    count: int
    turns: int
    at_once: int
    system_tokens: int
    history_tokens: tuple[int, int]
    new_tokens: int
    answer_tokens: tuple[int, int]

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest conversation at its end."""
        turn = self.new_tokens + self.answer_tokens[1]
        return self.system_tokens + self.history_tokens[1] + self.turns * turn


@dataclass
class Turn:
    """One question: its prompt is all that was said before and something new."""

    request_id: str
    conversation: int
    prompt: list[int]
    """Empty once it was answered: a long list of lists would make each garbage collection slow."""
    prompt_tokens: int
    answer_tokens: int
    """How many the answer must have."""
    asked: float
    arrivals: list[float] = field(default_factory=list)
    """When tokens came; those of one step come at once."""
    answer: list[int] = field(default_factory=list)


class Talk:
    """The conversations of one seed: the same questions and lengths, whatever is answered.

    Whose turn is when is the same too, but a conversation that still gets an answer is passed over.
    """

    def __init__(self, load: Conversations, seed: int) -> None:
        random = np.random.default_rng((seed, load.count))

        def draw(length: int) -> list[int]:
            tokens: list[int] = random.integers(10, 31000, length).tolist()
            return tokens

        def lengths(bounds: tuple[int, int], count: int) -> list[int]:
            drawn: list[int] = random.integers(*bounds, count, endpoint=True).tolist()
            return drawn

        system = draw(load.system_tokens)
        histories = lengths(load.history_tokens, load.count)
        self.spoken = [system + draw(length) for length in histories]
        """All that was said by now, by conversation."""
        questions = [[draw(load.new_tokens) for _ in range(load.turns)] for _ in self.spoken]
        self._order = random.permutation(np.repeat(np.arange(load.count), load.turns)).tolist()
        self._questions = [
            list(zip(asked, lengths(load.answer_tokens, load.turns), strict=True))
            for asked in questions
        ]
        """What is asked, and how many tokens the answer has; the next question is the last."""
        self._at_once, self._seed = load.at_once, seed
        self._open: dict[str, Turn] = {}
        self.turns: list[Turn] = []
        """All that were asked, in this order."""

    @property
    def is_over(self) -> bool:
        """Whether everything was asked and answered."""
        return not self._order and not self._open

    def ask(self, now: float) -> Turn | None:
        """Return a question to send at this time, in seconds; None as long as users must wait."""
        if len(self._open) == self._at_once:
            return None
        answered = {turn.conversation for turn in self._open.values()}
        place = next((i for i, whose in enumerate(self._order) if whose not in answered), None)
        if place is None:
            return None
        whose, request_id = self._order.pop(place), f"turn{self._seed}-{len(self.turns)}"
        question, answer_tokens = self._questions[whose].pop()
        self.spoken[whose] += question
        prompt = [*self.spoken[whose]]
        turn = Turn(request_id, whose, prompt, len(prompt), answer_tokens, now)
        self._open[turn.request_id] = turn
        self.turns.append(turn)
        return turn

    def take(self, tokens: Mapping[str, Sequence[int]], now: float) -> None:
        """Take in the tokens that came at this time, by request."""
        for request_id, new in tokens.items():
            turn = self._open[request_id]
            turn.arrivals.append(now)
            turn.answer += new
            if len(turn.answer) == turn.answer_tokens:
                self.spoken[turn.conversation] += turn.answer
                turn.prompt = []
                del self._open[request_id]

    # -- what users waited, in seconds ----------------------------------------------------------

    @property
    def seconds(self) -> float:
        """From the first question to the last token."""
        return max(turn.arrivals[-1] for turn in self.turns) - self.turns[0].asked

    @property
    def waits(self) -> list[float]:
        """From every question to its first token."""
        return [turn.arrivals[0] - turn.asked for turn in self.turns]

    @property
    def between_tokens(self) -> list[float]:
        """From every token to the next one of the same answer."""
        return [
            after - before
            for turn in self.turns
            for before, after in zip(turn.arrivals, turn.arrivals[1:], strict=False)
        ]
