"""The host arena: memory for slots, optionally registered with CUDA, and its lifetime.

The memory belongs to one owner object, which the arena, its views and the state of every engine
hold. When the last of them is gone, the memory is unregistered and then unmapped.
"""

from __future__ import annotations

import ctypes
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.mapping import Mapping, PinnedRegistrar
from kv_swap.memory.registration import MemoryRoom, Registration, choose_piece_bytes
from kv_swap.memory.shared import SharedMemory
from kv_swap.memory.windows import Windows


class HostArena:
    """Zeroed memory for `num_slots` slots of `slot_bytes`, rounded up to whole system pages.

    The memory is private or `shared`, which must have exactly the bytes of all slots; each process
    registers its own mapping of it. Pages come from `numa_node` while it has free ones.

    With `register`, every byte is page-locked. With `background` as well, the constructor returns
    once the first pieces are locked, and threads lock the rest, pausing while `room` has too little
    memory; `ready_slots` shows their progress.

    Arenas of up to `num_windows` other processes can be mapped after it (`windows`).

    Raises `PinnedMemoryError`, without leaving anything behind, if the memory cannot be mapped or
    page-locked.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        register: PinnedRegistrar | None,
        background: bool = False,
        numa_node: int | None = None,
        shared: SharedMemory | None = None,
        room: MemoryRoom | None = None,
        num_windows: int = 0,
    ) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PinnedMemoryError(
                f"an arena needs at least 1 slot of 1 byte, got {num_slots} of {slot_bytes} bytes"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.registered = register is not None
        self.piece_bytes = choose_piece_bytes(slot_bytes)
        if shared is not None and shared.nbytes != self.nbytes:
            raise PinnedMemoryError(
                f"{num_slots} slots of {slot_bytes} bytes do not fill shared memory of "
                f"{shared.nbytes} bytes: make it of {self.nbytes}"
            )
        fd = None if shared is None else shared.fileno()
        self.windows: Windows | None = None
        if num_windows:
            self.windows = Windows(num_windows, num_slots, slot_bytes, register)
        address = 0 if self.windows is None else self.windows.arena_address
        mapping = Mapping(self.nbytes, fd=fd, numa_node=numa_node, address=address)
        self._registration: Registration | None = None
        if register is not None:
            self._registration = Registration(mapping, register, self.piece_bytes, room=room)
        self._owner = _Owner(mapping, self.nbytes, self._registration, self.windows)
        if self._registration is not None:
            try:
                self._registration.start(background=background)
            except BaseException:
                # The traceback holds this frame, and the frame holds the owner.
                self._owner.release()
                raise

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def address(self) -> int:
        """Address of slot 0; slot `s` is `s * slot_bytes` later. Keeps nothing alive.

        A copy by the copy engine must not cross a multiple of `piece_bytes`, counted from slot 0.
        """
        return self._owner.address

    @property
    def ready_slots(self) -> int:
        """Number of ready slots, from 0; any thread may read it. Grows unless locking fails."""
        if self._registration is None:
            return self.num_slots
        return min(self.num_slots, self._registration.ready_bytes // self.slot_bytes)

    def wait_ready(self, timeout_seconds: float | None = None) -> bool:
        """Block until locking has ended, not just paused; return whether all slots are ready."""
        if self._registration is not None:
            self._registration.wait(timeout_seconds)
        return self.ready_slots == self.num_slots

    def read(self, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return copies of readable slots, `(len(slots), slot_bytes)`."""
        memory = ctypes.c_uint8 * self.slot_bytes
        addresses = (self.address + slot * self.slot_bytes for slot in slots.tolist())
        return np.stack([np.ctypeslib.as_array(memory.from_address(one)) for one in addresses])

    def view(self) -> NDArray[np.uint8]:
        """Return the slots, uint8 of `(num_slots, slot_bytes)`. Views keep the memory alive."""
        return np.asarray(self._owner).reshape(self.num_slots, self.slot_bytes)


class _Owner:
    """Owns one mapping. It is the base of arrays made from its `__array_interface__`."""

    def __init__(
        self,
        mapping: Mapping,
        nbytes: int,
        registration: Registration | None,
        windows: Windows | None,
    ) -> None:
        self.address = mapping.address
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }
        self.release = weakref.finalize(self, _release, mapping, registration, windows, os.getpid())
        # At interpreter exit, views and copies may still be in use; the system frees the memory.
        self.release.atexit = False


def _release(
    mapping: Mapping, registration: Registration | None, windows: Windows | None, process: int
) -> None:
    """Free the memory, except in a forked child, which has neither the memory nor the threads."""
    if os.getpid() != process:
        return
    if windows is not None:
        windows.release()
    if registration is None:
        mapping.close()
    else:
        registration.release()
