"""A subscriber to vLLM's publisher follows what a real engine has in host memory."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.engine.harness import (
    BLOCK_TOKENS,
    PATIENCE_SECONDS,
    Engine,
    engine,
    plain_answers,
)
from tests.support.inputs import BLOCK_BYTES, random_tokens
from tests.support.patience import be_patient
from tests.support.router import Router

PAGE = Path(__file__).parents[2] / "docs/use/events.md"
SLOTS = 20
PROMPTS = [random_tokens(200, seed) for seed in range(4)]


class Subscriber:
    """Reads what vLLM publishes at an endpoint, as a router does."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self._socket: Any = None
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next = 0
        self.cleared = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        self.routers = [Router(BLOCK_TOKENS, clears_all=clears) for clears in (True, False)]

    @contextlib.contextmanager
    def connected(self) -> Iterator[Callable[[], None]]:
        """Connect to an engine; the returned function waits until the connection is up."""
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        connections = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(self.endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")

        def wait() -> None:
            assert connections.poll(PATIENCE_SECONDS * 1000)
            time.sleep(0.5)  # until the subscription arrives

        try:
            yield wait
        finally:
            self._socket.disable_monitor()
            connections.close(linger=0)
            self._socket.close(linger=0)

    def read(self, timeout_ms: int) -> bool:
        """Apply one batch; return whether there was one."""
        if not self._socket.poll(timeout_ms):
            return False
        _, number, payload = self._socket.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if sequence == 0 and self._next:
            self.begin_anew()  # another engine
        else:
            assert sequence == self._next, "a batch is missing"
        self._next = sequence + 1
        batch = self._decode(payload)
        self.cleared += sum(type(event).__name__ == "AllBlocksCleared" for event in batch.events)
        for router in self.routers:
            router.hear(batch.events)
        return True

    def known_when(self, expected: set[Any]) -> list[set[Any]]:
        """Read until both routers have these blocks, or patience ends; return their blocks."""
        until = time.monotonic() + PATIENCE_SECONDS
        while any(r.in_memory != expected for r in self.routers) and time.monotonic() < until:
            self.read(100)
        while self.read(200):
            pass  # nothing more may arrive and make it wrong again
        return [router.in_memory for router in self.routers]


@contextlib.contextmanager
def script_of_page(endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """Run the subscriber from the documentation."""
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-c", script, endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            with zmq.Context.instance().socket(zmq.XPUB) as publisher:
                publisher.bind(endpoint)
                assert publisher.poll(PATIENCE_SECONDS * 1000), "it does not subscribe"
            yield running
        finally:
            running.kill()


def counted_by(script: subprocess.Popen[str], blocks: int) -> bool:
    """Read the script's output until it has counted this many blocks."""
    assert script.stdout is not None
    return f"{blocks} blocks in host memory\n" in script.stdout


@contextlib.contextmanager
def published(models: Path, subscriber: Subscriber, **keys: Any) -> Iterator[Engine]:
    events = KVEventsConfig(True, "zmq", subscriber.endpoint)
    plugin = {"cpu_bytes": f"{SLOTS * BLOCK_BYTES}B", **keys}
    with (
        # A pool of a few kilobytes, which an engine would refuse.
        mock.patch("kv_offload.config.checks.SMALLEST_BYTES", 0),
        subscriber.connected() as wait,
        engine(models, "qwen3", plugin, kv_events_config=events) as running,
    ):
        wait()
        yield running


def check(subscriber: Subscriber, running: Engine) -> int:
    """Compare the routers' blocks with those in host memory, once the engine is idle."""
    running.settle()
    in_memory = {
        (0, maybe_convert_block_hash(key)) for key in running.offload.manager.readable_slots()
    }
    for known in subscriber.known_when(in_memory):
        assert known == in_memory
    return len(in_memory)


def test_a_router_knows_what_is_in_host_memory(model_folder, tmp_path):
    subscriber = Subscriber(tmp_path)
    with script_of_page(subscriber.endpoint) as script:
        expected = plain_answers(model_folder, PROMPTS, one_by_one=True)
        with published(model_folder, subscriber) as running:
            assert running.offload.manager.num_slots == SLOTS
            assert running.generate_each(PROMPTS[:2]) == expected[:2]
            assert check(subscriber, running) == 12
            assert counted_by(script, 12)
            assert running.generate_each(PROMPTS) == expected
            assert running.offload.manager.evictions > 0
            assert check(subscriber, running) == SLOTS
            assert subscriber.cleared == 0
            # The engine's own cache is cleared, host memory is not.
            assert running.reload(PROMPTS[3:]) == expected[3:]
            assert running.reload(PROMPTS[3:], corrupted=True) != expected[3:]
            assert check(subscriber, running) == SLOTS
            assert subscriber.cleared == 2
            # Only host memory is emptied.
            running.offload.resets.reset_cache()
            assert check(subscriber, running) == 0
            assert subscriber.cleared == 2
            assert running.generate_each(PROMPTS[:1]) == expected[:1]
            assert running.llm.reset_prefix_cache(reset_connector=True)
            assert check(subscriber, running) == 0
            assert running.generate_each(PROMPTS[:1]) == expected[:1]
            assert check(subscriber, running) == 6
        with published(model_folder, subscriber) as another:
            assert another.generate_each(PROMPTS[1:3]) == expected[1:3]
            assert check(subscriber, another) == 12


def test_a_router_knows_what_is_on_a_disk_also_after_a_restart(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    be_patient(monkeypatch)
    subscriber = Subscriber(tmp_path)
    disk = {"path": str(tmp_path / "disk"), "bytes": f"{4 * SLOTS * BLOCK_BYTES}B"}
    more = {"disk": disk, "eviction_policy": "lru", "load_or_recompute": "always_load"}
    expected = plain_answers(model_folder, PROMPTS, one_by_one=True)

    def check_disk(running: Engine) -> set[Any]:
        check(subscriber, running)
        manager = running.offload.tiers.tiers["disk"].manager
        assert manager is not None
        below = {(0, maybe_convert_block_hash(key)) for key in manager.readable_slots()}
        assert all(router.on_disk == below for router in subscriber.routers)
        return below

    with published(model_folder, subscriber, **more) as running:
        assert running.generate_each(PROMPTS[:3]) == expected[:3]
        running.settle()  # otherwise a block may be evicted before a busy disk has it
        assert running.generate_each(PROMPTS[3:]) == expected[3:]
        left = check_disk(running)
        assert len(left) == 4 * 6 > SLOTS, "what host memory has evicted, too"
        assert not any(router.without_tokens for router in subscriber.routers)
    with published(model_folder, subscriber, **more) as another:
        assert another.generate_each(PROMPTS[:1]) == expected[:1]
        assert check_disk(another) >= left
        assert all(len(left - router.without_tokens) == 6 for router in subscriber.routers)
