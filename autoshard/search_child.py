"""A process that plans candidates: a task on standard input, then candidates; answers on standard output.

Messages are pickles of `trial.Task`, of (`candidates.Candidate`, `trial.Hints`), and of
`trial.Tried` or, where the task itself is no good, the exception. What the program
prints meanwhile goes to standard error.
"""

import os
import pickle
import sys
from typing import Any, BinaryIO


def main() -> None:
    """Answers candidates until standard input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from autoshard import _quiet

    _quiet.on_cpu_alone()
    from autoshard.errors import AutoshardError
    from autoshard.trial import Trials

    source = sys.stdin.buffer
    sys.path[:0] = pickle.load(source)
    trials = Trials(pickle.load(source))
    while True:
        try:
            candidate, hints = pickle.load(source)
        except EOFError:
            return
        try:
            answer: Any = trials.run(candidate, hints)
        except AutoshardError as error:
            answer = error
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # whoever asked is gone
            os._exit(1)


if __name__ == "__main__":
    main()
