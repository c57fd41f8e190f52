"""Startup: starts jax without the warnings of GPU and TPU plugins on a machine that has neither.

While they load, the GPU plugin's libraries (JAX 0.10) report from C++ that there is no driver, and libtpu that
there is no TPU. These messages bypass Python's `sys.stderr` and come before any log level can be set. They mean
nothing to a user who plans for an accelerator elsewhere. All other output comes through.
"""

import contextlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HARMLESS = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|I\d{4} .*Could not find cuda drivers on your machine, GPU will not be used\."
    rb"|WARNING: Logging before InitGoogle\(\) is written to STDERR"
    rb"|Failed to find host bounds for accelerator type: WARNING: could not determine TPU accelerator type.*"
    rb"|E\d{4} .*unexpected worker hostname 'WARNING: could not determine TPU worker hostnames.*"
    rb"|=== Source Location Trace: ===[ \t]*|learning/\w+/tfrc/runtime/.*"
    # From the plugin itself: the traceback of an error whose last line says that a CUDA library is missing.
    rb"|Jax plugin configuration error: Exception when calling jax_plugins\.xla_cuda\d+\.initialize\(\)"
    rb"(\r?\n(Traceback .*|[ \t].*|RuntimeError: (?!Unable).*|The above exception .*|))*"
    rb"\r?\nRuntimeError: Unable to load \w+\. Is it installed\?)\r?\n",
    re.MULTILINE,
)


@contextlib.contextmanager
def without_driver_notices() -> Generator[None]:
    """Holds file descriptor 2 back meanwhile, and then writes all but the harmless lines.

    JAX logs a missing CUDA library to `sys.stderr`, which in a notebook is no file: there the record is dropped.
    """
    log = logging.getLogger("jax._src.xla_bridge")
    log.addFilter(_is_news)
    try:
        with _stderr_without_notices():
            yield
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return re.fullmatch(r"Unable to load \w+\. Is it installed\?", str(error)) is None


@contextlib.contextmanager
def _stderr_without_notices() -> Generator[None]:
    try:
        stderr = os.dup(2)
    except OSError:  # closed: there is nothing to hold back
        yield
        return
    with tempfile.TemporaryFile() as held:
        _flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, _HARMLESS.sub(b"", held.read()))


def _flush() -> None:
    if sys.stderr is not None:  # as it is in a process without a console
        sys.stderr.flush()


class _First(MetaPathFinder):
    """Finds jax as it is found anyway, and holds notices back while it loads."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def quietly(module: ModuleType) -> None:
            with without_driver_notices():
                load(module)

        loader.exec_module = quietly
        return spec


def before_jax() -> None:
    """Sees to it that jax, when somebody imports it, loads quietly; imports nothing itself."""
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, _First())


def devices() -> list[Any]:
    """`jax.devices()`; the first call starts jax, quietly where it uses the CPU alone or finds nothing else."""
    import jax

    if jax.config.jax_platforms != "cpu" and accelerated():  # pyright: ignore[reportAttributeAccessIssue]  (a flag)
        return jax.devices()
    with without_driver_notices():
        return jax.devices()


def accelerated() -> bool:
    """Whether the machine shows a GPU or a TPU: then nothing is held back, not even for a moment."""
    shown = [path for kind in ("nvidia[0-9]*", "accel*", "vfio/[0-9]*", "kfd") for path in Path("/dev").glob(kind)]
    return bool(shown) or "TPU_ACCELERATOR_TYPE" in os.environ or not Path("/dev").is_dir()


def on_cpu_alone() -> None:
    """Starts jax on the CPU alone, here and in subprocesses: planning needs no device."""
    import jax

    os.environ["JAX_PLATFORMS"] = "cpu"  # for subprocesses; this one's jax has read it
    jax.config.update("jax_platforms", "cpu")
    devices()
