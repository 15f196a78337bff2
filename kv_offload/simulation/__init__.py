"""What a cache would have kept: traces of requests, replayed without an engine.

trace.py   reads a trace from a file of JSON lines
replay.py  one trace through the real cache manager and an eviction policy
bounds.py  what no policy can exceed: Belady's choice, and memory without end
"""
