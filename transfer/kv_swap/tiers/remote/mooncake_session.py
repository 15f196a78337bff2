"""Sets up Mooncake: import, limits, log, and the connection to a master."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import socket
from dataclasses import dataclass
from typing import Any

from kv_swap.errors import TierError

_SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""Settings that Mooncake reads only from the environment. Its default limits are 30 s each."""

_PROBE_SECONDS = 2.0
"""Timeout for checking that there is a master. Mooncake itself takes 4.3 s to find none, and its
`setup` blocks all Python threads meanwhile."""

_METADATA = "P2PHANDSHAKE"
"""Peer-to-peer exchange of memory addresses; no server other than the master is needed."""

NOT_INSTALLED = (
    "Mooncake is not installed in this Python: pip install 'kv-offload[mooncake]', for Python 3.11 "
    "to 3.13"
)

_FATAL = 3
"""Level for glog, which would otherwise write a line to stderr for each failing key."""


@dataclass(slots=True, eq=False)
class Session:
    """A connection: Mooncake's object, the port that names it, and the number of running calls."""

    store: Any
    port: socket.socket
    calls: int = 0
    ending: bool = False
    ended: bool = False


def is_installed() -> bool:
    """Return whether this Python has Mooncake, without importing it."""
    return importlib.util.find_spec("mooncake") is not None


def connect(master: str, segment_bytes: int) -> Session:
    """Connect to a master and give it memory. Raises `TierError`."""
    store_class = _import()
    with contextlib.ExitStack() as undo:
        # The port stays taken while the session lives: Mooncake identifies a process by host and
        # port.
        port = undo.enter_context(socket.socket())
        port.bind((_own_address(master), 0))
        host, number = port.getsockname()
        store = store_class()
        undo.callback(store.close)
        code = store.setup(f"{host}:{number}", _METADATA, segment_bytes, 0, "tcp", "", master)
        if code:
            raise TierError(
                f"Mooncake cannot be set up with the master at {master} ({code}): look whether "
                f"that is mooncake_master of version 0.3.13, and whether this machine has "
                f"{segment_bytes} bytes for the segment"
            )
        undo.pop_all()
    return Session(store, port)


def _own_address(master: str) -> str:
    """Return the address from which this machine reaches the master, which must be running."""
    host, colon, port = master.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise TierError(f"a master is HOST:PORT, such as 10.0.0.5:50051, got {master!r}")
    try:
        with socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise TierError(
            f"cannot reach the store at {master}: {error}; start mooncake_master there, or look "
            f"at the network"
        ) from error


def _import() -> Any:
    """Import Mooncake with limits that suit a cache, and without a line on stderr per key."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise TierError(NOT_INSTALLED) from error
    except ImportError as error:
        raise TierError(
            f"Mooncake cannot be loaded: {error}; for libibverbs: apt-get install libibverbs1; for "
            f"libcudart: pip install 'mooncake-transfer-engine-non-cuda>=0.3.13.post1'"
        ) from error
    if "MC_LOG_LEVEL" not in os.environ:
        _silence(str(module.__file__))
    return module.MooncakeDistributedStore


def _silence(path: str) -> None:
    library = ctypes.CDLL(path)
    with contextlib.suppress(AttributeError, ValueError):  # names of this version
        # Mooncake sets the level at its first call.
        library._ZN8mooncake12globalConfigEv()
        ctypes.c_int.in_dll(library, "_ZN3fLI17FLAGS_minloglevelE").value = _FATAL
