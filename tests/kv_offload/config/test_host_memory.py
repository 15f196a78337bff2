from pathlib import Path

import pytest

from kv_offload.config.host_memory import (
    HostMemory,
    headroom_bytes,
    read_available_memory,
    read_host_memory,
)
from kv_offload.errors import CapacityError

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712  # what cgroup v1 shows where no limit is set


class Machine:
    def __init__(self, root: Path, cgroup: str | None):
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal:       {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n"
        )
        if cgroup is not None:
            (self.proc / "self/cgroup").write_text(cgroup)

    def limit(self, path: str, content: object) -> Path:
        file = self.cgroups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
        return file

    def memory(self) -> HostMemory:
        return read_host_memory(self.proc, self.cgroups)

    def available(self) -> HostMemory:
        return read_available_memory(self.proc, self.cgroups)


def test_without_cgroups_it_is_the_machine(tmp_path):
    machine = Machine(tmp_path, cgroup=None)
    assert machine.memory() == HostMemory(64 * GIB, str(machine.proc / "meminfo"))
    source = f"MemAvailable in {machine.proc / 'meminfo'}"
    assert machine.available() == HostMemory(48 * GIB, source)


@pytest.mark.parametrize("path", ["a/b", "a", "."])
def test_the_smallest_limit_on_the_way_up_counts(tmp_path, path):
    v2 = Machine(tmp_path / "v2", "0::/a/b\n")
    v1 = Machine(tmp_path / "v1", "5:cpu,cpuacct:/x\n4:memory:/a/b\n1:name=systemd:/y\n")
    for machine, root, name in ((v2, "", V2), (v1, "memory/", V1)):
        for other in ("a/b", "a", "."):
            machine.limit(f"{root}{other}/{name}", NO_LIMIT_V1)
        file = machine.limit(f"{root}{path}/{name}", 8 * GIB)
        assert machine.memory() == HostMemory(8 * GIB, str(file))


V1, V2 = "memory.limit_in_bytes", "memory.max"
LIMITS = [
    ("v1, a shared hierarchy", "4:cpu,memory:/a", {f"memory/a/{V1}": 8 * GIB}, 8 * GIB),
    *(
        (f"the smaller one: {v1}, {v2}", "4:memory:/a\n0::/b", limits, 8 * GIB)
        for v1, v2 in ((8, 16), (16, 8))
        for limits in [{f"memory/a/{V1}": v1 * GIB, f"unified/b/{V2}": v2 * GIB}]
    ),
    ("a container sees its own root", "4:memory:/docker/01ab", {f"memory/{V1}": 8 * GIB}, 8 * GIB),
    ("another namespace's name", "0::/../a", {f"../a/{V2}": GIB, V2: 8 * GIB}, 8 * GIB),
    ("v2 slows down", "0::/a", {f"a/{V2}": 16 * GIB, "a/memory.high": 8 * GIB}, 8 * GIB),
    ("odd letters", b"0::/a:b/\xff", {f"a:b/{V2}": 8 * GIB}, 8 * GIB),
]


@pytest.mark.parametrize(("what", "cgroup", "limits", "size_bytes"), LIMITS)
def test_which_limits_count(tmp_path, what, cgroup, limits, size_bytes):
    machine = Machine(tmp_path, "")
    content = cgroup if isinstance(cgroup, bytes) else cgroup.encode()
    (machine.proc / "self/cgroup").write_bytes(content + b"\n")
    for path, limit in limits.items():
        machine.limit(path, limit)
    assert machine.memory().size_bytes == size_bytes, what


@pytest.mark.parametrize(
    ("meminfo", "read", "reason"),
    [
        (None, Machine.memory, r"No such file or directory.*Make .*/meminfo .*readable"),
        ("MemFree: 1 kB\n", Machine.memory, r"no MemTotal in .*/meminfo"),
        ("MemTotal: 1 kB\n", Machine.available, r"no MemAvailable in .*/meminfo"),
        (
            "MemTotal: 1 kB\n",
            Machine.memory,
            r"a/memory.max holds 'lots' instead of a number of bytes",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, meminfo, read, reason):
    machine = Machine(tmp_path, "0::/a\n")
    (machine.proc / "meminfo").unlink()
    if meminfo is not None:
        (machine.proc / "meminfo").write_text(meminfo)
    machine.limit("a/memory.max", "lots")
    with pytest.raises(CapacityError, match=reason):
        read(machine)


def v1(limit: int, used: int, **stat: int) -> dict[str, object]:
    """Return the files of this process's cgroup."""
    files = {V1: limit, "memory.usage_in_bytes": used, "memory.stat": lines(stat)}
    return {f"memory/a/{name}": content for name, content in files.items()}


def v2(limit: object, used: object, high: object = "max", **stat: int) -> dict[str, object]:
    files = {V2: limit, "memory.current": used, "memory.high": high, "memory.stat": lines(stat)}
    return {f"a/{name}": content for name, content in files.items()}


def lines(stat: dict[str, int]) -> str:
    return "\n".join(f"{name} {gib * GIB}" for name, gib in stat.items())


V2_STAT = {"anon": 5, "file": 4, "inactive_file": 2, "active_file": 1}
V1_STAT = {"inactive_file": 7, "total_inactive_file": 2, "total_active_file": 1}
USE = [
    ("v2, but for cached files", v2(32 * GIB, 10 * GIB, **V2_STAT), 32 - 10 + 3, f"a/{V2}"),
    ("v2, where it slows down", v2(32 * GIB, 10 * GIB, 16 * GIB), 16 - 10, "a/memory.high"),
    ("v1, but for cached files", v1(32 * GIB, 10 * GIB, **V1_STAT), 32 - 10 + 3, f"memory/a/{V1}"),
    ("no limit has no use", v1(NO_LIMIT_V1, 60 * GIB) | v2("max", "not read"), 48, None),
    ("more than the limit", v2(4 * GIB, 5 * GIB), 0, f"a/{V2}"),
    ("no figure does not count", {f"a/{V2}": 4 * GIB}, 48, None),
]


@pytest.mark.parametrize(("what", "files", "gib", "limit"), USE)
def test_what_is_in_use_is_taken_from_the_limit(tmp_path, what, files, gib, limit):
    machine = Machine(tmp_path, "4:memory:/a\n0::/a\n")
    for path, content in files.items():
        machine.limit(path, content)
    available = machine.available()
    assert available.size_bytes == gib * GIB, what
    used = "memory.usage_in_bytes" if what.startswith("v1") else "memory.current"
    assert limit is None or available.source == (
        f"{machine.cgroups / limit} less what {used} says, without cached files"
    )


def test_the_cgroup_with_the_least_left_counts_not_the_smallest(tmp_path):
    machine = Machine(tmp_path, "0::/a/b\n")
    for path, limit, used in (("a/b", 16, 1), ("a", 32, 30), (".", 16, 1)):
        machine.limit(f"{path}/memory.max", limit * GIB)
        machine.limit(f"{path}/memory.current", used * GIB)
    assert machine.available().size_bytes == 2 * GIB
    assert machine.memory().size_bytes == 16 * GIB


def test_this_machine_has_memory_and_some_of_it_is_taken():
    assert 0 < read_available_memory().size_bytes < read_host_memory().size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "headroom"), [(1024 * GIB, 2 * GIB), (32 * GIB, 2 * GIB), (4 * GIB, GIB // 4)]
)
def test_the_headroom_is_small(size_bytes, headroom):
    assert headroom_bytes(HostMemory(size_bytes, "")) == headroom
