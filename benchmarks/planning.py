r"""How long planning takes, stage by stage, each model in a fresh process.

    python -m benchmarks.planning [MODEL ...]

Models: a name of `models.names()`, with `name@field=value,…` for other fields; the default is
what the project promises: gpt2-small whole, unrolled, on a 2 × 4 mesh. The mesh and the
hardware are `--mesh` and `--hardware`; `--memory` lifts the limit where only time matters, and
`--constraints all` leaves out the probes of what Shardy reaches by itself:

    python -m benchmarks.planning llama3-405b@layers=32,batch=64,sequence=4096 \
        --mesh data=8,model=8 --hardware h100:8x8 --memory 10TB --constraints all

`--remat` is that of `autoshard.plan`; docs/recomputation.md has what the choice of what is kept takes:

    python -m benchmarks.planning llama3-8b@scan=True,batch=8,sequence=4096 --remat add

`zoo:NAME@…` is a program of other people, of `benchmarks.zoo`, at other sizes than its own:

    python -m benchmarks.planning --remat add \
        zoo:hf-llama@layers=32,width=4096,heads=32,vocab=32000,batch=16,sequence=2048
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, get_args

from autoshard.cli.written import assignments, byte_count, mesh_axes
from autoshard.ir.recomputation import Remat

DEFAULT = ("mlp-1k", "tiny-llama", "gpt2-small", "llama3-8b@layers=4,batch=8,sequence=2048")


def one(model: str, **options: Any) -> dict[str, Any]:
    """Plans one model in this process, with options of `autoshard.plan`: seconds per stage, the plan's own numbers."""
    begin = time.perf_counter()
    import autoshard

    name, _, fields = model.partition("@")
    step, arguments, donated = built(name, **assignments([field for field in fields.split(",") if field], "MODEL@"))
    made = time.perf_counter()
    plan = autoshard.plan(step, *arguments, donate_argnums=donated, for_grad=False, **options)
    done = time.perf_counter()
    planned = plan.planned
    assert planned is not None  # made here
    return {
        "model": model,
        "equations": len(planned.formulation.decisions.graph.eqns),
        "decisions": len(planned.formulation.decisions.nodes),
        "classes": planned.formulation.folding.classes,
        "program_s": made - begin,
        **{f"{stage}_s": s for stage, s in planned.seconds.items()},
        "total_s": done - made,
        "constraints_share": planned.seconds.get("constraints", 0.0) / (done - made),
        "cpu_s": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "gap": plan.record.certificate.gap,
        "step_ms": plan.record.cost.step_s * 1e3,
    }


def built(name: str, **fields: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """A program, its arguments as shapes, and the numbers of those that it may overwrite."""
    kind, _, subject = name.rpartition(":")
    if kind == "zoo":
        import jax

        from benchmarks.model_zoo import build
        from benchmarks.zoo.program import LARGE
        from benchmarks.zoo.subjects import SUBJECTS

        program = build({one.name: one for one in SUBJECTS}[subject], replace(LARGE, **fields))
        return program.step, jax.eval_shape(program.arguments), program.donate
    import models

    return *models.build(name, **fields), 0


def main() -> None:
    """Runs every model in its own process and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--mesh", default="data=2,model=4")
    parser.add_argument("--hardware", default="h100:1x8")
    parser.add_argument("--rel-gap", type=float, default=1e-2)
    parser.add_argument("--memory", type=byte_count, help="limit per device: 64GB; default: the chip's")
    parser.add_argument("--constraints", choices=("needed", "all"), default="needed")
    parser.add_argument("--remat", choices=get_args(Remat), default="written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options = {key: getattr(arguments, key) for key in ("hardware", "rel_gap", "memory", "constraints", "remat")}
    if arguments.child:
        print(json.dumps(one(arguments.child, mesh=mesh_axes(arguments.mesh), **options)))
        return
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        command = [sys.executable, "-m", "benchmarks.planning", *sys.argv[1:], "--child", model]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in rows[-1].items()}
        print("  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)


if __name__ == "__main__":
    main()
