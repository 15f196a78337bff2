"""What doctor says of a store, with a real master and without one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kv_offload.config import RemoteConfig
from kv_offload.tools.doctor import remote
from kv_offload.tools.doctor.report import Check
from tests.support.mooncake import Master, free_port, require_mooncake
from tests.support.tier_bed import MooncakeBed, named


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    require_mooncake()
    with Master() as master:
        yield master


def checks(master: str, environ: dict[str, str] | None = None, **how: bool) -> dict[str, Check]:
    store = RemoteConfig(kind="mooncake", address=master, bytes=0)
    found = remote.check_remote(store, environ or {}, measures=how.get("measures", True))
    return {check.name: check for check in found}


RATES = r"32 of 32 blocks stored, found, read and verified {}: [\d.]+ GB/s put, [\d.]+ GB/s got"


def test_without_engines_doctor_gives_the_memory_itself(master):
    found = checks(master.address)
    assert list(found) == ["remote keys", "remote", "remote rate"]
    assert [found[name].state for name in ("remote", "remote rate")] == ["ok", "ok"]
    assert re.match(
        RATES.format("in doctor's own memory, as no engine gives any"), found["remote rate"].found
    )


def test_the_memory_of_engines_is_measured_and_left_as_it_was(master):
    with MooncakeBed(master.address, 256 << 20) as bed:
        assert bed.put(named(8)).failed == ()
        rate = checks(master.address)["remote rate"]
        assert rate.state == "ok"
        assert re.match(RATES.format("in memory of others"), rate.found)
        assert bed.get(named(8)).failed == ()


def test_a_store_with_little_room_is_a_warning(master):
    with MooncakeBed(master.address, 32 << 20) as bed:
        assert bed.put(named(8)).failed == ()
        rate = checks(master.address)["remote rate"]
        assert rate.state == "warning"
        assert "Give the store more memory" in rate.remedy


def test_nothing_is_moved_without_a_measurement(master):
    assert checks(master.address, measures=False)["remote rate"].state == "not checked"


def test_no_master_is_a_problem():
    require_mooncake()
    address = f"127.0.0.1:{free_port()}"
    found = checks(address)
    assert list(found) == ["remote keys", "remote"]
    assert found["remote"].state == "problem"
    assert f"cannot reach the store at {address}" in found["remote"].found


@pytest.mark.parametrize(("environ", "state"), [({}, "not checked"), ({remote.SEED: "0"}, "ok")])
def test_keys_are_the_same_elsewhere_with_a_seed(environ, state):
    require_mooncake()
    assert checks(f"127.0.0.1:{free_port()}", environ)["remote keys"].state == state


@pytest.mark.parametrize(
    ("environ", "found"),
    [({}, "is not set"), ({remote.SEED: "random"}, "is 'random', not a number")],
)
def test_a_missing_seed_is_not_called_a_wrong_one(tmp_path, environ, found):
    folder = RemoteConfig(kind="folder", path=str(tmp_path), bytes=1 << 20)
    keys, *_ = remote.check_remote(folder, environ, measures=False)
    assert keys.found.startswith(f"{remote.SEED} {found}; ")


@pytest.mark.parametrize("in_file", [False, True])
def test_the_command_has_a_section(command, tmp_path, in_file):
    require_mooncake()
    address = f"127.0.0.1:{free_port()}"
    words = ["--remote", address]
    if in_file:
        file = tmp_path / "kv-offload.yaml"
        file.write_text(
            f'cpu_bytes: 1GiB\nremote: {{kind: mooncake, address: "{address}", bytes: 0}}\n'
        )
        words = [str(file)]
    done = command("doctor", "--json", "--no-measure", *words)
    assert done.status == 1
    assert f"cannot reach the store at {address}" in done.out
