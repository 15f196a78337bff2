import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_offload.config import DEFAULT, SCHEMA, OffloadConfig, describe_bytes, trace_config
from kv_offload.config.host_memory import HostMemory
from kv_offload.errors import CapacityError, ConfigError, KVOffloadError

GIB = 1 << 30
HOST = HostMemory(64 * GIB, "/proc/meminfo")
DOCS = Path(__file__).parents[3] / "docs/use/configuration.md"
DEFAULTS = OffloadConfig(
    cpu_bytes=16 * GIB,
    eviction_policy="lru",
    store_blocks="all",
    store_after_uses=1,
    transfer_engine="auto",
    max_pinned_share=0.8,
    load_or_recompute="measured",
    keep_on_sleep=False,
    on_load_failure="recompute",
)


def load(extra_config=None, environ=None, replicas=1):
    return trace_config(extra_config or {}, environ or {}, host=HOST, replicas=replicas).config


def refusal(extra_config=None, environ=None, kind=ConfigError, replicas=1):
    with pytest.raises(kind) as caught:
        load(extra_config, environ, replicas)
    message = str(caught.value)
    assert message.startswith("kv-offload: ")
    assert message.count("kv-offload: ") == 1
    return message.removeprefix("kv-offload: ")


@pytest.fixture
def write(tmp_path):
    def write(content, name="kv.yaml"):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write


