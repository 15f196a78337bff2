"""Which blocks are sampled, and what a cache in miniature does with them."""

from __future__ import annotations

import random

import pytest

from kv_offload.simulation.mini_sim import MiniSim, SampledRequest, sample_blocks


def prompt(blocks: int, source: random.Random) -> list[bytes]:
    return [source.randbytes(16) for _ in range(blocks)]


def test_prompts_with_the_same_beginning_have_the_same_sample_of_it():
    source = random.Random(1)
    shared = prompt(700, source)
    sampled = [
        [place for place in sample_blocks(shared + prompt(rest, source), 4) if place < 700]
        for rest in (0, 1, 300, 5000)
    ]
    assert len(sampled[0]) > 20
    assert sampled == sampled[:1] * 4


@pytest.mark.parametrize("length", [1, 9, 40, 1000])
def test_each_block_has_the_same_chance(length):
    source = random.Random(2)
    prompts = 64_000 // length
    places = [p for _ in range(prompts) for p in sample_blocks(prompt(length, source), 4)]
    assert len(places) == pytest.approx(4000, rel=0.1)
    assert sum(places) / len(places) == pytest.approx((length - 1) / 2, rel=0.1)


def test_long_prompts_have_nearly_as_many_as_they_should():
    source = random.Random(3)
    counts = {len(sample_blocks(prompt(4096, source), 5)) for _ in range(50)}
    assert min(counts) > 128 - 16
    assert max(counts) < 128 + 16


def test_a_block_of_several_hashes_is_known_by_its_last():
    hashes = prompt(4000, random.Random(4))
    assert sample_blocks(hashes, 3, 4) == sample_blocks(hashes[3::4], 3)
    assert sample_blocks(hashes[:3], 0, 4) == []
    assert sample_blocks(hashes[:9], 0) == [*range(9)]


def hits(miniature: MiniSim, *prompts: list[bytes], first: int = 0) -> list[int]:
    return miniature.serve([SampledRequest(keys, first) for keys in prompts])


def test_what_lies_before_a_look_up_is_used_and_does_not_count():
    miniature = MiniSim("lru", 4)
    assert hits(miniature, [b"a", b"b", b"c"]) == [0]
    assert hits(miniature, [b"a", b"b", b"c", b"d"], first=1) == [2]
    assert hits(miniature, [b"x", b"y"]) == [0]  # in place of b and c, which were used first
    assert hits(miniature, [b"a", b"b", b"c"]) == [1]
    miniature.reset()
    assert hits(miniature, [b"a"]) == [0]


def test_requests_that_are_served_together_find_what_those_before_them_bring():
    miniature = MiniSim("lru", 8)
    assert hits(miniature, [b"a", b"b"], [b"a", b"c"], [b"a", b"c", b"d"], [b"d"]) == [0, 1, 2, 1]
    assert hits(miniature, [b"b"], [b"x", b"d"], [b"x", b"d"]) == [1, 0, 2]
