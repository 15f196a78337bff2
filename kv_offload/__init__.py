"""A second, larger KV cache in host memory for vLLM engines.

Importing this package does not import torch, cupy or vllm: vLLM loads it in every process,
including the API front end.
"""

__version__ = "0.1.0"
