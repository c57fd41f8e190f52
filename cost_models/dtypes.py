"""Element types by name: their size, and which of a chip's matmul rates serves them."""

import re

import numpy as np

_BYTES = {"bfloat16": 2.0, "bool": 1.0, "int4": 0.5, "uint4": 0.5, "int2": 0.25, "uint2": 0.25}
_FLOAT_BITS = re.compile(r"float(\d+)_")


def itemsize(dtype: str) -> float:
    """Bytes per element: `itemsize("float8_e4m3fn") == 1`."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    if match := _FLOAT_BITS.match(dtype):
        return int(match[1]) / 8
    return float(np.dtype(dtype).itemsize)


def matmul_rates(dtype: str) -> tuple[str, ...]:
    """Names of the rates that serve a matmul of this dtype, the first that a chip states wins.

    Types without matrix units of their own run on a wider type's (int4 on int8,
    fp4 on fp8); types that no matrix unit takes (int32, complex) run on the vector units.
    """
    if match := _FLOAT_BITS.match(dtype):
        narrow = f"peak_float{match[1]}_flops_per_s"
        return (narrow, "peak_float8_flops_per_s", "peak_bfloat16_flops_per_s")
    if dtype in ("int4", "uint4", "int2", "uint2"):
        return ("peak_int4_flops_per_s", "peak_int8_flops_per_s")
    if dtype in ("int8", "uint8"):
        return ("peak_int8_flops_per_s",)
    if dtype == "float16":
        return ("peak_float16_flops_per_s", "peak_bfloat16_flops_per_s")
    return (f"peak_{dtype}_flops_per_s", "vector_flops_per_s")
