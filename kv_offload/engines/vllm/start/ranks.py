"""Exchanges facts between ranks and the scheduler at start, and counts replicas on this host.

A replica's configuration may not say how many replicas there are. vLLM makes each replica of a
dense model a separate engine. With external load balancing, or if a user starts the replicas
(`VLLM_DP_SIZE`), every process reports only one. So the front end records the number; without that
record, it is inferred from the address at which replicas meet.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm.locate import call_ranks, callers
from kv_offload.errors import UnsupportedError
from kv_offload.messages import WorkerCapacity
from kv_offload.worker.sharing import SharingRanks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NOTED = "_kv_offload_local_replicas"
"""Attribute of a `ParallelConfig`: number of replicas that its front end starts on this host."""

_REPLICA_ID = re.compile(r"_dp[0-9]+$")
"""Suffix that vLLM appends to each replica's engine id."""


def ask_capacities() -> list[WorkerCapacity]:
    """Return the capacity of every rank once its KV cache is registered. Blocks.

    Raises `UnsupportedError` unless the engine core is on the call stack.
    """
    for core in callers():
        if hasattr(core, "model_executor"):
            return call_ranks(core, "capacity")
    raise UnsupportedError(
        "inside a MultiConnector and with prefill context parallelism the ranks are asked through "
        "vLLM's engine core, which is not on the call stack in this vLLM: use KVOffloadConnector "
        "without these"
    )


def tensor_parallel_ranks() -> SharingRanks:
    """Return the ranks of this rank's tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return SharingRanks(group.rank_in_group, group.world_size, lambda value: _gather(value, group))


def gather_over_ranks(value: Any) -> list[Any]:
    """Return the value of each rank of this replica; only `value` if vLLM has formed no groups.

    Blocks until all ranks of the replica have called it. Avoids vLLM's group of all ranks, which
    includes other replicas' ranks in a mixture of experts.
    """
    import torch
    from vllm.distributed import parallel_state

    gathered = [value]
    if torch.distributed.is_initialized():
        for name in ("get_tp_group", "get_pp_group", "get_pcp_group"):
            group = getattr(parallel_state, name)()
            if group.world_size > 1:
                gathered = [item for part in _gather(gathered, group) for item in part]
    return gathered


def _gather(value: Any, group: Any) -> list[Any]:
    import torch

    gathered: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, value, group=group.cpu_group)
    return gathered


@dataclass(frozen=True, slots=True)
class LocalReplicas:
    """The replicas of one engine on this host, including the caller's."""

    count: int
    hidden: bool = False
    """True if there may be more replicas that cannot be seen from here."""


def note_local_replicas(vllm_config: VllmConfig, supervised: int = 1) -> None:
    """Record how many replicas the front end, or its supervisor, starts on this host."""
    parallel = vllm_config.parallel_config
    setattr(parallel, _NOTED, max(supervised, int(parallel.data_parallel_size_local)))


def count_local_replicas(
    vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ
) -> LocalReplicas:
    """Return how many replicas of this engine run on this host, as far as visible.

    All processes of a replica get the same answer. Other engines do not count.
    """
    parallel = vllm_config.parallel_config
    noted = int(getattr(parallel, _NOTED, 1))
    local = max(noted, int(parallel.data_parallel_size_local))
    if local > 1:
        return LocalReplicas(local)
    if parallel.data_parallel_size == 1:
        engine_id = vllm_config.kv_transfer_config.engine_id or ""
        return LocalReplicas(1, hidden=bool(_REPLICA_ID.search(engine_id)))
    if _is_this_host(parallel.data_parallel_master_ip):
        return LocalReplicas(int(parallel.data_parallel_size))
    apart = parallel.data_parallel_external_lb or int(environ.get("VLLM_DP_SIZE", "1")) > 1
    return LocalReplicas(1, hidden=bool(apart))


def _is_this_host(address: str) -> bool:
    """Return whether only processes on this host can meet at an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
