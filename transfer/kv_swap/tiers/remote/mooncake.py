"""A client of Mooncake Store over TCP: the wheel `mooncake-transfer-engine-non-cuda` 0.3.13.post1.

The process can give memory, its segment, to the pool; others reach it at the address of this
machine's route to the master. After a restart of the master, Mooncake rejoins automatically within
two seconds; all objects in memory are lost.

A stalled transfer is reported as failed after 60 s, but **continues**: its bytes can arrive when
the memory already holds another block. So after a call that took this long, the connection is
closed, which ends its transfers, before the call returns.

Memory is not registered. Over TCP, Mooncake needs registration only for memory that others address,
and it lets anyone who reaches this process read and write registered memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kv_swap.errors import TierError
from kv_swap.tiers.remote.client import Fate, Parts, RemoteClient

_SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""Settings that Mooncake reads only from the environment. Its default limits are 30 s each."""

_PROBE_SECONDS = 2.0
"""Timeout for checking that a master is running. Mooncake itself takes 4.3 s to notice that none
is, and its `setup` blocks all Python threads meanwhile."""

_METADATA = "P2PHANDSHAKE"
"""Peer-to-peer exchange of memory addresses, which needs no server besides the master."""

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
        # Keep the port while the session lives: Mooncake identifies a process by host and port.
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
        with socket.socket() as connection:  # IPv4, whatever else the name has, as in `connect`
            connection.settimeout(_PROBE_SECONDS)
            connection.connect((host, int(port)))
            return str(connection.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise TierError(
            f"cannot reach the store at {master}: {error}; start mooncake_master there, or look "
            f"at the network"
        ) from error


def _import() -> Any:
    """Import Mooncake with time limits for a cache, and without a line on stderr per key."""
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


_AGAIN_SECONDS = 1.0
"""Seconds between checks whether the master is back."""

_UNSETTLED_SECONDS = 50.0
"""Shorter calls abandoned no transfer: Mooncake abandons one after 60 s."""

_TRANSFER_FAIL = -800
_UNREACHABLE = {
    -900: "the master is gone",
    -901: "the master does not answer",
    -1010: "the master does not serve",
    -1011: "the master does not serve",
}
_MISSING = {-703, -704, -707, -710, -712}
_FULL = {-101, -200}
_OTHER_SIZE = -600
_MEANINGS = {
    _TRANSFER_FAIL: "the process that has the memory for it is gone, or the network between; "
    "the master drops that memory ten seconds after its process ends",
    -601: "the master does not know this client yet, which it does some seconds after its restart",
}


class MooncakeClient(RemoteClient):
    """A client of the master at `master`, HOST:PORT, that gives `segment_bytes` to the pool."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        self._master = master
        self._segment_bytes = segment_bytes
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._closed = False

    def connect(self) -> None:
        with self._changed:
            self._open()

    def exist(self, keys: Sequence[str]) -> list[bool]:
        with self._call() as session:
            codes = session.store.batch_is_exist(list(keys))
        self._check_reachable(codes)
        for code in codes:
            if code < 0:
                raise TierError(f"cannot ask {self._master}: {_explain(code)}")
        return [code == 1 for code in codes]

    def put(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        codes = self._transfer(lambda store: store.batch_put_from_multi_buffers, keys, parts)
        return [Fate.FULL if code in _FULL else self._fate(code) for code in codes]

    def get(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        codes = self._transfer(lambda store: store.batch_get_into_multi_buffers, keys, parts)
        sizes = [sum(nbytes for _, nbytes in own) for own in parts]
        failed = [key for key, code in zip(keys, codes, strict=True) if code == _TRANSFER_FAIL]
        found = self._sizes(failed) if failed else {}
        fates: list[Fate | TierError] = []
        for key, code, size in zip(keys, codes, sizes, strict=True):
            if code == _OTHER_SIZE or 0 <= code < size or found.get(key, size) != size:
                fates.append(Fate.OTHER)
            else:
                fates.append(Fate.MISSING if code in _MISSING else self._fate(code))
        return fates

    def _sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the sizes of existing objects: reading a shorter one fails without a reason."""
        with self._call() as session:
            sizes = {key: int(session.store.get_size(key)) for key in keys}
        return {key: size for key, size in sizes.items() if size >= 0}

    def remove(self, keys: Sequence[str]) -> None:
        with self._call() as session:
            self._check_reachable(session.store.batch_remove(list(keys), force=True))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            self._end(session)

    def _transfer(
        self,
        method: Callable[[Any], Callable[..., Sequence[int]]],
        keys: Sequence[str],
        parts: Sequence[Parts],
    ) -> Sequence[int]:
        addresses = [[address for address, _ in own] for own in parts]
        sizes = [[nbytes for _, nbytes in own] for own in parts]
        codes = [0] * len(keys)
        with self._call() as session:
            began = time.monotonic()
            for rows in _rounds(keys):
                found = method(session.store)(
                    [keys[row] for row in rows],
                    [addresses[row] for row in rows],
                    [sizes[row] for row in rows],
                )
                for row, code in zip(rows, found, strict=True):
                    codes[row] = code
            seconds = time.monotonic() - began
        if seconds > _UNSETTLED_SECONDS:
            with self._changed:
                if self._session is session:
                    self._session = None
            self._end(session)
        self._check_reachable(codes)
        return codes

    def _fate(self, code: int) -> Fate | TierError:
        if code >= 0:
            return Fate.DONE
        return TierError(f"the store at {self._master} failed: {_explain(code)}")

    def _check_reachable(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code in _UNREACHABLE:
                raise TierError(
                    f"cannot reach the store at {self._master}: {_UNREACHABLE[code]} ({code}); "
                    f"look whether mooncake_master runs there, and at the network"
                )

    @contextlib.contextmanager
    def _call(self) -> Iterator[Session]:
        """Yield a session that stays open during the block; connect if there is none."""
        with self._changed:
            session = self._open()
            session.calls += 1
        try:
            yield session
        finally:
            with self._changed:
                session.calls -= 1
                self._changed.notify_all()

    def _open(self) -> Session:
        if self._closed:
            raise TierError(f"the client of {self._master} is closed")
        if self._session is None:
            self._session = connect(self._master, self._segment_bytes)
        return self._session

    def _end(self, session: Session) -> None:
        """Close a session on one thread once no call uses it; return once it is closed.

        Mooncake's `close` blocks all Python threads: for a second or two if the master answers, for
        4 to 20 s if it is gone or does not answer. So first wait until it answers.
        """
        with self._changed:
            self._changed.wait_for(lambda: session.calls == 0)
            if session.ending:
                self._changed.wait_for(lambda: session.ended)
                return
            session.ending = True
        while any(code < 0 for code in session.store.batch_is_exist(["any"])):
            time.sleep(_AGAIN_SECONDS)
        session.store.close()
        session.port.close()
        with self._changed:
            session.ended = True
            self._changed.notify_all()


def _rounds(keys: Sequence[str]) -> list[list[int]]:
    """Split rows so that no call has a key twice: Mooncake would move it only once."""
    if len(set(keys)) == len(keys):
        return [list(range(len(keys)))]
    rounds: list[list[int]] = []
    seen: Counter[str] = Counter()
    for row, key in enumerate(keys):
        if seen[key] == len(rounds):
            rounds.append([])
        rounds[seen[key]].append(row)
        seen[key] += 1
    return rounds


def _explain(code: int) -> str:
    return f"{_MEANINGS.get(code, 'see ErrorCode in types.h of Mooncake Store')} ({code})"
