"""Tests in this folder need a GPU; on a machine without one they are reported as skipped."""

import pytest


def pytest_collection_modifyitems(items):
    try:
        import torch

        reason = None if torch.cuda.is_available() else "not run: this machine has no GPU that PyTorch can use"
    except ImportError:
        reason = "not run: PyTorch is not installed"
    for item in items:
        if reason and "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))
