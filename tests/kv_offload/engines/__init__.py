"""What knows vLLM: `kv_offload.engines.vllm`."""
