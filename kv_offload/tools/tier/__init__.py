"""What the folder of a disk holds: read, verified and shown. Imports no vLLM."""
