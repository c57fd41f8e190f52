r"""Hostile programs in large numbers: how many are wrong, rounded, refused, or fail with an exception that is not ours.

    python -m benchmarks.hostile_programs --seeds 0:10000 --workers 2

A program is its seed (tests/hostile_programs.py). Verdicts are kept, a line per group of programs,
in the file `--results`; what is there is not run again, so that a run can be stopped and taken up.
Every worker is a process of its own: one that dies or hangs costs its group, whose programs are then
run one by one, and the program that killed it is a foreign exception, unless plain JAX dies of it, too.

    python -m benchmarks.hostile_programs --seeds 1234 --results ""     # one program, nothing kept
    python -m benchmarks.hostile_programs --seeds 1234 --show           # what it computes
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

DEVICES = 8
GROUP = 20  # programs that one question has: tests.hostile_programs.GROUP, which JAX would have to be imported for
ASKED = 40  # groups that a process judges, before a new one takes its place: JAX keeps what it has traced and compiled
LIMIT_S = 600.0  # for a group, on a busy machine
KINDS = ("right", "rounding", "wrong", "foreign", "refused", "void")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, or one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", default="hostile.jsonl", help='a file of verdicts; "" keeps none')
    parser.add_argument("--again", action="store_true", help="run again what was not right")
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    parser.add_argument("--shrink", action="store_true", help="print the smallest piece of each that fails likewise")
    parser.add_argument("--plain", action="store_true", help="without autoshard: what plain JAX makes of the programs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(planned=not options.plain)
        return
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if options.show or options.shrink:
        show(seeds, smallest=options.shrink)
        return
    kept = Path(options.results) if options.results else None
    done = read(kept, seeds, again=options.again)
    begin = time.perf_counter()
    fresh = run([s for s in seeds if s not in done], options.workers, kept, planned=not options.plain)
    took = time.perf_counter() - begin
    print(table([*done.values(), *fresh]))
    if fresh:
        print(f"\n{len(fresh)} programs in {took:.0f} s, {options.workers} workers: {len(fresh) / took:.2f} a second")


def child(*, planned: bool) -> None:
    """Judges the seeds of each line that comes in, and answers with a line."""
    from tests.hostile_oracle import judge

    for line in sys.stdin:
        print(json.dumps([asdict(v) for v in judge(json.loads(line), planned=planned)]), flush=True)


def show(seeds: Iterable[int], *, smallest: bool) -> None:
    """Prints programs, with their settings and arguments; shrunk ones as far as they are left."""
    environment = worker_environment()
    os.environ.update({key: environment[key] for key in ("JAX_PLATFORMS", "XLA_FLAGS")})
    import jax

    from tests import hostile_shrink
    from tests.hostile_programs import Program

    for seed in seeds:
        if smallest:
            piece, how = hostile_shrink.shrunk(seed)
            print(f"{seed}: {piece.setting}\n{how or 'does not fail'}\n{hostile_shrink.text(piece)}\n", flush=True)
            continue
        program = Program(seed)
        print(f"{seed}: {program.setting}, arguments {[f'{a.dtype}{list(a.shape)}' for a in program.arguments]}")
        print(jax.make_jaxpr(program)(program.arguments))


def worker_environment() -> dict[str, str]:
    """The environment of a silent process with eight CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"}


