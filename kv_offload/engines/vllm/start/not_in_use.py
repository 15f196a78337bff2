"""Says why an engine starts without the plugin. Imports no vLLM: most such engines want none."""

from __future__ import annotations

import logging
import sys

from kv_offload.engines.vllm.start.command_line import ARGUMENT, is_given_empty

logger = logging.getLogger(__name__)


def log_why() -> None:
    """Log that vLLM got no transfer configuration: a warning where the argument was given empty."""
    if is_given_empty(sys.argv):
        logger.warning(
            "kv-offload: not in use: %s is empty, so this engine runs without kv-offload. Check "
            "what fills it: `kv-offload config --argument FILE` prints it, or an error",
            ARGUMENT,
        )
    else:
        # vLLM's own file of arguments (`--config`) may have an empty one.
        logger.info("kv-offload: not in use: %s is not given, or is empty", ARGUMENT)


def log_other(connector: str | None) -> None:
    """Log that vLLM was asked for another connector, or for a MultiConnector without ours."""
    logger.info("kv-offload: not in use: the connector of this engine is %s", connector)
