"""Reads and shows the files in a disk's folder. Does not import vLLM."""
