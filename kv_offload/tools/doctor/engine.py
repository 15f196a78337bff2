"""What an engine needs to find the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from kv_offload.tools.doctor.report import Check, judged, not_checked
from kv_offload.tools.doctor.versions import VLLM_NAMES, installed

GROUP, PLUGIN = "vllm.general_plugins", "kv_offload"
PLUGINS_VARIABLE = "VLLM_PLUGINS"


def check_plugin(environ: Mapping[str, str]) -> Check:
    """Say whether vLLM will load the plugin into an engine that is started here."""
    if not entry_points(group=GROUP, name=PLUGIN):
        return judged(
            "plugin",
            "kv-offload is on Python's path, but it is not installed",
            f"its entry point in {GROUP}",
            "From a checkout: pip install . in the Python that runs vLLM.",
            fits=False,
        )
    value = environ.get(PLUGINS_VARIABLE)
    if value is None and not installed(*VLLM_NAMES):
        return not_checked("plugin", "installed in this Python, which has no vLLM")
    if value is None:
        return Check(name="plugin", state="ok", found="installed where vLLM looks for plugins")
    return judged(
        "plugin",
        f"{PLUGINS_VARIABLE} is {value!r}",
        f"{PLUGIN} in it, or no such variable",
        f"vLLM will say `Unsupported connector type`. Add {PLUGIN}, or unset the variable.",
        fits=PLUGIN in value.split(","),
    )
