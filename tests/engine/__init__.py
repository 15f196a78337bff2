"""Tests on a real vLLM engine; skipped without vLLM."""

import importlib
import os
import warnings

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of vLLM and torch are not ours to fix
    pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")
    importlib.import_module("vllm.entrypoints.llm")