class Worker:
    """A process that judges programs; a new one whenever it has died."""

    def __init__(self, *, planned: bool) -> None:
        self._planned = planned
        self._command = [sys.executable, "-m", "benchmarks.hostile_programs", "--child"]
        self._command += [] if planned else ["--plain"]
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None
        self._asked = 0

    def judge(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The verdicts on programs; where the process dies of them, of each by itself."""
        answer = self._ask(seeds)
        if answer is not None:
            return json.loads(answer)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        beside = ("For simplicity", "WARNING", "I0000")  # what JAX and XLA say of themselves
        last = [line for line in lines if line.strip("-") and not line.startswith(beside)]
        self.close()
        if len(seeds) > 1:
            middle = len(seeds) // 2
            return self.judge(seeds[:middle]) + self.judge(seeds[middle:])
        why = f"the process died: {last[-1][:200] if last else 'without a word'}"
        void = self._planned and self._dies_plain(seeds)
        kind, why = ("void", f"of plain JAX, too, {why}") if void else ("foreign", why)
        return [{"seed": seeds[0], "setting": "", "kind": kind, "why": why, "primitives": []}]

    def _dies_plain(self, seeds: Sequence[int]) -> bool:
        """Whether a process dies of a program without autoshard, too."""
        plain = Worker(planned=False)
        try:
            return plain._ask(seeds) is None
        finally:
            plain.close()

    def _ask(self, seeds: Sequence[int]) -> str | None:
        """Its line; None if it died, or was killed for taking too long."""
        self._asked += 1
        if self._asked % ASKED == 0:
            self.close()
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=worker_environment(),
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(list(seeds)) + "\n")
        process.stdin.flush()
        alarm = threading.Timer(LIMIT_S, process.kill)
        alarm.start()
        try:
            return process.stdout.readline() or None
        finally:
            alarm.cancel()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def run(seeds: Sequence[int], workers: int, kept: Path | None, *, planned: bool) -> list[dict[str, Any]]:
    """The verdicts on programs, written down as they come."""
    groups: dict[int, list[int]] = {}
    for seed in seeds:
        groups.setdefault(seed // GROUP, []).append(seed)
    waiting = deque(groups.values())
    found: list[dict[str, Any]] = []
    one_at_a_time = threading.Lock()
    begin = time.perf_counter()

    def work() -> None:
        worker = Worker(planned=planned)
        try:
            while waiting:
                try:
                    group = waiting.popleft()
                except IndexError:  # the other worker took the last
                    return
                verdicts = worker.judge(group)
                with one_at_a_time:
                    write(verdicts, kept)
                    found.extend(verdicts)
                    told(found, len(seeds), time.perf_counter() - begin)
        finally:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def told(found: Sequence[dict[str, Any]], total: int, seconds: float) -> None:
    """Says how far it is, where somebody looks."""
    if sys.stderr.isatty():
        counts = Counter(v["kind"] for v in found)
        text = ", ".join(f"{counts[k]} {k}" for k in KINDS if counts[k])
        print(f"\r{len(found)}/{total} after {seconds:.0f} s: {text}   ", end="", file=sys.stderr, flush=True)


def write(verdicts: Iterable[dict[str, Any]], kept: Path | None) -> None:
    """Appends verdicts to the file."""
    if kept is not None:
        with kept.open("a") as file:
            file.writelines(json.dumps(v) + "\n" for v in verdicts)


def read(kept: Path | None, seeds: range, *, again: bool) -> dict[int, dict[str, Any]]:
    """The verdicts that are there, the last of each seed."""
    if kept is None or not kept.exists():
        return {}
    lines = (json.loads(line) for line in kept.read_text().splitlines() if line.endswith("}"))
    found = {v["seed"]: v for v in lines if v["seed"] in seeds}
    return {s: v for s, v in found.items() if not again or v["kind"] in ("right", "void")}


def table(verdicts: Sequence[dict[str, Any]]) -> str:
    """Programs by mode and verdict, the primitives in them, and all that was not right."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    used: Counter[str] = Counter()
    for v in verdicts:
        for row in (v["setting"].partition(" ")[0] or "(died)", "all"):
            rows[row][v["kind"]] += 1
        used.update(v["primitives"])
    lines = [f"{'mode':<12}" + "".join(f"{kind:>10}" for kind in ("programs", *KINDS))]
    for row in sorted(rows, key=lambda row: (row == "all", row)):
        numbers = (rows[row].total(), *(rows[row][kind] for kind in KINDS))
        lines.append(f"{row:<12}" + "".join(f"{number:>10}" for number in numbers))
    lines += ["", f"{len(used)} primitives, and how many programs have each:"]
    words = [f"{name} {count}" for name, count in used.most_common()]
    lines += textwrap.wrap(", ".join(words), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    for kind in KINDS[1:]:
        by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for v in verdicts:
            if v["kind"] == kind:
                by_reason[re.sub(r"[\d.]+|\w+\.py:\S+", "#", v["why"])[:90] if kind != "wrong" else ""].append(v)
        for same in sorted(by_reason.values(), key=len, reverse=True):
            lines += ["", f"{kind}, {len(same)}: {same[0]['why']}"]
            lines += [f"  {v['seed']}  {v['setting']}  {v['why'][:160]}" for v in same[: 50 if kind == "wrong" else 5]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
