"""A rank's access to vLLM: the model runner that calls it, and the forward context."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kv_offload.engine import KVCaches
from kv_offload.engines.vllm.locate import callers
from kv_offload.engines.vllm.model.layout import (
    describe_kv_caches,
    describe_pages,
    describe_unpacked,
    layer_regions,
)
from kv_offload.engines.vllm.patches import EXECUTE_MODEL, LOAD_WEIGHTS
from kv_offload.engines.vllm.patches.patch import add_listener

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger(__name__)


def find_runner() -> Any | None:
    """Return the innermost model runner on the call stack; vLLM does not pass it to connectors.

    While the connector is being built, this is vLLM's worker, which has the same method.
    """
    return next((caller for caller in callers() if hasattr(caller, "execute_model")), None)


class VLLMRank:
    """Implements `kv_offload.engine.RankEngine`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        gives_idle_blocks: bool,
        packs: bool,
    ) -> None:
        self.gives_idle_blocks = gives_idle_blocks
        self._packs = packs
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config

    def describe_kv_caches(self, kv_caches: Mapping[str, Any]) -> KVCaches:
        """Return the layout, the tensors, and the regions that each layer reads.

        Warns if packing is on but nothing can be packed.
        """
        layout = describe_kv_caches(kv_caches, self._kv_cache_config, packs=self._packs)
        if self._packs and not any(region.packing for region in layout.regions):
            logger.warning("kv-offload: %s", describe_unpacked(kv_caches, layout))
        return KVCaches(layout, [*kv_caches.values()], layer_regions(kv_caches, layout))

    def describe_pages(self, kv_caches: Mapping[str, Any]) -> str:
        """Return a digest of where a slot holds each value of a block; see `model.layout`."""
        return describe_pages(
            self._vllm_config, self._kv_cache_config, kv_caches, packs=self._packs
        )

    def find_output_copy_stream(self) -> Any | None:
        """Return the stream on which the model runner copies sampled tokens to the host, if any.

        Runner V2 always has one. Runner V1 creates it at first use; if it will be used, this
        creates it earlier.
        """
        for runner in callers():
            stream = getattr(runner, "output_copy_stream", None)
            if stream is not None:
                return stream
            make = getattr(runner, "_get_or_create_async_output_copy_stream", None)
            if make is not None:
                return make() if getattr(runner, "use_async_scheduling", False) else None
        return None

    def count_weight_loads(self) -> Callable[[], int]:
        """Count later calls of the model's `load_weights`; return a getter of the count.

        Trainers in the engine's process call that method without the engine core noticing.
        """
        loads = 0

        def count(*_args: Any, **_kwargs: Any) -> None:
            nonlocal loads
            loads += 1

        model = getattr(find_runner(), "get_model", lambda: None)()
        if hasattr(type(model), "load_weights"):
            add_listener(LOAD_WEIGHTS, model, count)
        return lambda: loads

    def forward_context(self) -> object | None:
        """Return vLLM's context of the current or next forward pass; None if there is none."""
        from vllm import forward_context as contexts

        return contexts.get_forward_context() if contexts.is_forward_context_available() else None

    def forward_with_layer_calls(self) -> tuple[object, Hashable] | None:
        """Return the next forward pass if its attention layers call `wait_for_layer_load`.

        Called when the connector's metadata is bound. By then the runner has set the forward
        context, except runner V2 when it replays a full graph. None for a full graph, for
        micro-batches (several threads, each with its own context), and for steps without attention.
        """
        context: Any = self.forward_context()
        if context is None or context.ubatch_slices is not None:
            return None
        mode, metadata = context.cudagraph_runtime_mode.name, context.attn_metadata
        if mode not in ("NONE", "PIECEWISE") or not isinstance(metadata, dict) or not metadata:
            return None
        return context, (mode, context.skip_compiled)


def before_each_step(call: Callable[..., None]) -> None:
    """Make the model runner call `call`, with the same arguments, before each `execute_model`.

    The connector's first hook runs a few milliseconds later; the link would be idle until then.
    """
    runner = find_runner()
    if runner is not None:
        add_listener(EXECUTE_MODEL, runner, call)


def guard_inputs(vllm_config: VllmConfig) -> None:
    """Make runner V1 of a pipeline copy a step's inputs to the GPU before it rewrites them.

    Otherwise the first stages can compute a step with inputs of the next one. vLLM guards them only
    with asynchronous scheduling (vllm-project/vllm pull request 47644, open in November 2026).
    """
    runner = find_runner()
    if (
        vllm_config.max_concurrent_batches > 1
        and runner is not None
        and getattr(runner, "prepare_inputs_event", runner) is None
        and runner.device.type == "cuda"
    ):
        runner.prepare_inputs_event = torch.cuda.Event(blocking=True)
