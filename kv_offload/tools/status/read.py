"""Reads the metrics page of a running vLLM server."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kv_offload.config.sizes import format_size
from kv_offload.errors import ServerError
from kv_offload.metrics import PREFIX
from kv_offload.tools.output import printable

ENGINE_PREFIX = "vllm:"
OF_VLLM = "vllm:prefix_cache_"
"""Prefix of the metrics of vLLM's own cache, which are read in addition to ours."""
MAX_VALUE = 2.0**63
"""Upper bound for all valid samples; none is negative."""
TIMEOUT_SECONDS = 10.0
"""Timeout for connecting, and for each of the server's pauses."""
ANSWER_SECONDS = 30.0
"""Limit for the whole answer, from connecting to its last byte."""
MAX_PAGE_BYTES = 16 << 20
"""Maximum size of an answer. A page has about 100 KiB per engine."""
MAX_ENGINES = 256
"""Maximum number of engines on a page. `MAX_PAGE_BYTES` has room for 160 with all metrics."""

NO_ENGINE = (
    "{address} has no metrics of vLLM: it is another server, or vLLM was started with "
    "--disable-log-stats; give the address of vLLM's API server, started without that argument"
)
NO_PLUGIN = (
    "{address} is a vLLM server without kv-offload: a line of its log begins with "
    "`kv-offload: not in use` and says why; if there is none, kv-offload is not installed in the "
    "server's Python, or VLLM_PLUGINS leaves it out. Start the server with what "
    "`kv-offload config` prints"
)


@dataclass(frozen=True)
class Reading:
    """The samples on a page at one moment."""

    taken: float
    """Time of the reading, in seconds of a monotonic clock."""
    engines: tuple[str, ...]
    """The server's engines (data-parallel replicas): values of the label `engine`."""
    model: str
    values: Mapping[str, Mapping[str, float]]
    """Values by engine, then by their name on the page."""
    buckets: Mapping[tuple[str, str], Mapping[float, float]]
    """Histograms by name (without `_bucket`) and engine: cumulative counts by upper bound."""


