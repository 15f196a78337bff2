"""The contents of a disk's folder: read, verified and shown. Imports no vLLM."""
