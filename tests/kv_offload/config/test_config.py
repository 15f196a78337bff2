import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.cache.policies import POLICIES
from kv_offload.config import (
    DEFAULT,
    SCHEMA,
    SECTIONS,
    DiskConfig,
    OffloadConfig,
    RemoteConfig,
    trace_config,
)
from kv_offload.config.checks import check_sizes
from kv_offload.config.host_memory import HostMemory
from kv_offload.config.unknown_keys import _NOT_NEEDED, _OTHERS_KEYS, _RENAMED
from kv_offload.errors import CapacityError, ConfigError, KVOffloadError

GIB = 1 << 30
HOST = HostMemory(64 * GIB, "/proc/meminfo")
DOCS = Path(__file__).parents[3] / "docs/use/configuration.md"
DEFAULTS = OffloadConfig(cpu_bytes=16 * GIB)
INLINE = "kv_connector_extra_config"


def load(extra_config=None, environ=None, replicas=1):
    return trace_config(extra_config or {}, environ or {}, host=HOST, replicas=replicas).config


def refusal(extra_config=None, environ=None, kind=ConfigError, replicas=1):
    with pytest.raises(kind) as caught:
        load(extra_config, environ, replicas)
    message = str(caught.value)
    assert message.startswith("kv-offload: ")
    assert message.count("kv-offload: ") == 1
    return str(caught.value.args[0])


def test_all_that_is_wrong_is_said_at_once(write):
    """Every line of the file and every variable, those of a section that lacks a key too."""
    file = write(
        "cpu_byte: 5\ncpu_bytes: 64\neviction_policy: arc\nremote: 5\ndisk: {pth: x}\n"
        "store_blocks: none\n"
    )
    with pytest.raises(ConfigError) as caught:
        load({"config_file": file, "pack_kv": "maybe"}, {"KV_OFFLOAD_CPU_BYTES": "1GiB"})
    begins = [
        "environment: KV_OFFLOAD_CPU_BYTES: ",
        *(f"{file}: {key}: " for key in ("cpu_byte", "cpu_bytes", "eviction_policy", "remote")),
        *(f"{file}: {key}: " for key in ("disk.pth", "store_blocks")),
        f"{INLINE}: pack_kv: ",
        *(f"{file}: disk: disk.{key} is missing" for key in ("path", "bytes")),
    ]
    assert len(caught.value.args) == len(begins)
    for problem, begin in zip(caught.value.args, begins, strict=True):
        assert problem.startswith(begin)
    text = str(caught.value)
    assert "\n" not in text, "one line in a log"
    assert text.startswith(f"kv-offload: (1) {begins[0]}")
    assert f" (10) {begins[-1]}" in text


@pytest.fixture
def write(tmp_path):
    def write(content, name="kv.yaml"):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("cpu_bytes", 1 << 20, 1 << 20),
        ("cpu_bytes", "0.4%", 64 * GIB * 4 // 1000),
        ("eviction_policy", "lru", "lru"),
        ("max_pinned_share", 0.01, 0.01),
        ("max_pinned_share", 1, 1.0),
        ("max_share_per_salt", 0.01, 0.01),
        ("keep_on_sleep", True, True),
        ("record_trace_bytes", "200MB", 200_000_000),
        ("record_trace", "/var/log/trace.jsonl", "/var/log/trace.jsonl"),
    ],
)
def test_values_that_are_accepted_inline_and_in_a_file(write, key, value, expected):
    for extra_config in ({key: value}, {"config_file": write(json.dumps({key: value}))}):
        assert load(extra_config) == dataclasses.replace(DEFAULTS, **{key: expected})
    assert load({"config_file": write("# nothing\n")}) == DEFAULTS


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("eviction_policy", "arc", "use auto, the default, which keeps reused prefixes through"),
        ("transfer_engine", "dma", "remove the key: auto, the default"),
        ("store_after_uses", 2, "remove the key. eviction_policy: auto, the default, prefers"),
    ],
)
def test_what_was_removed_is_refused_with_what_to_use(write, key, value, remedy):
    file = write(json.dumps({key: value}))
    for source, extra_config in ((INLINE, {key: value}), (file, {"config_file": file})):
        message = refusal(extra_config)
        assert message.startswith(f"{source}: {key}: {value!r}: was removed: {remedy}")