# Values


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "{}"])
def test_without_a_file_or_in_an_empty_one_all_are_defaults(write, content):
    assert load() == load({"config_file": write(content)}) == DEFAULTS


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("cpu_bytes", 1 << 20, 1 << 20),
        ("cpu_bytes", "5000B", 5000),
        ("cpu_bytes", "64B", 64),
        ("cpu_bytes", 62 * GIB, 62 * GIB),
        ("cpu_bytes", "1.5GiB", 3 * GIB // 2),
        ("cpu_bytes", "48 GB", 48 * 10**9),
        ("cpu_bytes", "40%", 64 * GIB * 40 // 100),
        ("cpu_bytes", "0.4%", 64 * GIB * 4 // 1000),
        ("cpu_bytes", "96%", 64 * GIB * 96 // 100),
        ("eviction_policy", "arc", "arc"),
        ("store_blocks", "prompt", "prompt"),
        ("store_after_uses", 1, 1),
        ("store_after_uses", 1000, 1000),
        ("transfer_engine", "host", "host"),
        ("transfer_engine", "cuda", "cuda"),
        ("transfer_engine", "dma", "dma"),
        ("max_pinned_share", 0.01, 0.01),
        ("max_pinned_share", 1, 1.0),
        ("load_or_recompute", "always_load", "always_load"),
        ("keep_on_sleep", True, True),
        ("on_load_failure", "fail", "fail"),
    ],
)
def test_values_that_are_accepted_inline_and_in_a_file(write, key, value, expected):
    for extra_config in ({key: value}, {"config_file": write(json.dumps({key: value}))}):
        assert load(extra_config) == dataclasses.replace(DEFAULTS, **{key: expected})


LITTLE = "less than 1 MiB (1048576 bytes), room for hardly one block"
BARE = f"without a unit it is bytes, {LITTLE}. Did you mean"
BAD_VALUES = [
    ("cpu_bytes", 0, f"{LITTLE}. Allowed"),
    ("cpu_bytes", -1, f"{LITTLE}. Allowed"),
    ("cpu_bytes", 40, f"{BARE} 40GiB, 40% or 40B? Allowed"),
    ("cpu_bytes", 64, f"{BARE} 64GiB, 64% or 64B? Allowed"),
    ("cpu_bytes", 1024, f"{BARE} 1024MiB or 1024B? Allowed"),
    ("cpu_bytes", 5000, f"{BARE} 5000MiB or 5000B? Allowed"),
    ("cpu_bytes", (1 << 20) - 1, BARE),
    ("cpu_bytes", 1.0, "a number with a fraction needs a unit. Allowed"),
    ("cpu_bytes", 1.5, "a number with a fraction needs a unit. Allowed"),
    ("cpu_bytes", True, "must be bytes, a size"),
    ("cpu_bytes", None, "must be bytes, a size"),
    ("cpu_bytes", [1], "must be bytes, a size"),
    ("cpu_bytes", 2**70, "must be 9223372036854775807 at most"),
    ("cpu_bytes", "48", "the unit is missing, write 48GiB, 48% or 48B. Allowed"),
    ("cpu_bytes", "48G", "unknown unit 'G', write 48GB or 48GiB. Allowed"),
    ("cpu_bytes", "48Q", "unknown unit 'Q', known are B, kB, MB"),
    ("cpu_bytes", "-1GiB", "not a positive number and a unit"),
    ("cpu_bytes", "0GiB", "less than one byte"),
    ("cpu_bytes", "0%", "less than one byte"),
    ("cpu_bytes", "0.0001%", f"that is 68719 bytes here, {LITTLE}. Allowed"),
    ("eviction_policy", "lfu", "must be lru or arc"),
    ("eviction_policy", "LRU", "must be lru or arc"),
    ("eviction_policy", False, "must be lru or arc"),
    ("eviction_policy", "\ud800", "must be lru or arc"),
    ("store_blocks", "decode", "must be all or prompt"),
    ("store_after_uses", 0, "must be an integer of at least 1"),
    ("store_after_uses", 1.0, "must be an integer"),
    ("store_after_uses", 2**70, "must be 9223372036854775807 at most"),
    ("store_after_uses", "4", "must be an integer"),
    ("store_after_uses", True, "must be an integer"),
    ("transfer_engine", "gpu", "must be auto, host, cuda or dma"),
    ("max_pinned_share", 0, "must be a number from 0.01 to 1; with less, too few blocks are"),
    ("max_pinned_share", 0.0099, "must be a number from 0.01 to 1; with less"),
    ("max_pinned_share", -0.5, "must be a number from 0.01"),
    ("max_pinned_share", 1.01, "must be a number from 0.01 to 1"),
    ("max_pinned_share", "50%", "must be a number from 0.01 to 1"),
    ("max_pinned_share", True, "must be a number"),
    ("load_or_recompute", "always", "must be measured or always_load"),
    ("keep_on_sleep", 1, "must be true or false"),
    ("keep_on_sleep", "yes", "must be true or false"),
    ("on_load_failure", "retry", "must be recompute or fail"),
    ("on_load_failure", {}, "must be recompute or fail"),
]


@pytest.mark.parametrize(("key", "value", "reason"), BAD_VALUES)
def test_bad_values_are_refused_with_source_path_value_and_remedy(write, key, value, reason):
    file = write(json.dumps({key: value}))
    for extra_config, source in (
        ({key: value}, "kv_connector_extra_config"),
        ({"config_file": file}, file),
    ):
        message = refusal(extra_config)
        shown = json.dumps(value) if isinstance(value, bool) else repr(value)
        shown = "no value" if value is None else shown
        assert message.startswith(f"{source}: {key}: {shown}: {reason}")
        has_limit = f"{SCHEMA[key].allowed}. Correct it, or remove it" in message
        assert has_limit or "at most. Correct it, or remove it" in message
        assert "`" not in message, "no type of a library's"
        assert message.endswith(f"to get the default, {SCHEMA[key].written_default}.")


LISTS = "".join(f"- &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]\n" for n in range(30))
DIGITS = "f" * 5000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *((f"max_pinned_share: {text}", "max_pinned_share") for text in (".nan", ".inf", "-.inf")),
        ("store_after_uses: 0", "store_after_uses: 0: must be"),
        ("max_pinned_share: 1.0e-300", "max_pinned_share: 1.0e-300: must be a number from 0.01"),
        (f"store_after_uses: '{'x' * 100_000}'", "store_after_uses: 'xxx"),
        (f"- &a0 [x]\n{LISTS}", "the top level is [["),
        (f"? {'x' * 500}\n: 1", "xxx: 1: unknown key"),
        ('"\\e[2J": 1', r"\x1b[2J: 1: unknown key"),
        (f"store_after_uses: 0x{DIGITS}", "store_after_uses: 0xfff"),
        (f"? 0x{DIGITS}\n: 1", "a huge integer: 1: unknown key"),
        *((f"{key}: 1", "unknown key") for key in ("1", "true", "null", "2024-01-01")),
    ],
)
def test_a_strange_file_is_refused_in_short_and_without_escapes(write, content, problem):
    message = refusal({"config_file": write(content)})
    assert problem in message
    assert len(message) < 1000
    assert "x" * 200 not in message
    assert "\x1b" not in message


