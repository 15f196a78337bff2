"""Which engine and which arena are made; tests/gpu has them copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap import factory
from kv_swap.cuda import engine as cuda
from kv_swap.factory import EngineKind, create_engine
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import KVLayout, Region

LAYOUT = KVLayout(2, (Region(1 << 20, 64, 64, 0),))


class Made:
    """Stands in for a class: remembers what it was made of."""

    pci_bus_id = "0000:1a:00.0"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.arguments, self.more = arguments, more


@pytest.mark.parametrize(("kind", "copy_engine_only"), [("cuda", False), ("dma", True)])
def test_a_cuda_engine_has_a_page_locked_arena(
    kind: EngineKind, copy_engine_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "CudaSwapEngine", Made)
    monkeypatch.setattr(factory, "HostArena", Made)
    monkeypatch.setattr(factory, "CudaRegistrar", Made)
    stream, device = object(), object()
    tensors: Any = [object()]
    made: Any = create_engine(
        kind,
        LAYOUT,
        3,
        device=device,  # type: ignore[arg-type]
        keep_alive=tensors,
        output_copy_stream=stream,  # type: ignore[arg-type]
    )
    layout, arena, *others = made.arguments
    assert layout is LAYOUT
    assert others == [device, tensors, stream]
    assert made.more == {"copy_engine_only": copy_engine_only}
    assert arena.arguments == (3, 64)
    assert arena.more["register"].arguments == (device,)
    assert arena.more["background"]


def test_a_host_engine_page_locks_nothing() -> None:
    device: Any = object()
    engine = create_engine("host", LAYOUT, 3, device=device, keep_alive=[])
    assert isinstance(engine, HostSwapEngine)
    assert engine._state.arena is not None
    assert not engine._state.arena.registered
    engine.close()


def test_the_engine_fits_the_tensors_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaSwapEngine", Made)
    monkeypatch.setattr(factory, "HostArena", Made)
    monkeypatch.setattr(factory, "CudaRegistrar", Made)
    tensor: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    made: Any = create_engine("auto", LAYOUT, 3, keep_alive=[tensor])
    assert made.arguments[2] is tensor.device
    assert made.more == {"copy_engine_only": False}
    monkeypatch.undo()
    tensor.device.type = "cpu"
    with create_engine("auto", LAYOUT, 3, keep_alive=[tensor]) as engine:
        assert isinstance(engine, HostSwapEngine)
    assert engine._state.stopping, "a context manager closes its engine"