BARE = "without a unit this means bytes, less than 1 MiB (1048576 bytes), hardly one block."


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("cpu_bytes", 0, "less than 1 MiB (1048576 bytes), hardly one block. Allowed"),
        ("cpu_bytes", 64, f"{BARE} Did you mean 64GiB or 64%? Allowed"),
        ("cpu_bytes", 1.5, "a number with a fraction needs a unit. Allowed"),
        ("cpu_bytes", True, "must be bytes, a size"),
        ("cpu_bytes", None, "must be bytes, a size"),
        ("cpu_bytes", [1], "must be bytes, a size"),
        ("cpu_bytes", 2**70, "must be 9223372036854775807 at most"),
        ("eviction_policy", "lfu", "must be auto or lru"),
        ("eviction_policy", "\ud800", "must be auto or lru"),
        ("max_pinned_share", 0.0099, "must be a number from 0.01 to 1; with less, too few blocks"),
        ("max_pinned_share", 1.01, "must be a number from 0.01 to 1"),
        ("max_share_per_salt", 0, "must be a number from 0.01 to 1 (no limit)"),
        ("keep_on_sleep", "yes", "must be true or false"),
        ("on_load_failure", {}, "must be recompute or fail"),
        ("disk.path", "", "must be the path of a folder"),
        ("disk.path", 7, "must be the path of a folder"),
        ("disk.path", None, "must be the path of a folder"),
        ("disk.path", "/nvme/\0", "a path cannot contain a null character. Allowed"),
        ("disk.bytes", "10%", "unknown unit '%', known are B, kB, MB, GB, TB, KiB, MiB, GiB, Ti"),
        ("disk.bytes", "500", "the unit is missing, write 500MiB. Allowed"),
        ("disk.bytes", 64, f"{BARE} Did you mean 64GiB? Allowed: bytes, or a size (500GiB)"),
        ("disk.bytes", [1], "must be bytes, or a size (500GiB)"),
        (
            "disk.write_rate",
            0,
            "nothing would be written to the disk. To run without a disk, remove disk. Allowed",
        ),
        ("disk.write_rate", 8, f"{BARE} Did you mean 8GiB?"),
        ("disk.path", "$HOME/kv", "$HOME is not expanded as in a shell. Write the path"),
        ("record_trace", "/data/${USER}/trace", "${USER} is not expanded"),
        ("disk.path", "~no such user/kv", "there is no user of that name. Write the path itself."),
        ("disk.write_rate", None, "must be bytes, or a size (1GiB)"),
        ("disk.keep_on_restart", "no", "must be true or false"),
        ("remote.kind", "redis", "must be mooncake, folder or s3"),
        ("remote.path", "$SHARED/kv", "$SHARED is not expanded as in a shell. Write the"),
        (
            "remote.address",
            "10.0.0.5",
            "must be host:port, a port from 1 to 65535, for example 10.0.0.5:50051",
        ),
        ("remote.address", "http://10.0.0.5:50051", "must be host:port"),
        ("remote.address", "10.0.0.5:0", "must be host:port, a port from 1 to 65535"),
        ("remote.address", "10.0.0.5:65536", "must be host:port"),
        ("remote.address", "10.0.0.5:50051\n", "must be host:port"),
        ("remote.url", "https://kv.example.com", "must be s3://BUCKET or s3://BUCKET/PREFIX, with"),
        ("remote.url", "s3://KEY:SECRET@kv", "must be s3://BUCKET"),
        ("remote.url", "s3://", "must be s3://BUCKET"),
        ("remote.bytes", 64, f"{BARE} Did you mean 64GiB? Allowed: bytes, or a size (64GiB)"),
        (
            "remote.write_rate",
            0,
            "nothing would be written to the remote store. To run without a remote store, remove "
            "remote. Allowed",
        ),
    ],
)
def test_bad_values_are_refused_with_source_path_value_and_remedy(write, key, value, reason):
    section, _, inner = key.rpartition(".")
    given = {section: {inner: value}} if section else {key: value}
    file = write(json.dumps(given))
    for extra_config, source in ((given, INLINE), ({"config_file": file}, file)):
        message = refusal(extra_config)
        shown = json.dumps(value) if isinstance(value, bool) else repr(value)
        shown = "no value" if value is None else shown
        assert message.startswith(f"{source}: {key}: {shown}: {reason}")
        limit = "at most" if "at most" in reason else SCHEMA[key].allowed
        default = SCHEMA[key].written_default
        remedy = f"remove it to get the default, {default}."
        if SCHEMA[key].is_required:
            remedy = f"remove {section} to run without a "
        assert f"{limit}. Correct it, or {remedy}" in message


