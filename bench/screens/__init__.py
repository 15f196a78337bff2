"""Makes the pictures of the docs from a server that runs: `python -m bench.screens`."""
