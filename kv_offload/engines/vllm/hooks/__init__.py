"""The connector's hooks, called by vLLM on its scheduler's thread and on each rank."""
