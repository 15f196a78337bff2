"""An OpenAI-compatible server with the plugin, as the README starts it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kv_offload.metrics import PREFIX
from kv_offload.tools.main import main
from tests.support.server import (
    BLOCK_TOKENS,
    SLOT_BYTES,
    ask,
    get,
    hit,
    metric,
    serving,
    wait_for,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server")) as url:
        yield url


def test_a_server_that_has_served_nobody_tells_its_pool(server: str) -> None:
    wait_for(server, f"{PREFIX}pool_slots", 2048)
    wait_for(server, f"{PREFIX}slots", 2048)
    assert metric(server, f"{PREFIX}slot_bytes") == SLOT_BYTES


def test_a_prompt_is_served_again_from_host_memory(server: str) -> None:
    counters = (
        "vllm:external_prefix_cache_hits_total",
        f"{PREFIX}hit_tokens_total",
        f"{PREFIX}loaded_bytes_total",
        f"{PREFIX}lookup_tokens_total",
        f"{PREFIX}load_bytes_sum",
        f"{PREFIX}load_seconds_count",
        f"{PREFIX}request_hit_tokens_sum",
    )
    before = [metric(server, name) for name in counters]
    first, again = hit(server, seed=9)
    assert again == first
    assert len(first.split()) >= 8  # special tokens have no text
    grown = [metric(server, name) - old for name, old in zip(counters, before, strict=True)]
    tokens, copied = 9 * 32, 9 * SLOT_BYTES
    assert grown == [tokens, tokens, copied, 2 * 300, copied, 1, tokens]
    assert metric(server, f"{PREFIX}slots_in_use") >= 9


def test_cached_tokens_of_an_answer_count_hits_of_either_cache(server: str) -> None:
    """What a client reads does not tell where its tokens came from; the metrics do."""
    name = f"{PREFIX}hit_tokens_total"
    hit(server, seed=12)
    loaded = metric(server, name)
    of_gpu = ask(server, seed=12)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert metric(server, name) == loaded
    get(server + "/reset_prefix_cache", {})
    of_host = ask(server, seed=12)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert metric(server, name) == loaded + of_host
    assert of_gpu == of_host == 300 // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_reset_of_an_idle_server_shows_in_its_gauges(server: str) -> None:
    hit(server, seed=10)
    assert metric(server, f"{PREFIX}slots_in_use") > 0
    get(server + "/reset_prefix_cache?reset_external=true", {})
    wait_for(server, f"{PREFIX}slots_in_use", 0)


def test_kv_offload_status_shows_the_server(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hit(server, seed=11)
    assert main(["status", server, "--once"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"kv-offload at {server}/metrics: small, engine 0\n")
    hits = f"{metric(server, f'{PREFIX}hit_tokens_total'):,.0f}"
    assert re.search(rf"loaded: the hit rate +{hits} +\d+\.\d %", page)
    assert re.search(r"in use: [\d.]+ KiB of 64 MiB on one rank +\d+ slots", page)
    assert re.search(r"a load takes [\d.]+ ms, 99 %:", page)
    assert "none since the start" in page
