"""Marks for tests that compile with XLA:GPU or XLA:TPU: they run where that compiler is installed."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from autoshard.backends import compile

GPU = [pytest.mark.gpu_compiler, pytest.mark.skipif(not compile.available("gpu"), reason="XLA:GPU is not installed")]
TPU = [pytest.mark.tpu_compiler, pytest.mark.skipif(not compile.available("tpu"), reason="XLA:TPU is not installed")]

F = TypeVar("F", bound=Callable[..., Any])


def needs_gpu_compiler(test: F) -> F:
    """Marks a test that compiles with XLA:GPU."""
    for mark in GPU:
        test = mark(test)
    return test


def needs_tpu_compiler(test: F) -> F:
    """Marks a test that compiles with XLA:TPU."""
    for mark in TPU:
        test = mark(test)
    return test
