"""The bench of links: who copies when, and what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import links


class FakePipe:
    """A GPU whose link carries 50 GB/s, and three fifths of that beside another one."""

    busy: list[FakePipe]

    def __init__(self, busy: list[FakePipe]) -> None:
        self.busy = busy

    def send(self, _asked: tuple[str, str]) -> None:
        self.busy.append(self)

    def poll(self, _seconds: float) -> bool:
        return True

    def recv(self) -> float:
        rate = 50e9 if len(self.busy) == 1 else 30e9
        if self.busy[-1] is self:  # all have been asked for as much, so all end together
            self.busy.clear()
        return rate


def test_each_gpu_copies_alone_and_then_all_at_once() -> None:
    busy: list[FakePipe] = []
    pipes: Any = [FakePipe(busy), FakePipe(busy)]
    rates = links._rates(pipes)
    assert set(rates) == {"load", "store"}
    for ways in rates.values():
        assert set(ways) == {"blocks", "one piece"}
        for found in ways.values():
            assert found == {"alone": [50e9, 50e9], "at once": [30e9, 30e9]}
    assert "| load, blocks | 50.0 / 50.0 | 30.0 / 30.0 | 0.60 / 0.60 |" in links.table(rates)


def test_a_host_without_gpus_has_memory_and_no_rates(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setattr(links, "DRIVER", tmp_path / "nvidiactl")
    found = links.host_of(2)
    assert (found["gpus"], found["rates"]) == ([], {})
    assert all(text.endswith("kB") for text in found["memory_by_node"].values())


@pytest.mark.skipif(links.DRIVER.exists(), reason="needs a host without a GPU")
def test_a_gpu_that_fails_leaves_the_rest_of_a_bench_to_be_measured(monkeypatch: Any) -> None:
    monkeypatch.setattr(links, "DRIVER", Path("/"))
    found = links.host_of(1)
    assert found["rates"] == {}
    assert found["error"].startswith("links: EOFError")
    assert found["memory_by_node"]


def test_the_topology_has_no_codes_of_a_terminal(monkeypatch: Any) -> None:
    monkeypatch.setattr(links, "output_of", lambda *_: "\x1b[4m\tGPU0\x1b[0m\nGPU0\t X")
    monkeypatch.setattr(links, "DRIVER", Path("/does/not/exist"))
    assert links.host_of(1)["topology"] == "\tGPU0\nGPU0\t X"
