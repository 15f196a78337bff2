"""Host time inside a connector: every hook that vLLM defines for connectors is timed."""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

HOOKS = tuple(
    {
        name
        for base in (KVConnectorBase_V1, SupportsHMA)
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    - {"save_kv_layer", "wait_for_layer_load"}
)
"""Public methods of vLLM's base classes; properties and class methods are not timed.

Nor are the two hooks that vLLM calls once a layer: timing them would cost more than they do."""

OWN_HOOKS = ("begin_step", "hear_ranks")
"""Functions that this project has the engine call as well."""


class ConnectorClock:
    """Adds up the time inside the hooks of the connectors that it was put on, until `take`.

    Works on any connector class. A hook that calls another one is counted once. Costs about 0.3 us
    a call, which are not counted.
    """

    def __init__(self) -> None:
        self.by_hook: Counter[str] = Counter()
        """Seconds since the last `take`."""
        self._inside = False

    def put_on(self, connector: Any) -> None:
        """Have the hooks of one object timed from now on."""
        own = (name for name in OWN_HOOKS if hasattr(connector, name))
        for name in (*HOOKS, *own):
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> Counter[str]:
        """Return the seconds by hook since the last call."""
        taken, self.by_hook = self.by_hook, Counter()
        return taken

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return hook(*arguments, **named)
            self._inside = True
            started = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                self.by_hook.update({name: time.perf_counter() - started})
                self._inside = False

        return timed
