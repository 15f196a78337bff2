"""Which engine and which arena are made; tests/gpu has them copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap import factory
from kv_swap.cuda import engine as cuda
from kv_swap.factory import create_engine
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout, Region

LAYOUT = KVLayout(2, (Region(1 << 20, 64, 64, 0),))


class Made:
    """Stands in for a class: remembers what it was made of."""

    pci_bus_id = "0000:1a:00.0"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.arguments, self.more = arguments, more


@pytest.mark.parametrize(("kind", "shared", "node"), [("cuda", object(), None), ("auto", None, 1)])
def test_a_cuda_engine_has_a_page_locked_arena(kind, shared, node, monkeypatch):
    """`auto` fits the tensors; the device is theirs unless it is named.

    The arena lies near its device, unless peers have placed the memory that they share.
    """
    monkeypatch.setattr(cuda, "CudaSwapEngine", Made)
    monkeypatch.setattr(factory, "HostArena", Made)
    monkeypatch.setattr(factory, "CudaRegistrar", Made)
    monkeypatch.setattr(factory, "device_node", {Made.pci_bus_id: 1}.get)
    tensors: Any = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    stream: Any = object()
    room: Any = object()
    named: Any = None if kind == "auto" else object()
    made: Any = create_engine(
        kind,
        LAYOUT,
        3,
        device=named,
        keep_alive=tensors,
        output_copy_stream=stream,
        shared=shared,
        room=room,
    )
    device = named or tensors[0].device
    layout, arena, *others = made.arguments
    assert layout is LAYOUT
    assert others == [device, tensors, stream]
    assert not made.more
    assert arena.arguments == (3, 64)
    assert arena.more["register"].arguments == (device,)
    assert arena.more["background"]
    assert (arena.more["numa_node"], arena.more["shared"]) == (node, shared)
    assert arena.more["room"] is room, "the pool stops growing when memory is short"


CPU = SimpleNamespace(device=SimpleNamespace(type="cpu"))


@pytest.mark.parametrize(
    ("kind", "device", "tensors"), [("host", object(), []), ("auto", None, [CPU])]
)
def test_a_host_engine_page_locks_nothing(kind, device, tensors):
    with create_engine(kind, LAYOUT, 3, device=device, keep_alive=tensors) as engine:
        assert isinstance(engine, HostSwapEngine)
        assert engine._state.arena is not None
        assert not engine._state.arena.registered
    assert engine._state.stopping, "a context manager closes its engine"