def test_a_bad_value_is_refused_also_where_another_source_overrides_it(write):
    file = write("max_pinned_share: 1.5")
    message = refusal({"config_file": file, "max_pinned_share": 0.5})
    assert message.startswith(f"{file}: max_pinned_share: 1.5")


def test_a_bad_value_of_the_argument_is_short_too():
    assert len(refusal({"store_after_uses": "x" * 100_000})) < 1000
    assert "1: 2: unknown key" in refusal({1: 2})


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("store_after_uses: 1_0.50", "store_after_uses: 1_0.50: must be"),
        ("store_after_uses: -0x1f", "store_after_uses: -0x1f: must be"),
        ("eviction_policy: no", "eviction_policy: no: must be"),
        ("eviction_policy: 2024-01-01", "eviction_policy: 2024-01-01: must be"),
        ("cpu_bytes: 1_000", "cpu_bytes: 1_000: without a unit"),
        ("cpu_bytes: 0x1000000000", "cpu_bytes: 0x1000000000: asks for 64 GiB"),
        ("store_after_uses: 1e3", "store_after_uses: '1e3': must be"),
        ("cpu_byte: &a 0x10", "cpu_byte: 0x10: unknown key"),
        ("<<: {max_pinned_share: 1.50}", "max_pinned_share: 1.50: must be"),
    ],
)
def test_a_message_shows_what_was_written_and_not_what_yaml_made_of_it(write, content, shown):
    file = write(content)
    assert refusal({"config_file": file}, kind=KVOffloadError).startswith(f"{file}: {shown}")


# Capacity


def test_more_than_the_machine_has(write):
    message = refusal({"cpu_bytes": "65GiB"}, kind=CapacityError)
    assert message == (
        "kv_connector_extra_config: cpu_bytes: '65GiB': asks for 65 GiB (69793218560 bytes), but "
        "/proc/meminfo says that there are 64 GiB (68719476736 bytes), of which 2 GiB must stay "
        "free. Ask for less, for example 25%, or give the process more."
    )
    file = write("cpu_bytes: 100%")
    assert refusal({"config_file": file}, kind=CapacityError).startswith(f"{file}: cpu_bytes: '100")
    assert "cpu_bytes: 66571993089:" in refusal({"cpu_bytes": 62 * GIB + 1}, kind=CapacityError)


def test_replicas_of_a_host_divide_a_percentage():
    assert load(replicas=8).cpu_bytes == 2 * GIB
    assert load({"cpu_bytes": "50%"}, replicas=8).cpu_bytes == 4 * GIB
    message = refusal({"cpu_bytes": "100%"}, kind=CapacityError, replicas=8)
    assert message.startswith(
        "kv_connector_extra_config: cpu_bytes: '100%': asks for 8 GiB (8589934592 bytes) for each "
        "of 8 replicas on this host, 64 GiB (68719476736 bytes) in all, but /proc/meminfo says"
    )


def test_a_size_is_for_each_replica():
    assert load({"cpu_bytes": "7GiB"}, replicas=8).cpu_bytes == 7 * GIB
    assert load({"cpu_bytes": 7 * GIB}, replicas=8).cpu_bytes == 7 * GIB
    for value in ("8GiB", 8 * GIB):
        message = refusal({"cpu_bytes": value}, kind=CapacityError, replicas=8)
        assert "for each of 8 replicas on this host, 64 GiB" in message


def test_only_the_effective_size_must_fit(write):
    file = write("cpu_bytes: 1TiB")
    assert load({"config_file": file, "cpu_bytes": "1GiB"}).cpu_bytes == GIB


def test_the_memory_of_this_machine_is_the_default_whole():
    from kv_offload.config.host_memory import read_host_memory

    whole = read_host_memory().size_bytes
    assert trace_config({}, {}).config.cpu_bytes == whole // 4
    with pytest.raises(CapacityError, match=r"100\.1%"):
        trace_config({"cpu_bytes": "100.1%"}, {})


