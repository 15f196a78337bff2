"""Resources of a CUDA engine's copies, which are freed only once all its streams are idle."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kv_swap.cuda.block_copies import suits_copy_engine
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.gate_test import check_gates
from kv_swap.cuda.gated import GatedPath
from kv_swap.cuda.kernel_families import choose_family, families_of
from kv_swap.cuda.lane import CopyPath, Lane, Pace
from kv_swap.cuda.streams import CopyStream
from kv_swap.cuda.swap import KernelPath, SwapKernel
from kv_swap.cuda.tiles import WaveTable
from kv_swap.engine import CopiesWith, Direction, Held
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class State(Held):
    """Resources of copies in flight. Asynchronous loads advance first: requests wait for them."""

    copies_with: CopiesWith = "kernels"
    pace: Pace = field(default_factory=Pace)
    lanes: dict[Direction | Literal["before_compute"], Lane] = field(default_factory=dict)


_LEAKED: list[State] = []
"""States whose copies may still be running, or that belong to a parent process; never freed."""


def choose_copies(layout: KVLayout, device: torch.device) -> CopiesWith:
    """Return the copy path for a layout: the copy engine if a block is a few long copies.

    Logs if the copy engine would suit the layout but does not yield at gates.
    """
    if not suits_copy_engine(layout):
        return "kernels"
    report = check_gates(device)
    if report.yields:
        return "gates"
    logger.warning(
        "kernels copy, not the copy engine: small copies would wait too long for it here (%s)",
        report.found,
    )
    return "kernels"


def make_state(
    layout: KVLayout,
    arena: HostArena,
    device: torch.device,
    keep_alive: Sequence[object],
    output_copy_stream: torch.cuda.Stream | None,
    copies_with: CopiesWith | None,
) -> State:
    """Allocate the resources of copies, and compile the kernels, which one lane always needs.

    If `copies_with` is None, `choose_copies` decides. Synchronises. Raises `DeviceError`.
    """
    state = State(
        arena, tuple(keep_alive), copies_with=copies_with or choose_copies(layout, device)
    )
    registrar = CudaRegistrar(device)
    families = families_of(layout, choose_family(device))
    tables = [WaveTable(layout, family, device, registrar) for family in families]

    def make_lane(
        direction: Direction,
        output_copy_stream: torch.cuda.Stream | None = None,
        *,
        before_compute: bool = False,
    ) -> Lane:
        # Loads before compute use kernels: these start earlier, and SMs are free while compute
        # waits.
        if state.copies_with == "gates" and not before_compute:
            path: CopyPath = GatedPath(direction, layout, arena, device)
        else:
            kernels = [SwapKernel(layout, arena, device, one, direction) for one in families]
            waves = tables if before_compute else ()
            path = KernelPath(direction, kernels, layout.block_bytes, registrar, waves)
        # As many events for jobs as for slices, because each job has one event and a slice or more.
        stream = CopyStream(device, 2 * path.max_in_flight, output_copy_stream)
        path.warm_up(stream.stream)
        stream.stream.synchronize()
        return Lane(direction, path, stream, state.pace)

    state.lanes = {
        Direction.LOAD: make_lane(Direction.LOAD),
        Direction.STORE: make_lane(Direction.STORE, output_copy_stream),
        "before_compute": make_lane(Direction.LOAD, before_compute=True),
    }
    return state


def release(state: State) -> None:
    """Wait for the streams, then drop everything that copies use, including unqueued slices.

    Runs once, on any thread. Does nothing in a forked child, which cannot call CUDA.
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
    state.arena = None
    state.keep_alive = ()
