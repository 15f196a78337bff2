"""Mooncake Store for tests and the demo: libraries without root, processes that can be killed.

Its wheel needs libibverbs, which many machines lack. If it is missing, the packages are fetched
with apt-get into the user's cache folder and loaded from there. If that fails too, `missing` gives
the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Self
from unittest import mock

from tests.support.processes import ROOT

PACKAGES = ("libnl-3-200", "libnl-route-3-200", "libibverbs1")
LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""Libraries, each after those it needs."""

FOLDERS_VARIABLE = "LD_LIBRARY_PATH"

PATIENT = {"MC_RPC_TIMEOUT_MS": "60000"}
"""Variables of processes that must not lose the store. With the default of 2 s they lost the master
on two cores with five busy processes."""


def patient() -> Any:
    """Return a context in which stores wait for a master as long as `PATIENT` says."""
    return mock.patch.dict("os.environ", PATIENT)


def require_mooncake() -> None:
    """Make Mooncake loadable here and in processes of `environment`, or skip with the reason."""
    import pytest  # the demo does not need it

    if (reason := missing()) is not None:
        pytest.skip(reason)


def missing() -> str | None:
    """Make Mooncake loadable here and in processes of `environment`, or return why it is not."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake's wheel is not installed, which is for Python 3.11 to 3.13"
    try:
        for library in LIBRARIES:
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError:
        return _load_fetched()
    return None


def environment() -> dict[str, str]:
    """Return variables for processes that use Mooncake: the libraries' folder, and this path."""
    found = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    folders = [str(folder) for folder in _folders() if folder.exists()]
    found[FOLDERS_VARIABLE] = os.pathsep.join([*folders, found.get(FOLDERS_VARIABLE, "")])
    return found


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kv-offload-tests" / "libibverbs"


def _folders() -> list[Path]:
    machine = f"{os.uname().machine}-linux-gnu"
    return [_cache() / "usr/lib" / machine, _cache() / "lib" / machine]


def _load_fetched() -> str | None:
    try:
        if not all(any((folder / name).exists() for folder in _folders()) for name in LIBRARIES):
            _fetch()
        for name in LIBRARIES:
            (path,) = [folder / name for folder in _folders() if (folder / name).exists()]
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return (
            f"Mooncake needs libibverbs1, which is not installed and cannot be fetched with "
            f"apt-get: {error}"
        )
    return None


def _fetch() -> None:
    """Fill the folder completely or not at all, since other processes may fetch concurrently."""
    cache = _cache()
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        folder = Path(scratch, cache.name)
        folder.mkdir()
        download = ["apt-get", "download", *PACKAGES]
        subprocess.run(download, cwd=scratch, check=True, capture_output=True, timeout=60)
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True, timeout=60)
        with contextlib.suppress(OSError):  # another process was faster
            folder.rename(cache)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class HeldPort:
    """A loopback port reserved while this object lives.

    Its socket never listens, so Linux lets a server that also sets SO_REUSEADDR use the port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])
        weakref.finalize(self, self._socket.close)


class Program:
    """A process that can be stopped and killed; a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def kill(self) -> None:
        """Kill it with SIGKILL, even while it is stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def hold(self) -> None:
        """Stop it, which acts like a network that drops everything.

        Return once all its threads have stopped: until the one that takes the signal gets a core,
        the others continue to answer.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class Master(Program):
    """A `mooncake_master` on loopback. `address` is HOST:PORT.

    It drops a client that has been silent for `client_seconds`, with everything that this client
    has put, and starts to evict when 90 % full. Blocks that were read or looked up are not evicted
    for `lease_seconds`. A read that takes longer returns nothing; on a busy machine half a second
    may be too short.
    """

    def __init__(
        self, *, starts: bool = True, lease_seconds: float = 10, client_seconds: int = 5
    ) -> None:
        super().__init__()
        self._lease_ms = round(lease_seconds * 1000)
        self._client_seconds = client_seconds
        self._ports = HeldPort(), HeldPort()
        self.address = f"127.0.0.1:{self._ports[0].number}"
        if starts:
            self.start()

    def start(self) -> None:
        """Start it at the same address as before; return once it serves."""
        self._process = subprocess.Popen(
            [
                Path(sys.executable).with_name("mooncake_master"),
                f"--rpc_port={self._ports[0].number}",
                f"--metrics_port={self._ports[1].number}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                f"--client_ttl={self._client_seconds}",
                f"--default_kv_lease_ttl={self._lease_ms}",
            ],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        wait_until_it_serves(self._process, self._ports[0].number)


def wait_until_it_serves(process: subprocess.Popen[Any], port: int) -> None:
    """Wait until a server accepts connections."""
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert process.poll() is None, f"{process.args} has ended"
            assert time.monotonic() < deadline, f"{process.args} does not serve"
            time.sleep(0.02)
        else:
            return


_PEER = """
import sys
from tests.support.tier_bed import MooncakeBed, named
master, segment_bytes, count, slot_bytes = sys.argv[1], *map(int, sys.argv[2:])
with MooncakeBed(master, segment_bytes, count, slot_bytes) as bed:
    while bed.put(named(count)).failed:
        pass  # on a busy machine the master may not answer in time
    print("stored", flush=True)
    sys.stdin.read()
"""


class Peer(Program):
    """Another process with a tier, which contributes memory and has stored `named(count)` there."""

    def __init__(
        self, master: str, count: int = 8, slot_bytes: int = 16384, segment_bytes: int = 64 << 20
    ) -> None:
        super().__init__()
        arguments = [str(number) for number in (segment_bytes, count, slot_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PEER, master, *arguments],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "stored\n"

    def __exit__(self, *error: object) -> None:
        """Shut it down in order: a killed process counts as alive until the master times it out."""
        if self._process is not None:
            self.go_on()  # a failed test may have left it stopped
            self._process.communicate(timeout=120)
            self._process = None
