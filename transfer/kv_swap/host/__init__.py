"""KV caches in host memory: the engine and its copies."""
