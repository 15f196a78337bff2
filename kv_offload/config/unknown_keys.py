"""Refuses unknown keys and suggests the right one.

Each key of earlier versions, vLLM's connectors and LMCache has a specific answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from kv_offload.config.schema import SCHEMA, SECTIONS, keys_of
from kv_offload.errors import ConfigError

ALIKE = 0.75
"""Minimum similarity for suggesting a key: 0.89 for `evict_policy` and `eviction_policy`, 0.67 for
the unrelated `store_policy` and `store_blocks`."""

_VLLMS_KEYS = frozenset(
    (
        "kv_transfer_config",
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "kv_connector_extra_config",
    )
)
"""Keys of vLLM's own argument that users write among ours."""

_RENAMED = {
    "disk_path": "disk.path",
    "disk_bytes": "disk.bytes",
    "disk_write_rate": "disk.write_rate",
    "disk_restart": "disk.keep_on_restart",
    "disk_keep_on_reset": "disk.keep_on_reset",
    "store": "remote.kind",
    "store_master": "remote.address",
    "store_bytes": "remote.bytes",
    "store_write_rate": "remote.write_rate",
    "store_keep_on_reset": "remote.keep_on_reset",
}
"""Our keys by their former names."""

_OTHERS_KEYS = {
    # vLLM
    "cache_policy_module_path": "eviction_policy",
    "cpu_bytes_to_use": "cpu_bytes",
    "cpu_bytes_to_use_per_rank": "cpu_bytes",
    "disk_capacity_bytes": "disk.bytes",
    "kv_load_failure_policy": "on_load_failure",
    "kv_offload_backend": "disk.path",
    "kv_offloading_size": "cpu_bytes",
    "max_tracker_size": "eviction_policy",
    "num_cpu_blocks": "cpu_bytes",
    "offload_prompt_only": "store_blocks",
    "secondary_tiers": "disk.path",
    "store_threshold": "eviction_policy",
    "swap_space": "cpu_bytes",
    # LMCache
    "cache_policy": "eviction_policy",
    "gds_path": "disk.path",
    "local_disk": "disk.path",
    "max_local_cpu_size": "cpu_bytes",
    "max_local_disk_size": "disk.bytes",
    "remote_url": "remote.kind",
    "save_decode_cache": "store_blocks",
}
"""Our keys by the equivalent keys of vLLM's connectors and of LMCache."""

_NOT_NEEDED = {
    # vLLM
    "block_size": "blocks have the size of the engine's --block-size",
    "blocks_per_chunk": "blocks have the size of the engine's --block-size",
    "disk_buffer_slots": "a disk uses direct I/O where its filesystem allows it",
    "kv_offloading_backend": "--kv-transfer-config names the connector",
    "lazy_offload": "blocks are stored once they are computed; store_blocks says which",
    "self_describing_kv_events": "vLLM's --kv-events-config turns events on",
    "spec_module_path": "there is one kind of host memory, of cpu_bytes",
    "spec_name": "there is one kind of host memory, of cpu_bytes",
    "use_page_cache": "a disk uses direct I/O where its filesystem allows it",
    # LMCache
    "chunk_size": "blocks have the size of the engine's --block-size",
    "enable_blending": "only a common prefix is reused",
    "enable_controller": "a server's metrics and routes replace it",
    "enable_p2p": "another connector in a MultiConnector does that",
    "enable_pd": "another connector in a MultiConnector does that",
    "local_cpu": "there is always host memory; cpu_bytes says how much",
    "pre_caching_hash_algorithm": "vLLM's --prefix-caching-hash-algo names it",
    "remote_serde": "blocks are stored as they are; pack_kv packs them without loss",
    "reserve_local_cpu_size": "some memory of the machine always stays free",
    "save_unfull_chunk": "only full blocks are kept",
    "use_layerwise": "the engine decides when layers are copied",
}
"""Keys of vLLM's connectors and of LMCache without an equivalent here, with the reason."""


def unknown_key(
    source: str, section: str, name: str, value: str, extra: Sequence[str] = ()
) -> ConfigError:
    """Return the error that refuses a key, with advice on what to write instead.

    `value` is shown unchanged. `extra` lists further top-level keys that this source allows.
    """
    place = f"{section}.{name}" if section else name
    refused = f"{source}: {place}: {value}: "
    written = name.lower().replace("-", "_")
    if not section and written in _RENAMED:
        return ConfigError(f"{refused}was renamed: write {_as_place(_RENAMED[written])}.")
    if written == "store_after_uses":
        return ConfigError(
            f"{refused}was removed: remove the key. eviction_policy: auto, the default, prefers "
            "prefixes that are used again; to write less to a disk, lower disk.write_rate."
        )
    refused += "unknown key. "
    if written in _VLLMS_KEYS:
        return ConfigError(
            f"{refused}It belongs in vLLM's argument --kv-transfer-config. Here only the "
            f"plugin's own keys are read: {_describe_keys('', extra)}."
        )
    others = written.removeprefix("lmcache").lstrip("_.")
    if ours := _OTHERS_KEYS.get(others):
        answer = f"It is a key of another connector; write {_as_place(ours)} instead."
    elif reason := _NOT_NEEDED.get(others):
        answer = f"It is a key of another connector, not needed here: {reason}. Remove it."
    elif others != written:
        answer = "It is a key of LMCache without an equivalent here. Remove it."
    else:
        answer = (
            f"{_suggest(section, written, extra)}Correct or remove it; the "
            f"keys{f' of {section}' if section else ''} are {_describe_keys(section, extra)}."
        )
    return ConfigError(f"{refused}{answer}")


def _suggest(section: str, written: str, extra: Sequence[str]) -> str:
    """Return a question that suggests the closest key; empty if none is similar."""
    # Also finds `disk.path` or `path` at the top level, keys in the wrong section, `remote_bytes`.
    near = [name for name in SCHEMA if written in (name, name.rpartition(".")[2])]
    flat = {name.replace(".", "_"): name for name in SCHEMA if "." in name}
    own = [*keys_of(section), *(() if section else extra)]
    if alike := difflib.get_close_matches(written, own, n=1, cutoff=ALIKE):
        near = alike
    elif not near:
        near = [flat[name] for name in difflib.get_close_matches(written, flat, 1, ALIKE)]
    return f"Did you mean {' or '.join(map(_as_place, near))}? " if near else ""


def _as_place(name: str) -> str:
    """Return a key in its section, as a user writes it: `disk: {path: ...}`."""
    section, _, key = name.rpartition(".")
    return f"{section}: {{{key}: ...}}" if section else name


def _describe_keys(section: str, extra: Sequence[str]) -> str:
    """Return the keys of a section, or all keys."""
    if section:
        return ", ".join(keys_of(section))
    names = [
        f"{name}: {{{', '.join(keys_of(name))}}}" if name in SECTIONS else name
        for name in keys_of("")
    ]
    return ", ".join([*names, *extra])
