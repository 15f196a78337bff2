"""Refuses requests with invalid `kv_transfer_params` where vLLM validates other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_offload.engines.vllm.patches.patch import Patch
from kv_offload.errors import RequestError
from kv_offload.hints import check_depth, read_hints


def check_hints(
    original: Callable[..., Any],
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run around `InputProcessor.process_inputs`, which handles every request.

    Raises vLLM's own error, which a server answers with status 400; any other would give 500.
    """
    from vllm.exceptions import VLLMValidationError

    extra = getattr(params, "extra_args", None) or {}
    transfer = extra.get("kv_transfer_params")
    try:
        check_depth(transfer)
        read_hints(transfer)
    except RequestError as error:
        raise VLLMValidationError(str(error)) from error
    return original(self, request_id, prompt, params, *args, **kwargs)


CHECK_HINTS = Patch(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs", check_hints, "front end"
)
