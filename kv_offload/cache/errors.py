"""Errors of the host cache's callers; the tree above them is in `kv_offload.errors`."""

from kv_offload.errors import KVOffloadError


class MissingKeyError(KVOffloadError, KeyError):
    """A load was asked for a key that is not readable."""


class MisuseError(KVOffloadError, RuntimeError):
    """The calling code broke a rule that is documented where this is raised."""
