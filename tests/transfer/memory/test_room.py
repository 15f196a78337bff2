from __future__ import annotations

import pytest
from kv_swap.memory.room import MemoryRoom


@pytest.mark.parametrize(("wanted", "spare"), [(500, 200), (700, 0), (701, -1)])
def test_what_is_spare_is_above_the_headroom_and_all_figures_are_named(
    wanted: int, spare: int
) -> None:
    room = MemoryRoom(lambda: (1000, "meminfo"), headroom_bytes=300)
    assert room.spare_bytes(wanted) == (
        spare,
        f"1000 bytes are available (meminfo), {wanted} are wanted next, and 300 must stay free",
    )
