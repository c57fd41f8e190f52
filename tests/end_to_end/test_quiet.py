"""Quiet: what plugins write where there is no accelerator is no news; everything else comes through."""

import logging
import os
import subprocess
import sys

import pytest

from autoshard import _startup

NOISE = b"""\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795508379.101098   15371 cudart_stub.cc:31] \
Could not find cuda drivers on your machine, GPU will not be used.
Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda12.initialize()
Traceback (most recent call last):
  File "jax_plugins/xla_cuda12/__init__.py", line 201, in _version_check
    version = get_version()
              ^^^^^^^^^^^^^
RuntimeError: jaxlib/cuda/versions_helpers.cc:38: operation cudaRuntimeGetVersion(&version) failed

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "jax/_src/xla_bridge.py", line 508, in discover_pjrt_plugins
    plugin_module.initialize()
RuntimeError: Unable to load CUDA. Is it installed?
Failed to find host bounds for accelerator type: WARNING: could not determine TPU accelerator type, please set it
WARNING: Logging before InitGoogle() is written to STDERR
E0000 00:00:1795507739.215239    7438 common_lib.cc:906] INVALID_ARGUMENT: Error: unexpected worker hostname 'WARNING: \
could not determine TPU worker hostnames or IP addresses' from env var TPU_WORKER_HOSTNAMES.
=== Source Location Trace: ===
learning/45eac/tfrc/runtime/libtpu_init_utils.cc:370
"""
NEWS = b"""\
E0000 00:00:1795507739.215239    7438 common_lib.cc:906] INVALID_ARGUMENT: something else
RuntimeError: Unable to load the program
"""


def test_only_noise_is_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    with _startup.without_driver_notices():
        os.write(2, NEWS[:10] + NEWS[10:] + NOISE + NEWS)
    assert capfd.readouterr().err.encode() == NEWS + NEWS


class Ear(logging.Handler):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(str(record.exc_info and record.exc_info[1]))


def test_a_missing_cuda_library_is_no_news_to_whom_a_log_goes() -> None:
    log, handler = logging.getLogger("jax._src.xla_bridge"), Ear()
    log.addHandler(handler)
    try:
        with _startup.without_driver_notices():
            for text in ("Unable to load CUDA. Is it installed?", "Unable to load the program"):
                try:
                    raise RuntimeError(text)
                except RuntimeError:
                    log.exception("Jax plugin configuration error")
    finally:
        log.removeHandler(handler)
    assert handler.heard == ["Unable to load the program"]


def test_devices_are_found_quietly_without_an_accelerator() -> None:
    if _startup.accelerated():
        pytest.skip("this machine has an accelerator, whose plugins are heard")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    code = "from autoshard import _startup; print(len(_startup.devices()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1
    assert done.stderr == ""
