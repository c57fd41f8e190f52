"""A process that plans candidates: a task on standard input, then orders and news; answers on standard output.

Messages are pickles of `trial.Task`, of `workers.Order` and `workers.News`, and of
`trial.Tried` or, if the task itself is invalid, the exception. The program's own output
goes to standard error.
"""

import os
import pickle
import queue
import sys
import threading
from math import inf
from typing import Any, BinaryIO


def main() -> None:
    """Answers orders until standard input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from autoshard import _startup

    _startup.on_cpu_alone()
    from autoshard.errors import AutoshardError
    from autoshard.explore.trial import Hints, Trials
    from autoshard.explore.workers import News, Order

    source = sys.stdin.buffer
    trials = Trials(pickle.load(source))
    least_s: dict[object, float] = {}  # step by contest
    orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()

    def listen() -> None:
        """Takes news in while a candidate is planned."""
        while True:
            try:
                message: Order | News = pickle.load(source)
            except EOFError:
                orders.put(None)
                return
            if isinstance(message, Order):
                orders.put(message)
            else:
                least_s[message.contest] = message.step_s

    threading.Thread(target=listen, daemon=True).start()
    while (order := orders.get()) is not None:
        contest = order.candidate.contest

        def cutoff_s(contest: object = contest) -> float:
            return least_s.get(contest, inf)

        try:
            answer: Any = trials.run(order.candidate, Hints(known=order.known, cutoff_s=cutoff_s))
        except AutoshardError as error:
            answer = error
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(1)
