"""The mapping and where its pages come from, asked of the running kernel."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from kv_swap.memory import mapping
from kv_swap.memory.mapping import Mapping
from kv_swap.memory.numa import device_node, prefer_node

from tests.support.registrars import PAGE, is_mapped, policy_of, resident_bytes, usable_node

# -- mappings ----------------------------------------------------------------------------------


def test_a_mapping_is_whole_pages_that_exist_only_once_populated():
    made = Mapping(64 * PAGE - 1)
    assert made.nbytes == 64 * PAGE
    assert made.address % PAGE == 0
    assert resident_bytes(made.address, made.nbytes) == 0
    made.populate(8 * PAGE, 16 * PAGE)
    assert resident_bytes(made.address, made.nbytes) == 16 * PAGE
    made.discard(16 * PAGE)
    assert resident_bytes(made.address, made.nbytes) == 8 * PAGE
    made.close()
    assert not is_mapped(made.address)


@pytest.fixture
def file() -> Iterator[int]:
    """A file in memory, of 4 pages that do not exist yet."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4 * PAGE)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("shared", [False, True])
def test_children_and_core_dumps_do_not_get_it(shared, file):
    made = Mapping(4 * PAGE, fd=file if shared else None)
    areas = Path("/proc/self/smaps").read_text()
    (flags,) = re.findall(rf"^{made.address:x}-.*?^VmFlags: (.*?)$", areas, re.DOTALL | re.M)
    assert {"dc", "dd"} <= set(flags.split())


FEW_MAPS = 10
"""Fewer tell nothing: either the work held up the others, or the machine did."""
ATTEMPTS = 20
"""A busy machine may hold up either thread for as long as the work takes, but not every time."""


def longest_map_beside(work: Callable[[], object]) -> float:
    """Return how long the longest of many maps beside `work` took, as a share of the work."""
    thread = threading.Thread(target=work)
    maps: list[float] = []
    started = time.perf_counter()
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        with mmap.mmap(-1, 64 << 10) as memory:
            memory[0] = 1
        maps.append(time.perf_counter() - began)
        time.sleep(0.0002)
    return max(maps) / (time.perf_counter() - started) if len(maps) >= FEW_MAPS else 1.0


def test_no_mmap_waits_until_all_pages_are_there():
    """A start maps memory hundreds of times, and must not wait for the pool."""
    shares: list[float] = []
    while len(shares) < ATTEMPTS and not any(share <= 0.5 for share in shares):
        made = Mapping(512 << 20)
        shares.append(longest_map_beside(partial(made.populate, 0, made.nbytes)))
        assert resident_bytes(made.address, made.nbytes) == made.nbytes
        made.close()
    assert min(shares) <= 0.5, f"the longest mmap took these shares of the work: {shares}"


def test_a_kernel_that_cannot_populate_is_no_error(file, monkeypatch):
    monkeypatch.setattr(mapping, "MADV_POPULATE_WRITE", 4711)
    made = Mapping(4 * PAGE, fd=file)
    made.populate(0, 4 * PAGE)
    assert resident_bytes(made.address, made.nbytes) == 0


def test_memory_that_cannot_be_had_is_an_error_and_no_signal(file):
    """A shared mapping beyond the end of its file: a touch would be SIGBUS."""
    made = Mapping(4 * PAGE, fd=file)
    os.ftruncate(file, PAGE)
    with pytest.raises(OSError, match="Bad address"):
        made.populate(0, 4 * PAGE)


def test_shared_pages_are_not_discarded(file):
    one, other = Mapping(4 * PAGE, fd=file), Mapping(4 * PAGE, fd=file)
    one.populate(0, 4 * PAGE)
    other.discard(0)
    one.discard(0)
    assert one.describe() == "from where its creator placed it"
    assert resident_bytes(one.address, one.nbytes) == 4 * PAGE
    assert os.fstat(file).st_blocks * 512 == 4 * PAGE


# -- NUMA --------------------------------------------------------------------------------------


def test_pages_come_from_the_node_that_was_asked_for():
    node = usable_node()
    plain, bound = Mapping(8 * PAGE), Mapping(8 * PAGE, numa_node=node)
    assert policy_of(plain.address) != f"prefer:{node}"
    assert policy_of(bound.address) == f"prefer:{node}"
    assert bound.describe() == f"from NUMA node {node}"
    bound.populate(0, 8 * PAGE)


def test_a_system_that_refuses_changes_nothing(monkeypatch):
    plain = Mapping(8 * PAGE)
    usual = policy_of(plain.address)  # vLLM's CPU engine sets one for its process
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    made = Mapping(8 * PAGE, numa_node=0)
    assert policy_of(made.address) == usual
    assert made.describe() == "from any NUMA node"
    monkeypatch.undo()
    assert not prefer_node(made.address, 8 * PAGE, 1023), "a node that does not exist"
    assert not prefer_node(made.address + 1, 8 * PAGE, 0), "an address that is no page's"
    assert policy_of(made.address) == usual


@pytest.mark.parametrize(
    ("online", "numa_node", "expected"),
    [
        ("0-1", "1", 1),
        ("0,2", "2", 2),
        ("0-1", "0", 0),
        ("0", "0", None),
        ("0-1", "-1", None),
        ("0-1", "", None),
        ("0-1", None, None),
        (None, "1", None),
    ],
)
def test_the_node_of_a_device(tmp_path, online, numa_node, expected):
    device = tmp_path / "bus/pci/devices/0000:1a:00.0"
    device.mkdir(parents=True)
    if numa_node is not None:
        (device / "numa_node").write_text(numa_node + "\n")
    if online is not None:
        (tmp_path / "devices/system/node").mkdir(parents=True)
        (tmp_path / "devices/system/node/online").write_text(online + "\n")
    assert device_node("0000:1A:00.0", tmp_path) == expected
