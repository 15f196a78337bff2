"""Which layers may wait for their waves: how loads are cut, what is learned, what is missed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.messages import Outcome
from kv_offload.worker.waves import WEIGHTS, cut_waves
from tests.support.rank import Rank, store, synchronous

EAGER = "eager"
ALL = ("layer.0", "layer.1", "layer.2")
FIRST_WAVE, WHOLE = [True, False, False], [True, True, True]
MIB = 1 << 20


def alone(count: int) -> dict[str, frozenset[int]]:
    return {f"layer.{i}": frozenset([i]) for i in range(count)}


def test_first_and_last_wave_are_small():
    layers = alone(32)
    cut = cut_waves(list(layers), layers, [MIB] * 32)
    assert cut is not None
    assert [len(wave) for wave in cut.waves] == [5, 9, 10, 5, 3]
    assert list(chain(*cut.waves)) == list(range(32))
    assert cut.wave_of == {
        f"layer.{region}": index for index, wave in enumerate(cut.waves) for region in wave if index
    }


def test_a_region_comes_with_the_first_layer_that_reads_it():
    """And first of all what no layer is known to read, or one that never calls."""
    shared = {"layer.3": frozenset([1, 3]), "layer.2": frozenset([0, 2])}
    layers = alone(4) | shared | {"state": frozenset([4, 6])}
    cut = cut_waves([*alone(4)], layers, [MIB] * 7)
    assert cut is not None
    assert cut.waves == ((4, 5, 6, 0), (1,), (2,), (3,))
    assert cut.wave_of == {"layer.1": 1, "layer.2": 2, "layer.3": 3}


@pytest.mark.parametrize(
    ("order", "layers", "regions"),
    [
        ([], alone(3), 3),
        (["layer.0"], alone(1), 1),
        # One region of all layers, as a layout with blocks outermost has.
        (["a", "b"], {"a": frozenset([0]), "b": frozenset([0])}, 1),
        (["layer.0"], alone(3), 3),
        (["unknown.0", "unknown.1"], {}, 2),
    ],
)
def test_one_wave_is_no_cut(order, layers, regions):
    assert cut_waves(order, layers, [MIB] * regions) is None


@pytest.mark.parametrize(
    ("block_kib", "sizes"),
    [
        (511, None),
        (512, [29, 3]),
        (1024, [24, 5, 3]),
        (1536, [14, 10, 5, 3]),
        (2048, [5, 9, 10, 5, 3]),
    ],
)
def test_small_blocks_come_in_fewer_waves(block_kib, sizes):
    """Else the launches would cost more time than the waves hide."""
    layers = alone(32)
    cut = cut_waves(list(layers), layers, [block_kib << 5] * 32)
    assert (cut and [len(wave) for wave in cut.waves]) == sizes


@given(st.data())
def test_no_layer_reads_what_a_later_wave_brings(data):
    regions = data.draw(st.integers(1, 12))
    some = st.frozensets(st.integers(0, regions - 1), min_size=1)
    layers = {f"l{i}": data.draw(some) for i in range(data.draw(st.integers(1, 10)))}
    pages = st.lists(st.integers(1, MIB), min_size=regions, max_size=regions)
    called = data.draw(st.lists(st.sampled_from([*layers, "nobody"]), unique=True))
    cut = cut_waves(called, layers, data.draw(pages))
    if cut is None:
        return
    assert 2 <= len(cut.waves) <= len(WEIGHTS)
    assert all(cut.waves)
    assert set(cut.wave_of) <= set(called)
    arrived: set[int] = set()
    for index, wave in enumerate(cut.waves):
        assert not arrived & set(wave)
        arrived |= set(wave)
        for layer, read in layers.items():
            if cut.wave_of.get(layer, 0) == index:
                assert read <= arrived
    assert set(range(regions)) <= arrived


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank of three layers that has learned nothing; slot 2 has what block 1 had of each."""
    monkeypatch.setattr("kv_offload.worker.forward_loads.WAVES_FROM_BYTES", 0)
    monkeypatch.setattr("kv_offload.worker.waves.LEAST_WAVE_BYTES", 1)
    made = Rank(layers=3).start()
    made.store(store(0, (1, 2)))
    yield made
    made.half.shutdown()