def test_a_disk_needs_a_folder_and_a_size(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for path, resolved in {
        "/nvme/kv": "/nvme/kv",
        "kv": f"{tmp_path}/kv",
        "~/kv": "/home/me/kv",
    }.items():
        config = load({"disk": {"path": path, "bytes": "1.5TB"}})
        disk = DiskConfig(path=resolved, bytes=1_500_000_000_000)
        assert config == dataclasses.replace(DEFAULTS, disk=disk)
    file = write("disk:\n  path: /nvme/kv")
    assert refusal({"config_file": file}) == (
        f"{file}: disk: disk.bytes is missing. Add it: Disk space for one replica of the "
        "engine, over all its ranks. Allowed: bytes, or a size (500GiB). Or remove disk to run "
        "without a disk."
    )
    assert refusal({"disk": {}}).startswith(f"{INLINE}: disk: disk.path is missing. Add it: ")


def test_keys_of_a_section_win_one_by_one_and_null_leaves_all_of_it_out(write):
    file = write("disk: {path: /nvme/kv, bytes: 2GiB, write_rate: 1MiB}")
    extra = {"config_file": file, "disk": {"bytes": "1GiB"}}
    assert load(extra).disk == DiskConfig(path="/nvme/kv", bytes=GIB, write_rate=1 << 20)
    assert load({"config_file": file, "disk": None}) == DEFAULTS
    assert load({"config_file": write("disk: null\nremote:\n")}) == DEFAULTS
    file = write("disk: {path: /nvme/kv, bytes: 3}")
    assert "disk.bytes: 3: without a unit" in refusal({"config_file": file, "disk": None})


@pytest.mark.parametrize("value", ["/nvme/kv", [1], True, 0])
def test_a_section_is_a_mapping(write, value):
    message = refusal({"config_file": write(json.dumps({"disk": value}))})
    assert ": must be a mapping, disk: {path: ..., bytes: ..., write_rate: ..., " in message
    assert message.endswith("Correct it, or remove it to run without a disk.")


def test_a_remote_store_needs_an_address_and_a_size_and_may_have_a_disk_beside_it():
    remote = {"kind": "mooncake", "address": "10.0.0.5:50051", "bytes": "1GiB"}
    config = load({"remote": remote})
    assert config.remote == RemoteConfig(kind="mooncake", address="10.0.0.5:50051", bytes=GIB)
    assert (config.given_bytes, config.host_bytes) == (GIB, config.cpu_bytes + GIB)
    assert load({"remote": {**remote, "bytes": 0}}).host_bytes == config.cpu_bytes
    assert refusal({"remote": {"kind": "mooncake", "bytes": 0}}).startswith(
        f"{INLINE}: remote: remote.address is missing. Add it: Address of Mooncake's master. "
    )
    folder = {"kind": "folder", "path": "/mnt/lustre/kv", "bytes": "20TiB"}
    config = load({"remote": folder})
    assert (config.remote.path, config.remote.bytes) == ("/mnt/lustre/kv", 20 << 40)
    assert config.given_bytes == 0, "it takes no memory"
    assert refusal({"remote": {**folder, "address": "10.0.0.5:50051"}}) == (
        f"{INLINE}: remote.address: '10.0.0.5:50051': belongs to remote.kind mooncake, and it is "
        "folder. Remove it, or change remote.kind."
    )
    with pytest.raises(ConfigError) as caught:  # and not that `path` belongs to another kind
        load({"remote": {**folder, "kind": "nfs"}})
    (problem,) = caught.value.args
    assert "remote.kind: 'nfs': must be mooncake, folder or s3. " in problem
    config = load({"remote": {"kind": "s3", "url": "s3://bucket/kv", "bytes": 0}})
    assert (config.remote.url, config.remote.bytes, config.given_bytes) == ("s3://bucket/kv", 0, 0)
    del folder["path"]
    assert "remote: remote.path is missing. Add it: " in refusal({"remote": folder})
    both = load({"remote": remote, "disk": {"path": "/nvme/kv", "bytes": "1GiB"}})
    assert (both.disk.bytes, both.remote.kind) == (1 << 30, "mooncake")
    with pytest.raises(CapacityError, match=r"asks for .*, and remote.bytes for 62 GiB"):
        load({"remote": {**remote, "bytes": "62GiB"}})


LISTS = "".join(f"- &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]\n" for n in range(30))
DIGITS = "f" * 5000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("max_pinned_share: .nan", "max_pinned_share"),
        (f"max_pinned_share: '{'x' * 100_000}'", "max_pinned_share: 'xxx"),
        (f"- &a0 [x]\n{LISTS}", "the top level is [["),
        (f"? {'x' * 500}\n: 1", "xxx: 1: unknown key"),
        ('"\\e[2J": 1', r"\x1b[2J: 1: unknown key"),
        (f"? 0x{DIGITS}\n: 1", "a huge integer: 1: unknown key"),
    ],
)
def test_a_strange_file_is_refused_in_short_and_without_escapes(write, content, problem):
    message = refusal({"config_file": write(content)})
    assert problem in message
    assert len(message) < 1000
    assert "x" * 200 not in message
    assert "\x1b" not in message


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("max_pinned_share: 1_0.50", "max_pinned_share: 1_0.50: must be"),
        ("eviction_policy: no", "eviction_policy: no: must be"),
        ("cpu_bytes: 0x1000000000", "cpu_bytes: 0x1000000000: asks for 64 GiB"),
        ("max_pinned_share: 1e3", "max_pinned_share: '1e3': must be"),
        ("cpu_byte: &a 0x10", "cpu_byte: 0x10: unknown key"),
        ("<<: {max_pinned_share: 1.50}", "max_pinned_share: 1.50: must be"),
    ],
)
def test_a_message_shows_what_was_written_and_not_what_yaml_made_of_it(write, content, shown):
    file = write(content)
    assert refusal({"config_file": file}, kind=KVOffloadError).startswith(f"{file}: {shown}")


