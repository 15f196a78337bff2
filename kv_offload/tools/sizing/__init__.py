"""Computes the size of a model's tokens from its config.json, without an engine or weights."""
