from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.errors import CapacityError
from kv_offload.sizes import UNITS, HostMemory, format_size, parse_size, read_host_memory

GIB = 1 << 30
UNIT_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
NO_LIMIT_V1 = 9223372036854771712  # what cgroup v1 shows where no limit is set


def test_units_are_those_of_the_oracle():
    assert set(UNITS) == set(UNIT_BYTES)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("48GiB", 48 * GIB),
        ("48 GB", 48 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("1gib", GIB),
        ("1GIB", GIB),
        ("1Gb", 10**9),
        ("  2 TiB ", 2 << 40),
        ("7B", 7),
        ("1.9B", 1),
        ("40%", 400),
        ("12.5 %", 125),
        ("0.1%", 1),
        ("250%", 2500),
    ],
)
def test_sizes_that_are_accepted(text, size_bytes):
    assert parse_size(text, whole_bytes=1000) == size_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a positive number and a unit"),
        ("GiB", "not a positive number and a unit"),
        ("-1GiB", "not a positive number and a unit"),
        ("+1GiB", "not a positive number and a unit"),
        (".5GiB", "not a positive number and a unit"),
        ("1.GiB", "not a positive number and a unit"),
        ("1,5GiB", "not a positive number and a unit"),
        ("1e9B", "not a positive number and a unit"),
        ("1 GiB 2", "not a positive number and a unit"),
        ("1\N{KELVIN SIGN}iB", "not a positive number and a unit"),
        ("\N{ARABIC-INDIC DIGIT THREE}GiB", "not a positive number and a unit"),
        ("nan%", "not a positive number and a unit"),
        ("48", "the unit is missing"),
        ("1.5", "the unit is missing"),
        ("48G", "unknown unit 'G', known are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and %"),
        ("48Gi", "unknown unit 'Gi'"),
        ("48%%", "unknown unit '%%'"),
        ("48%GiB", "unknown unit '%GiB'"),
        ("0GiB", "less than one byte"),
        ("0%", "less than one byte"),
        ("0.5B", "less than one byte"),
        ("0.01%", "less than one byte"),
    ],
)
def test_sizes_that_are_refused(text, reason):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_size(text, whole_bytes=1000)
    assert reason in str(caught.value)


@given(
    number=st.decimals(min_value=1, max_value=10**6, places=3),
    unit=st.sampled_from(sorted(UNIT_BYTES)),
    space=st.sampled_from(["", " "]),
    change_case=st.sampled_from([str, str.lower, str.upper]),
)
def test_any_number_and_unit_is_exact_to_the_byte(number, unit, space, change_case):
    text = change_case(f"{number}{space}{unit}")
    assert parse_size(text, whole_bytes=1) == int(Fraction(number) * UNIT_BYTES[unit])


@given(size_bytes=st.integers(1, 1 << 60))
def test_bytes_round_trip(size_bytes):
    assert parse_size(f"{size_bytes}B", whole_bytes=1) == size_bytes


@given(size_bytes=st.integers(1, 1 << 60))
def test_a_formatted_size_is_within_its_two_decimals(size_bytes):
    # Half of the last decimal, and the byte that the parser rounds down.
    assert abs(parse_size(format_size(size_bytes), 1) - size_bytes) <= 0.00501 * size_bytes + 1


