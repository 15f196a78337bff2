"""Checks vLLM's arguments before an engine starts, and logs why the plugin is not in use.

The command line itself is read, because vLLM does not record an empty argument or a duplicate key.
Imports vLLM only where this connector is loaded: most engines without the plugin do not want it.
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
"""Option that starts one server per replica on this host, each with the same command line."""
LOCAL_SIZE = ("--data-parallel-size-local", "-dpl")
RAY_VARIABLES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Comma-separated list of additional variables that vLLM passes to Ray actors."""
NOTHING = ("", "None")
"""Values of the argument, for example from an unset shell variable, that vLLM treats as absent."""


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
        # It may be empty in vLLM's own file of arguments (`--config`).
        logger.info("kv-offload: not in use: %s is not given, or is empty", ARGUMENT)


def name_file_to_ray(environ: MutableMapping[str, str]) -> None:
    """Make engines and ranks started by Ray read the file named in this process's environment."""
    names = [name for name in environ.get(RAY_VARIABLES, "").split(",") if name.strip()]
    if FILE_VARIABLE in environ and FILE_VARIABLE not in names:
        environ[RAY_VARIABLES] = ",".join([*names, FILE_VARIABLE])


def check_keys(argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a duplicate key in the argument's JSON; Python keeps the last one."""
    for text in _values(argv):
        try:
            json.loads(text or "", object_pairs_hook=_without_duplicates)
        except ConfigError:
            raise
        except ValueError:  # vLLM reports the mistake, or accepts other syntax
            continue


def supervised_replicas(argv: Sequence[str]) -> int:
    """Return how many replicas' servers a supervisor starts on this host; 1 without a supervisor.

    The supervisor gives each of these servers `data_parallel_size_local` 1.
    """
    if SUPERVISOR not in (word.replace("_", "-") for word in argv):
        return 1
    sizes = [size for size in _values(argv, *LOCAL_SIZE) if size is not None and size.isdecimal()]
    return int(sizes[-1]) if sizes else 1


def _values(argv: Sequence[str], *names: str) -> list[str | None]:
    """Return each value of `ARGUMENT` or, if given, of `names`; None if the value is missing.

    A value is the text after `=` or the next word. vLLM accepts names with `_` too.
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
    """Shut down the connector of an earlier engine, unless that engine still exists.

    vLLM has one connector per process, and keeps that of an engine that failed to start. The next
    engine would get it with the failed engine's settings, KV cache and host memory.
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
