"""A second, larger KV cache in host memory for vLLM engines.

Importing this package imports neither torch, cupy nor vllm: vLLM loads it in every process, the
API front end included.
"""

__version__ = "0.1.0"