def test_more_than_the_machine_has():
    assert refusal({"cpu_bytes": "65GiB"}, kind=CapacityError) == (
        "kv_connector_extra_config: cpu_bytes: '65GiB': asks for 65 GiB (69793218560 bytes), but "
        "/proc/meminfo reports 64 GiB (68719476736 bytes), of which 2 GiB must stay "
        "free. Ask for less, for example 25%, or give the process more memory."
    )
    assert "cpu_bytes: 66571993089:" in refusal({"cpu_bytes": 62 * GIB + 1}, kind=CapacityError)


def test_replicas_of_a_host_divide_a_percentage_and_each_takes_a_size():
    assert load(replicas=8).cpu_bytes == 2 * GIB
    assert load({"cpu_bytes": "7GiB"}, replicas=8).cpu_bytes == 7 * GIB
    for value in ("100%", "8GiB", 8 * GIB):
        assert (
            f"cpu_bytes: {value!r}: asks for 8 GiB (8589934592 bytes) for each of 8 replicas on "
            "this host, 64 GiB (68719476736 bytes) in all, but /proc/meminfo reports"
        ) in refusal({"cpu_bytes": value}, kind=CapacityError, replicas=8)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("evict_policy", "Did you mean eviction_policy? Correct or remove it"),
        ("CPU_BYTES", "Did you mean cpu_bytes? Correct or remove it"),
        ("config_file", "Correct or remove it"),
        ("cpu-byte", "Did you mean cpu_bytes? Correct or remove it"),
        ("store_policy", "Correct or remove it"),
        ("path", "Did you mean disk: {path: ...} or remote: {path: ...}? "),
        ("address", "Did you mean remote: {address: ...}? "),
        ("write_rate", "Did you mean disk: {write_rate: ...} or remote: {write_rate: ...}? "),
        ("disk.path", "Did you mean disk: {path: ...}? "),
        ("remote_byte", "Did you mean remote: {bytes: ...}? "),
        ("disks", "Did you mean disk? "),
        ("kv-transfer-config", "It belongs in vLLM's argument --kv-transfer-config. "),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_and_all_keys(write, key, hint):
    file = write(f"{key}: lru")
    inline = [({key: "lru"}, INLINE)] if key != "config_file" else []
    for extra_config, source in (*inline, ({"config_file": file}, file)):
        message = refusal(extra_config)
        assert message.startswith(f"{source}: {key}: 'lru': unknown key. {hint}")
        assert all(name.rpartition(".")[2] in message for name in SCHEMA)
        assert (
            "disk: {path, bytes, write_rate, keep_on_restart, keep_on_reset}, remote: {" in message
        )
    assert "Did you mean config_file?" in refusal({"config_fil": file}), "a key inline alone"


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("store_threshold", "It is a key of another connector; write eviction_policy"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "It is a key of another connector; write cpu_bytes"),
        ("lmcache.local_disk", "It is a key of another connector; write disk: {path: ...}"),
        ("LMCACHE_REMOTE_URL", "It is a key of another connector; write remote: {kind: ...}"),
        ("secondary_tiers", "It is a key of another connector; write disk: {path: ...}"),
        ("num_cpu_blocks", "It is a key of another connector; write cpu_bytes"),
        (
            "block_size",
            "It is a key of another connector, not needed here: blocks have the size of the "
            "engine's --block-size. Remove it.",
        ),
        ("chunk_size", "It is a key of another connector, not needed here: blocks have"),
        ("lazy_offload", "It is a key of another connector, not needed here: blocks are"),
        ("LMCACHE_BLEND_RECOMPUTE_RATIOS", "It is a key of LMCache without an equivalent"),
        ("kv-load-failure-policy", "It is a key of another connector; write on_load_failure"),
    ],
)
def test_a_key_of_another_connector_is_refused_with_what_to_do_alone(write, key, answer):
    """No list of keys follows, in which the answer would be hard to find."""
    file = write(f"{key}: lru")
    for extra_config, source in (({key: "lru"}, INLINE), ({"config_file": file}, file)):
        message = refusal(extra_config)
        assert message.startswith(f"{source}: {key}: 'lru': unknown key. {answer}")
        assert message.endswith((" instead.", " Remove it."))
        assert "record_trace" not in message


