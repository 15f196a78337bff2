"""The keys of the configuration: their types, limits, defaults and descriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from msgspec import Meta

from kv_offload.config.sizes import format_size

DEFAULT_CPU_BYTES = "25%"
MAX_INT = 2**63 - 1

PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
"""A regular expression for 1 to 65535."""

ADDRESS = rf"^[^\s:/]+:{PORT}\Z"
"""A regular expression for the address of Mooncake's master."""

Size = Annotated[int, Meta(ge=1, le=MAX_INT)]
FilePath = Annotated[str, Meta(min_length=1)]


def _says(
    description: str, allowed: str = "", takes: str = "", kind: str = "", **limits: Any
) -> Meta:
    """Describe a key; `allowed` can be omitted if the type is a `Literal` of names or `bool`.

    A key with a `kind` belongs to that kind of remote store, and is required there.
    """
    extra = {"allowed": allowed, "takes": takes, "kind": kind}
    return Meta(description=description, extra=extra, **limits)


def _size(description: str, allowed: str) -> Meta:
    """Describe a key that takes a size with a unit."""
    return _says(description, allowed, "size")


def _path(description: str, allowed: str, kind: str = "") -> Meta:
    """Describe a key that takes a path; relative paths are made absolute."""
    return _says(description, allowed, "path", kind)


