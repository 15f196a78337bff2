"""What the copies of a CUDA engine use; freed only once all its streams are idle."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.dma import DmaPath
from kv_swap.cuda.kernel_families import choose_family, families_of
from kv_swap.cuda.lane import CopyPath, Lane
from kv_swap.cuda.streams import CopyStream
from kv_swap.cuda.swap import KernelPath, SwapKernel
from kv_swap.cuda.tiles import WaveTable
from kv_swap.engine import Direction, Held
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class State(Held):
    """What copies in flight need. Loads are advanced first: somebody waits for them."""

    lanes: dict[Direction | Literal["before_compute"], Lane] = field(default_factory=dict)
    wave_tables: Sequence[WaveTable] = ()


_LEAKED: list[State] = []
"""Of copies that may still run, or of a parent process; it is never freed."""


def make_state(
    layout: KVLayout,
    arena: HostArena,
    device: torch.device,
    keep_alive: Sequence[object],
    output_copy_stream: torch.cuda.Stream | None,
    copy_engine_only: bool,
) -> State:
    """Compile the kernels and allocate what copies need. Synchronises. Raises `DeviceError`."""
    registrar = CudaRegistrar(device)
    state = State(arena, tuple(keep_alive))
    families = families_of(layout, None if copy_engine_only else choose_family(device))
    kernels = [SwapKernel(layout, arena, device, family) for family in families]
    block_bytes = layout.block_bytes
    for direction, awaited in ((Direction.LOAD, None), (Direction.STORE, output_copy_stream)):
        path: CopyPath
        if not kernels:
            path = DmaPath(direction, layout, arena, device)
        else:
            path = KernelPath(direction, kernels, block_bytes, registrar)
        state.lanes[direction] = _make_lane(direction, path, device, awaited)
    if kernels:
        tables = [WaveTable(layout, family, device, registrar) for family in families]
        path = KernelPath(Direction.LOAD, kernels, block_bytes, registrar, tables)
        state.wave_tables = tables
        state.lanes["before_compute"] = _make_lane(Direction.LOAD, path, device, None)
    return state


def _make_lane(
    direction: Direction,
    path: CopyPath,
    device: torch.device,
    output_copy_stream: torch.cuda.Stream | None,
) -> Lane:
    # As many events for jobs as for slices: a job has one of its own and at least a slice.
    stream = CopyStream(device, 2 * path.max_in_flight, output_copy_stream)
    path.warm_up(stream.stream)
    stream.stream.synchronize()
    return Lane(direction, path, stream)


def release(state: State) -> None:
    """Let the streams run out, then drop what their copies used; slices not queued, too.

    Runs once, on any thread. Not in a forked child, which cannot call CUDA.
    """
    if os.getpid() != state.process:
        _LEAKED.append(state)
        return
    try:
        for lane in state.lanes.values():
            lane.stream.stream.synchronize()
    except RuntimeError:
        logger.exception("cannot wait for copies; what they use is not freed")
        _LEAKED.append(state)
        return
    state.lanes.clear()
    state.wave_tables = ()
    state.arena = None
    state.keep_alive = ()
