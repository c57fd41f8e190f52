"""What is loaded with the public names: nothing that a plan from the store does without."""

import subprocess
import sys

SEEN = """
import sys
import autoshard
autoshard.jit, autoshard.plan, autoshard.Plan
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_large_packages_are_loaded_where_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jax" in loaded
    assert loaded.isdisjoint({"networkx", "ortools", "numba", "jsonschema"})
