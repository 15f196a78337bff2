"""An engine with a Mooncake store: the cost of a store that is full, hangs or is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tiers import base
from tests.engine.harness import (
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
)
from tests.support.inputs import Tokens, random_tokens
from tests.support.mooncake import Master, Peer, environment, require_mooncake
from tests.support.patience import be_patient, wait_for_answers
from tests.support.processes import stay, staying
from tests.support.waiting import wait_until

PROMPTS = prompts_with_shared_prefix()
MANY = [random_tokens(1920, seed=100 + number) for number in range(10)]
"""More than `SEGMENT` holds: 36 KiB per block with its header."""
SEGMENT = "16MiB"


@pytest.fixture
def master() -> Iterator[Master]:
    require_mooncake()
    with Master() as running:
        yield running


def store(master: str, nbytes: str | int = SEGMENT, **more: Any) -> dict[str, Any]:
    """Return the plugin's keys. Blocks in the store are loaded even if computing is faster."""
    keys = {"remote": {"kind": "mooncake", "address": master, "bytes": nbytes}}
    return {**keys, "load_or_recompute": "always_load", **more}


@pytest.fixture
def expected(model_folder: Path) -> list[Tokens]:
    """The answers of an engine without the plugin."""
    return plain_answers(model_folder, [*PROMPTS, *MANY])[: len(PROMPTS)]


def compute_and_stay(models: str, address: str, ready: str) -> None:
    """Put the prompts' blocks into memory of this process, and wait to be killed."""
    require_mooncake()
    with offloading(Path(models), plugin=store(address)) as running:
        running.generate(PROMPTS)
        running.settle()
        stay(ready)


@pytest.mark.slow  # `tests/transfer/tiers/test_mooncake_faults.py` has a full store in `make test`
def test_an_engine_that_writes_more_than_the_store_holds_computes_what_is_lost(
    model_folder, master, expected, monkeypatch
):
    be_patient(monkeypatch)
    of_many = plain_answers(model_folder, [*PROMPTS, *MANY])[len(PROMPTS) :]
    with offloading(model_folder, plugin=store(master.address), blocks=1000) as ours:
        assert ours.generate(PROMPTS) == expected
        assert ours.generate(MANY) == of_many
        ours.settle()
        lost = ours.totals["lost_tier_slots"]
        ours.forget_host_memory()
        assert ours.generate(MANY) == of_many
        # Refused while the store was full, or evicted since.
        assert lost + ours.totals["lost_tier_slots"] > 0
        # A store that refuses all of a job, because it evicts too slowly, is still read.
        assert ours.totals["promoted_slots"] > 0


def test_a_master_and_a_peer_that_fail_cost_computing_and_are_used_again_later(
    model_folder, master, expected, monkeypatch
):
    """The master is killed, then it hangs; then the process that has the blocks hangs."""
    monkeypatch.setattr(base, "FIRST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(base, "LONGEST_PAUSE_SECONDS", 0.5)
    with (
        Peer(master.address, count=1) as peer,
        offloading(model_folder, plugin=store(master.address, 0)) as ours,
    ):
        assert ours.generate(PROMPTS) == expected
        ours.forget_host_memory()
        master.kill()
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["promoted_slots"] == 0
        ours.forget_host_memory()
        master.start()

        def is_served() -> bool:
            assert ours.generate(PROMPTS) == expected
            ours.forget_host_memory()
            assert ours.generate(PROMPTS) == expected
            return ours.totals["promoted_slots"] > 0

        wait_until(is_served)
        ours.forget_host_memory()
        master.hold()
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["promoted_slots"] == 0
        master.go_on()
        wait_until(is_served)
        ours.forget_host_memory()
        peer.hold()
        wait_for_answers(monkeypatch)
        assert ours.generate(PROMPTS) == expected
        assert ours.totals["late_promotions"] > 0
        assert ours.totals["promoted_slots"] == 0
        assert ours.offload.gauges()["promoting_slots"] > 0, "reads hang, and nothing else does"
        peer.go_on()
        wait_until(is_served)


def test_what_a_killed_engine_had_is_computed(
    model_folder, master, expected, tmp_path, monkeypatch
):
    wait_for_answers(monkeypatch)
    words = ("tests.engine.test_mooncake", model_folder, master.address)
    with (
        staying(*words, folder=tmp_path, forks=True, **environment()) as (peer, _),
        offloading(model_folder, plugin=store(master.address, 0)) as ours,
    ):
        assert ours.generate(PROMPTS[:1]) == expected[:1]
        assert ours.totals["promoted_slots"] > 0
        os.killpg(peer.pid, signal.SIGKILL)
        assert ours.generate(PROMPTS) == expected


if __name__ == "__main__":
    compute_and_stay(*sys.argv[1:])
