"""What a disk is measured to give."""

from __future__ import annotations

import pytest
from kv_swap.errors import TierError
from kv_swap.tiers.probe import find_filesystem, measure


@pytest.mark.parametrize("block_bytes", [65536, 65536 + 16])
def test_measures_a_folder_and_leaves_nothing_there(tmp_path, block_bytes):
    rates = measure(tmp_path, 4 << 20, block_bytes)
    assert rates.write_bytes_per_second > 0
    assert rates.read_bytes_per_second > 0
    assert not (rates.direct and block_bytes % 512)
    assert list(tmp_path.iterdir()) == []


def test_names_the_filesystem_of_a_folder(small, failing):
    (small / "folder").mkdir()
    assert find_filesystem(small / "folder") == "tmpfs"
    assert find_filesystem(failing[0]) == "ext4"


def test_says_why_a_folder_cannot_be_measured(small):
    with pytest.raises(TierError, match="No space left on device; free space"):
        measure(small, 8 << 20, 65536)
    assert list(small.iterdir()) == []
    with pytest.raises(TierError, match="No such file or directory; make the folder"):
        measure(small / "gone", 1 << 20, 65536)
