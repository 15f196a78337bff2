"""The arena under CUDA: page-locked in the background during copies and captures, and shared."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.engine import SwapJob
from kv_swap.errors import JobError
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena
from kv_swap.memory.numa import device_node

from tests.gpu.caches import (
    KIB,
    LOAD,
    MIB,
    STORE,
    cupy,
    finish,
    ids,
    make_cache,
    random_pairs,
    randomize,
    run_script,
    torch,
)

DEVICE = torch.device("cuda", 0)
REGISTERED, UNREGISTERED = 1, 0
"""cudaMemoryTypeHost and cudaMemoryTypeUnregistered."""


def kind_of(address: int) -> int:
    """Return the type of memory that CUDA sees at an address."""
    return int(cupy.cuda.runtime.pointerGetAttributes(address).type)


class HeldRegistrar(CudaRegistrar):
    """Registers the first piece at once, and each other one when the test releases it."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.permits = threading.Semaphore(1)
        self.nbytes = 0
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> None:
        assert self.permits.acquire(timeout=60)
        super().register(address, nbytes)
        with self._lock:
            self.nbytes += nbytes


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(registration, "PIECE_BYTES", 2 * MIB)
    monkeypatch.setattr(registration, "BATCH_BYTES", 2 * MIB)
    return 2 * MIB


def background_arena(num_slots: int, slot_bytes: int, registrar: CudaRegistrar) -> HostArena:
    return HostArena(num_slots, slot_bytes, register=registrar, background=True)


def test_slots_are_used_while_the_others_are_locked(small_pieces):
    cache = make_cache(60, [(64 * KIB, 64 * KIB), (64 * KIB, 64 * KIB)])
    registrar = HeldRegistrar(DEVICE)
    arena = background_arena(160, cache.layout.slot_bytes, registrar)
    engine = CudaSwapEngine(cache.layout, arena, DEVICE, [cache.storage])
    # The lanes' lists are locked through a separate registrar.
    assert (arena.ready_slots, engine.ready_slots, registrar.nbytes) == (16, 16, 2 * MIB)
    slots = torch.from_numpy(arena.view())
    randomize(cache.storage)
    with pytest.raises(JobError, match="slot 16, valid are 0 to 15 until more of 160"):
        engine.submit(SwapJob(0, STORE, np.array([[1, 15], [2, 16]], np.int32)))
    rng = np.random.default_rng(0)
    ready = 16
    while True:
        before = cache.blocks()
        pairs = random_pairs(rng, 60, ready, min(60, ready))
        block_ids, slot_ids = ids(pairs)
        engine.submit(SwapJob(1, STORE, pairs))
        registrar.permits.release(4)
        (stored,) = finish(engine)
        assert stored.error is None
        assert torch.equal(slots[slot_ids], before[block_ids])
        cache.storage.fill_(0)
        engine.submit(SwapJob(2, LOAD, pairs))
        (loaded,) = finish(engine)
        assert loaded.error is None
        assert torch.equal(cache.blocks()[block_ids], before[block_ids])
        if ready == 160:
            break
        randomize(cache.storage)
        deadline = time.monotonic() + 60
        while arena.ready_slots == ready:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            registrar.permits.release()  # later pieces may have used up those before a gap
        ready = arena.ready_slots
    assert arena.wait_ready(60)
    engine.close()


def test_a_capture_survives_registrations_and_their_end(small_pieces):
    """Torch's captures have mode `global`, which forbids other threads many calls."""
    value = torch.zeros(1024, device=DEVICE)
    value.add_(1)
    registrar = HeldRegistrar(DEVICE)
    arena = background_arena(40, MIB, registrar)
    dropped = background_arena(4, MIB, CudaRegistrar(DEVICE))
    assert dropped.wait_ready(60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        registrar.permits.release(40)
        assert arena.wait_ready(60), "all is registered within the capture"
        ended = threading.Thread(target=dropped._owner.release)
        ended.start()
        ended.join(60)
        value.add_(1)
    assert kind_of(arena.address + arena.nbytes - 1) == REGISTERED
    value.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (value == 2).all()


def test_without_relaxed_mode_a_capture_would_not_survive():
    """The control of the test above. In a separate process, because it leaves an error behind."""
    ended = run_script(
        """
import torch
from kv_swap.cuda import device as cuda_device
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.memory.arena import HostArena
cuda_device._exchange_capture_mode = lambda mode: None
device = torch.device("cuda", 0)
value = torch.zeros(8, device=device)
made = CudaRegistrar(device)
value.add_(1)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        value.add_(1)
        HostArena(4, 1 << 20, register=made)
    print("captured")
except Exception as error:
    print("refused", error)
"""
    )
    assert "refused" in ended.stdout, ended.stdout + ended.stderr


def test_a_failure_in_the_background_leaves_what_was_locked(small_pieces, caplog):
    class Failing(CudaRegistrar):
        base = 0

        def register(self, address: int, nbytes: int) -> None:
            self.base = self.base or address
            if address - self.base == 4 * small_pieces:
                nbytes = 1 << 62  # CUDA refuses it in its own words
            super().register(address, nbytes)

    arena = background_arena(400, MIB, Failing(DEVICE))
    assert not arena.wait_ready(60)
    assert arena.ready_slots == 8
    assert "cudaError" in caplog.text
    assert f"only the first {8 * MIB} are used" in caplog.text
    assert kind_of(arena.address + 8 * MIB - 1) == REGISTERED
    assert kind_of(arena.address + 8 * MIB) == UNREGISTERED
    assert kind_of(arena.address + arena.nbytes - 1) == UNREGISTERED
    torch.ones(8, device=DEVICE).sum().item()


def test_pages_lie_near_the_device():
    node = device_node(CudaRegistrar(DEVICE).pci_bus_id)
    if node is None:
        pytest.skip("needs a machine of several NUMA nodes that says which is the device's")
    arena = HostArena(64, MIB, register=CudaRegistrar(DEVICE), numa_node=node)
    line = next(
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if int(line.split()[0], 16) == arena.address
    )
    assert f"prefer:{node}" in line or f"prefer=relative:{node}" in line
    assert f" N{node}=" in line


def test_the_process_may_end_while_threads_lock():
    ended = run_script(
        """
import torch
from kv_swap.memory import registration
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.memory.arena import HostArena
registration.BATCH_BYTES = registration.PIECE_BYTES
device = torch.device("cuda", 0)
torch.ones(8, device=device).sum().item()
arena = HostArena(4096, 1 << 20, register=CudaRegistrar(device), background=True)
print("ready", arena.ready_slots < 4096)
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "ready True\n"), ended.stderr
    assert ended.stderr == ""
