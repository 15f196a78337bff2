"""Says why an engine starts without the plugin. Imports no vLLM: most such engines want none."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

logger = logging.getLogger(__name__)

ARGUMENT = "--kv-transfer-config"
NOTHING = ("", "None")
"""Values of the argument that vLLM takes for none."""


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


def is_given_empty(argv: Sequence[str]) -> bool:
    """Return whether a command line has the argument with nothing in it, as a shell may leave it.

    vLLM takes names with `_` too, and the value as the next word or behind a `=`.
    """
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == ARGUMENT and (value if has_value else following) in NOTHING:
            return True
    return False
