"""Conversations with a server: turns that begin with all that was said before."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.server import get
from tests.support.small_models import VOCABULARY

CLIENTS = 3
OPEN_PER_CLIENT = 24
"""Together more tokens than the engine's own cache has room for."""

INSTRUCTIONS, MESSAGE, ANSWER, LONGEST = 128, (60, 140), 12, 900
"""In tokens. Instructions begin every conversation; one that is longer than `LONGEST` ends."""


def talk(server: str, seconds: float) -> None:
    """Have conversations for this long; raise what a request raised."""
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(CLIENTS) as clients:
        for client in [clients.submit(_client, server, n, deadline) for n in range(CLIENTS)]:
            client.result()


def _client(server: str, number: int, deadline: float) -> None:
    """Take turns, one after the other, each in one of the open conversations."""
    instructions = _words(random.Random(0), INSTRUCTIONS)
    rng = random.Random(1 + number)
    conversations = [list(instructions) for _ in range(OPEN_PER_CLIENT)]
    while time.monotonic() < deadline:
        chosen = rng.randrange(OPEN_PER_CLIENT)
        said = conversations[chosen]
        said += _words(rng, rng.randint(*MESSAGE))
        said += _answer(server, said)
        if len(said) > LONGEST - MESSAGE[1]:
            conversations[chosen] = list(instructions)


def _words(rng: random.Random, count: int) -> list[str]:
    """Return words of the small model's vocabulary, one token each."""
    return [f"t{rng.randrange(3, VOCABULARY)}" for _ in range(count)]


def _answer(server: str, said: list[str]) -> list[str]:
    body: dict[str, Any] = {
        "model": "small",
        "prompt": " ".join(said),
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer: str = json.loads(get(server + "/v1/completions", body))["choices"][0]["text"]
    return answer.split()
