"""The keys of the configuration: their types, limits, defaults and descriptions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from msgspec import Meta

DEFAULT_CPU_BYTES = "25%"
MAX_INT = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The effective configuration of one engine, as `trace_config` checked and resolved it."""

    cpu_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_INT,
            description="Host memory for one replica of the engine, over all its ranks.",
            extra={
                "allowed": "bytes, a size (48GiB), or a share of the machine's memory (40%) that "
                "its data-parallel replicas divide"
            },
        ),
    ]
    eviction_policy: Annotated[
        Literal["lru", "arc"],
        Meta(description="Which blocks leave host memory first when it is full."),
    ] = "lru"
    store_blocks: Annotated[
        Literal["all", "prompt"],
        Meta(description="What is copied to host memory: all blocks, or only those of the prompt."),
    ] = "all"
    store_after_uses: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_INT,
            description="How often a prefix must have been computed or reused before it is stored.",
            extra={"allowed": "an integer of at least 1"},
        ),
    ] = 1
    transfer_engine: Annotated[
        Literal["auto", "host", "cuda", "dma"],
        Meta(
            description="What copies: the host (for the CPU engine), CUDA, CUDA with its copy "
            "engine only (dma), or whichever fits."
        ),
    ] = "auto"
    max_pinned_share: Annotated[
        float,
        Meta(
            ge=0.01,
            le=1,
            description="Share of the free GPU blocks that running stores may keep from reuse.",
            extra={
                "allowed": "a number from 0.01 to 1; with less, too few blocks are stored at a time"
            },
        ),
    ] = 0.8
    load_or_recompute: Annotated[
        Literal["measured", "always_load"],
        Meta(description="Whether a hit is computed where that was measured to be sooner."),
    ] = "measured"
    keep_on_sleep: Annotated[
        bool,
        Meta(
            description="Whether host memory still serves after a sleep of level 1.",
            extra={"allowed": "true or false"},
        ),
    ] = False
    on_load_failure: Annotated[
        Literal["recompute", "fail"],
        Meta(description="Whether a request whose load failed is computed again or fails."),
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
