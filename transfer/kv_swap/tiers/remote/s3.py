"""A client of S3 and compatible servers, through obstore, with credentials from the environment.

obstore uses `AWS_ACCESS_KEY_ID` and related variables, or the machine's role, and
`AWS_ENDPOINT_URL`. A server's answer to a wrong credential repeats parts of it, so errors here
contain only the answer's code.

An object appears only once it has been written completely. If two engines write it concurrently,
both write the same content. An object's age counts from its writing: reads do not renew it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from kv_swap.errors import TierError
from kv_swap.tiers.remote.client import PREFIX, Fate, Parts, RemoteClient, memory_of
from kv_swap.tiers.remote.sweep import Entry, Sweeper
from kv_swap.tiers.workers import in_parallel

CONNECT_SECONDS = 2
REQUEST_SECONDS = 10
"""Maximum seconds for a request and its answer; after that the request fails."""

RETRIES = 2
"""Retries after an answer such as 503, all within `REQUEST_SECONDS`."""

ASKING_THREADS = 32
"""An answer takes 10 to 50 ms."""

NOT_INSTALLED = "obstore is not installed in this Python: pip install 'kv-offload[s3]'"

_OBJECT = re.compile(rf"{PREFIX}[0-9a-f]{{32}}/[0-9a-f]{{32}}")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"\b(?:status|Status)\D{0,20}([1-5][0-9]{2})\b")

_REMEDIES = {
    "PermissionDeniedError": "the credentials may not do this: look at the bucket's policy",
    "UnauthenticatedError": "the server does not know the credentials of this process",
    "FileNotFoundError": "there is no such bucket",
    "GenericError": "look at the server, at AWS_ENDPOINT_URL, AWS_REGION, and the network to it",
}


def is_installed() -> bool:
    """Return whether this Python has obstore, without importing it."""
    return importlib.util.find_spec("obstore") is not None


class S3Client(RemoteClient):
    """Objects below a URL, `s3://BUCKET/PREFIX`, which take at most `max_bytes` together.

    0 means no limit: a rule of the bucket must remove objects.
    """

    threads = 16
    probes = ASKING_THREADS

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url = url
        self._sweeper = Sweeper(self, max_bytes) if max_bytes else None
        self._opening = threading.Lock()
        self._opened: Any = None
        self._closed = False

    def connect(self) -> None:
        self._has("connect")

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return in_parallel(self._has, keys, ASKING_THREADS)

    def put(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        return [self._write(key, own) for key, own in zip(keys, parts, strict=True)]

    def get(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        return [self._read(key, own) for key, own in zip(keys, parts, strict=True)]

    def remove(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        import obstore

        with self._asking("remove objects"), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store(), list(keys))

    def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.close()

    def entries(self) -> Iterator[Entry]:
        """See `Sweepable`."""
        import obstore

        with self._asking("list objects"):
            for page in obstore.list(self._store(), PREFIX):
                if self._closed:
                    return
                for found in page:
                    if _OBJECT.fullmatch(found["path"]):
                        used = found["last_modified"].timestamp()
                        yield Entry(found["path"], found["size"], used)

    def _has(self, key: str) -> bool:
        import obstore

        with self._asking("ask for objects"):
            try:
                obstore.head(self._store(), key)
            except FileNotFoundError:
                return False
        return True

    def _write(self, key: str, parts: Parts) -> Fate | TierError:
        import obstore

        body = b"".join(memory_of(parts))
        try:
            with self._asking("write objects"):
                obstore.put(self._store(), key, body, use_multipart=False)
        except _RefusedError as error:
            return TierError(str(error))
        if self._sweeper is not None:
            self._sweeper.wrote(len(body))
        return Fate.DONE

    def _read(self, key: str, parts: Parts) -> Fate | TierError:
        import obstore

        try:
            with self._asking("read objects"):
                try:
                    found = obstore.get(self._store(), key)
                    if found.meta["size"] != sum(size for _, size in parts):
                        return Fate.OTHER
                    body = memoryview(found.bytes())
                except FileNotFoundError:
                    return Fate.MISSING
        except _RefusedError as error:
            return TierError(str(error))
        offset = 0
        for memory in memory_of(parts):
            memory[:] = body[offset : offset + len(memory)]
            offset += len(memory)
        return Fate.DONE

    def _store(self) -> Any:
        """Return obstore's client; the first call creates it."""
        with self._opening:
            if self._closed:
                raise TierError(f"the client of {self._url} is closed")
            if self._opened is None:
                try:
                    from obstore.store import S3Store
                except ImportError as error:
                    raise TierError(NOT_INSTALLED) from error
                endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
                self._opened = S3Store.from_url(
                    self._url,
                    client_options={
                        # Options override the environment. A user who names an HTTP endpoint wants
                        # it, and a signature does not reveal the secret.
                        "allow_http": endpoint.startswith("http://"),
                        "timeout": timedelta(seconds=REQUEST_SECONDS),
                        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    },
                    retry_config={
                        "max_retries": RETRIES,
                        "retry_timeout": timedelta(seconds=REQUEST_SECONDS),
                    },
                )
            return self._opened

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn obstore's errors into a `TierError` without any part of a credential."""
        try:
            yield
        except TierError:
            raise
        except Exception as error:  # noqa: BLE001 - errors of obstore, and of Rust below it
            name, text = type(error).__name__, str(error)
            codes = [*_STATUS.findall(text)[:1], *_CODE.findall(text)[:1]]
            answer = f" ({' '.join(codes)})" if codes else ""
            kind = (
                _RefusedError
                if name in ("PermissionDeniedError", "UnauthenticatedError")
                else TierError
            )
            remedy = _REMEDIES.get(name, _REMEDIES["GenericError"])
            # Not `from error`: a log of the cause would contain the server's text.
            raise kind(f"cannot {what} at {self._url}: {name}{answer}: {remedy}") from None


class _RefusedError(TierError):
    """The server answered with a refusal of this object; other objects may succeed."""
