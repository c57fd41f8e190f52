"""Compiler flags: the compiler options that a plan file may hold.

A plan file is data: its flags may only change how the planned program is scheduled. So they
are from this list, and their values are numbers or truth values; no flag takes a path, a
command or a text. Other flags are given in Python: `plan.verify(compiler_options=…)`,
`lowered.compile(compiler_options=…)`.
"""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import PlanFileError

_LARGEST = 2**40

# The flags of plans (`build_record`) and of `refine`, and related ones: they merge collectives, or let them overlap.
TRUTHS = frozenset(
    {
        "xla_gpu_enable_analytical_latency_estimator",
        "xla_gpu_enable_latency_hiding_scheduler",
        "xla_gpu_enable_pipelined_all_gather",
        "xla_gpu_enable_pipelined_all_reduce",
        "xla_gpu_enable_pipelined_reduce_scatter",
        "xla_gpu_enable_triton_gemm",
        "xla_gpu_enable_while_loop_double_buffering",
    }
)
COUNTS = frozenset(
    {
        "xla_gpu_all_gather_combine_threshold_bytes",
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
    }
)


def checked(options: Mapping[str, Any], source: object) -> dict[str, Any]:
    """A file's compiler options.

    Raises:
      PlanFileError: a flag is not one that a plan file may set, or has a value of another kind.
    """
    for name, value in options.items():
        if name in TRUTHS:
            fits = isinstance(value, bool)
        elif name in COUNTS:
            fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST
        else:
            raise PlanFileError(
                f"{source} sets the compiler flag `{name[:80]}`, which a plan file may not: it may set "
                f"{', '.join(sorted(TRUTHS | COUNTS))}; give others in Python, with compiler_options="
            )
        if not fits:
            kind = "true or false" if name in TRUTHS else f"a whole number from 0 to {_LARGEST}"
            raise PlanFileError(f"{source} sets the compiler flag `{name}` to {str(value)[:80]!r}; it is {kind}")
    return dict(options)
