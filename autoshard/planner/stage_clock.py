"""Stage clock: seconds per stage of planning; each is logged when it is done."""

import logging
import time

log = logging.getLogger("autoshard")


class StageClock:
    """Seconds per stage; each is logged when it is done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        log.debug("%s: %.3f s", stage, now - self._last, extra={"stage": stage})
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
