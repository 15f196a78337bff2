"""Decides which blocks are copied, once per engine, next to the engine's scheduler.

Imports no engine and no device code."""
