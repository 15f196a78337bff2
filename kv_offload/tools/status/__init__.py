"""Reads, evaluates and draws the metrics of a running server. Does not import vLLM."""
