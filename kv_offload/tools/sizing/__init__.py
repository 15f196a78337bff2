"""Computes the bytes that a model's tokens take from its config.json: no engine, no weights."""
