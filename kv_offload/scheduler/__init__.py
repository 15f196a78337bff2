"""Decides what moves, once per engine, next to its scheduler.

Imports no engine and no device code."""
