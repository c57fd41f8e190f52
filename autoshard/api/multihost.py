"""Multihost: several processes run one program; process 0 plans, and all run its plan.

The processes meet in the key-value store of `jax.distributed`, under the number of the
call. Each says which program it has traced; process 0 compares, plans, and answers with
a plan or an error. Nobody waits for long without a sign: process 0 shows that it is
alive while it plans, and gives up on processes that do not turn up.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import _jax
from autoshard.errors import AutoshardError, InfeasibleError, ProcessError

log = logging.getLogger("autoshard")

PULSE_S = 1.0  # how often process 0 shows that it is alive
_CALLS = "autoshard/calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """This process among the others; `store` is their common key-value store."""

    store: Any
    index: int
    count: int
    wait_s: float

    def agree(self, name: str, program: Mapping[str, Any], decide: Callable[[], str]) -> str:
        """Returns the result of `decide` in process 0 to every process, if all have the same program.

        Args:
          name: name of the function, for messages.
          program: items that must be equal everywhere: item → JSON value.
          decide: called in process 0 alone.

        Raises:
          ProcessError: a process has another program or does not turn up within `wait_s`, or
            process 0 failed. An error of `decide` is raised in process 0, and in the others as
            an error with the same text.
        """
        call = f"autoshard/{self.store.key_value_increment(f'{_CALLS}/{self.index}', 1)}"
        if self.index == 0:
            return self._lead(call, name, program, decide)
        try:
            self.store.key_value_set(f"{call}/program/{self.index}", json.dumps(program))
            return self._follow(call, name)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ProcessError(
                f"{name}: process 0, which plans it, is gone or out of reach: {reason}; its own output says why"
            ) from error

    def _lead(self, call: str, name: str, program: Mapping[str, Any], decide: Callable[[], str]) -> str:
        with Pulse(self.store, f"{call}/pulse"):
            try:
                self._compare(call, name, program)
                text = decide()
            except BaseException as error:
                kind = type(error).__name__ if isinstance(error, AutoshardError) else "AutoshardError"
                self._answer(call, {"error": kind, "text": str(error) or repr(error)})
                raise
            self._answer(call, {"plan": text})
        return text

    def _answer(self, call: str, answer: Mapping[str, str]) -> None:
        self.store.key_value_set(f"{call}/answer", json.dumps(answer))

    def _compare(self, call: str, name: str, program: Mapping[str, Any]) -> None:
        deadline = time.monotonic() + self.wait_s
        own = json.loads(json.dumps(program))
        wrong: list[str] = []
        for other in range(1, self.count):
            text = _get(self.store, f"{call}/program/{other}", deadline)
            if text is None:
                raise ProcessError(
                    f"{name}: process {other} of {self.count} did not come to plan it within {self.wait_s:g} s; "
                    "every process must call the same functions in the same order "
                    "(wait_s= allows more time; with 0 a process plans by itself)"
                )
            theirs = json.loads(text)
            differs = [f"{k} {theirs.get(k)} instead of {own[k]}" for k in own if theirs.get(k) != own[k]]
            if differs:
                wrong.append(f"process {other} has {', '.join(differs)}")
        if wrong:
            raise ProcessError(
                f"{name}: the processes do not have the same program as process 0: {'; '.join(wrong)}\n"
                "  the same code, shapes and versions must run in all of them"
            )

    def _follow(self, call: str, name: str) -> str:
        pulse, deadline = "", time.monotonic() + self.wait_s
        while True:
            text = _get(self.store, f"{call}/answer", time.monotonic() + PULSE_S)
            if text is not None:
                break
            now = _get(self.store, f"{call}/pulse", time.monotonic()) or ""
            if now != pulse:
                pulse, deadline = now, time.monotonic() + self.wait_s
            elif time.monotonic() > deadline:
                raise ProcessError(
                    f"{name}: process 0 {'stopped planning it' if pulse else 'did not come to plan it'}: "
                    f"nothing was heard for {self.wait_s:g} s; every process must call the same functions in the "
                    "same order (wait_s= allows more time)"
                )
        answer = json.loads(text)
        if "plan" in answer:
            return answer["plan"]
        kind = InfeasibleError if answer["error"] == "InfeasibleError" else ProcessError
        raise kind(f"process 0 could not plan: {answer['text']}" if kind is not ProcessError else answer["text"])


class Pulse:
    """Shows every second that this process is alive, from a thread of its own."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        beats = 0
        with suppress(jax.errors.JaxRuntimeError):  # without a store there is nobody to show it to
            while not self._over.wait(PULSE_S if beats else 0.0):
                beats += 1
                self._store.key_value_set(self._key, str(beats), allow_overwrite=True)

    def begin(self) -> None:
        """Starts to show it."""
        self._thread.start()

    def end(self) -> None:
        """Shows it no more."""
        self._over.set()
        self._thread.join()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


def _get(store: Any, key: str, deadline: float) -> str | None:
    """A key's value, or None if it is not set by the deadline (`time.monotonic`)."""
    return _jax.stored(store, key, max(1, int(1000 * (deadline - time.monotonic()))))


def peers_of(devices: list[Any], wait_s: float) -> Peers | None:
    """The processes of devices; None if this one is alone.

    Raises:
      ProcessError: the devices belong to some of the processes alone.
    """
    owners = {device.process_index for device in devices}
    if len(owners) < 2:
        return None
    store = _jax.process_store()
    if store is None or owners != set(range(jax.process_count())):
        raise ProcessError(
            f"the mesh has devices of processes {sorted(owners)} of {jax.process_count()}: "
            "take devices of one process or of all, and call jax.distributed.initialize"
        )
    return Peers(store=store, index=jax.process_index(), count=len(owners), wait_s=wait_s)
