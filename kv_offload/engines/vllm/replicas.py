"""How many data-parallel replicas of an engine run on this host: they divide its memory.

vLLM builds the connector in the processes of a replica, and there the configuration may no longer
say it. Of a dense model each replica is made an engine of its own, whose data-parallel sizes are 1.
With external load balancing, and where a user starts the replicas (`VLLM_DP_SIZE`), every process
says that it has one. So the front end notes the number while it is known, and what remains is
inferred from the address at which replicas meet.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_offload.engines.vllm.compat import noted_replicas

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_REPLICA_ID = re.compile(r"_dp[0-9]+$")
"""What vLLM appends to the engine id of each replica."""


@dataclass(frozen=True, slots=True)
class LocalReplicas:
    """The replicas of one engine on this host, the asking one included."""

    count: int
    hidden: bool = False
    """Whether there may be more, which cannot be seen from here."""


def count_local_replicas(
    vllm_config: VllmConfig, environ: Mapping[str, str] = os.environ
) -> LocalReplicas:
    """Return how many replicas of this engine run on this host, as far as it can be seen.

    Equal in all processes of a replica. Engines that only happen to run beside it are not counted.
    """
    parallel = vllm_config.parallel_config
    local = max(noted_replicas(parallel), int(parallel.data_parallel_size_local))
    if local > 1:
        return LocalReplicas(local)
    if parallel.data_parallel_size == 1:
        transfer = vllm_config.kv_transfer_config
        return LocalReplicas(1, hidden=bool(_REPLICA_ID.search(transfer.engine_id or "")))
    if _is_this_host(parallel.data_parallel_master_ip):
        return LocalReplicas(int(parallel.data_parallel_size))
    apart = parallel.data_parallel_external_lb or int(environ.get("VLLM_DP_SIZE", "1")) > 1
    return LocalReplicas(1, hidden=bool(apart))


def _is_this_host(address: str) -> bool:
    """Whether nobody outside this host can meet at an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
