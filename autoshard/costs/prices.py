"""Prices: seconds as the solver's integers, and the parts of a machine that prices are asked of."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.errors import InfeasibleError

INF_PS = 10**18
PS_PER_S = 1e12

Seconds = NDArray[np.float64]


class CollectiveMachine(Protocol):
    """The parts of a cost model that resharding uses (`cost_models.Machine` is one)."""

    @property
    def overlap(self) -> float: ...

    @property
    def unscattered_axes(self) -> frozenset[str]: ...

    @property
    def slice_axes(self) -> frozenset[str]: ...

    @property
    def tiled(self) -> bool: ...

    def collective_s(self, kind: Any, axes: tuple[str, ...], nbytes: ArrayLike) -> NDArray[np.float64]: ...

    def hbm_s(self, nbytes: ArrayLike) -> NDArray[np.float64]: ...


class Machine(CollectiveMachine, Protocol):
    """The parts of a cost model that prices of equations use."""

    @property
    def gathers_ahead(self) -> bool: ...

    @property
    def stores_quotients(self) -> bool: ...

    @property
    def stores_score_gradients(self) -> bool: ...

    @property
    def host_bytes_per_s(self) -> float: ...

    def matmul_s(
        self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, *, beside_bytes: ArrayLike = 0.0
    ) -> Seconds: ...

    def vector_s(self, operations: ArrayLike) -> NDArray[np.float64]: ...

    def contraction_sums(
        self, batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str, result_dtype: str
    ) -> NDArray[np.int64]: ...


def picoseconds(seconds: Seconds) -> NDArray[np.int64]:
    """Seconds as the solver's integer picoseconds; larger prices than it can count are infinite.

    Raises:
      InfeasibleError: a price is not finite.
    """
    if not np.isfinite(seconds).all():
        raise InfeasibleError("the cost model returned a price that is not finite")
    return np.rint(np.minimum(seconds * PS_PER_S, INF_PS)).astype(np.int64)