@dataclass(frozen=True, kw_only=True)
class DiskConfig:
    """A folder on a local disk for blocks that leave host memory."""

    path: Annotated[
        FilePath,
        _path("Folder on a local disk for blocks that leave host memory.", "the path of a folder"),
    ]
    bytes: Annotated[
        Size,
        _size(
            "Disk space for one replica of the engine, over all its ranks.",
            "bytes, or a size (500GiB)",
        ),
    ]
    write_rate: Annotated[
        Size,
        _size(
            "Maximum bytes per second that one replica writes to the disk, over all its ranks.",
            "bytes, or a size (1GiB)",
        ),
    ] = 1 << 30
    keep_on_restart: Annotated[
        bool, _says("Whether blocks on the disk are reused after a restart.")
    ] = True
    keep_on_reset: Annotated[
        bool, _says("Whether blocks on the disk stay usable after a reset of the prefix cache.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """A remote store that several engines share."""

    kind: Annotated[
        Literal["mooncake", "folder", "s3"],
        _says(
            "The remote store: Mooncake Store, a folder of a shared filesystem (NFS, Lustre, "
            "CephFS), or a bucket of S3."
        ),
    ]
    address: Annotated[
        Annotated[str, Meta(pattern=ADDRESS)] | None,
        _says(
            "Address of Mooncake's master.",
            "host:port, a port from 1 to 65535, for example 10.0.0.5:50051",
            kind="mooncake",
        ),
    ] = None
    path: Annotated[
        FilePath | None,
        _path("The shared folder, which must exist.", "the path of a folder", kind="folder"),
    ] = None
    url: Annotated[
        Annotated[str, Meta(pattern=r"^s3://[^\s/?#@]+(/[^\s?#@]*)?\Z")] | None,
        _says(
            "The bucket, and a prefix in it. Credentials come from the environment.",
            "s3://BUCKET or s3://BUCKET/PREFIX, without credentials",
            kind="s3",
        ),
    ] = None
    bytes: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INT)],
        _size(
            "For mooncake: memory that one replica of the engine gives to it, over all its ranks. "
            "For a folder or a bucket: the limit for all engines together.",
            "bytes, or a size (64GiB); 0 to use what others give to Mooncake, or for a bucket with "
            "a rule that removes objects",
        ),
    ]
    write_rate: Annotated[
        Size,
        _size(
            "Maximum bytes per second that one replica writes to it, over all its ranks.",
            "bytes, or a size (1GiB)",
        ),
    ] = 1 << 30
    keep_on_reset: Annotated[
        bool, _says("Whether its blocks stay usable after a reset of the prefix cache.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The effective configuration of one engine, checked and resolved by `trace_config`."""

    cpu_bytes: Annotated[
        Size,
        _size(
            "Host memory for one replica of the engine, over all its ranks.",
            "bytes, a size (48GiB), or a share of the machine's memory (40%) that its "
            "data-parallel replicas divide",
        ),
    ]
    host_pool: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")] | None,
        _says(
            "Name of a pool on this host: its engines read each other's host memory, and a "
            "restarted engine takes over the blocks of the one before it, even after a crash.",
            "a name of 1 to 64 letters, digits, dots, underscores and hyphens",
        ),
    ] = None
    host_pool_path: Annotated[
        FilePath,
        _path("Folder of a memory filesystem that holds the pools.", "the path of a folder"),
    ] = "/dev/shm"
    eviction_policy: Annotated[
        Literal["auto", "lru"],
        _says("Which blocks leave host memory first when it is full."),
    ] = "auto"
    store_blocks: Annotated[
        Literal["all", "prompt"],
        _says("Blocks to copy to host memory: all, or only those of the prompt."),
    ] = "all"
    transfer_engine: Annotated[
        Literal["auto", "host", "cuda"],
        _says("Engine that copies: the host (for the CPU engine), CUDA, or whichever fits."),
    ] = "auto"
    pack_kv: Annotated[
        bool,
        _says(
            "Whether to pack bfloat16 KV without loss while copying it, so that host memory holds "
            "more."
        ),
    ] = False
    max_pinned_share: Annotated[
        float,
        _says(
            "Share of the GPU blocks that may be held for stores at a time.",
            "a number from 0.01 to 1; with less, too few blocks are stored at a time",
            ge=0.01,
            le=1,
        ),
    ] = 0.8
    max_share_per_salt: Annotated[
        float,
        _says(
            "Share of host memory, and of a disk, that blocks of one cache_salt may take.",
            "a number from 0.01 to 1 (no limit); requests without a cache_salt share one part",
            ge=0.01,
            le=1,
        ),
    ] = 1.0
    max_retained_share: Annotated[
        float,
        _says(
            "Share of host memory that requests may retain, over all of them.",
            "a number from 0 (retain nothing) to 0.9",
            ge=0,
            le=0.9,
        ),
    ] = 0.25
    max_retained_share_per_salt: Annotated[
        float,
        _says(
            "Share of host memory that requests of one cache_salt may retain.",
            "a number from 0 to 0.9; requests without a cache_salt share one part",
            ge=0,
            le=0.9,
        ),
    ] = 0.25
    load_or_recompute: Annotated[
        Literal["measured", "always_load"],
        _says("Whether to recompute a hit if measurements show that this is faster."),
    ] = "measured"
    keep_on_sleep: Annotated[
        bool, _says("Whether blocks in host memory stay usable after a sleep of level 1.")
    ] = False
    on_load_failure: Annotated[
        Literal["recompute", "fail"],
        _says("Whether a request whose load failed is recomputed or fails."),
    ] = "recompute"
    disk: DiskConfig | None = None
    remote: RemoteConfig | None = None
    record_trace: Annotated[
        FilePath | None,
        _path(
            "File to which the requests are recorded, without their text.",
            "the path of a file",
        ),
    ] = None
    record_trace_bytes: Annotated[
        Size,
        _size(
            "Maximum size of the recordings in that file, including those of earlier starts.",
            "bytes, or a size (256MiB)",
        ),
    ] = 256 << 20

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that one replica takes, all ranks combined."""
        return self.cpu_bytes + self.given_bytes

    @property
    def given_bytes(self) -> int:
        """Bytes of host memory that one replica gives to a remote store, all ranks combined."""
        is_given = self.remote is not None and self.remote.kind == "mooncake"
        return self.remote.bytes if self.remote is not None and is_given else 0


@dataclass(frozen=True, slots=True)
class Key:
    """A key as described in error messages, the command line and docs/use/configuration.md."""

    name: str
    """Includes the section, if any: `disk.path`."""
    type: Any
    description: str
    allowed: str
    takes: str
    """`size`, `path`, or empty for other types."""
    default: Any
    """As a user writes it, even for a size. None if there is no default or the key is required."""
    written_default: str
    """The default as text for the file; `required` if its section requires the key."""
    is_required: bool
    kind: str
    """The kind of remote store that the key is for; empty if it is for all kinds."""

    @property
    def section(self) -> str:
        """The key's section, or empty."""
        return self.name.rpartition(".")[0]


def as_yaml(value: Any) -> str:
    """Return a plain value as a user writes it in the file: `false`, `25%`."""
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


SECTIONS: dict[str, type[DiskConfig | RemoteConfig]] = {"disk": DiskConfig, "remote": RemoteConfig}
"""The nested mappings of a configuration. Without `disk` there is no disk, without `remote` no
remote store."""


def _keys(config: type[Any], section: str = "") -> Iterator[Key]:
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        if not section and field.name in SECTIONS:
            yield from _keys(SECTIONS[field.name], field.name)
            continue
        kind, *_, meta = get_args(hints[field.name])
        names = ("true", "false") if kind is bool else get_args(kind)
        allowed = meta.extra["allowed"] or f"{', '.join(names[:-1])} or {names[-1]}"
        takes, of_kind = meta.extra["takes"], meta.extra["kind"]
        is_required = bool(section) and (field.default is dataclasses.MISSING or bool(of_kind))
        default: Any = None if is_required else field.default
        if field.name == "cpu_bytes":
            default = DEFAULT_CPU_BYTES
        elif takes == "size" and default is not None:
            default = format_size(default).replace(" ", "")
        yield Key(
            name=f"{section}.{field.name}".removeprefix("."),
            type=hints[field.name],
            description=meta.description,
            allowed=allowed,
            takes=takes,
            default=default,
            written_default="required" if is_required else as_yaml(default),
            is_required=is_required,
            kind=of_kind,
        )


SCHEMA = {key.name: key for key in _keys(OffloadConfig)}


def keys_of(section: str) -> list[str]:
    """Return the keys of a section without its name; of the top level if `section` is empty."""
    if not section:
        return [*dict.fromkeys(key.section or key.name for key in SCHEMA.values())]
    return [key.name.rpartition(".")[2] for key in SCHEMA.values() if key.section == section]
