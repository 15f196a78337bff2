"""Routes on vLLM's API server for operators: empty host memory, pause and resume stores.

vLLM loads this endpoint plugin only if `VLLM_PLUGINS` names it. The server's `--api-key` protects
paths below `/v1`; without a key these routes refuse all calls.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.requests import Request

from kv_offload.engines.vllm.actions import PAUSE_STORES, RESUME_STORES

PREFIX = "/v1/kv-offload"
"""vLLM requires its key for paths below `/v1`."""


class ControlRoutes:
    """vLLM's interface of an endpoint plugin."""

    name = "kv_offload_control"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, route in (
            ("empty", empty),
            ("pause-stores", pause_stores),
            ("resume-stores", resume_stores),
        ):
            app.add_api_route(f"{PREFIX}/{path}", route, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Give the routes the engine, but only if calling them requires a key."""
        has_key = any(args.api_key or [os.environ.get("VLLM_API_KEY")])
        state.kv_offload_engine = engine_client if has_key else None


def _engine(request: Request) -> Any:
    engine = getattr(request.app.state, "kv_offload_engine", None)
    if engine is None:
        raise HTTPException(
            403,
            f"kv-offload: {PREFIX} is off, because this server has no engine or requires no key: "
            "start it with --api-key",
        )
    return engine


async def empty(request: Request) -> dict[str, str]:
    """Empty host memory, and also the engine's own cache unless requests use it."""
    whole = await _engine(request).reset_prefix_cache(reset_connector=True)
    return {"host_memory": "empty", "engine_cache": "empty" if whole else "in use"}


async def pause_stores(request: Request) -> dict[str, str]:
    """Pause stores; blocks in host memory can still be loaded."""
    return await _act(request, PAUSE_STORES)


async def resume_stores(request: Request) -> dict[str, str]:
    """Resume stores."""
    return await _act(request, RESUME_STORES)


async def _act(request: Request, action: str) -> dict[str, str]:
    (state,) = await _engine(request).collective_rpc(action)
    return {"stores": state}
