"""What the thread that asks a store answers, and what becomes of a store that does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.remote.client import PREFIX, RemoteClient, object_keys

from kv_offload.tiers import directory as remote_directory
from kv_offload.tiers.directory import Question, RemoteDirectory
from tests.support.waiting import wait_until

NAMES = [b"a", b"b", b"c"]


class Asked(RemoteClient):
    """Has some objects, and notes which keys it was asked for."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)
        self.asked: list[list[str]] = []
        self.error: TierError | None = None
        self.answers = threading.Event()
        self.connects = threading.Event()
        for ready in (self.answers, self.connects):
            ready.set()
        self.connected = self.closed = False

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self.answers.wait(20)
        self.asked.append(list(keys))
        if self.error is not None:
            raise self.error
        return [key in self.keys for key in keys]

    def close(self) -> None:
        self.closed = True

    def connect(self) -> None:
        self.connects.wait(20)
        if self.error is not None:
            raise self.error
        self.connected = True

    def put(self, keys: object, parts: object) -> None:  # type: ignore[override]
        raise AssertionError("it only asks")

    get = remove = put  # type: ignore[assignment]


def keys(prefix: str, *names: bytes) -> list[str]:
    return object_keys(prefix, names)


def ask(
    directory: RemoteDirectory, names: Sequence[bytes], *, are_chained: bool = False
) -> Question:
    question = Question(names, are_chained)
    directory.ask(question)
    return question


def answered(question: Question) -> Sequence[bool] | None:
    wait_until(lambda: question.is_done)
    return question.found


def test_a_block_is_there_if_all_of_its_parts_are():
    client = Asked(*keys("0", b"a", b"b"), *keys("1", b"b", b"c"))
    directory = RemoteDirectory(client, ["0", "1"], object_keys)
    assert answered(ask(directory, NAMES)) == [False, True, False]
    assert client.asked == [keys("0", *NAMES), keys("1", b"a", b"b")], "those that can be there"
    directory.close(20)
    assert client.closed


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("probes", [1, 2, 32])
def test_of_a_chain_a_store_is_asked_for_a_few_names(length, probes):
    """A request for each of a thousand objects would take longer than a prompt may wait."""
    names = [f"{number}".encode() for number in range(length)]
    for there in {0, 1, length // 3, length - 1, length}:
        client = Asked(*keys("0", *names[:there]), *keys("1", *names))
        client.probes = probes
        directory = RemoteDirectory(client, ["0", "1"], object_keys)
        expected = [number < there for number in range(length)]
        assert answered(ask(directory, names, are_chained=True)) == expected
        asked = [call for call in client.asked if call[0].startswith(f"{PREFIX}0/")]
        assert max(map(len, asked)) <= probes
        if probes == 32:
            assert len(asked) <= 3
        directory.close(20)


@pytest.mark.parametrize("gone", [1, 2, 50])
def test_a_chain_whose_beginning_is_gone_is_not_there(gone):
    names = [f"{number}".encode() for number in range(100)]
    client = Asked(*keys("0", *names[gone:]))
    client.probes = 32
    directory = RemoteDirectory(client, ["0"], object_keys)
    assert not any(answered(ask(directory, names, are_chained=True)) or [True])
    directory.close(20)


def test_an_error_is_told_once_and_the_next_question_is_asked(caplog):
    client = Asked(*keys("0", b"b"))
    client.error = TierError("the master is gone")
    directory = RemoteDirectory(client, ["0"], object_keys)
    assert [answered(ask(directory, NAMES)) for _ in range(3)] == [None] * 3
    assert caplog.text.count("the remote store does not answer: ") == 1
    client.error = None
    assert answered(ask(directory, NAMES)) == [False, True, False]
    directory.close(20)


def test_an_engine_starts_with_a_connection():
    client = Asked()
    directory = RemoteDirectory(client, ["0"], object_keys)
    assert client.connected
    directory.close(20)


def test_an_engine_starts_also_while_the_store_is_away(caplog, monkeypatch):
    client = Asked()
    client.error = TierError("start mooncake_master there")
    RemoteDirectory(client, ["0"], object_keys).close(20)
    assert "start mooncake_master there" in caplog.text

    client = Asked()
    client.connects.clear()
    monkeypatch.setattr(remote_directory, "START_SECONDS", 0.05)
    began = time.monotonic()
    directory = RemoteDirectory(client, ["0"], object_keys)
    assert time.monotonic() - began < 10
    answer = ask(directory, NAMES)
    assert not answer.is_done
    client.connects.set()
    assert answered(answer) == [False] * 3
    directory.close(20)


def test_neither_a_question_nor_the_end_waits_for_a_store_that_hangs():
    client = Asked()
    client.answers.clear()
    directory = RemoteDirectory(client, ["0"], object_keys)
    began = time.monotonic()
    answer = ask(directory, NAMES)
    directory.close(0.05)
    assert time.monotonic() - began < 10
    assert not answer.is_done
    client.answers.set()
    assert answered(answer) == [False] * 3
