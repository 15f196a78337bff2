"""What an engine needs to find the plugin, and what it must not turn off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from kv_offload.doctor.report import Check, judged, not_checked

GROUP, PLUGIN = "vllm.general_plugins", "kv_offload"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
HASH_VARIABLE = "PYTHONHASHSEED"


def check_engine(environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield what can be seen of an engine that would be started here."""
    yield check_plugin(environ, bool(entry_points(group=GROUP, name=PLUGIN)))
    yield not_checked(
        "prefix caching",
        "an argument of the engine, which doctor does not see; vLLM turns it on by default",
        "Do not give --no-enable-prefix-caching: blocks are found by their prefix hash.",
    )
    yield check_hash(environ)


def check_plugin(environ: Mapping[str, str], is_installed: bool) -> Check:
    """Say whether vLLM will load the plugin."""
    if not is_installed:
        return judged(
            "plugin",
            "kv-offload is on Python's path, but it is not installed",
            f"its entry point in {GROUP}",
            "From a checkout: pip install . in the Python that runs vLLM.",
            fits=False,
        )
    value = environ.get(PLUGINS_VARIABLE)
    if value is None:
        return Check(name="plugin", state="ok", found="installed where vLLM looks for plugins")
    return judged(
        "plugin",
        f"{PLUGINS_VARIABLE} is {value!r}",
        f"{PLUGIN} in it, or no such variable",
        f"vLLM will say `Unsupported connector type`. Add {PLUGIN}, or unset the variable.",
        fits=PLUGIN in value.split(","),
    )


def check_hash(environ: Mapping[str, str]) -> Check:
    """Say whether block hashes are the same in another process. Nothing needs that today."""
    value = environ.get(HASH_VARIABLE)
    fixed = value is not None and value != "random"
    shown = f"{HASH_VARIABLE} is {value}" if fixed else f"{HASH_VARIABLE} is not set to a number"
    return Check(
        name="reproducible hash",
        state="ok",
        found=f"{shown}; nothing here outlives the engine, so none is needed",
    )
