"""Checks the settings, and notes the replicas, in the process that reads the user's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_offload.engines.vllm.start import command_line


def check_settings(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run around `EngineArgs.create_engine_config`."""
    if self.kv_transfer_config is None:
        command_line.log_not_in_use()
        return original(self, *args, **kwargs)
    # Imported here: most processes never need it.
    from kv_offload.engines.vllm.start import early, ranks

    early.check_arguments(self)
    config = original(self, *args, **kwargs)
    ranks.note_local_replicas(config)
    early.check_settings(config)
    if not early.asks_for_us(config.kv_transfer_config):
        command_line.log_other_connector(config.kv_transfer_config.kv_connector)
    return config