def test_every_key_of_another_connector_is_answered_with_one_of_ours():
    assert {*_OTHERS_KEYS.values(), *_RENAMED.values()} <= SCHEMA.keys()
    others = _OTHERS_KEYS.keys() | _NOT_NEEDED.keys()
    assert not (others | _RENAMED.keys()) & (SCHEMA.keys() | SECTIONS.keys())
    assert not others & _RENAMED.keys()


@pytest.mark.parametrize(("key", "place"), _RENAMED.items())
def test_a_key_that_was_renamed_is_refused_with_its_new_place(write, key, place):
    section, _, name = place.partition(".")
    file = write(f"{key}: 1GiB")
    for source, extra in ((INLINE, {key: "1GiB"}), (file, {"config_file": file})):
        assert refusal(extra) == (
            f"{source}: {key}: '1GiB': was renamed: write {section}: {{{name}: ...}}."
        )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("size", ""),
        ("byte", "Did you mean bytes? "),
        ("address", "Did you mean remote: {address: ...}? "),
        ("cpu_bytes", "Did you mean cpu_bytes? "),
    ],
)
def test_an_unknown_key_of_a_section_is_refused_with_the_keys_of_it(write, key, hint):
    file = write(f"disk: {{path: /nvme/kv, bytes: 1GiB, {key}: 1_0}}")
    assert refusal({"config_file": file}) == (
        f"{file}: disk.{key}: 1_0: unknown key. {hint}Correct or remove it; the keys of disk are "
        "path, bytes, write_rate, keep_on_restart, keep_on_reset."
    )


def test_one_salt_may_not_retain_more_than_all(write):
    """By default both are a quarter, and the lower one counts."""
    assert load({"max_retained_share": 0.1}).max_retained_share_per_salt == 0.25
    file = write("max_retained_share: 0.10\nmax_retained_share_per_salt: 0.20")
    assert refusal({"config_file": file}) == (
        f"{file}: max_retained_share_per_salt: 0.20: more than max_retained_share, 0.10, which is "
        "for all requests together. Give at most 0.10, or raise max_retained_share."
    )