# Unknown keys


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("evict_policy", "eviction_policy"),
        ("cpu_bytes_to_use", "cpu_bytes"),
        ("CPU_BYTES", "cpu_bytes"),
        ("zzz", None),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_and_all_keys(write, key, near):
    file = write(f"{key}: lru")
    for extra_config, source in (
        ({key: "lru"}, "kv_connector_extra_config"),
        ({"config_file": file}, file),
    ):
        message = refusal(extra_config)
        assert message.startswith(f"{source}: {key}: 'lru': unknown key. ")
        assert ("Did you mean" in message) == (near is not None)
        assert near is None or f"Did you mean {near}?" in message
        assert all(name in message for name in SCHEMA)


def test_config_file_is_a_key_only_inline(write):
    file = write("config_file: /x.yaml")
    message = refusal({"config_file": file})
    assert message.startswith(f"{file}: config_file: '/x.yaml': unknown key")
    assert "config_file" in refusal({"config_fil": file}).split("the keys are")[1]
    assert "Did you mean config_file?" in refusal({"config_fil": file})


@pytest.mark.parametrize("key", ["kv_connector", "kv_role", "kv-transfer-config"])
def test_what_belongs_into_vllms_argument_is_told_so(write, key):
    message = refusal({"config_file": write(f"{key}: KVOffloadConnector")})
    assert "unknown key. It belongs into vLLM's argument --kv-transfer-config. " in message
    assert "Did you mean" not in message
    assert all(name in message for name in SCHEMA)


# Sources and precedence


def test_inline_wins_over_the_file_which_wins_over_the_default_and_is_traced(write):
    file = write("store_after_uses: 2\nstore_blocks: prompt\ncpu_bytes: 1GiB")
    traced = trace_config({"config_file": file, "store_after_uses": 4}, {}, host=HOST)
    assert traced.config == dataclasses.replace(
        DEFAULTS, store_after_uses=4, store_blocks="prompt", cpu_bytes=GIB
    )
    assert traced.file == Path(file)
    assert set(traced.given) == set(SCHEMA)
    assert traced.given["store_after_uses"] == ("kv_connector_extra_config", 4, "4")
    assert traced.given["cpu_bytes"] == (file, "1GiB", "1GiB")
    assert traced.given["eviction_policy"] == (DEFAULT, "lru", "lru")
    assert trace_config({}, {}, host=HOST).file is None


def test_the_named_file_wins_over_the_environment(write):
    named, other = write("store_after_uses: 2"), write("store_after_uses: 3", name="other.yaml")
    environ = {"KV_OFFLOAD_CONFIG_FILE": other}
    assert load({"config_file": named}, environ).store_after_uses == 2
    assert load({}, environ).store_after_uses == 3
    assert load({"store_after_uses": 4}, environ).store_after_uses == 4


def test_paths_may_be_relative_links_or_start_at_home(write, tmp_path, monkeypatch):
    write("store_after_uses: 2")
    (tmp_path / "link.yaml").symlink_to("kv.yaml")
    (tmp_path / "deep/below").mkdir(parents=True)
    (tmp_path / "away").symlink_to("deep/below")
    (tmp_path / "deep/kv.yaml").write_text("store_after_uses: 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load({"config_file": "kv.yaml"}).store_after_uses == 2
    assert load({"config_file": "link.yaml"}).store_after_uses == 2
    assert load({"config_file": "~/kv.yaml"}).store_after_uses == 2
    assert load({"config_file": "away/../kv.yaml"}).store_after_uses == 3
    assert trace_config({"config_file": "kv.yaml"}, {}, host=HOST).file == tmp_path / "kv.yaml"


def test_an_empty_variable_is_an_absent_one():
    assert load({}, {"KV_OFFLOAD_CONFIG_FILE": ""}) == DEFAULTS


# Other variables


@pytest.mark.parametrize("key", SCHEMA)
def test_a_variable_named_after_a_key_is_refused(key):
    name = f"KV_OFFLOAD_{key.upper()}"
    for extra_config in ({}, {key: SCHEMA[key].default}):
        assert refusal(extra_config, {name: "100GiB"}) == (
            f"environment: {name}: '100GiB': no variable sets a key. Write {key} into the file "
            "that KV_OFFLOAD_CONFIG_FILE names, or into kv_connector_extra_config, and unset "
            f"{name}."
        )
    assert load({}, {name: ""}) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("KV_OFFLOAD_CONFIG", "Did you mean KV_OFFLOAD_CONFIG_FILE?"),
        ("KV_OFFLOAD_CONFIG_PATH", "Did you mean KV_OFFLOAD_CONFIG_FILE?"),
        ("KV_OFFLOAD_ENABLED", "Unset it unless another reads it."),
    ],
)
def test_a_variable_that_nobody_reads_is_a_warning(name, hint):
    traced = trace_config({}, {name: "/srv/kv.yaml"}, host=HOST)
    assert traced.config == DEFAULTS
    assert traced.warnings == (
        f"environment: {name} is not read: the plugin reads KV_OFFLOAD_CONFIG_FILE only. {hint}",
    )


