"""The keys of the configuration: their types, limits, defaults and descriptions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from msgspec import Meta

DEFAULT_CPU_BYTES = "25%"
MAX_INT = 2**63 - 1


def _says(description: str, allowed: str = "", **limits: Any) -> Meta:
    """Describe a key; `allowed` is left out where the type has the names that are allowed."""
    return Meta(description=description, extra={"allowed": allowed} if allowed else None, **limits)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The effective configuration of one engine, as `trace_config` checked and resolved it."""

    cpu_bytes: Annotated[
        int,
        _says(
            "Host memory for one replica of the engine, over all its ranks.",
            "bytes, a size (48GiB), or a share of the machine's memory (40%) that its "
            "data-parallel replicas divide",
            ge=1,
            le=MAX_INT,
        ),
    ]
    eviction_policy: Annotated[
        Literal["lru", "arc"], _says("Which blocks leave host memory first when it is full.")
    ] = "lru"
    store_blocks: Annotated[
        Literal["all", "prompt"],
        _says("What is copied to host memory: all blocks, or only those of the prompt."),
    ] = "all"
    store_after_uses: Annotated[
        int,
        _says(
            "How often a prefix must have been computed or reused before it is stored.",
            "an integer of at least 1",
            ge=1,
            le=MAX_INT,
        ),
    ] = 1
    transfer_engine: Annotated[
        Literal["auto", "host", "cuda", "dma"],
        _says(
            "What copies: the host (for the CPU engine), CUDA, CUDA with its copy engine only "
            "(dma), or whichever fits."
        ),
    ] = "auto"
    max_pinned_share: Annotated[
        float,
        _says(
            "Share of the free GPU blocks that running stores may keep from reuse.",
            "a number from 0.01 to 1; with less, too few blocks are stored at a time",
            ge=0.01,
            le=1,
        ),
    ] = 0.8
    load_or_recompute: Annotated[
        Literal["measured", "always_load"],
        _says("Whether a hit is computed where that was measured to be sooner."),
    ] = "measured"
    keep_on_sleep: Annotated[
        bool, _says("Whether host memory still serves after a sleep of level 1.", "true or false")
    ] = False
    on_load_failure: Annotated[
        Literal["recompute", "fail"],
        _says("Whether a request whose load failed is computed again or fails."),
    ] = "recompute"


@dataclass(frozen=True, slots=True)
class Key:
    """One key as error messages, the command line and docs/use/configuration.md describe it."""

    name: str
    type: Any
    description: str
    allowed: str
    default: Any

    @property
    def written_default(self) -> str:
        """The default as a user writes it into the file."""
        return as_yaml(self.default)


def as_yaml(value: Any) -> str:
    """Return a plain value as a user writes it into the file: `false`, `25%`."""
    return yaml.safe_dump([value], default_flow_style=True, width=float("inf")).strip()[1:-1]


def _key(field: dataclasses.Field[Any], hint: Any) -> Key:
    kind, meta = get_args(hint)
    names = get_args(kind)
    allowed = meta.extra["allowed"] if meta.extra else f"{', '.join(names[:-1])} or {names[-1]}"
    default = DEFAULT_CPU_BYTES if field.default is dataclasses.MISSING else field.default
    return Key(field.name, hint, meta.description, allowed, default)


_HINTS = get_type_hints(OffloadConfig, include_extras=True)
SCHEMA = {f.name: _key(f, _HINTS[f.name]) for f in dataclasses.fields(OffloadConfig)}
