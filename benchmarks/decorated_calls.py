"""Random calls of decorated functions beside `jax.jit`: equal results, errors and deleted buffers.

python -m benchmarks.decorated_calls --calls 5000
"""

import argparse
import os
import time
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

from tests.random_calls import Compared, sequence

EACH = 25  # calls of one function


def main() -> None:
    """Runs sequences seed by seed until enough calls were made, and prints the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    asked = parser.parse_args()
    begin = time.perf_counter()
    seen: list[Compared] = []
    for seed in range(asked.seed, asked.seed + -(-asked.calls // EACH)):
        for one in sequence(seed, min(EACH, asked.calls - len(seen))):
            seen.append(one)
            for what in one.differ:
                print(f"{one.text}\n    {what}", flush=True)
    rows: dict[str, Counter[str]] = {}
    for one in seen:
        row = rows.setdefault(one.way, Counter())
        row.update({"calls": 1, "planned": one.planned, "raised in jax.jit": one.raised, "differ": bool(one.differ)})
    print(f"{'':8}{'calls':>8}{'planned':>9}{'raised in jax.jit':>19}{'differ':>8}")
    for way, row in sorted(rows.items()):
        print(f"{way:8}{row['calls']:8}{row['planned']:9}{row['raised in jax.jit']:19}{row['differ']:8}")
    print(f"{sum(bool(one.differ) for one in seen)} of {len(seen)} calls differ; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