def test_inline_wins_over_the_file_which_wins_over_the_default_and_is_traced(write):
    """Only the effective size must fit, but every value that is given is checked."""
    file = write("cpu_bytes: 1TiB\nmax_pinned_share: 1.5")
    message = refusal({"config_file": file, "cpu_bytes": "1GiB", "max_pinned_share": 0.5})
    assert message.startswith(f"{file}: max_pinned_share: 1.5")
    file = write("cpu_bytes: 1TiB")
    assert load({"config_file": file, "cpu_bytes": "1GiB"}).cpu_bytes == GIB
    file = write("max_pinned_share: 0.2\nstore_blocks: prompt\ncpu_bytes: 1GiB")
    traced = trace_config({"config_file": file, "max_pinned_share": 0.4}, {}, host=HOST)
    assert traced.config == dataclasses.replace(
        DEFAULTS, max_pinned_share=0.4, store_blocks="prompt", cpu_bytes=GIB
    )
    assert traced.file == Path(file)
    assert set(traced.given) == {key.section or key.name for key in SCHEMA.values()}
    assert traced.given["max_pinned_share"] == (INLINE, 0.4, "0.4")
    assert traced.given["cpu_bytes"] == (file, "1GiB", "1GiB")
    assert traced.given["eviction_policy"] == (DEFAULT, "auto", "auto")


def test_the_file_of_a_command_wins_over_the_named_one_and_that_over_the_environment(write):
    named, other = write("max_pinned_share: 0.2"), write("max_pinned_share: 0.3", name="other.yaml")
    environ = {"KV_OFFLOAD_CONFIG_FILE": other}
    assert load({"config_file": named}, environ).max_pinned_share == 0.2
    assert load({}, environ).max_pinned_share == 0.3
    assert load({"max_pinned_share": 0.4}, environ).max_pinned_share == 0.4
    assert load({}, {"KV_OFFLOAD_CONFIG_FILE": ""}) == DEFAULTS
    traced = trace_config({"config_file": other}, environ, file=named, host=HOST)
    assert traced.given["max_pinned_share"].source == named


def test_paths_may_be_relative_or_start_at_home(write, tmp_path, monkeypatch):
    write("max_pinned_share: 0.2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/kv.yaml", "kv.yaml"):
        assert trace_config({"config_file": path}, {}, host=HOST).file == tmp_path / "kv.yaml"


def test_a_variable_named_after_a_key_is_refused():
    for key in (*SCHEMA, *SECTIONS):
        name = f"KV_OFFLOAD_{key.replace('.', '_').upper()}"
        assert refusal({}, {name: "100GiB"}) == (
            f"environment: {name}: '100GiB': variables do not set keys. Write {key} into the file "
            "that KV_OFFLOAD_CONFIG_FILE names, or into kv_connector_extra_config, and unset "
            f"{name}."
        )
        assert load({}, {name: ""}) == DEFAULTS


def test_a_variable_that_nobody_reads_is_a_warning_and_those_of_others_are_none(write):
    """Kubernetes tells every container of its services; one may be named `kv-offload`."""
    environ = {
        "KV_OFFLOAD_CONFIG_FILE": write("max_pinned_share: 0.2"),
        "KV_OFFLOAD_SERVICE_HOST": "10.0.0.1",
        "KV_OFFLOAD_SERVICE_PORT_HTTP": "8000",
        "KV_OFFLOAD_PORT": "tcp://10.0.0.1:8000",
        "KV_OFFLOAD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KV_OFFLOAD_CONFIG_SERVICE_HOST": "10.0.0.2",
        "KV_OFFLOAD_BENCH_RESULTS": "results",
        "VLLM_KV_OFFLOAD": "1",
        "KV_OFFLOAD_CONFIG": "/srv/kv.yaml",
    }
    traced = trace_config({}, environ, host=HOST)
    assert traced.config.max_pinned_share == 0.2
    (warning,) = traced.warnings
    assert warning.startswith(
        "environment: KV_OFFLOAD_CONFIG is not read: the plugin reads KV_OFFLOAD_CONFIG_FILE only."
    )


