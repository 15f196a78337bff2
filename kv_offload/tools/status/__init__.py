"""What a running server's metrics say: a page is read, worked out and drawn. Imports no vLLM."""
