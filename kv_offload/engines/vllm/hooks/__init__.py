"""The connector's hooks, as vLLM calls them: on its scheduler's thread and on a rank."""
