"""Traces of requests, replayed without an engine to see which blocks a cache would have kept.

trace.py   reads a trace from a file of JSON lines
replay.py  runs a trace through the real cache manager and an eviction policy, or unlimited memory
"""
