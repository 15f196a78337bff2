"""A client of Mooncake before there is a master: what is imported when, and what is said."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.remote.client import namespace, object_keys
from kv_swap.tiers.remote.mooncake import MooncakeClient

from tests.support.mooncake import LIBRARIES, free_port, require_mooncake
from tests.support.processes import run_code

IMPORTS = """
import sys
import kv_offload, kv_swap, kv_swap.tiers.remote.tier
from kv_swap.tiers.remote.mooncake import MooncakeClient
MooncakeClient("127.0.0.1:50051", 1 << 30)
print([name for name in sys.modules if name.partition(".")[0] == "mooncake"])
"""


def test_mooncake_is_imported_only_by_who_connects():
    assert run_code(IMPORTS) == "[]\n"


CONNECT = """
import sys
from kv_swap.errors import TierError
from kv_swap.tiers.remote.mooncake import MooncakeClient
{before}
try:
    MooncakeClient("127.0.0.1:1", 0).connect()
except TierError as error:
    print(error)
"""


def test_a_wheel_that_is_not_installed_is_named():
    said = run_code(CONNECT.format(before="sys.modules['mooncake'] = None"))
    assert "pip install 'kv-offload[mooncake]'" in said


def test_a_library_that_is_not_installed_is_named():
    require_mooncake()
    code = f"import ctypes; ctypes.CDLL({LIBRARIES[-1]!r})"
    if subprocess.run([sys.executable, "-c", code], env={}, capture_output=True).returncode == 0:
        pytest.skip("this machine has libibverbs")
    said = run_code(CONNECT.format(before=""))
    assert "libibverbs.so.1" in said
    assert "apt-get install libibverbs1" in said


@pytest.mark.parametrize("master", ["", "somewhere", "10.0.0.5:", ":50051", "10.0.0.5:x"])
def test_a_master_is_a_host_and_a_port(master):
    require_mooncake()
    with pytest.raises(TierError, match=r"a master is HOST:PORT, such as 10\.0\.0\.5:50051, got"):
        MooncakeClient(master, 0).connect()


def test_a_host_that_is_not_there_is_named():
    require_mooncake()
    with pytest.raises(TierError, match=r"cannot reach the store at nowhere\.invalid:5"):
        MooncakeClient("nowhere.invalid:5", 0).connect()


def test_a_master_is_reached_over_ipv4_and_no_other_way():
    require_mooncake()
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        master = f"::1:{listener.getsockname()[1]}"
        with pytest.raises(TierError, match=f"cannot reach the store at {master}"):
            MooncakeClient(master, 0).connect()


def test_who_asks_without_a_master_hears_so_each_time():
    require_mooncake()
    client = MooncakeClient(f"127.0.0.1:{free_port()}", 0)
    for _ in range(2):
        with pytest.raises(TierError, match="start mooncake_master there"):
            client.exist(["a"])
    client.close()


def test_keys_are_the_same_in_every_process():
    """Another version or machine must find them, or none at all: they are fixed."""
    file_id = namespace({"model": "m", "rank": "0"}, 4096)
    assert file_id == namespace({"rank": "0", "model": "m"}, 4096)
    assert file_id == "31b515673836892162901e21bd5dabb9"
    (key,) = object_keys(file_id, [b"name"])
    assert key == f"kv-offload/{file_id}/c96a918390b153ff53816205aaaa5e4a"
    assert len({namespace(d, n) for d in ({}, {"a": "b"}, {"ab": ""}) for n in (1, 2)}) == 6
