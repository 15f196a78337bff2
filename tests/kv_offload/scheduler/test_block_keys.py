"""What is in the key of a block: everything that changes its KV, through vLLM's own hashes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request

from kv_offload.cache.prefix import CacheGroup, PrefixMap
from tests.support.configurations import block_hasher

GROUP = CacheGroup(0, 4)
PREFIXES = PrefixMap([GROUP], 4, make_block_hash_with_group_id)


def image(identifier: str, offset: int = 4) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=3),
    )


def adapter(name: str) -> LoRARequest:
    return LoRARequest(name, 1, f"/adapters/{name}")


def keys(**more: Any) -> list[bytes]:
    request = Request(
        "a",
        list(range(12)),
        SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=block_hasher(4),
        **more,
    )
    return PREFIXES.slot_keys(request.block_hashes, GROUP, 0, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"lora_request": adapter("a")}, {"lora_request": adapter("b")}),
        ({"lora_request": adapter("a")}, {}),
    ],
)
def test_salts_and_adapters_share_no_block(one, other):
    assert keys(**one) == keys(**one)
    assert set(keys(**one)).isdisjoint(keys(**other))
    assert len(set(keys(**one))) == 3


def test_another_image_changes_its_block_and_all_behind_it():
    one, again, other = (keys(mm_features=[image(name)]) for name in ("cat", "cat", "dog"))
    assert one == again
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


def test_cache_groups_share_no_block():
    request_keys = keys()
    other = PrefixMap([CacheGroup(1, 4)], 4, make_block_hash_with_group_id)
    hashes = request_keys  # a key of group 0 is the hash itself
    assert set(other.slot_keys(hashes, other.groups[0], 0, 3)).isdisjoint(request_keys)
    assert PREFIXES.slot_keys(hashes, GROUP, 0, 3) == request_keys
