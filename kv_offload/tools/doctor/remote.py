"""Checks that a remote store answers, that engines' keys agree, and a round trip of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kv_swap.errors import TierError
from kv_swap.tiers.remote.client import RemoteClient
from kv_swap.tiers.remote.probe import RemoteRates, measure

from kv_offload.config import RemoteConfig
from kv_offload.config.sizes import format_size
from kv_offload.errors import KVOffloadError
from kv_offload.tools.doctor import BLOCK_BYTES, TOKEN_BYTES
from kv_offload.tools.doctor.report import Check, judged, not_checked
from kv_offload.worker.remote import check_usable, make_client

NUM_BLOCKS = 32

OWN_BYTES = 2 * NUM_BLOCKS * BLOCK_BYTES
"""Bytes of memory that doctor gives to the store if no engine gives any."""

SEED = "PYTHONHASHSEED"


def check_remote(
    remote: RemoteConfig, environ: Mapping[str, str], *, measures: bool
) -> Iterator[Check]:
    """Check that the store answers, that keys are equal on all engines, and a round trip."""
    yield _check_keys(environ)
    try:
        check_usable(remote)
    except KVOffloadError as error:
        yield Check("remote", "problem", error.message, "a store that this process can use")
        return
    asker = make_client(remote, 0)
    place = f"the master at {remote.address}" if remote.address else remote.path or remote.url
    try:
        asker.exist(["doctor"])
        yield Check("remote", "ok", f"{place} answers")
        if measures:
            yield _check_round_trip(remote, asker)
        else:
            yield not_checked("remote rate", "--no-measure was given")
    except TierError as error:
        needed, remedy = f"{remote.kind} that answers", "Correct that, and run doctor again."
        yield Check("remote", "problem", str(error), needed, remedy)
    finally:
        asker.close()


def _check_keys(environ: Mapping[str, str]) -> Check:
    seed = environ.get(SEED, "")
    needed = "the same number for all engines of the store, if their vLLM needs one"
    if seed.isdecimal():
        return Check("remote keys", "ok", f"{SEED} is {seed}", needed)
    remedy = f"Start all engines with the same one, such as {SEED}=0."
    state = f"{seed!r}, not a number" if seed else "not set"
    found = f"{SEED} is {state}; at startup an engine says whether its vLLM needs one"
    return not_checked("remote keys", found, remedy)


def _check_round_trip(remote: RemoteConfig, asker: RemoteClient) -> Check:
    name, where = "remote rate", remote.path or remote.url or "in memory of others"
    try:
        try:
            rates = measure(asker, make_client(remote, 0), NUM_BLOCKS, BLOCK_BYTES)
        except TierError:
            if remote.kind != "mooncake":
                raise
            # Before the first engine starts, no process gives memory.
            where = "in doctor's own memory, as no engine gives any"
            rates = measure(asker, make_client(remote, OWN_BYTES), NUM_BLOCKS, BLOCK_BYTES)
    except TierError as error:
        remedy = "Check the store's memory or disk, and the network to it."
        return Check(name, "problem", str(error), "blocks are read back unchanged", remedy)
    return judged(
        name,
        _describe(rates, where),
        f"room for {rates.tried} blocks of {format_size(BLOCK_BYTES)}",
        "Give the store more memory, or look at how fast it evicts.",
        fits=rates.stored == rates.tried,
        otherwise="warning",
    )


def _describe(rates: RemoteRates, where: str) -> str:
    tokens = rates.get_bytes_per_second / TOKEN_BYTES
    return (
        f"{rates.stored} of {rates.tried} blocks stored, found, read and verified {where}: "
        f"{rates.put_bytes_per_second / 1e9:.2f} GB/s put, "
        f"{rates.get_bytes_per_second / 1e9:.2f} GB/s got: {tokens:,.0f} tokens/s of "
        f"{format_size(TOKEN_BYTES)} each"
    )
