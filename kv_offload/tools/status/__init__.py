"""Reads, evaluates and draws a running server's metrics. Does not import vLLM."""
