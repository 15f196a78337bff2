"""Places memory near a device on machines with several NUMA nodes, without libnuma."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, from Linux's syscall tables; glibc has no wrapper for it."""

_MPOL_PREFERRED = 1
"""From linux/mempolicy.h: take memory from one node while it has any, then from others."""

_MASK_BITS = 1024
"""Nodes in a mask; Linux allows at most 1,024 (CONFIG_NODES_SHIFT)."""

_libc = ctypes.CDLL(None, use_errno=True)


def device_node(pci_bus_id: str, sysfs: Path = Path("/sys")) -> int | None:
    """Return the node of a PCI device; `None` if it is unknown or the machine has only one."""
    try:
        online = (sysfs / "devices/system/node/online").read_text().strip()
        device = sysfs / "bus/pci/devices" / pci_bus_id.lower()
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if online.isdecimal() or not 0 <= node < _MASK_BITS else node


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Make untouched pages come from `node` while it has free ones.

    `address` must be page-aligned. Returns False if the system refuses, as in containers.
    """
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        return False
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word_bits))()
    mask[node // word_bits] = 1 << node % word_bits
    # The kernel reads one bit fewer than this number.
    arguments = (address, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), _MASK_BITS + 1, 0)
    return not _libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
