"""vLLM: the only folder that imports it."""
