"""What host memory of other sizes would have brought for a recorded trace. Imports no vLLM."""