def forward(rank: Rank, *layers: str, kind: str | None = EAGER) -> bool:
    """Run a step without loads in which these layers call; tell whether somebody listens."""
    rank.engine.context = object()
    rank.engine.forward = kind and (rank.engine.context, kind)
    metadata = rank.begin()
    listens = rank.half.on_layer is not None
    rank.call(*layers)
    rank.end(metadata)
    return listens


def load(rank: Rank, *layers: str, kind: str = EAGER) -> list[bool]:
    """Run a step with a load; tell which layers have theirs when the forward begins."""
    rank.poison()
    rank.engine.context = object()
    rank.engine.forward = (rank.engine.context, kind)
    metadata = rank.begin(loads=[synchronous(rank.next_job_id, "a", (4, 2))])
    arrived = rank.holds(4)
    rank.call(*layers)
    rank.end(metadata)
    return arrived


def test_a_forward_teaches_its_kind_once(rank):
    assert load(rank, *ALL) == WHOLE
    assert not forward(rank)
    assert load(rank, *ALL) == FIRST_WAVE
    assert forward(rank, kind="piecewise")
    assert not forward(rank, kind=None), "its layers are not known to call"


def test_another_kind_must_have_the_same_late_layers(rank):
    for kind, layers in {EAGER: ALL, "no first": ALL[1:], "no last": ALL[:-1]}.items():
        assert forward(rank, *layers, kind=kind)
    assert load(rank, *ALL[1:], kind="no first") == FIRST_WAVE, "the first layer is not late"
    assert load(rank, *ALL[:-1], kind="no last") == WHOLE
    assert load(rank, *ALL) == WHOLE, "its kind was not known when it started"
    assert load(rank, *ALL) == FIRST_WAVE


def test_a_kind_without_late_layers_leaves_the_cut_to_others(rank):
    assert forward(rank, kind="silent")
    assert load(rank, kind="silent") == WHOLE
    assert forward(rank, *ALL)
    assert load(rank, kind="silent") == WHOLE
    assert not forward(rank, kind="silent")


def test_calls_under_another_context_are_a_draft_heads(rank):
    rank.layers_call()
    metadata = rank.begin()
    rank.call("layer.0", "layer.1")
    for context in (object(), None):
        rank.engine.context = context
        rank.call("layer.2")
    rank.end(metadata)
    assert load(rank, *ALL) == [True, False, True]


def test_a_layer_that_nobody_described_needs_everything(rank):
    forward(rank, *ALL)
    metadata = rank.begin(loads=[synchronous(1, "a", (4, 2))])
    rank.call("reads.another")
    assert rank.holds(4) == WHOLE
    rank.call(*ALL)
    rank.end(metadata)
    assert rank.jobs() == {1: Outcome.OK}


def test_a_layer_need_not_call_without_a_load(rank):
    forward(rank, *ALL)
    load(rank, *ALL)
    assert not forward(rank)
    assert load(rank, *ALL) == FIRST_WAVE
    assert rank.jobs() == {1: Outcome.OK, 2: Outcome.OK}


def test_layers_that_did_not_call_are_named_and_waves_do_not_come_back(rank, caplog):
    forward(rank, *ALL)
    load(rank, "layer.0", "layer.2")
    assert "1 layers, layer.1 first, did not call the connector" in caplog.text
    assert rank.jobs() == {1: Outcome.LOST}
    for kind in (EAGER, "new"):
        assert not forward(rank, *ALL, kind=kind)
        assert load(rank, *ALL, kind=kind) == WHOLE
    assert rank.jobs() == {2: Outcome.OK, 3: Outcome.OK}