def test_variables_of_others_are_left_alone(write):
    """Kubernetes tells every container of its services; one may be named `kv-offload`."""
    environ = {
        "KV_OFFLOAD_CONFIG_FILE": write("store_after_uses: 2"),
        "KV_OFFLOAD_SERVICE_HOST": "10.0.0.1",
        "KV_OFFLOAD_SERVICE_PORT": "8000",
        "KV_OFFLOAD_SERVICE_PORT_HTTP": "8000",
        "KV_OFFLOAD_PORT": "tcp://10.0.0.1:8000",
        "KV_OFFLOAD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KV_OFFLOAD_CONFIG_SERVICE_HOST": "10.0.0.2",
        "KV_OFFLOAD_BENCH_RESULTS": "results",
        "VLLM_KV_OFFLOAD": "1",
    }
    traced = trace_config({}, environ, host=HOST)
    assert (traced.warnings, traced.config.store_after_uses) == ((), 2)


# Files that cannot be used

READABLE = "Give the path of a YAML file that this process can read."


@pytest.mark.parametrize("value", [None, "", 3, ["a"], b"x"])
def test_a_config_file_that_is_no_path(value):
    message = refusal({"config_file": value})
    assert message == f"kv_connector_extra_config: config_file: {value!r}: not a path. {READABLE}"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing.yaml", "No such file or directory"),
        ("kv.yaml/x", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("~nobody-has-this-name/kv.yaml", "No such file or directory"),
        ("a\0b", "null "),
        (".", "is not a regular file"),
        ("pipe", "is not a regular file"),
        ("model.safetensors", "it has 5,368,709,120 bytes, but a configuration has at most 1,048"),
    ],
)
def test_files_that_cannot_be_read(write, tmp_path, monkeypatch, path, reason):
    write("")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(5 << 30)
    monkeypatch.chdir(tmp_path)
    for extra_config, environ, place in (
        ({"config_file": path}, {}, "kv_connector_extra_config: config_file"),
        ({}, {"KV_OFFLOAD_CONFIG_FILE": path}, "environment: KV_OFFLOAD_CONFIG_FILE"),
    ):
        message = refusal(extra_config, environ)
        assert message.startswith(f"{place}: '{path[:20]}" if path.isprintable() else place)
        assert reason in message
        assert message.endswith(READABLE)


def test_standard_input_is_no_file(monkeypatch, tmp_path, write):
    reason = "standard input is not read, because the engine reads the file again when it starts"
    assert refusal({"config_file": "-"}) == (
        f"kv_connector_extra_config: config_file: '-': {reason}. {READABLE} For a file of this "
        "name write ./-"
    )
    write("store_after_uses: 2", name="-")
    monkeypatch.chdir(tmp_path)
    assert load({"config_file": "./-"}).store_after_uses == 2


def test_a_file_without_permission(write, monkeypatch):
    file = write("")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root, in a container, reads any file
    message = refusal({"config_file": file})
    assert message.startswith(f"kv_connector_extra_config: config_file: {file!r}: cannot be read: ")
    assert "Permission denied" in message


