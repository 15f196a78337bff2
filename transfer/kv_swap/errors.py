"""The error tree of `kv_swap`.

TransferError
├── LayoutError      a KV cache whose pages cannot be described: refused at start
├── JobError         a job that must not be run: bad pairs, or an engine that is closed
├── CopyError        a copy that was started and failed; names the call, the bytes and the job
├── DeviceError      a device, or software for it, that cannot run the copy kernels
└── PinnedMemoryError  host memory that could not be allocated or registered
"""


class TransferError(Exception):
    """Base of every error that this package raises."""


class LayoutError(TransferError, ValueError):
    """A KV cache has a shape, stride or page size that the copy paths do not handle."""


class JobError(TransferError, ValueError):
    """A job is malformed or was submitted to a closed engine; nothing was copied."""


class CopyError(TransferError, RuntimeError):
    """A copy failed after it was started; its destination must be treated as garbage."""


class DeviceError(TransferError, RuntimeError):
    """CuPy is missing, the kernels do not compile, or the device cannot run them."""


class PinnedMemoryError(TransferError, RuntimeError):
    """Host memory could not be allocated or page-locked."""
