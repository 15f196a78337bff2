"""The complete list of vLLM patches; the modules contain the wrappers.

`docs/design/patches.md` says why each is needed and what is lost without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kv_offload.engines.vllm.patches.hints import CHECK_HINTS
from kv_offload.engines.vllm.patches.patch import Patch, Version, notify_first
from kv_offload.engines.vllm.patches.reset_prefix_cache import reset_after_drain
from kv_offload.engines.vllm.patches.update_from_output import apply_reports_first
from kv_offload.engines.vllm.patches.vllm_workarounds import (
    chunk_after_hit,
    clear_uncomputed_hashes,
    continue_session,
    name_written_states,
)
from kv_offload.engines.vllm.patches.waiting import skip_waiting
from kv_offload.engines.vllm.patches.weights import keep_on_sleep, watch_call
from kv_offload.engines.vllm.start.command_line import check_settings

if TYPE_CHECKING:
    from kv_offload.config import OffloadConfig

EXECUTE_MODEL = Patch("model runner.execute_model", notify_first, "rank")
LOAD_WEIGHTS = Patch("model.load_weights", notify_first, "rank")
PATCHES = (
    Patch("vllm.engine.arg_utils:EngineArgs.create_engine_config", check_settings, "process"),
    CHECK_HINTS,
    Patch("vllm.v1.engine.core:EngineCore.reset_prefix_cache", reset_after_drain),
    Patch("vllm.v1.engine.core:EngineCore.collective_rpc", watch_call),
    Patch(
        "vllm.v1.engine.core:EngineCore.sleep",
        keep_on_sleep,
        needed=lambda _, config: config.keep_on_sleep,
    ),
    Patch("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", apply_reports_first),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._preempt_request", clear_uncomputed_hashes),
    Patch("vllm.v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled", skip_waiting),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session", continue_session),
    Patch("vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split", chunk_after_hit),
    Patch(
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager._cache_partial_tail_block",
        name_written_states,
        needed=lambda version, _: version < (0, 32),
    ),
    EXECUTE_MODEL,
    LOAD_WEIGHTS,
)


def install_in_process() -> None:
    """Patch the loaded modules that every process needs patched; a second call replaces nothing."""
    for patch in PATCHES:
        if patch.where == "process" and patch.target.partition(":")[0] in sys.modules:
            patch.install_on_class()


def install_for_scheduler(version: Version, config: OffloadConfig) -> None:
    """Apply the patches that this engine and configuration need; a second call replaces nothing."""
    for patch in PATCHES:
        if patch.where == "scheduler" and (patch.needed is None or patch.needed(version, config)):
            patch.install_on_class()