def metrics_url(address: str) -> str:
    """Return the metrics URL for `host:port` or a URL. Raises `ServerError` for other text."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        known = known and "@" not in parts.netloc and url.isascii()
        _ = parts.port
        (parts.hostname or "").encode("idna")  # raises for an invalid host name
        known = known and not address.isdecimal() and not os.path.isfile(address)
    except ValueError:
        known = False
    if not known:
        raise ServerError(
            f"{short(address)!r} is not the address of a server; write localhost:8000 or "
            "http://localhost:8000: a host in ASCII letters, no password, a port of at most 65535"
        )
    path = parts.path.rstrip("/").removesuffix("/metrics")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"{path}/metrics", "", ""))


def read(url: str) -> Reading:
    """Fetch and parse a metrics page.

    Blocks for at most `ANSWER_SECONDS`. Only the main thread may call it. Raises `ServerError` with
    the likely reason if there is no metrics page of kv-offload.
    """
    try:
        opener = urllib.request.build_opener()  # the shared one keeps the first call's proxies
        with _limited(ANSWER_SECONDS), opener.open(url, timeout=TIMEOUT_SECONDS) as response:
            answer = _read_answer(response)
            led_to = response.url
    except urllib.error.HTTPError as error:
        error.close()
        raise ServerError(
            f"{url} answers with HTTP status {error.code} ({short(error.reason)})"
            f"{_describe_proxy(url)}; vLLM's API server has its metrics at /metrics: check the "
            "address, and any proxy in front of it"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a bad redirect
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServerError(
            f"{url} cannot be reached{_describe_proxy(url)}: {short(why)}; check the address "
            "(http or https, the host, the port, by default 8000), and that the server has started "
            "(it answers once the model is loaded)"
        ) from error
    if len(answer) > MAX_PAGE_BYTES:
        raise ServerError(
            f"{url} answers with more than {format_size(MAX_PAGE_BYTES)}, the limit for a page of "
            "metrics: it is not a page of vLLM; give the address of vLLM's API server"
        )
    address = url if led_to == url else f"{url}, which leads to {short(led_to)},"
    return parse(answer.decode(errors="replace"), address)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block after `seconds`.

    A socket timeout limits only single pauses, so a server that sends one byte at a time could keep
    the caller waiting forever: in the status line, headers, a redirect or a proxy's answer.
    """

    def stop(*_: object) -> None:
        raise TimeoutError(f"the answer has not ended in {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    # Repeat the signal: Python drops an exception that is raised inside a destructor.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _read_answer(response: http.client.HTTPResponse) -> bytes:
    """Return the whole answer; if it is too large, more than `MAX_PAGE_BYTES` of its beginning.

    Raises `OSError` or `HTTPException` for a truncated answer: part of a page, or of a number,
    could pass for the whole.
    """
    answer = response.read(MAX_PAGE_BYTES + 1)
    if response.length and len(answer) <= MAX_PAGE_BYTES:  # `length` is what remains unread
        raise http.client.IncompleteRead(answer, response.length)
    return answer


def _describe_proxy(url: str) -> str:
    """Describe the proxy from the environment that was asked, not the server; empty if none was."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or urllib.request.proxy_bypass(parts.netloc):
        return ""
    host = proxy.rpartition("@")[2]  # without a user and password
    return (
        f" through {short(host)}, which {parts.scheme}_proxy names (no_proxy={parts.hostname} "
        "asks the server itself)"
    )


def parse(page: str, address: str) -> Reading:
    """Parse a page in Prometheus's text format. Raises `ServerError` for any other format."""
    values: dict[str, dict[str, float]] = {}
    buckets: dict[tuple[str, str], dict[float, float]] = {}
    models: set[str] = set()
    is_vllm = False
    try:
        for family in text_string_to_metric_families(page):
            is_vllm = is_vllm or family.name.startswith(ENGINE_PREFIX)
            for sample in family.samples if family.name.startswith((PREFIX, OF_VLLM)) else ():
                if not 0 <= sample.value < MAX_VALUE:
                    raise ValueError(f"{sample.name} is {sample.value}")  # noqa: TRY301
                engine = short(sample.labels.get("engine", ""))
                if sample.name.startswith(PREFIX):
                    models.add(short(sample.labels.get("model_name", "")))
                if "le" in sample.labels:
                    name = sample.name.removesuffix("_bucket")
                    bounds = buckets.setdefault((name, engine), {})
                    bounds[float(sample.labels["le"])] = sample.value
                else:
                    by_name = values.setdefault(engine, {})
                    by_name[sample.name] = by_name.get(sample.name, 0.0) + sample.value
    except (ValueError, LookupError) as error:  # the parser raises either
        raise ServerError(
            f"{address} is not a page of metrics ({short(error)}); give the address of vLLM's API "
            "server"
        ) from error
    if not is_vllm:
        raise ServerError(NO_ENGINE.format(address=address))
    engines = [
        engine for engine, names in values.items() if any(name.startswith(PREFIX) for name in names)
    ]
    if not engines:
        raise ServerError(NO_PLUGIN.format(address=address))
    if len(engines) > MAX_ENGINES:
        raise ServerError(
            f"{address} has metrics of {len(engines):,} engines, and a server has {MAX_ENGINES} at "
            "most: give the address of one API server of vLLM, not of what gathers many"
        )
    engines.sort(key=_by_number)
    return Reading(time.monotonic(), tuple(engines), ", ".join(sorted(models)), values, buckets)


def short(what: object, letters: int = 120) -> str:
    """Return another program's text as one short, printable line."""
    line = printable(" ".join(str(what).split()))
    return line if len(line) <= letters else f"{line[: letters - 3]}..."


def _by_number(engine: str) -> tuple[int, str]:
    return int(engine) if engine.isdecimal() else -1, engine
