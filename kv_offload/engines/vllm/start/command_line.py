"""Checks vLLM's arguments before an engine starts, and logs why the plugin is not in use.

vLLM does not record that the argument was given empty, or that a key was given twice. Imports vLLM
only where this connector is loaded: most engines that start without the plugin do not want it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from kv_offload.config.file import show
from kv_offload.config.trace import FILE_VARIABLE
from kv_offload.errors import ConfigError

logger = logging.getLogger(__name__)

ARGUMENT = "--kv-transfer-config"
SUPERVISOR = "--data-parallel-multi-port-external-lb"
"""Starts one server per replica on this host, each with the same command line."""
LOCAL_SIZE = ("--data-parallel-size-local", "-dpl")
RAY_VARIABLES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Lists, separated by commas, further variables that vLLM passes to the actors of Ray."""
NOTHING = ("", "None")
"""Values of the argument that vLLM treats as absent, as a shell may leave it."""


def check_settings(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run around `EngineArgs.create_engine_config`, which reads the user's arguments."""
    end_stale_connector()
    if self.kv_transfer_config is None:
        _log_not_in_use()
        return original(self, *args, **kwargs)
    from kv_offload.engines.vllm.start import early, members, ranks

    if members.asks_for_us(self.kv_transfer_config):
        check_keys(sys.argv)
        name_file_to_ray(os.environ)
    early.check_arguments(self)
    config = original(self, *args, **kwargs)
    ranks.note_local_replicas(config, supervised_replicas(sys.argv))
    early.check_settings(config)
    if members.asks_for_us(config.kv_transfer_config):
        from kv_offload.engines.vllm.patches.hints import CHECK_HINTS

        CHECK_HINTS.install_on_class()
    else:
        connector = config.kv_transfer_config.kv_connector
        logger.info("kv-offload: not in use: the connector of this engine is %s", connector)
    return config


def _log_not_in_use() -> None:
    if any(value in NOTHING for value in _values(sys.argv)):
        logger.warning(
            "kv-offload: not in use: %s is empty, so this engine runs without kv-offload. Check "
            "what fills it: `kv-offload config --argument FILE` prints it, or an error",
            ARGUMENT,
        )
    else:
        # vLLM's own file of arguments (`--config`) may have an empty one.
        logger.info("kv-offload: not in use: %s is not given, or is empty", ARGUMENT)


def name_file_to_ray(environ: MutableMapping[str, str]) -> None:
    """Make engines and ranks started by Ray read the file that the environment names here."""
    names = [name for name in environ.get(RAY_VARIABLES, "").split(",") if name.strip()]
    if FILE_VARIABLE in environ and FILE_VARIABLE not in names:
        environ[RAY_VARIABLES] = ",".join([*names, FILE_VARIABLE])


def check_keys(argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a duplicate key in the argument's JSON.

    Python's JSON silently keeps the last one.
    """
    for text in _values(argv):
        try:
            json.loads(text or "", object_pairs_hook=_without_duplicates)
        except ConfigError:
            raise
        except ValueError:  # vLLM reports the mistake, or accepts another form
            continue


def supervised_replicas(argv: Sequence[str]) -> int:
    """Return for how many replicas of this host a supervisor starts a server each; 1 without one.

    Such a server gets a warning that there is one replica only.
    """
    if SUPERVISOR not in (word.replace("_", "-") for word in argv):
        return 1
    sizes = [size for size in _values(argv, *LOCAL_SIZE) if size is not None and size.isdecimal()]
    return int(sizes[-1]) if sizes else 1


def _values(argv: Sequence[str], *names: str) -> list[str | None]:
    """Return each value of an argument: the next word, if there is one, or the text after `=`.

    The argument is `ARGUMENT`, or one of `names`. vLLM accepts names with `_` too.
    """
    values = []
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") in (names or (ARGUMENT,)):
            values.append(value if has_value else following)
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(
                f"{ARGUMENT}: {show(key)[1:-1]} is given twice, as {show(found[key])} and as "
                f"{show(value)}: remove one of the two"
            )
        found[key] = value
    return found


def end_stale_connector() -> None:
    """Shut down the connector that a former engine left; does nothing while that engine exists.

    vLLM has one connector per process, and keeps that of an engine that failed to start. The next
    engine would get it, with the settings, the KV cache and the host memory of the failed one.
    """
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
