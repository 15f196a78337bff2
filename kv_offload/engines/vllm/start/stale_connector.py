"""Ends the connector of an engine that failed to start, before the process builds another engine.

vLLM has one connector per process, and gives it to each engine there. It keeps the connector of an
engine that failed to start. The next engine would get it, with the settings, the KV cache and the
host memory of the failed one.
"""

from __future__ import annotations

import gc
import logging
import sys

logger = logging.getLogger(__name__)


def end_stale_connector() -> None:
    """Shut down the connector that a former engine left; does nothing while that engine exists."""
    if "kv_offload.engines.vllm.connector" not in sys.modules:
        return
    from vllm.distributed import kv_transfer
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    from kv_offload.engines.vllm.locate import connectors_in

    if not kv_transfer.has_kv_transfer_group():
        return
    group = kv_transfer.get_kv_transfer_group()
    ours = next(connectors_in(group, "offload_worker"), None)
    if ours is None:
        return
    if not ours.engine_is_gone:
        _collect()
    if ours.engine_is_gone:
        logger.info("kv-offload: the previous engine is gone: releasing its host memory")
        ensure_kv_transfer_shutdown()


def _collect() -> None:
    """Collect garbage, including objects that vLLM froze at start: an engine contains cycles."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
