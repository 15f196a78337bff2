"""Stand-ins for CUDA's memory registration, and queries to the kernel about memory."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import threading
from pathlib import Path

import numpy as np
import pytest

PAGE = mmap.PAGESIZE


def is_mapped(address: int) -> bool:
    """Ask the kernel, without touching the memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = address // PAGE * PAGE
    return libc.msync(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 1) == 0


def resident_bytes(address: int, nbytes: int) -> int:
    """Return the number of resident bytes in a range of whole pages in this process.

    `smaps` cannot say, because the kernel merges adjacent mappings into one area.
    """
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(-(-nbytes // PAGE) * 8), np.uint64)
    present_or_swapped = entries >> np.uint64(62) != 0
    return int(np.count_nonzero(present_or_swapped)) * PAGE


def usable_node() -> int:
    """Return a NUMA node that this process may take memory from; skip if none can be chosen.

    Docker's seccomp profile refuses the system calls for memory policies to containers without
    CAP_SYS_NICE, and a cpuset may allow a process only some of the nodes.
    """
    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(ctypes.c_long(number), None, None, 0, None, 0):
        pytest.skip("needs a system that lets this process choose a NUMA node")
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^Mems_allowed_list:\s*(\d+)", status, re.M)[0])


def policy_of(address: int) -> str:
    """Return the memory policy of a mapping, as the kernel prints it."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError as error:
        pytest.skip(f"needs a kernel with NUMA: {error}")
    (policy,) = [line.split()[1] for line in lines if int(line.split()[0], 16) == address]
    return policy


class Registrar:
    """Records calls; the piece at byte `failing_offset` of the first memory fails."""

    def __init__(self, failing_offset: int | None = None) -> None:
        self.failing_offset = failing_offset
        self.base: int | None = None
        self.calls: list[tuple[int, int]] = []
        self.live: dict[int, int] = {}
        self.threads: set[threading.Thread] = set()
        self.unmapped_too_early = False
        self._lock = threading.Lock()

    writes = False

    def for_reading(self) -> Registrar:
        return self

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self.base is None:
                self.base = address
            self.threads.add(threading.current_thread())
            if address - self.base == self.failing_offset:
                raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
            self.calls.append((address, nbytes))
            self.live[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._lock:
            self.unmapped_too_early |= not is_mapped(address)
            del self.live[address]

    def assert_undone(self) -> None:
        """Assert that everything was unregistered, and then unmapped."""
        assert not self.live
        assert not self.unmapped_too_early
        assert self.base is not None
        assert not is_mapped(self.base)


class GatedRegistrar(Registrar):
    """Holds back every registration but the first until it is `opened`."""

    def __init__(self, failing_offset: int | None = None) -> None:
        super().__init__(failing_offset)
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()

    def register(self, address: int, nbytes: int) -> None:
        if self.base is not None:
            self.reached.release()
            assert self.opened.wait(120)
        super().register(address, nbytes)
