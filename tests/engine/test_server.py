"""An OpenAI-compatible server with the plugin; `test_readme.py` starts one as the README does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash

from kv_offload.metrics import PREFIX
from kv_offload.tools.main import main
from tests.engine.test_kv_events import Subscriber
from tests.support.collector import ENVIRONMENT as TO_COLLECTOR
from tests.support.collector import Collector
from tests.support.inputs import BLOCK_BYTES, BLOCK_TOKENS
from tests.support.server import (
    FOR_TRIALS,
    PROMPT_TOKENS,
    ask,
    get,
    hit,
    metric,
    serving,
    wait_for,
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Subscriber:
    return Subscriber(tmp_path_factory.mktemp("events"))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector, router: Subscriber
) -> Iterator[str]:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    same_hashes = {"PYTHONHASHSEED": "0"}
    with (
        pytest.MonkeyPatch.context() as patch,
        router.connected() as wait,
        serving(
            tmp_path_factory.mktemp("server"),
            words=(
                *("--otlp-traces-endpoint", collector.url),
                *("--kv-events-config", json.dumps(events)),
            ),
            environment={**FOR_TRIALS, **TO_COLLECTOR, **same_hashes},
        ) as url,
    ):
        for name, value in same_hashes.items():
            patch.setenv(name, value)
        init_none_hash(get_hash_fn_by_name("sha256"))
        wait()
        yield url


def test_a_prompt_is_served_again_from_host_memory(server):
    """Its metrics, and what a client reads, to whom both caches look the same."""
    wait_for(server, f"{PREFIX}pool_slots", 2048)  # before any request
    wait_for(server, f"{PREFIX}slots", 2048)
    assert metric(server, f"{PREFIX}slot_bytes") == BLOCK_BYTES
    counters = {
        "vllm:external_prefix_cache_hits_total": 288,
        f"{PREFIX}hit_tokens_total": 288,
        f"{PREFIX}loaded_bytes_total": 9 * BLOCK_BYTES,
        f"{PREFIX}lookup_tokens_total": 2 * 300,
        f"{PREFIX}load_bytes_sum": 9 * BLOCK_BYTES,
        f"{PREFIX}load_seconds_count": 1,
        f"{PREFIX}request_hit_tokens_sum": 288,
    }
    before = {name: metric(server, name) for name in counters}
    first, again = hit(server, seed=9)
    assert again == first
    assert len(first.split()) >= 8  # special tokens have no text
    assert {name: metric(server, name) - old for name, old in before.items()} == counters
    for of_host in (0, 288):
        loaded = metric(server, f"{PREFIX}hit_tokens_total")
        usage = ask(server, seed=9)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 288
        assert metric(server, f"{PREFIX}hit_tokens_total") == loaded + of_host
        get(server + "/reset_prefix_cache", {})


def test_a_reset_of_an_idle_server_shows_in_its_gauges(server):
    hit(server, seed=10)
    assert metric(server, f"{PREFIX}slots_in_use") > 0
    get(server + "/reset_prefix_cache?reset_external=true", {})
    wait_for(server, f"{PREFIX}slots_in_use", 0)


def test_a_client_that_traces_sees_what_host_memory_brought(server, collector):
    hit(server, seed=12)
    get(server + "/reset_prefix_cache", {})
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    ask(server, seed=12, headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})
    spans = collector.of_trace(trace_id, 3)
    of = {span.name: span for span in spans}
    assert of.keys() == {"llm_request", "kv_offload.lookup", "kv_offload.load"}
    assert {span.parent_id for span in spans} == {parent_id}
    assert of["kv_offload.lookup"].attributes["kv_offload.hit_tokens"] == 288
    load = of["kv_offload.load"]
    assert load.attributes["kv_offload.slots"] == 9
    assert load.attributes["kv_offload.outcome"] == "ok"
    whole = of["llm_request"]
    assert whole.start_ns <= of["kv_offload.lookup"].start_ns <= load.end_ns <= whole.end_ns


def test_kv_offload_status_shows_the_server(server, capsys):
    hit(server, seed=11)
    assert main(["status", server, "--once"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"kv-offload at {server}/metrics: small, engine 0\n")
    hits = f"{metric(server, f'{PREFIX}hit_tokens_total'):,.0f}"
    assert re.search(rf"loaded: the hit rate +{hits} +\d+\.\d %", page)
    assert re.search(r"Host memory, 64 MiB a rank +[\d.]+ KiB +\d+\.\d %", page)
    assert re.search(r"time of a load: median, 99 % +[\d.]+ ms +[\d.]+ ms", page)
    assert "none since the start" in page


def test_hints_of_a_router_are_followed_and_its_index_knows_what_is_in_host_memory(server, router):
    get(server + "/reset_prefix_cache?reset_external=true", {})
    wait_for(server, f"{PREFIX}slots_in_use", 0)
    for known in router.known_when(set()):
        assert not known
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    expected = ask(server, seed=20)["choices"][0]["text"]
    wait_for(server, f"{PREFIX}slots_in_use", blocks)

    def action(kind: str, **payload: object) -> dict[str, object]:
        return {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}

    def hinted(*actions: object, seed: int) -> tuple[str, float, float]:
        """Return the answer, and how many actions were followed and ignored."""
        names = [f"{PREFIX}{name}_kv_hints_total" for name in ("followed", "ignored")]
        before = [metric(server, name) for name in names]
        hint = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
        answer = ask(server, seed=seed, kv_transfer_params={"kv_hint": hint})
        followed, ignored = (metric(server, n) - b for n, b in zip(names, before, strict=True))
        return answer["choices"][0]["text"], followed, ignored

    assert metric(server, f"{PREFIX}retained_slots") == 0
    get(server + "/reset_prefix_cache", {})
    keep = action("kv.retain", ttl_seconds=600)
    assert hinted(keep, action("kv.fetch"), seed=20) == (expected, 1, 1)
    wait_for(server, f"{PREFIX}retained_slots", blocks)
    # With `kv.evict` a request is answered but not stored; malformed hints affect only their own
    # request.
    stored = metric(server, "vllm:host_kv_cache_stored_bytes_total")
    assert hinted(action("kv.evict"), seed=21)[1:] == (1, 0)
    assert metric(server, "vllm:host_kv_cache_stored_bytes_total") == stored
    assert hinted(action("kv.retain", ttl_seconds=-1), "?", seed=22)[1:] == (0, 2)
    wait_for(server, f"{PREFIX}slots_in_use", 2 * blocks)
    slots = metric(server, f"{PREFIX}slots_in_use")
    in_memory = [one.in_memory for one in router.routers]
    while any(len(known) < slots for known in in_memory):
        assert router.read(60_000), "a block that is in host memory was not announced"
    assert in_memory[0] == in_memory[1]
    assert len(in_memory[0]) == slots
    get(server + "/reset_prefix_cache?reset_external=true", {})
    for known in router.known_when(set()):
        assert not known
