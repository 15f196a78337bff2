"""What bounds host memory here, for error messages."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def describe_limits() -> str:
    """Return the limits on locked memory and on memory at all, and what is available."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    parts = [
        f"ulimit -l is {'unlimited' if locked == resource.RLIM_INFINITY else f'{locked} bytes'}"
    ]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            parts.append(f"cgroup limit is {Path(path).read_text().strip()} bytes")
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                parts.append(line)
    return ", ".join(parts)
