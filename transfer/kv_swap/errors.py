"""The errors of `kv_swap`. `TransferError` is their base; `explain` describes an `OSError`."""

from __future__ import annotations

import errno
import os


class TransferError(Exception):
    """Base of every error that this package raises."""


class LayoutError(TransferError, ValueError):
    """A KV cache has a shape, stride or page size that the copy paths do not support."""


class JobError(TransferError, ValueError):
    """A job is malformed or was submitted to a closed engine; nothing was copied."""


class CopyError(TransferError, RuntimeError):
    """A copy failed after it had started; its destination holds garbage."""


class DeviceError(TransferError, RuntimeError):
    """CuPy is missing, the kernels do not compile, or the device cannot run them."""


class PinnedMemoryError(TransferError, RuntimeError):
    """Host memory could not be allocated or page-locked."""


class TierError(TransferError, RuntimeError):
    """A lower tier cannot be opened, or a slot could not be read or written."""


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
    """Return the text of an error on a tier's file, with a remedy."""
    text = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "").format(user=os.geteuid())
    return f"{text}; {remedy}" if remedy else text
