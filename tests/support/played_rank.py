"""The ranks of a played engine, and the executor through which vLLM's engine core calls them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput

from tests.support.configurations import PAGE_WORDS
from tests.support.manual_copies import manual_copies
from tests.support.manual_tier import ManualTier, manual_tiers

if TYPE_CHECKING:
    import numpy as np

    from tests.support.played_engine import PlayedEngine


REGISTERS_AGAIN = hasattr(KVConnectorBase_V1, "restore_kv_caches")
"""Whether vLLM takes the KV caches away from its connectors for a sleep, as it does from 0.33."""


class PlayedWeights:
    """A model to which a trainer gives weights. They do not affect what `PlayedModel` samples."""

    def load_weights(self, weights: Sequence[tuple[str, Any]]) -> set[str]:
        return {name for name, _ in weights}


class PlayedRank:
    """One worker: the worker role of the connector, its KV cache, and its copies."""

    def __init__(self, config: Any, kv_cache_config: KVCacheConfig, rank: int) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        self.weights = PlayedWeights()
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        self.memory = torch.full((kv_cache_config.num_blocks, PAGE_WORDS), -1, dtype=torch.int64)
        self.kv: list[NDArray[np.int64]] = []
        caches = {}
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            rows = 1 if isinstance(spec, MambaSpec) else spec.block_size
            tensor = self.memory.view(len(self.memory), rows, -1)
            caches[group.layer_names[0]] = tensor
            self.kv.append(tensor.numpy())
        with manual_copies() as made, manual_tiers() as tiers:
            self.connector.register_kv_caches(caches)
        self.copies = made[0]
        self.tiers = tiers
        """The configured tiers, a disk before a remote store."""

    @property
    def tier(self) -> ManualTier | None:
        """The first tier."""
        return self.tiers[0] if self.tiers else None

    def get_model(self) -> PlayedWeights:
        """Stand in for the model runner, which the connector looks for at registration."""
        return self.weights

    def execute_model(self, scheduler_output: Any) -> None:
        """Stand in for the model runner; `begin` and `end` are called instead."""

    def begin(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        if output.new_block_ids_to_zero:
            self.memory[output.new_block_ids_to_zero] = 0
        self.copy_blocks(output)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)

    def copy_blocks(self, output: Any) -> None:
        """Copy each block in which a hit ends, before its request writes into it."""
        for copied in output.kv_cache_block_copies or ():
            self.memory[copied.dst_block_id] = self.memory[copied.src_block_id]

    def end(self, output: Any) -> KVConnectorOutput | None:
        """Run the hooks at a step's end as this vLLM's model runner does.

        A step without a forward returns nothing if there is nothing to report.
        """
        connector, report = self.connector, KVConnectorOutput()
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        report.finished_sending = results.finished_sending
        report.finished_recving = results.finished_recving
        report.failed_recving = results.failed_recving
        report.invalid_block_ids = connector.get_block_ids_with_load_errors()
        report.kv_connector_stats = connector.get_kv_connector_stats()
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return None if not output.num_scheduled_tokens and report.is_empty() else report


class PlayedExecutor:
    """The calls that an engine core makes on all its ranks."""

    is_sleeping = False

    def __init__(self, engine: PlayedEngine) -> None:
        self._engine = engine

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), *_: Any
    ) -> list[Any]:
        engine = self._engine
        while engine.scheduled:
            engine.execute()  # dispatched earlier
        if isinstance(method, str):
            engine.timing.compute()
            if "weight" in method or method == "update_named_param":
                engine.change_weights()
            return [None for _ in engine.ranks]
        answers = []
        for rank in engine.ranks:
            with mock.patch(
                "vllm.distributed.kv_transfer.get_kv_transfer_group", lambda r=rank: r.connector
            ):
                answers.append(method(None, *args))
        return answers

    def sleep(self, level: int) -> None:
        """Discard the KV cache, and with `level` 2 the weights, which come back different."""
        self.collective_rpc("sleep")
        for rank in self._engine.ranks:
            if REGISTERS_AGAIN:
                rank.connector.unregister_kv_caches()
            rank.memory.fill_(-1)
        if level > 1:
            self._engine.change_weights()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing: the memory is there."""
        if REGISTERS_AGAIN and (tags is None or "kv_cache" in tags):
            for rank in self._engine.ranks:
                rank.connector.restore_kv_caches()

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        """Return each rank's handshake metadata.

        vLLM asks for it at startup and, from 0.33, at wake-up.
        """
        return [
            {(0, index): rank.connector.get_handshake_metadata()}
            for index, rank in enumerate(self._engine.ranks)
        ]

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no such cache."""

    reset_encoder_cache = reset_mm_cache
