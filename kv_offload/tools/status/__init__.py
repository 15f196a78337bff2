"""Shows a running server's metrics: a page is read, worked out and drawn. Imports no vLLM."""
