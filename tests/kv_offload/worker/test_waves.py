"""Which layers may wait for their waves: how loads are cut, what is learned, what is missed."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.worker.waves import WEIGHTS, LayerWaves, cut_waves

EAGER = ("NONE", False)


def alone(count: int) -> dict[str, frozenset[int]]:
    """Layers with a region each."""
    return {f"layer.{i}": frozenset([i]) for i in range(count)}


# -- cuts --------------------------------------------------------------------------------------


def test_first_and_last_wave_are_small() -> None:
    layers = alone(32)
    cut = cut_waves(list(layers), layers, [100] * 32)
    assert cut is not None
    assert [len(wave) for wave in cut.waves] == [5, 9, 10, 5, 3]
    assert list(chain(*cut.waves)) == list(range(32))
    assert cut.wave_of == {
        f"layer.{region}": index for index, wave in enumerate(cut.waves) for region in wave if index
    }


def test_keys_and_values_apart_come_together() -> None:
    layers = {"a": frozenset([0, 2]), "b": frozenset([1, 3])}
    cut = cut_waves(["b", "a"], layers, [16] * 4)
    assert cut is not None
    assert cut.waves == ((1, 3), (0, 2))
    assert cut.wave_of == {"a": 1}


def test_what_a_silent_layer_reads_comes_first() -> None:
    layers = alone(4) | {"state": frozenset([2, 4])}
    cut = cut_waves([f"layer.{i}" for i in range(4)], layers, [16] * 6)
    assert cut is not None
    assert cut.waves == ((2, 4, 5, 0), (1,), (3,)), "no layer has region 5"
    assert cut.wave_of == {"layer.1": 1, "layer.3": 2}


def test_shared_regions_come_with_the_first_layer_that_reads_them() -> None:
    layers = alone(4) | {"layer.3": frozenset([1]), "layer.2": frozenset([0, 2])}
    cut = cut_waves([f"layer.{i}" for i in range(4)], layers, [16] * 3)
    assert cut is not None
    assert cut.waves == ((0,), (1,), (2,))
    assert cut.wave_of == {"layer.1": 1, "layer.2": 2, "layer.3": 1}


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
def test_one_wave_is_no_cut(
    order: list[str], layers: dict[str, frozenset[int]], regions: int
) -> None:
    assert cut_waves(order, layers, [16] * regions) is None


@given(st.data())
def test_no_layer_reads_what_a_later_wave_brings(data: st.DataObject) -> None:
    regions = data.draw(st.integers(1, 12))
    some = st.frozensets(st.integers(0, regions - 1), min_size=1)
    layers = {f"l{i}": data.draw(some) for i in range(data.draw(st.integers(1, 10)))}
    called = data.draw(st.lists(st.sampled_from([*layers, "nobody"]), unique=True))
    cut = cut_waves(called, layers, data.draw(st.lists(st.integers(1, 99), min_size=regions)))
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


# -- what is learned ---------------------------------------------------------------------------


def forward(waves: LayerWaves, *layers: str, kind: object = EAGER) -> bool:
    """Run a step in which these layers call; tell whether it gives the first cut."""
    context = object()
    waves.forward_follows((context, kind))  # type: ignore[arg-type]
    for layer in layers:
        if waves.learning:
            waves.learn(layer, context)
    return bool(waves.forward_ended())


def answers_to(waves: LayerWaves, kind: object) -> list[str]:
    """Tell what a forward of this kind that follows is good for."""
    waves.forward_follows(kind and (object(), kind))  # type: ignore[arg-type]
    return [name for name in ("learning", "possible") if getattr(waves, name)]


@pytest.fixture
def waves() -> LayerWaves:
    return LayerWaves(alone(3), [16] * 3)


def test_a_forward_teaches_its_kind_once(waves: LayerWaves) -> None:
    assert answers_to(waves, EAGER) == ["learning"]
    assert forward(waves, *alone(3))
    assert waves.cut is not None
    assert answers_to(waves, EAGER) == ["possible"]
    assert not forward(waves)
    for other in (("PIECEWISE", False), ("NONE", True)):
        assert answers_to(waves, other) == ["learning"]
    assert answers_to(waves, None) == []


def test_another_kind_must_have_the_same_late_layers(waves: LayerWaves) -> None:
    forward(waves, *alone(3))
    cut = waves.cut
    assert not forward(waves, "layer.1", "layer.2", kind="without the first")
    assert answers_to(waves, "without the first") == ["possible"], "the first layer is not late"
    assert not forward(waves, "layer.0", "layer.1", kind="without the last")
    assert answers_to(waves, "without the last") == []
    assert waves.cut is cut


def test_a_kind_without_late_layers_leaves_the_cut_to_others(waves: LayerWaves) -> None:
    assert not forward(waves, kind="silent")
    assert waves.cut is None
    assert forward(waves, *alone(3))
    assert answers_to(waves, "silent") == []


def test_calls_under_another_context_are_a_draft_heads(waves: LayerWaves) -> None:
    context = object()
    waves.forward_follows((context, EAGER))
    for layer in ("layer.0", "layer.1"):
        waves.learn(layer, context)
    waves.learn("layer.2", object())
    waves.learn("layer.2", None)
    waves.forward_ended()
    assert waves.cut is not None
    assert waves.cut.waves == ((2, 0), (1,))


# -- a step with a load ------------------------------------------------------------------------


@pytest.fixture
def expecting(waves: LayerWaves) -> LayerWaves:
    """In a step with a load that arrives in waves."""
    forward(waves, *alone(3))
    waves.forward_follows((object(), EAGER))
    waves.expect()
    return waves


def test_layers_that_do_not_call_are_found(expecting: LayerWaves) -> None:
    assert [expecting.called(layer) for layer in ("layer.0", "layer.2")] == [0, 2]
    expecting.forward_ended()
    assert expecting.missed() == ["layer.1"]
    assert expecting.missed() == []


def test_a_layer_that_nobody_described_needs_everything(expecting: LayerWaves) -> None:
    assert expecting.called("reads.another") == 2
    assert expecting.missed() == ["layer.1", "layer.2"]


def test_nothing_is_expected_without_a_load(expecting: LayerWaves) -> None:
    expecting.forward_follows((object(), EAGER))
    assert expecting.missed() == []


def test_waves_that_were_given_up_do_not_come_back(waves: LayerWaves) -> None:
    forward(waves, *alone(3))
    waves.give_up()
    for kind in (EAGER, "new"):
        assert answers_to(waves, kind) == []
        assert not forward(waves, *alone(3), kind=kind)
    assert waves.cut is None
