"""The rule that chooses a path, over tables of which the right choice is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kv_swap.calibration import PAGE_BYTES, PAGES, Calibration, DeviceKey, Point
from kv_swap.cuda.copy_path import PATHS, PathName
from kv_swap.cuda.dma import SLICE_BYTES, SLICE_COPIES
from kv_swap.engine import Direction
from kv_swap.path_rule import MeasuredRule, OnlyPath

LOAD, STORE = Direction.LOAD, Direction.STORE
KIB, MIB = 1 << 10, 1 << 20
KEY = DeviceKey("NVIDIA H200", (9, 0), "580.95.05, CUDA 13000", "32.0 GT/s PCIe x 16")


def make_calibration(gbps: Callable[[PathName, Direction, int, int], float]) -> Calibration:
    return Calibration(
        KEY,
        tuple(
            Point(path, direction, page_bytes, pages, gbps(path, direction, page_bytes, pages))
            for path in PATHS
            for direction in Direction
            for page_bytes in PAGE_BYTES
            for pages in PAGES
        ),
    )


@pytest.mark.parametrize(("direction", "margin"), [(LOAD, 0.05), (STORE, 0.10)])
@pytest.mark.parametrize(("above", "chosen"), [(-0.001, "kernel"), (0.001, "dma")])
def test_the_copy_engine_must_win_by_a_margin(
    direction: Direction, margin: float, above: float, chosen: str
) -> None:
    faster = {direction: 1 + margin + above}
    rule = MeasuredRule(
        make_calibration(
            lambda path, way, *_: 50.0 * (faster.get(way, 1.0) if path == "dma" else 1)
        )
    )
    for page_bytes in (16, 16 * KIB, 100_000, 4 * MIB):
        for pages in (1, 8, 15):
            assert rule.choose(direction, page_bytes, pages) == chosen
        names = {"kernel"} if chosen == "kernel" else {"kernel", "dma"}
        assert rule.paths(direction, page_bytes) == names
    other = STORE if direction is LOAD else LOAD
    assert rule.paths(other, 2 * MIB) == {"kernel"}


def test_figures_are_interpolated_over_the_logarithms() -> None:
    def gbps(path: PathName, direction: Direction, page_bytes: int, pages: int) -> float:
        if path == "kernel":
            return 50
        return {256 * KIB: 40, 2 * MIB: 70}.get(page_bytes, 10) + {8: -5, 32: 5}[pages]

    rule = MeasuredRule(make_calibration(gbps))
    assert rule.gbps("dma", LOAD, 256 * KIB, 8) == pytest.approx(35)
    assert rule.gbps("dma", LOAD, 2 * MIB, 32) == pytest.approx(75)
    assert rule.gbps("dma", LOAD, 512 * KIB, 16) == pytest.approx(50)
    assert rule.gbps("dma", LOAD, 1 * MIB, 16) == pytest.approx(60)
    for beyond, nearest in (((64 * MIB, 32), (2 * MIB, 32)), ((16, 1), (16 * KIB, 8))):
        assert rule.gbps("dma", LOAD, *beyond) == rule.gbps("dma", LOAD, *nearest)
    assert rule.choose(LOAD, 512 * KIB, 16) == "kernel"
    assert rule.choose(LOAD, 1 * MIB, 16) == "dma"
    assert rule.choose(LOAD, 512 * KIB, 32) == "dma"


def test_jobs_of_more_than_a_slice_go_to_the_kernels() -> None:
    rule = MeasuredRule(make_calibration(lambda path, *_: 90 if path == "dma" else 1))
    assert rule.choose(LOAD, 16 * KIB, SLICE_COPIES) == "dma"
    assert rule.choose(LOAD, 16 * KIB, SLICE_COPIES + 1) == "kernel"
    assert rule.choose(LOAD, 2 * MIB, SLICE_BYTES // (2 * MIB)) == "dma"
    assert rule.choose(LOAD, 2 * MIB, SLICE_BYTES // (2 * MIB) + 1) == "kernel"


def test_a_rule_names_beforehand_whatever_it_chooses() -> None:
    def gbps(path: PathName, direction: Direction, page_bytes: int, pages: int) -> float:
        return 80 if (path, pages) == ("dma", 32) else 50

    rule = MeasuredRule(make_calibration(gbps))
    # 32 such pages are more than a slice, 13 are not, and the engine wins there already.
    for page_bytes in (16 * KIB, 4 * MIB):
        chosen = {rule.choose(LOAD, page_bytes, pages) for pages in range(1, 100)}
        assert chosen == rule.paths(LOAD, page_bytes) == {"kernel", "dma"}


@pytest.mark.parametrize("path", PATHS)
def test_one_path_for_everything(path: PathName) -> None:
    rule = OnlyPath(path)
    assert rule.paths(LOAD, 16) == {path}
    assert rule.choose(STORE, 2 * MIB, 100_000) == path
