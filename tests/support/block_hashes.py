"""Compute the block hashes of vLLM's engine core in a new process, for each hash function."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

from tests.support.processes import print_result

HAS_XXHASH = importlib.util.find_spec("xxhash") is not None
ALGORITHMS = ("sha256", "sha256_cbor", *(("xxhash", "xxhash_cbor") if HAS_XXHASH else ()))
SEEDS = (None, "0", "random")


def find(algorithm: str, seed: str | None) -> tuple[list[str], str | None]:
    """Return the keys of a prompt's blocks and, if they are not reproducible, the reason."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kv_offload.engines.vllm.model.namespace import reproducible_hashes

    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    request = Request(
        "request",
        [*range(40)],
        SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(8, function),
        cache_salt="salt",
    )
    cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
    config: Any = SimpleNamespace(cache_config=cache)
    return [key.hex() for key in request.block_hashes], reproducible_hashes(config)


if __name__ == "__main__":
    assert "PYTHONHASHSEED" not in os.environ, "as most users start an engine"
    assert sys.flags.hash_randomization
    print_result({f"{a} {s}": find(a, s) for a in ALGORITHMS for s in SEEDS})
