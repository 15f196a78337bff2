from __future__ import annotations

from unittest import mock

import pytest
import torch
from kv_swap.errors import DeviceError, PinnedMemoryError

from kv_offload.config import OffloadConfig
from kv_offload.config.host_memory import headroom_bytes, read_host_memory
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from kv_offload.messages import WorkerCapacity
from kv_offload.worker.allocation import check_packing, transfer_kind
from tests.support.rank import BLOCK_BYTES, Rank


def test_a_rank_holds_its_share_of_host_memory():
    rank = Rank(num_ranks=2, cpu_bytes=2 * BLOCK_BYTES * 5 + 100)
    assert rank.half.capacity() == WorkerCapacity(0, 0, 0), "not yet"
    rank.start()
    assert rank.transfer.num_slots == 5
    assert rank.half.capacity() == WorkerCapacity(0, 5, 5, slot_bytes=BLOCK_BYTES)
    rank.half.shutdown()


@pytest.mark.parametrize(
    ("num_ranks", "cpu_bytes", "given"),
    [(1, 1, "this engine 1 byte"), (2, 100, "each of 2 ranks 50 bytes")],
)
def test_a_share_below_one_slot_is_refused_with_the_size_that_is_needed(
    monkeypatch, num_ranks, cpu_bytes, given
):
    """The advice grows with the slot and the ranks."""
    monkeypatch.setattr("kv_offload.worker.allocation.USEFUL_SLOTS", 20 << 20)
    with pytest.raises(CapacityError) as caught:
        Rank(num_ranks=num_ranks, cpu_bytes=cpu_bytes).start()
    assert str(caught.value) == (
        f"kv-offload: cpu_bytes gives {given}, and one slot takes 64 bytes: a pool needs thousands "
        f"of them, set cpu_bytes to {num_ranks + 1}GiB or more"  # of 1.25 GiB for each rank
    )
    Rank(num_ranks=num_ranks, cpu_bytes=num_ranks * 64).start().half.shutdown()


@pytest.mark.parametrize(
    ("error", "ours"), [(PinnedMemoryError, CapacityError), (DeviceError, UnsupportedError)]
)
def test_errors_of_the_transfer_package_become_the_plugins(monkeypatch, error, ours):
    fail = mock.Mock(side_effect=error("cannot page-lock 5 bytes"))
    monkeypatch.setattr("kv_offload.worker.allocation.create_engine", fail)
    with pytest.raises(ours) as caught:
        Rank().start()
    assert str(caught.value) == "kv-offload: cannot page-lock 5 bytes"


def test_a_pool_grows_only_into_what_need_not_stay_free(monkeypatch):
    create = mock.Mock(side_effect=DeviceError("enough seen"))
    monkeypatch.setattr("kv_offload.worker.allocation.create_engine", create)
    with pytest.raises(UnsupportedError, match="enough seen"):
        Rank().start()
    room, whole = create.call_args.kwargs["room"], read_host_memory()
    assert room.headroom_bytes == headroom_bytes(whole)
    spare_bytes, figures = room.spare_bytes(1 << 20)
    assert 0 < spare_bytes < whole.size_bytes
    assert "bytes are available (" in figures
    assert room.spare_bytes(whole.size_bytes)[0] < 0


def test_a_transfer_engine_for_another_device_is_refused():
    with pytest.raises(ConfigError, match=r"is 'cuda', .* on cpu: use 'auto' or 'host'"):
        Rank(transfer_engine="cuda").start()
    Rank(transfer_engine="host").start().half.shutdown()
    for asked in ("auto", "cuda"):
        config = OffloadConfig(cpu_bytes=1, transfer_engine=asked)
        assert transfer_kind(config, "cuda") == "cuda"


def test_what_does_not_pack_is_refused_with_the_remedy():
    """GPUs before Hopper, or with less shared memory."""
    for capability in ((8, 9), (12, 0), (12, 1)):
        has = rf"has compute capability {capability[0]}\.{capability[1]}, .* need 9\.0 or newer"
        with pytest.raises(UnsupportedError, match=f"{has}, but not 12, .* set pack_kv to false"):
            check_packing(capability)
    for capability in ((9, 0), (10, 3), None):
        check_packing(capability)


def test_another_kind_of_device_or_cache_is_refused():
    rank = Rank()
    with pytest.raises(UnsupportedError, match="layer nobody"):
        rank.half.register_kv_caches({"nobody": rank.kv})
    rank.layers["layer.0"] = torch.empty_like(rank.kv, device="meta")
    with pytest.raises(UnsupportedError, match="on meta: supported are CUDA devices and CPU"):
        rank.start()
