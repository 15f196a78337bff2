"""`python -m kv_offload.cli` is `kv-offload`."""

import sys

from kv_offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