READABLE = "Give the path of a YAML file that this process can read."


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing.yaml", "No such file or directory"),
        ("~nobody-has-this-name/kv.yaml", "there is no user of that name"),
        ("$HOME/kv.yaml", "$HOME is not expanded as in a shell"),
        ("a\0b", "null "),
        ("pipe", "is not a regular file"),
        ("model.safetensors", "it has 5,368,709,120 bytes, but a configuration has at most 1,048"),
    ],
)
def test_files_that_cannot_be_read(write, tmp_path, monkeypatch, path, reason):
    write("")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(5 << 30)
    monkeypatch.chdir(tmp_path)
    for extra_config, environ, place in (
        ({"config_file": path}, {}, f"{INLINE}: config_file"),
        ({}, {"KV_OFFLOAD_CONFIG_FILE": path}, "environment: KV_OFFLOAD_CONFIG_FILE"),
    ):
        message = refusal(extra_config, environ)
        assert message.startswith(f"{place}: '{path[:20]}" if path.isprintable() else place)
        assert reason in message
        assert message.endswith(READABLE)


def test_what_is_no_path_and_standard_input_are_no_file(monkeypatch, tmp_path, write):
    for value in (None, "", 3):
        message = refusal({"config_file": value})
        assert message == f"{INLINE}: config_file: {value!r}: not a path. {READABLE}"
    reason = "standard input is not read, because the engine reads the file again when it starts"
    assert refusal({"config_file": "-"}) == (
        f"{INLINE}: config_file: '-': {reason}. {READABLE} For a file of this name write ./-"
    )
    write("max_pinned_share: 0.2", name="-")
    monkeypatch.chdir(tmp_path)
    assert load({"config_file": "./-"}).max_pinned_share == 0.2


NO_SPACE = "write `cpu_bytes: 1GiB`, with a space after the colon"


@pytest.mark.parametrize(
    ("content", "line", "column", "problem"),
    [
        ("cpu_bytes: 1\na: b: c", 2, 5, "mapping values are not allowed here"),
        ("a: !!python/name:os.system x", 1, 4, "could not determine a constructor for the tag"),
        ("? [a]\n: 1", 1, 3, "found unhashable key"),
        ("a: 1\nb: 2024-13-45", 2, 4, "'2024-13-45' is not a valid timestamp"),
        ("a: !!bool x", 1, 4, "'x' is not a valid bool"),
        ("a: !!map x", 1, 4, "expected a mapping node, but found scalar"),
        ("a: " + "1" * 5000, 1, 4, "is not a valid int"),
        ("max_pinned_share: 010", 1, 19, "'010' means 8 in YAML: write the number you mean"),
        ("max_pinned_share: 1:30", 1, 19, "'1:30' means 90 in YAML"),
        ("a: {b: 1}\na: {c: 2}", 2, 1, "a: a mapping: duplicate key, first given in line 1"),
        ("{store_blocks: all, 'store_blocks': all}", 1, 21, "duplicate key, first given in line 1"),
        ("[" * 3000, 1, 1, "nested too deeply"),
        ("a: 1\nb: \x01", 2, 4, "character 0x1 is not allowed in YAML"),
        (b"a: 1\nb: \xff", 2, 4, "byte 0xff is not UTF-8"),
        ("- a\n- b", 1, 1, "the top level is ['a', 'b'], but it must be a mapping"),
        ("# mine\r\ncpu_bytes:1GiB  # all of it\r\n", 2, 1, NO_SPACE),
        ("cpu_bytes=1GiB\neviction_policy=lru", 1, 1, NO_SPACE),
        ("eviction_policy: lru\ncpu_bytes:1GiB\nstore_blocks: all", 2, 1, NO_SPACE),
    ],
)
def test_malformed_files_are_refused_with_line_and_column(write, content, line, column, problem):
    file = write(content)
    message = refusal({"config_file": file})
    assert message.startswith(f"{file}, line {line}, column {column}: ")
    assert problem in message
    assert message.endswith(f"Correct the file; `kv-offload config {file}` checks it.")


TAGS = ["!!int ", "!!bool ", "!!map ", "&a ", "*a", "<<: "]
SYNTAX = [": ", "\n", "- ", "? ", *"{}[]~'\",%#\x00>|"]
VALUES = ["1", "0x1f", "1:30", "2024-02-30", "lru", "1GiB"]
WORDS = st.sampled_from([*SCHEMA, *SECTIONS, *TAGS, *SYNTAX, *VALUES])


