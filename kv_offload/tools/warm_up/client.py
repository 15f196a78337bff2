"""Sends prompts to a server's OpenAI API, several at a time."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kv_offload.errors import ConfigError, ServerError
from kv_offload.tools.status.read import short
from kv_offload.tools.warm_up.prompts import Prompt

TIMEOUT_SECONDS = 600.0
"""For each silence of the server: a long prompt waits behind others, and is computed."""
MAX_SHOWN = 300
"""Characters of a server's answer that a message shows."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM's server may have its key from, and this client has it from."""
NOT_SENT = frozenset({"max_completion_tokens", "min_tokens", "n", "stream_options"})
"""Keys that recorded requests may have and one token leaves no sense: vLLM would compute more, or
refuse them."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the server answered: tokens of the prompt; or else an error."""

    prompt: Prompt
    tokens: int = 0
    error: str = ""


class Client:
    """Talks to the server at `base`, a URL without `/v1`."""

    def __init__(self, base: str) -> None:
        """Raises `ConfigError` for a key that no request can have; does not show it."""
        self._base = base
        key = os.environ.get(KEY_VARIABLE, "")
        for place, letter in enumerate(key, 1):
            if letter > "\xff" or not letter.isprintable():
                raise ConfigError(
                    f"environment: {KEY_VARIABLE}: character {place} of {len(key)} is "
                    f"{letter!a}, which a request cannot have: set it to the key alone"
                )
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def model(self) -> str:
        """Return the name of the first model. Raises `ServerError`."""
        url = f"{self._base}/v1/models"
        try:
            return str(self._ask(url)["data"][0]["id"])
        except urllib.error.HTTPError as error:
            error.close()
            remedy = f"put the server's key into {KEY_VARIABLE}" if error.code == 401 else "see why"
            raise ServerError(f"{url} answers with HTTP status {error.code}: {remedy}") from error
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"{url} is not answered as by vLLM's API server: {short(error)}. Check the address"
            ) from error

    def send(
        self, prompts: Sequence[Prompt], more: Mapping[str, Any], at_once: int
    ) -> Iterator[Result]:
        """Send each prompt for one token, and yield the results as they come.

        `more` is added to bodies; what a line of the file has itself counts. Who stops early, as
        with Ctrl-C, waits for no answer.
        """
        waiting = deque(prompts)
        results: SimpleQueue[Result] = SimpleQueue()

        def work() -> None:
            while True:
                try:
                    prompt = waiting.popleft()
                except IndexError:
                    return
                results.put(self._send(prompt, more))

        for _ in range(min(at_once, len(prompts))):
            threading.Thread(target=work, name="kv-offload-warm-up", daemon=True).start()
        try:
            for _ in prompts:
                yield results.get()
        finally:
            waiting.clear()

    def _send(self, prompt: Prompt, more: Mapping[str, Any]) -> Result:
        wanted = {key: value for key, value in prompt.body.items() if key not in NOT_SENT}
        body = {**more, **wanted, "max_tokens": 1, "stream": False}
        try:
            answer = self._ask(f"{self._base}/v1/{prompt.endpoint}", body)
            return Result(prompt, int(answer["usage"]["prompt_tokens"]))
        except urllib.error.HTTPError as error:
            why = short(_read_error(error), MAX_SHOWN)
            return Result(prompt, error=f"HTTP status {error.code}: {why}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the other prompts go on
            return Result(prompt, error=f"{type(error).__name__}: {short(error)}")

    def _ask(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        opener = urllib.request.build_opener()
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            return json.loads(response.read())


def _read_error(error: urllib.error.HTTPError) -> str:
    """Return the beginning of what a server says of an error, as far as it comes."""
    try:
        with error:
            return error.read(MAX_SHOWN).decode(errors="replace")
    except (OSError, http.client.HTTPException) as broken:
        return f"{error.reason}; the rest does not come: {broken}"