@given(percent=st.integers(1, 100), whole_bytes=st.integers(100, 1 << 50))
def test_a_percentage_is_rounded_down(percent, whole_bytes):
    assert parse_size(f"{percent}%", whole_bytes) == whole_bytes * percent // 100


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (100 * GIB, "100 GiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_formatted_sizes(size_bytes, text):
    assert format_size(size_bytes) == text


class Machine:
    """A fake `/proc` and `/sys/fs/cgroup`."""

    def __init__(self, root: Path, cgroup: str | None, total_kib: int = 64 << 20):
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal:       {total_kib} kB\nMemFree: 1 kB\n")
        if cgroup is not None:
            (self.proc / "self/cgroup").write_text(cgroup)

    def limit(self, path: str, content: object) -> Path:
        file = self.cgroups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
        return file

    def memory(self) -> HostMemory:
        return read_host_memory(self.proc, self.cgroups)


def test_without_cgroups_it_is_the_machine(tmp_path):
    machine = Machine(tmp_path, cgroup=None)
    assert machine.memory() == HostMemory(64 * GIB, str(machine.proc / "meminfo"))


def test_v2_without_a_limit_is_the_machine(tmp_path):
    machine = Machine(tmp_path, "0::/user.slice/job\n")
    machine.limit("user.slice/job/memory.max", "max")
    machine.limit("user.slice/memory.max", "max")
    assert machine.memory().size_bytes == 64 * GIB


@pytest.mark.parametrize("path", ["a/b/memory.max", "a/memory.max", "memory.max"])
def test_v2_the_smallest_limit_on_the_way_up_counts(tmp_path, path):
    machine = Machine(tmp_path, "0::/a/b\n")
    for other in ("a/b/memory.max", "a/memory.max"):
        machine.limit(other, 32 * GIB)
    file = machine.limit(path, 8 * GIB)
    assert machine.memory() == HostMemory(8 * GIB, str(file))


@pytest.mark.parametrize("path", ["a/b", "a", ""])
def test_v1_the_smallest_limit_on_the_way_up_counts(tmp_path, path):
    machine = Machine(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/a/b\n1:name=systemd:/y\n")
    for other in ("a/b", "a", ""):
        machine.limit(f"memory/{other}/memory.limit_in_bytes", NO_LIMIT_V1)
    file = machine.limit(f"memory/{path}/memory.limit_in_bytes", 8 * GIB)
    assert machine.memory() == HostMemory(8 * GIB, str(file))


def test_v1_no_limit_is_the_machine(tmp_path):
    machine = Machine(tmp_path, "4:memory:/a\n")
    machine.limit("memory/a/memory.limit_in_bytes", NO_LIMIT_V1)
    assert machine.memory().size_bytes == 64 * GIB


def test_v1_the_memory_controller_may_share_its_hierarchy(tmp_path):
    machine = Machine(tmp_path, "4:cpu,memory:/a\n")
    machine.limit("memory/a/memory.limit_in_bytes", 8 * GIB)
    assert machine.memory().size_bytes == 8 * GIB


@pytest.mark.parametrize(("v1", "v2"), [(8 * GIB, 16 * GIB), (16 * GIB, 8 * GIB)])
def test_the_smaller_of_v1_and_v2_counts(tmp_path, v1, v2):
    machine = Machine(tmp_path, "4:memory:/a\n0::/b\n")
    machine.limit("memory/a/memory.limit_in_bytes", v1)
    machine.limit("unified/b/memory.max", v2)
    assert machine.memory().size_bytes == 8 * GIB


def test_a_container_that_sees_only_its_own_root(tmp_path):
    machine = Machine(tmp_path, "4:memory:/docker/0123abcd\n")
    machine.limit("memory/memory.limit_in_bytes", 8 * GIB)
    assert machine.memory().size_bytes == 8 * GIB


def test_a_cgroup_outside_the_namespace_leaves_only_its_root(tmp_path):
    machine = Machine(tmp_path, "0::/../a\n")
    machine.limit("a/memory.max", 1 * GIB)  # another cgroup that happens to have that name
    machine.limit("memory.max", 8 * GIB)
    assert machine.memory().size_bytes == 8 * GIB


def test_a_cgroup_of_other_processes_does_not_count(tmp_path):
    machine = Machine(tmp_path, "0::/mine\n")
    machine.limit("other/memory.max", 1 * GIB)
    assert machine.memory().size_bytes == 64 * GIB


def test_colons_and_odd_bytes_in_a_cgroup_path(tmp_path):
    machine = Machine(tmp_path, cgroup=None)
    (machine.proc / "self/cgroup").write_bytes(b"0::/a:b/\xff\n")
    machine.limit("a:b/memory.max", 8 * GIB)
    assert machine.memory().size_bytes == 8 * GIB


def test_a_limit_above_the_machine_does_not_count(tmp_path):
    machine = Machine(tmp_path, "0::/a\n")
    machine.limit("a/memory.max", 128 * GIB)
    assert machine.memory() == HostMemory(64 * GIB, str(machine.proc / "meminfo"))


def test_no_meminfo_is_refused(tmp_path):
    machine = Machine(tmp_path, cgroup=None)
    (machine.proc / "meminfo").unlink()
    with pytest.raises(
        CapacityError, match=r"No such file or directory.*Make .*/meminfo .*readable"
    ):
        machine.memory()


def test_meminfo_without_a_total_is_refused(tmp_path):
    machine = Machine(tmp_path, cgroup=None)
    (machine.proc / "meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(CapacityError, match=r"no MemTotal in .*/meminfo"):
        machine.memory()


def test_a_limit_that_is_not_a_number_is_refused(tmp_path):
    machine = Machine(tmp_path, "0::/a\n")
    machine.limit("a/memory.max", "lots")
    with pytest.raises(CapacityError, match=r"a/memory.max holds 'lots' where bytes belong"):
        machine.memory()


def test_this_machine():
    memory = read_host_memory()
    assert memory.size_bytes > 0
    assert Path(memory.source).is_file()
