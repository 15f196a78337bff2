"""KV caches on a CUDA device: the engine, its streams, the swap kernels and the copy engine."""
