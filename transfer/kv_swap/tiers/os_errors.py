"""Explains the system's errors for a tier's file, with a remedy."""

from __future__ import annotations

import errno
import os

_PERMIT = "let user {user} read and write there, or name another folder"

_REMEDIES = {
    errno.ENOENT: "make the folder, or name another",
    errno.ENOTDIR: "name a folder that exists",
    errno.EISDIR: "name a file in that folder",
    errno.EACCES: _PERMIT,
    errno.EPERM: _PERMIT,
    errno.EROFS: "mount it writable, or name a folder of another filesystem",
    errno.ENOSPC: "free space, or use fewer slots",
    errno.EDQUOT: "raise the quota, or use fewer slots",
    errno.EFBIG: "raise `ulimit -f`, or use fewer slots",
    errno.EIO: "`dmesg` says whether the disk fails",
}


def explain(error: OSError) -> str:
    """Return the error's text with a remedy."""
    text = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "").format(user=os.geteuid())
    return f"{text}; {remedy}" if remedy else text