@pytest.mark.parametrize(
    ("content", "line", "column", "problem"),
    [
        ("a: [1, 2", 1, 9, "expected ',' or ']', but got '<stream end>'"),
        ("cpu_bytes: 1\na: b: c", 2, 5, "mapping values are not allowed here"),
        ("\ta: 1", 1, 1, "cannot start any token"),
        ("a: 1\n---\nb: 2", 2, 1, "expected a single document in the stream"),
        ("*x", 1, 1, "found undefined alias 'x'"),
        ("a: !!python/name:os.system x", 1, 4, "could not determine a constructor for the tag"),
        ("? [a]\n: 1", 1, 3, "found unhashable key"),
        ("%YAML 9.9\n---\na: 1", 1, 1, "incompatible YAML document"),
        ("a: 1\nb: 2024-13-45", 2, 4, "'2024-13-45' is not a valid timestamp"),
        ("a: !!int x", 1, 4, "'x' is not a valid int"),
        ("a: !!float ''", 1, 4, "'' is not a valid float"),
        ("a: !!bool x", 1, 4, "'x' is not a valid bool"),
        ("a: !!timestamp x", 1, 4, "'x' is not a valid timestamp"),
        ("a: !!map x", 1, 4, "expected a mapping node, but found scalar"),
        ("a: " + "1" * 5000, 1, 4, "is not a valid int"),
        ("store_after_uses: 010", 1, 19, "'010' means 8 in YAML: write the number that you mean"),
        ("cpu_bytes: 010000000000", 1, 12, "'010000000000' means 1073741824 in YAML"),
        ("store_after_uses: 1:30", 1, 19, "'1:30' means 90 in YAML"),
        ("a: {b: 1}\na: {c: 2}", 2, 1, "a: a mapping: this key was given before, in line 1"),
        ("[" * 3000, 1, 1, "nested too deeply"),
        ("a: 1\nb: \x01", 2, 4, "character 0x1 is not allowed in YAML"),
        (b"a: 1\nb: \xff", 2, 4, "byte 0xff is not UTF-8"),
        ("é: ü".encode("latin-1"), 1, 1, "byte 0xe9 is not UTF-8"),
        ("cpu_bytes: 1".encode("utf-16"), 1, 1, "byte 0xff is not UTF-8"),
        ("- a\n- b", 1, 1, "the top level is ['a', 'b'], but it must be a mapping"),
        ("lru", 1, 1, "the top level is 'lru', but it must be a mapping of keys to values"),
        (
            "store_after_uses: 1\nstore_after_uses: 2",
            2,
            1,
            "store_after_uses: '2': this key was given",
        ),
        ("{store_blocks: all, 'store_blocks': all}", 1, 21, "was given before, in line 1"),
    ],
)
def test_malformed_files_are_refused_with_line_and_column(write, content, line, column, problem):
    file = write(content)
    message = refusal({"config_file": file})
    assert message.startswith(f"{file}, line {line}, column {column}: ")
    assert problem in message
    assert message.endswith(f"Correct the file; `kv-offload config {file}` checks it.")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("cpu_bytes=1GiB", 1),
        ("cpu_bytes = 1GiB", 1),
        ("cpu_bytes:1GiB", 1),
        ("# mine\r\ncpu_bytes:1GiB  # all of it\r\n", 2),
        ("cpu_bytes=1GiB\neviction_policy=arc", 1),
        ("cpu_bytes:1GiB\neviction_policy: arc", 1),
        ("eviction_policy: arc\ncpu_bytes:1GiB\nstore_blocks: all", 2),
    ],
)
def test_a_key_without_a_space_before_its_value(write, content, line):
    file = write(content)
    message = refusal({"config_file": file})
    assert message.startswith(f"{file}, line {line}, column 1: 'cpu_bytes")
    assert ": write `cpu_bytes: 1GiB`, with a space after the colon. Correct the file;" in message


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("\ufeff# größer\nstore_after_uses: 2", 2),
        ("store_after_uses: 0x1f", 31),
        ("store_after_uses: 1_000", 1000),
    ],
    ids=ascii,
)
def test_what_yaml_and_utf8_allow_is_fine(write, content, value):
    assert load({"config_file": write(content)}).store_after_uses == value


TAGS = ["!!int ", "!!bool ", "!!map ", "&a ", "*a", "<<: "]
SYNTAX = [": ", "\n", "- ", "? ", *"{}[]~'\",%#\x00>|"]
VALUES = ["1", "0x1f", "1:30", "2024-02-30", "lru", "1GiB"]
WORDS = st.sampled_from([*SCHEMA, *TAGS, *SYNTAX, *VALUES])


