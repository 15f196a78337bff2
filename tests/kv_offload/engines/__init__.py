"""What knows vLLM: `kv_offload.engines.vllm`. Each module here skips where there is no vLLM."""

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")
