"""Loads: copies from host memory to GPU blocks. The scheduler calls `admissions`."""
