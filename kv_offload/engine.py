"""Protocols for the engine's objects that the plugin uses.

`scheduler` and `worker` import no engine. The connector of an engine (`kv_offload.engines`) passes
them the engine's objects, of which they use only the attributes and methods declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from kv_swap.layout import KVLayout


class Request(Protocol):
    """A request in its current state; the engine updates it."""

    request_id: str
    block_hashes: Sequence[bytes]
    """One hash per full `hash_block_size` tokens; grows with them."""
    all_token_ids: Sequence[int]
    """Prompt and sampled tokens; read only if KV events are on."""
    num_tokens: int
    """Number of prompt and sampled tokens, without drafts and placeholders."""
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    """Tokens of launched steps whose output has not been read yet."""
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, Any] | None
    """The client's parameters for connectors (`kv_offload.hints`)."""
    trace_headers: Mapping[str, str] | None
    """The client's span, parent of the request's own spans; read only if the engine traces."""
    cache_salt: str | None
    """The client's salt, which is mixed into the hashes."""


class Block(Protocol):
    """A block of the engine's KV cache."""

    block_id: int
    ref_cnt: int
    block_hash: bytes | None
    """The block's key in the pool's prefix cache; None if it is not cached."""


class BlockPool(Protocol):
    """The engine's KV blocks. A referenced block is not given to another request."""

    blocks: Sequence[Block]
    """By block id."""
    null_block: Block
    """Fills a request's block table where no block is needed."""
    hash_block_size: int
    """Number of tokens that one block hash covers."""

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks without a reference."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        """Return the cached blocks for a hash, one per group; None if there are none."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop one reference to each block; of those that become free, the last is reused last."""


class AllocatedBlocks(Protocol):
    """The blocks that the engine allocated to a request."""

    def get_block_ids(self) -> Sequence[Sequence[int]]:
        """Return the block ids by cache group."""


class NewRequest(Protocol):
    """A request that a step runs for the first time, or again with a different list of blocks."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    """All of its block ids, by cache group; they replace earlier ones."""
    num_computed_tokens: int


class RunningRequests(Protocol):
    """The requests of a step that ran before; each position in the lists is one request."""

    req_ids: Sequence[str]
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    """By request and cache group; None for a request that got no block."""
    num_computed_tokens: Sequence[int]
    resumed_req_ids: set[str]
    """Requests whose `new_block_ids` replace earlier ones."""


class BlockState(Protocol):
    """Facts about a step's blocks beyond the list of new ones."""

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]
    """By request id: cache group, block id and number of tokens of each state that the step caches.

    A state need not be where its tokens would be in the request's block table: the engine moves the
    blocks of drafts within it, and keeps the state before a prompt's end in a separate block. Nor
    need its tokens fill a block."""

    def get_block_ids(self, req_id: str) -> Any:
        """Return the block table of a request that the step runs, by cache group."""


class StepOutput(Protocol):
    """The work that the engine's scheduler assigned to one step."""

    num_scheduled_tokens: Mapping[str, int]
    """By request id."""
    total_num_scheduled_tokens: int
    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: RunningRequests
    kv_connector_block_state: BlockState | None


@dataclass(frozen=True, slots=True)
class KVCaches:
    """The KV tensors that the engine registered on a rank."""

    layout: KVLayout
    tensors: Sequence[torch.Tensor]
    regions_of_layer: Mapping[str, frozenset[int]]
    """By layer, in the order of registration: the regions that it reads."""


class RankEngine(Protocol):
    """The engine on one rank.

    The worker's `register_kv_caches` calls the first four methods, while the engine's model runner
    is on the call stack.
    """

    gives_idle_blocks: bool
    """True if no forward pass of an earlier step reads or writes a block that a request is given.

    If this is unknown, a load must wait for those forward passes."""

    def describe_kv_caches(self, kv_caches: Mapping[str, Any]) -> KVCaches:
        """Return the registered KV caches; raises `UnsupportedError` if they cannot be copied."""

    def describe_pages(self, kv_caches: Mapping[str, Any]) -> str:
        """Return a description that differs if any value of a block is elsewhere in its slot."""

    def find_output_copy_stream(self) -> Any | None:
        """Return the stream that copies sampled tokens to the host; None if there is none."""

    def count_weight_loads(self) -> Callable[[], int]:
        """Return a function that counts the model's weight loads since this call."""

    def forward_context(self) -> object | None:
        """Return an identity of the current or next forward pass; None if there is none."""

    def forward_with_layer_calls(self) -> tuple[object, Hashable] | None:
        """Return the next forward pass and its kind; None if its layers do not call the connector.

        Forward passes of one kind run the same code. Layers call the connector just before they
        read KV.
        """