@given(content=st.one_of(st.binary(), st.lists(WORDS | st.text(max_size=3)).map("".join)))
def test_any_content_is_a_configuration_or_a_refusal(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(
        content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
    )
    with contextlib.suppress(KVOffloadError):
        assert load({"config_file": str(file)}).cpu_bytes > 0


# The record


def test_a_configuration_is_frozen_and_round_trips():
    config = load({"eviction_policy": "arc", "cpu_bytes": "3GiB", "max_pinned_share": 1})
    assert load(dataclasses.asdict(config)) == config
    with pytest.raises(AttributeError):
        config.cpu_bytes = 1


def test_describe_is_one_line_with_every_key_as_it_was_written(write):
    file = write("keep_on_sleep: no\nstore_after_uses: 0x1f\nmax_pinned_share: 1")
    traced = trace_config({"config_file": file, "cpu_bytes": "12.5%"}, {}, host=HOST)
    assert traced.describe() == (
        "cpu_bytes=12.5% (8 GiB), eviction_policy=lru, store_blocks=all, store_after_uses=0x1f, "
        "transfer_engine=auto, max_pinned_share=1, load_or_recompute=measured, keep_on_sleep=no, "
        "on_load_failure=recompute"
    )
    inline = trace_config({"keep_on_sleep": True}, {}, host=HOST).describe()
    assert inline.startswith("cpu_bytes=25% (16 GiB), ")
    assert ", keep_on_sleep=true, " in inline


def test_a_default_is_shown_as_a_user_writes_it(write):
    shown = {key.name: key.written_default for key in SCHEMA.values()}
    assert shown["keep_on_sleep"] == "false"
    assert shown["cpu_bytes"] == "25%"
    assert shown["max_pinned_share"] == "0.8"
    file = write("".join(f"{name}: {text}\n" for name, text in shown.items()))
    assert load({"config_file": str(file)}) == load({})


def test_the_eviction_policies_are_those_that_exist():
    from kv_offload.cache.policies import POLICIES

    kind, _ = get_args(get_type_hints(OffloadConfig, include_extras=True)["eviction_policy"])
    assert set(get_args(kind)) == set(POLICIES)


# The documentation


def test_the_documented_table_is_the_schema():
    rows = [
        f"| `{key.name}` | {key.description} | {key.allowed} | `{key.written_default}` |"
        for key in SCHEMA.values()
    ]
    documented = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert documented == rows


def test_the_documented_example_names_every_key(write):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    traced = trace_config({"config_file": write(example)}, {}, host=HOST)
    assert all(given.source != DEFAULT for given in traced.given.values())


def test_the_documented_inline_keys_are_accepted():
    commands = re.findall(r"--kv-transfer-config '(.*?)'", DOCS.read_text())
    inline = [json.loads(text).get("kv_connector_extra_config", {}) for text in commands]
    (keys,) = [extra for extra in inline if extra and "config_file" not in extra]
    assert load(keys) == dataclasses.replace(DEFAULTS, cpu_bytes=8 * GIB, eviction_policy="arc")


def test_the_documented_errors_are_real(write, tmp_path):
    errors = re.findall(r"^kv-offload: (.*)$", DOCS.read_text(), re.MULTILINE)
    contents = [
        "max_pinned_share: 80%",
        "cpu_bytes: 64",
        "evict_policy: arc",
        "cpu_bytes: 8GiB\ncpu_bytes: 16GiB",
    ]
    assert len(errors) == len(contents)
    for error, content in zip(errors, contents, strict=True):
        message = refusal({"config_file": write(content, name="kv-offload.yaml")})
        assert message.replace(str(tmp_path), "/srv") == error


# -- the file of a command -----------------------------------------------------------------------


def test_the_file_of_a_command_is_read_in_place_of_the_others(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text("store_after_uses: 3")
    environ = {"KV_OFFLOAD_CONFIG_FILE": "/missing.yaml"}
    traced = trace_config({}, environ, file=str(file), host=HOST)
    assert traced.config.store_after_uses == 3
    assert traced.file == file
    assert traced.given["store_after_uses"].source == str(file)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(1, "1 byte"), (1000, "1000 bytes"), (1024, "1 KiB (1024 bytes)"), (5 << 30, "5 GiB (")],
)
def test_sizes_in_messages(size_bytes, text):
    assert describe_bytes(size_bytes).startswith(text)
