"""Moves KV blocks between an engine's memory and host memory; knows neither vLLM nor kv_offload."""
