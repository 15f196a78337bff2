"""The errors of `kv_swap`. `TransferError` is their base class."""


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


class TierError(TransferError, RuntimeError):
    """A lower tier cannot be opened, or a slot could not be read or written."""
