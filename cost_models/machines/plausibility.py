"""Plausibility: numbers of a chip that no chip has together, which a file in other units than SI would state.

Bounds are wide around those of the catalogue's chips, from a CPU to a GPU of 2026: a number that is off by a thousand
falls outside.
"""

from dataclasses import dataclass

from cost_models.errors import HardwareFileError
from cost_models.machines.hardware_file import Chip


@dataclass(frozen=True, slots=True)
class _Ratio:
    """One number over another, what it is, and between which bounds it lies."""

    above: str
    below: str
    what: str
    least: float
    most: float
    most_of_slow: float = 0.0  # of processors, whose memory is larger and slower


_SLOW_FLOPS_PER_S = 1e13

_RATIOS = (
    _Ratio("peak_bfloat16_flops_per_s", "hbm_bytes_per_s", "FLOPs per byte of memory traffic", 0.5, 20_000),
    _Ratio("hbm_bytes", "hbm_bytes_per_s", "seconds to read the whole memory", 2e-4, 15, 500),
    _Ratio("domain.one_way_bytes_per_s", "hbm_bytes_per_s", "of memory's rate over the links", 5e-4, 10),
    _Ratio("peak_float32_flops_per_s", "peak_bfloat16_flops_per_s", "of bfloat16's rate in float32", 1e-3, 20),
    _Ratio("peak_float8_flops_per_s", "peak_bfloat16_flops_per_s", "of bfloat16's rate in float8", 0.05, 20),
)


def check(chip: Chip, file: str) -> None:
    """Refuses numbers of a chip and of its domain's links that no chip has together.

    Raises:
        HardwareFileError: Two of them are in a ratio that is far from every chip's.
    """
    numbers = {key: number.value for key, number in chip.numbers.items()}
    numbers |= {f"domain.{key}": number.value for key, number in chip.links["domain"].numbers.items()}
    for ratio in _RATIOS:
        above, below = numbers[ratio.above], numbers[ratio.below]
        found = above / below
        slow = numbers["peak_bfloat16_flops_per_s"] < _SLOW_FLOPS_PER_S
        most = max(ratio.most, ratio.most_of_slow) if slow else ratio.most
        if not ratio.least <= found <= most:
            raise HardwareFileError(
                file,
                f"`{ratio.above}` is {above:.3g} and `{ratio.below}` is {below:.3g}: {found:.3g} {ratio.what}, where "
                f"chips have {ratio.least:g} to {most:g}; one of them is in another unit than SI",
            )
