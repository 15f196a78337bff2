"""`python -m kv_offload` runs `kv-offload`."""

import sys

from kv_offload.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
