"""The engine's objects as the plugin sees them.

`scheduler` and `worker` import no engine. The connector of an engine (`kv_offload.engines`) hands
them the engine's objects, of which they use what stands here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from kv_swap.layout import KVLayout


class Request(Protocol):
    """A request as it is now; the engine changes it later."""

    request_id: str
    block_hashes: Sequence[bytes]
    """One for every full `hash_block_size` tokens; it grows with them."""
    all_token_ids: Sequence[int]
    """Tokens of the prompt and the sampled ones; read only where KV events are on."""
    num_tokens: int
    """Prompt and sampled tokens, without drafts and placeholders."""
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    """Tokens of steps that have been launched and whose output has not been read."""
    skip_reading_prefix_cache: bool
    kv_transfer_params: Mapping[str, Any] | None
    """The client's parameters for connectors (`kv_offload.hints`)."""
    trace_headers: Mapping[str, str] | None
    """Under which span of its client its own belong; asked for where the engine traces."""
    cache_salt: str | None
    """The client's salt, mixed into the hashes."""


class Block(Protocol):
    """A block of the engine's KV cache."""

    block_id: int
    ref_cnt: int
    block_hash: bytes | None
    """The key under which the pool knows it; None where it does not."""


class BlockPool(Protocol):
    """The engine's KV blocks. A reference keeps a block from being given to another request."""

    blocks: Sequence[Block]
    """By block id."""
    null_block: Block
    """Stands in a request's table where no block is needed."""
    hash_block_size: int
    """Tokens that one block hash covers."""

    def get_num_free_blocks(self) -> int:
        """Return how many blocks have no reference."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        """Return the blocks that the pool knows by a hash, one of each group; None without one."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Reference each block once more."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drop one reference of each; the last of those that become free is reused last."""


class AllocatedBlocks(Protocol):
    """The blocks that the engine gave a request."""

    def get_block_ids(self) -> Sequence[Sequence[int]]:
        """Return the ids by cache group."""


class NewRequest(Protocol):
    """A request that a step runs for the first time, or again with another list of blocks."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    """All of its blocks, by cache group: they replace what was known."""
    num_computed_tokens: int


class RunningRequests(Protocol):
    """The requests of a step that ran before; one position in every list is one request."""

    req_ids: Sequence[str]
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    """By cache group; None for a request that got no block."""
    num_computed_tokens: Sequence[int]
    resumed_req_ids: set[str]
    """Requests whose `new_block_ids` replace what was known."""


class BlockState(Protocol):
    """Facts about a step's blocks beyond the list of new ones."""

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]
    """By request id: cache group, block and how many tokens, of each state that the step names.

    A state need not lie where its tokens would be in the request's list of blocks: the engine moves
    blocks of drafts within it, and keeps the state before a prompt's end in a block of its own."""


class StepOutput(Protocol):
    """The work that the engine's scheduler put into one step."""

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
    """By layer, in the order in which the engine registered them: regions that it reads."""


class RankEngine(Protocol):
    """The engine on one rank. `register_kv_caches` of the worker asks the first four methods.

    The engine's model runner is on the call stack then.
    """

    gives_idle_blocks: bool
    """True if no forward of an earlier step reads or writes a block that a request is given.

    Where that is not known, a load must wait for those forwards."""

    def describe_kv_caches(self, kv_caches: Mapping[str, Any]) -> KVCaches:
        """Return what the engine registered; raises `UnsupportedError` if it cannot be copied."""

    def describe_pages(self, kv_caches: Mapping[str, Any]) -> str:
        """Return what differs where a value of a block is at another place of a slot."""

    def find_output_copy_stream(self) -> Any | None:
        """Return the stream that copies sampled tokens to the host; None where there is none."""

    def count_weight_loads(self) -> Callable[[], int]:
        """Return a function that counts how often the model is given weights from now on."""

    def forward_context(self) -> object | None:
        """Return what identifies the forward that runs or is about to; None without one."""

    def forward_with_layer_calls(self) -> tuple[object, Hashable] | None:
        """Return the forward about to run, and of which kind it is; None if layers do not call.

        Forwards of a kind run the same code. Layers that call do so just before they read KV.
        """
