"""Quiet: jax starts without what the GPU plugin writes where there is no GPU.

The plugin's libraries (JAX 0.10) report from C++, as they are loaded, that there is no
driver. That passes by Python's `sys.stderr`, before any log level can be set, and says
nothing to somebody who plans for a GPU elsewhere. All else that is written comes through.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_HARMLESS = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|I\d{4} .*Could not find cuda drivers on your machine, GPU will not be used\.)\r?\n",
    re.MULTILINE,
)


@contextlib.contextmanager
def without_driver_notices() -> Generator[None]:
    """Holds file descriptor 2 back meanwhile, and then writes all but the harmless lines."""
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
    """`jax.devices()`; the first call starts jax, quietly where it is to use the CPU alone."""
    import jax

    if jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]  (a flag)
        return jax.devices()
    with without_driver_notices():
        return jax.devices()


def on_cpu_alone() -> None:
    """Starts jax on the CPU alone, here and in subprocesses: planning needs no device."""
    import jax

    os.environ["JAX_PLATFORMS"] = "cpu"  # for subprocesses; this one's jax has read it
    jax.config.update("jax_platforms", "cpu")
    devices()
