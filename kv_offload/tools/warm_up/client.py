"""Sends prompts to a server's OpenAI API, several at a time."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from kv_offload.errors import ServerError
from kv_offload.tools.warm_up.prompts import Prompt

TIMEOUT_SECONDS = 600.0
"""For each silence of the server: a long prompt waits behind others, and is computed."""
MAX_SHOWN = 300
"""Characters of a server's answer that a message shows."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM's server may have its key from, and this client has it from."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the server answered: tokens of the prompt; or else an error."""

    prompt: Prompt
    tokens: int = 0
    error: str = ""


class Client:
    """Talks to the server at `base`, a URL without `/v1`."""

    def __init__(self, base: str) -> None:
        self._base = base
        key = os.environ.get(KEY_VARIABLE)
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
                f"{url} is not answered as by vLLM's API server: {error}. Check the address"
            ) from error

    def send(
        self, prompts: Sequence[Prompt], more: Mapping[str, Any], at_once: int
    ) -> Iterator[Result]:
        """Send each prompt for one token, and yield the results as they come.

        `more` is added to bodies; what a line of the file has itself counts.
        """
        pool = ThreadPoolExecutor(at_once)
        try:
            sent = [pool.submit(self._send, prompt, more) for prompt in prompts]
            for done in as_completed(sent):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, prompt: Prompt, more: Mapping[str, Any]) -> Result:
        body = {**more, **prompt.body, "max_tokens": 1, "stream": False}
        try:
            answer = self._ask(f"{self._base}/v1/{prompt.endpoint}", body)
            return Result(prompt, int(answer["usage"]["prompt_tokens"]))
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(MAX_SHOWN).decode(errors="replace")
            return Result(prompt, error=f"HTTP status {error.code}: {text}")
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            return Result(prompt, error=f"{type(error).__name__}: {error}")

    def _ask(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        opener = urllib.request.build_opener()
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            return json.loads(response.read())
