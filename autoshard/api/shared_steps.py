"""Shared steps: how a step ended that several processes run, each its part of it.

A process that fails says so in the key-value store of `jax.distributed`; process 0 gathers what all say, and
answers: then all of them have the step's result, or all raise the same error, within a second. Each process shows
every second that it lives; one that falls silent is an error, too. Nobody waits for a device without listening.
"""

import atexit
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from autoshard import _jax
from autoshard.api.multihost import PULSE_S, Peers, Pulse
from autoshard.api.placing import checksums
from autoshard.errors import ProcessError, StageRunError

_STEPS = "autoshard/steps"
_PULSES = "autoshard/pulses"
_ARGUMENTS, _START, _FINISH = _PHASES = ("arguments", "start", "finish")
_SIGNS = 3  # that a process may miss at least
_NAP_S, _LISTEN_S = 0.002, 0.2  # between looks at devices, and at the store


class SharedStep:
    """One step of several processes, as a context: what leaves it as an error, the others hear of.

    Args:
      peers: this process among the others; `wait_s` 0: silence is no error.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        number = peers.store.key_value_increment(f"{_STEPS}/count/{peers.index}", 1)
        self._key = f"{_STEPS}/{number}"
        self._ahead: list[str] = list(_PHASES)
        self._signs: dict[int, tuple[str, float]] = {}  # of every process its last sign, and when it was new
        live(peers)
        if peers.index == 0 and number > 2:  # all have read the answers of the step before the last one
            peers.store.key_value_delete(f"{_STEPS}/{number - 2}/")

    def __enter__(self) -> "SharedStep":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(jax.errors.JaxRuntimeError):
                for phase in self._ahead:
                    self._say(phase, _said(error))

    def compare(self, leaves: Sequence[Any]) -> None:
        """Waits until all have come, and compares what every process has whole.

        Args:
          leaves: the arguments of the step; arrays of all devices are the same anyway.

        Raises:
          ProcessError: the values of one are others, it failed, or it is silent.
        """
        self._agree(_ARGUMENTS, None, checksums(leaves))

    def start(self, failure: Exception | None) -> None:
        """Waits until every process has started its tasks, or one has failed to.

        Args:
          failure: of this process.

        Raises:
          StageRunError: a stage failed, here or in another process.
          ProcessError: a process failed otherwise, or is silent.
        """
        self._agree(_START, failure)

    def finish(self, values: Sequence[Any]) -> None:
        """Waits for the last results of the step, in every process.

        Args:
          values: arrays of this process.

        Raises:
          ProcessError: a process failed, or is silent.
        """
        heard = time.monotonic()
        while not all(x.is_ready() for x in values):
            if time.monotonic() - heard > _LISTEN_S:
                heard = time.monotonic()
                _raise(self._heard(_FINISH, 0.0) or {}, None)
            time.sleep(_NAP_S)
        failure: Exception | None = None
        try:
            jax.block_until_ready(values)
        except Exception as error:  # noqa: BLE001  (any: the others hear of it)
            failure = error
        self._agree(_FINISH, failure)

    def _agree(self, phase: str, failure: Exception | None, same: Sequence[int] = ()) -> None:
        """Waits until every process has come to the end of a phase with the same values, or one has failed."""
        self._ahead.remove(phase)
        try:
            self._say(phase, _said(failure) if failure else {"same": list(same)})
            while (answer := self._heard(phase, _LISTEN_S)) is None:
                pass
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ProcessError(f"process 0, which keeps what the processes say, is out of reach: {reason}") from error
        _raise(answer, failure)

    def _say(self, phase: str, text: Mapping[str, Any]) -> None:
        self._peers.store.key_value_set(f"{self._key}/{phase}/{self._peers.index}", json.dumps(text))

    def _heard(self, phase: str, wait_s: float) -> Mapping[str, Any] | None:
        """What process 0 says of a phase: {} if all went well; None while it says nothing."""
        store, key = self._peers.store, f"{self._key}/{phase}-answer"
        if self._peers.index:
            text = _jax.stored(store, key, max(1, int(1000 * wait_s)))
            return self._silent((0,)) if text is None else json.loads(text)
        heard = store.key_value_dir_get(f"{self._key}/{phase}/")
        said = {int(name.rpartition("/")[2]): json.loads(text) for name, text in heard}
        answer = self._judged({i: said[i] for i in sorted(said)})
        if answer is not None:
            store.key_value_set(key, json.dumps(answer), allow_overwrite=True)
        elif wait_s:
            time.sleep(_NAP_S)
        return answer

    def _judged(self, said: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """What process 0 answers to what the processes said; None before it can."""
        for i, text in said.items():
            if "same" not in text:
                return {**text, "process": i}
        lacking = [i for i in range(self._peers.count) if i not in said]
        if lacking:
            return self._silent(lacking)
        others = [i for i, text in said.items() if text != said[0]]
        if others:
            return {
                "process": others[0],
                "text": "its arguments are not those of process 0; give the same, or arrays of all devices",
            }
        return {}

    def _silent(self, processes: Sequence[int]) -> Mapping[str, Any] | None:
        """Which of the others gave no sign for so long; None if all did."""
        now, limit_s = time.monotonic(), max(self._peers.wait_s, _SIGNS * PULSE_S)
        found = {int(name.rpartition("/")[2]): x for name, x in self._peers.store.key_value_dir_get(f"{_PULSES}/")}
        for i in processes:
            sign = found.get(i, "")
            if i not in self._signs or self._signs[i][0] != sign:
                self._signs[i] = sign, now
            elif self._peers.wait_s and now - self._signs[i][1] > limit_s:
                return {"text": f"nothing was heard of it for {limit_s:g} s", "process": i}
        return None


_alive: dict[tuple[int, int], Pulse] = {}  # by store and process


def live(peers: Peers) -> None:
    """Shows the others from now on that this process lives."""
    key = id(peers.store), peers.index
    if key not in _alive:
        _alive[key] = Pulse(peers.store, f"{_PULSES}/{peers.index}")
        _alive[key].begin()
        atexit.register(_alive[key].end)  # before JAX closes the store


def _said(failure: BaseException) -> Mapping[str, Any]:
    if isinstance(failure, StageRunError):
        return {"stage": failure.__reduce__()[1]}
    return {"text": f"{type(failure).__name__}: {failure}"}


def _raise(answer: Mapping[str, Any], own: Exception | None) -> None:
    if not answer:
        return
    if "stage" in answer:
        raise own if isinstance(own, StageRunError) else StageRunError(*answer["stage"]) from own
    raise ProcessError(
        f"process {answer['process']} did not end the step: {answer['text']}\n"
        "  no process goes on; the parameters are as they were before the step"
    ) from own
