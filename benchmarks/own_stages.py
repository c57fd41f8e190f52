r"""Own stages of a large model: how long planning them takes, and a step as it is predicted.

    python -m benchmarks.own_stages

plans Llama 3 405B on 16,384 H100. Meta's step of 2,048 sequences of 8,192 tokens at 41% of peak FLOPs takes 6.2 s
(arXiv:2407.21783, table 4); what cuDNN's attention computes is not in our prices. Another model, mesh or schedule:

    python -m benchmarks.own_stages --model llama3-70b@remat=full --mesh stage=8,data=32,model=8 \
        --hardware h100:256x8 --batch 1024 --repeats 5
"""

import argparse
import time
from functools import partial

import jax

import autoshard
import models
from autoshard.api.own_stages import Pipeline
from autoshard.cli.written import assignments, mesh_axes

MODEL, MESH, HARDWARE = "llama3-405b@remat=dots", "stage=16,data=64,context=2,model=8", "h100:2048x8"


def planned(model: str = MODEL, mesh: str = MESH, hardware: str = HARDWARE, **how: int) -> Pipeline:
    """The plan of a model's loss in interleaved stages, whose gradients are reduced once a step.

    Args:
      model: `name@field=value,…`; its layers are scanned, its attention is cuDNN's.
      mesh: with axes `stage` and `data`.
      hardware: as of `autoshard.plan`.
      **how: `batch` and `sequence`, of 2,048 and 8,192; `steps` and `repeats`, of 32 and 8.
    """
    name, _, fields = model.partition("@")
    own = assignments([field for field in fields.split(",") if field], "MODEL@")
    module, config = models.find(name, scan=True, attention="cudnn", **own)
    program = autoshard.in_own_stages(
        partial(module.loss, config),
        stages="stage",
        steps=how.get("steps", 32),
        schedule="interleaved",
        repeats=how.get("repeats", 8),
        parts="data",
        mesh=mesh_axes(mesh),
        hardware=hardware,
        rel_gap=1e-2,
    )
    sizes = {"batch": how.get("batch", 2048), "sequence": how.get("sequence", 8192)}
    params = jax.eval_shape(partial(module.init, config), jax.random.key(0)).params
    return program.plan(params, jax.eval_shape(partial(module.example_batch, config, **sizes)))


def main() -> None:
    """Prints the stages, and the seconds that planning took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("model", MODEL), ("mesh", MESH), ("hardware", HARDWARE)):
        parser.add_argument(f"--{name}", default=value)
    for name, count in (("batch", 2048), ("sequence", 8192), ("steps", 32), ("repeats", 8)):
        parser.add_argument(f"--{name}", type=int, default=count)
    arguments = vars(parser.parse_args())
    begin, cpu = time.perf_counter(), time.process_time()
    pipeline = planned(**arguments)
    print(pipeline.summary())
    print(f"planned in {time.perf_counter() - begin:.1f} s, {time.process_time() - cpu:.1f} s of CPU")


if __name__ == "__main__":
    main()
