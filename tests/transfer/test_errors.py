from __future__ import annotations

import inspect

import pytest
from kv_swap import errors

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_tree(error: type[Exception]) -> None:
    """Whoever catches the base catches all, and the tree in the docstring is complete."""
    assert issubclass(error, errors.TransferError)
    assert error.__name__ in (errors.__doc__ or "")
    assert error.__doc__


def test_builtin_bases() -> None:
    assert issubclass(errors.JobError, ValueError)
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.CopyError, RuntimeError)
    assert issubclass(errors.PinnedMemoryError, RuntimeError)
    assert issubclass(errors.DeviceError, RuntimeError)
