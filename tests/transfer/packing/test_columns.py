from __future__ import annotations

import numpy as np
import pytest
from kv_swap.errors import LayoutError
from kv_swap.packing.format import Packing, tile_columns


@pytest.mark.parametrize(
    ("period", "run", "first_group", "expected", "count"),
    [
        (16, 0, 0, lambda g: g % 16, 16),
        (128, 0, 1024, lambda g: g % 128 // 2, 64),
        (256, 0, 0, lambda g: g % 256 // 4, 64),
        (1024, 0, 2048, lambda g: g // 16, 64),
        (4096, 0, 1024, lambda g: g // 16, 64),
        (16, 256, 1024, lambda g: g // 256 * 16 + g % 16, 64),
        (16, 2048, 1024, lambda g: g % 16, 16),
        (3, 0, 0, lambda g: g % 3, 8),
        (1, 1, 0, lambda g: g // 16, 64),
    ],
)
def test_a_column_is_eight_channels_merged_until_they_fit(
    period, run, first_group, expected, count
):
    columns = tile_columns(Packing(period, run), first_group)
    assert callable(expected)
    np.testing.assert_array_equal(columns.of_group, expected(np.arange(1024)))
    assert columns.count == count


def test_tiles_with_the_same_columns_have_the_same_object():
    assert tile_columns(Packing(16), 0) is tile_columns(Packing(16, 2048), 3072)
    assert tile_columns(Packing(16), 0) is not tile_columns(Packing(8), 0)


@pytest.mark.parametrize(("period", "run"), [(0, 0), (-1, 0), (1, -1)])
def test_a_packing_without_a_period_is_refused(period, run):
    with pytest.raises(LayoutError, match=f"period {period} and run {run}"):
        Packing(period, run)
