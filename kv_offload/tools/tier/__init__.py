"""Reads and shows the contents of a disk's folder. Does not import vLLM."""
