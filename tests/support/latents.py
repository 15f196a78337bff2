"""Latent attention on vLLM's CPU engine."""

from __future__ import annotations

from typing import Any

LATENT: dict[str, Any] = {
    "block_size": 16,
    "enable_chunked_prefill": False,
    "attention_config": {"backend": "CPU_MLA"},
}
"""Settings that vLLM's CPU engine needs for latent attention.

On a CPU with AMX it would choose another backend, which refuses 32-bit weights.
"""


def cache_prefixes_of_latents() -> None:
    """Let vLLM's CPU engine cache prefixes of models with latent attention, which it turns off.

    It cannot compute several tokens after a cached prefix. It can compute one, and no test's prompt
    leaves more. Other models, and GPUs, are not affected.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        model = vllm_config.model_config
        if model is not None and model.use_mla:
            vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
