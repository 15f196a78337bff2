"""The error tree of `kv_offload`; `transfer` has its own in `kv_swap.errors`.

A message names the value, the limit and the remedy. As text it begins with `kv-offload: `, by which
it is found in an engine's log.
"""


class KVOffloadError(Exception):
    """Base of every error that this package raises."""

    def __str__(self) -> str:
        """Return the message with the name of the plugin in front."""
        return f"kv-offload: {super().__str__()}"


class ConfigError(KVOffloadError, ValueError):
    """The configuration is missing, malformed, out of range or contradictory."""


class UnsupportedError(KVOffloadError, RuntimeError):
    """The engine's version, model or settings cannot be served; refused at start, never guessed."""


class CapacityError(KVOffloadError, RuntimeError):
    """The memory asked for does not exist, is not available, or cannot hold a single slot."""


class ServerError(KVOffloadError, RuntimeError):
    """A server is not there, is not vLLM, or runs without the plugin."""


class RequestError(KVOffloadError, ValueError):
    """A request's `kv_transfer_params` are wrong; that request alone is refused."""