@given(content=st.one_of(st.binary(), st.lists(WORDS | st.text(max_size=3)).map("".join)))
def test_any_content_is_a_configuration_or_a_refusal(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(
        content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    )
    with contextlib.suppress(KVOffloadError):
        assert load({"config_file": str(file)}).cpu_bytes > 0


def test_describe_is_one_line_with_every_key_as_it_was_written(write):
    file = write(
        "\ufeff# größer\nkeep_on_sleep: no\nrecord_trace_bytes: 0x40000000\nmax_pinned_share: 1"
    )
    traced = trace_config({"config_file": file, "cpu_bytes": "12.5%"}, {}, host=HOST)
    assert traced.config.record_trace_bytes == GIB
    assert traced.describe() == (
        "cpu_bytes=12.5% (8 GiB), host_pool=null, host_pool_path=/dev/shm, eviction_policy=auto, "
        "store_blocks=all, "
        "transfer_engine=auto, pack_kv=false, max_pinned_share=1, max_share_per_salt=1.0, "
        "max_retained_share=0.25, max_retained_share_per_salt=0.25, "
        "load_or_recompute=measured, keep_on_sleep=no, on_load_failure=recompute, "
        "disk=null, remote=null, record_trace=null, "
        "record_trace_bytes=0x40000000"
    )
    file = write("disk:\n  path: /kv\n  bytes: 0x40000000")
    assert (
        ", disk.path=/kv, disk.bytes=0x40000000, disk.write_rate=1GiB, disk.keep_on_restart=true, "
        "disk.keep_on_reset=false, remote=null, "
    ) in trace_config({"config_file": file}, {}, host=HOST).describe()
    inline = trace_config({"keep_on_sleep": True}, {}, host=HOST).describe()
    assert ", keep_on_sleep=true, " in inline


def test_the_eviction_policies_are_those_that_exist():
    kind, _ = get_args(get_type_hints(OffloadConfig, include_extras=True)["eviction_policy"])
    assert set(get_args(kind)) == set(POLICIES)


def test_the_documented_table_is_the_schema_whose_defaults_load(write):
    rows = [
        f"| `{key.name}` | {key.description} | {key.allowed} | `{key.written_default}` |"
        for key in SCHEMA.values()
    ]
    documented = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert documented == rows
    defaults = "".join(
        f"{key.name}: {key.written_default}\n" for key in SCHEMA.values() if not key.section
    )
    assert load({"config_file": write(defaults)}) == DEFAULTS


def test_the_documented_examples_name_every_key(write):
    """Those of the page of keys, and of the one that has every kind of remote store."""
    named: set[str] = set()
    pages = DOCS.read_text() + DOCS.with_name("tiers.md").read_text()
    for example in re.findall(r"```yaml\n(.*?)```", pages, re.DOTALL):
        host = HostMemory(1 << 40, "a test")
        given = trace_config({"config_file": write(example)}, {}, host=host).given
        named |= {name for name, value in given.items() if value.source != DEFAULT}
    assert {*SCHEMA} <= named


def test_the_documented_errors_are_real(write, tmp_path):
    errors = re.findall(r"^kv-offload: (.*)$", DOCS.read_text(), re.MULTILINE)
    contents = ["max_pinned_share: 80%", "cpu_bytes: 64", "cpu_bytes: 8GiB\ncpu_bytes: 16GiB"]
    for error, content in zip(errors, contents, strict=True):
        message = refusal({"config_file": write(content, name="kv-offload.yaml")})
        assert message.replace(str(tmp_path), "/srv") == error


def test_a_pool_that_its_filesystem_could_never_hold_is_refused(tmp_path):
    room = shutil.disk_usage(tmp_path).total
    host = HostMemory(4 * room, "a test")
    keys = {"host_pool": "chat", "host_pool_path": str(tmp_path), "cpu_bytes": room + 1}
    traced = trace_config(keys, {}, host=host)
    with pytest.raises(CapacityError, match="in the host pool, but the filesystem of"):
        check_sizes(traced)
    check_sizes(trace_config({**keys, "cpu_bytes": room}, {}, host=host))
    check_sizes(trace_config({**keys, "host_pool_path": "/none"}, {}, host=host))


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "x" * 65, "a b"])
def test_names_that_are_no_folder_of_a_pool_are_refused(name):
    with pytest.raises(ConfigError, match="host_pool"):
        trace_config({"host_pool": name}, {}, host=HOST)
