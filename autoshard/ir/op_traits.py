"""Op traits: one table of facts about primitives that do not depend on shapes, mesh or machine.

Other code reads `eqn.traits`; only this room, `rules/` and `ir/` list primitives. Facts that depend on shapes are
elsewhere: whether an equation is element-wise follows from its rule (`costs.fusion`). The exceptions are
`dot_general`, of which compilers make three different things (`traits_of_dot`), and reductions of single numbers.

A primitive without a row has `OpTraits()`, the cautious default: its operands and its result lie in memory, all of
their bytes count, it fuses with nothing, and no communication hides behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

# Primitives that are meant by themselves, not as one of a kind: their parameters are read, or a pattern has them.
AXIS_INDEX = "axis_index"
BROADCAST = "broadcast_in_dim"
CAST = "convert_element_type"
CONCATENATE = "concatenate"
CONSTRAINT = "sharding_constraint"  # `with_sharding_constraint`: its result is its operand, in a layout
BOUNDS = frozenset({"max", "min"})  # one behind the other they are a clamp
# Element by element in JAX, and several operations of one array in XLA.
SEVERAL = frozenset({"clamp", "erf", "erf_inv", "erfc", "integer_pow", "logistic", "pow", "select_n", "square"})
COND = "cond"
CONVOLUTION = "conv_general_dilated"
DEVICE_PUT = "device_put"
DOT_GENERAL = "dot_general"
RAGGED_DOT = "ragged_dot_general"
EXP, DIV, MUL, SUB = "exp", "div", "mul", "sub"
REDUCE_MAX, REDUCE_OR, REDUCE_SUM = "reduce_max", "reduce_or", "reduce_sum"
FFT = "fft"
GATHER = "gather"
IOTA = "iota"
JITS = ("jit", "pjit")  # the names that JAX has had for it
LESS = "lt"
PAD = "pad"
PALLAS = "pallas_call"
RESHAPE = "reshape"
REV = "rev"
SCAN = "scan"
SCATTER_ADD = "scatter-add"
SELECT = "select_n"
SHARD_MAP = "shard_map"
SLICE, SPLIT = "slice", "split"
TRANSPOSE = "transpose"
WHILE = "while"
# Links between a body and the equations around it (`ir.graph`).
LOOP_CONST, LOOP_SLICE, LOOP_CARRY = "loop_const", "loop_slice", "loop_carry"
LOOP_RESULT, LOOP_STACK, BRANCH_JOIN = "loop_result", "loop_stack", "branch_join"
PREDICATE = "predicate"
# Choices of what a backward pass reads (`problem.whole_step`).
KEEP, DERIVE, RECALL = "keep", "derive", "recall"


@dataclass(frozen=True, slots=True)
class AxisCollective:
    """A collective over named axes as a machine sees it: its kind, and the array whose bytes count.

    `sums`: it is a plain sum; at the end of a `shard_map` it may be finished by the equations that follow.
    """

    kind: str
    of_result: bool = False
    sums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTraits:
    """The facts about one primitive; the defaults are those of an unknown primitive."""

    # What it computes.
    contraction: bool = False  # a matrix multiplication or a convolution
    addition: bool = False  # the compilers merge the reductions of its terms
    scale: bool = False  # by one number, it commutes with a cast
    cast: bool = False  # the same values in another dtype
    copy: bool = False  # the same values in the same dtype
    repeats: bool = False  # the same values along more dimensions
    reshapes: bool = False  # the same values, their dimensions in another order or grouped otherwise
    cuts: bool = False  # a part of its operand, along some dimensions
    places: bool = False  # every element of its operands lies somewhere in its result, as it is
    scatters: bool = False  # its last operand lands somewhere in the first
    linear: bool = False  # in its operands, each by itself: all are multiplied by what one is multiplied by
    combines: bool = False  # linear in all of its operands together; a selection's condition is none of them
    draws: bool = False  # random numbers
    # Where its bytes are.
    renames: bool = False  # in memory its result is its operand under another name
    moves_nothing: bool = False  # reads and writes no bytes, even if its operand lies in memory
    reads_part: bool = False  # reads only the part of its first operand that it returns
    updates: bool = False  # writes a part of its first operand, where that lies if no one needs it as it was
    # What XLA does with it.
    fusible: bool = False  # fused with its neighbours, though not element-wise: it forces nothing into memory
    ends_fusion: bool = False  # its result is stored, its operands need not be
    costly: bool = False  # not computed twice, for a loop's stacked output and for other readers
    passes_sums: bool = False  # the partitioner lets a pending sum through, as it does past no scale or subtraction
    passes_totals: bool = False  # XLA still moves a sum over a loop's trips behind the loop if this follows it
    # Links and calls.
    link: bool = False  # joins a body to the equations around it
    enters_loop: bool = False  # its operand lies in memory while the loop runs
    leaves_loop: bool = False  # passes on a result of the loop's body
    choice: bool = False  # no program has it: a plan chooses what stands there
    foreign: bool = False  # code that cannot be looked into, or the host's
    collective: AxisCollective | None = None  # over named axes, in the body of a `shard_map`

    @property
    def same_values(self) -> bool:
        """Whether every element of the result is an element of the operand, in this or another dtype."""
        return self.renames or self.cast or self.repeats

    @property
    def keeps_dims(self) -> bool:
        """Whether the result is the operand, dimension by dimension, in this or another dtype."""
        return self.cast or (self.renames and not self.reshapes)


# What compilers compute once for all fusions that read it is theirs to say: `CompilerModel.computes_once`.
_COSTLY = OpTraits(costly=True)

_CONTRACTION = OpTraits(contraction=True)
_ADDITION = OpTraits(addition=True, passes_sums=True, combines=True)
_FUSIBLE = OpTraits(fusible=True)
_REDUCTION = OpTraits(fusible=True, ends_fusion=True)
_LINEAR = OpTraits(linear=True)
_RANDOM = OpTraits(draws=True)
_SCATTER = OpTraits(scatters=True, updates=True)
_FOREIGN = OpTraits(foreign=True)
# Sums that are moved behind a loop were measured with reshapes and transposes after them, not with these.
_GROUPED = OpTraits(reshapes=True, renames=True, fusible=True, linear=True)
_MOVED = OpTraits(reshapes=True, renames=True, fusible=True, passes_sums=True, passes_totals=True, linear=True)
_SUM = OpTraits(collective=AxisCollective("all-reduce", sums=True))
_EXTREMUM = OpTraits(collective=AxisCollective("all-reduce"))
_AXIS_GATHER = OpTraits(collective=AxisCollective("all-gather", of_result=True))
_AXIS_SCATTER = OpTraits(collective=AxisCollective("reduce-scatter"))

# Primitives that are not element-wise and have no trait: they read their operands from memory, and write their results.
_PLAIN = (
    *("approx_top_k", "bitcast_convert_type", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "sort", "top_k"),
    *("cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "fft", "hessenberg", "householder_product"),
    *("lu", "lu_pivots_to_permutation", "ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve"),
    *("tridiagonal", "tridiagonal_solve"),
    *("dce_sink", "debug_callback", "debug_print", "device_put", "empty", "empty2"),
    *("iota_2x32_shape", "platform_index", "pallas_call", "shard_map", "stack", "tile", "unstack"),
    *("random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap"),
    *("reduce", "reduce_prod", "reduce_xor", "reduce_window", "reduce_window_max", "reduce_window_min"),
    *("reduce_window_sum", "select_and_gather_add", "select_and_scatter", "select_and_scatter_add"),
)

# Primitive → its traits.
OP_TRAITS: Mapping[str, OpTraits] = {
    **dict.fromkeys(_PLAIN, OpTraits()),
    # Arithmetic.
    **dict.fromkeys((DOT_GENERAL, RAGGED_DOT, CONVOLUTION), _CONTRACTION),
    **dict.fromkeys(("add", "add_any"), _ADDITION),
    MUL: OpTraits(scale=True),
    DIV: OpTraits(scale=True, costly=True),
    **dict.fromkeys(("cbrt", "cos", "erf", "erfc", EXP, "exp2", "expm1", "log", "log1p", "logistic"), _COSTLY),
    **dict.fromkeys(("pow", "rsqrt", "sin", "sqrt", "tan", "tanh"), _COSTLY),
    REDUCE_SUM: OpTraits(fusible=True, ends_fusion=True, linear=True),
    **dict.fromkeys((REDUCE_MAX, REDUCE_OR, "reduce_min", "reduce_and"), _REDUCTION),
    **dict.fromkeys(("argmax", "argmin"), _REDUCTION),
    SUB: OpTraits(combines=True),
    **dict.fromkeys(("neg", "reduce_precision", "optimization_barrier"), _LINEAR),
    **dict.fromkeys(("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"), _RANDOM),
    # The same values elsewhere, or otherwise.
    CAST: OpTraits(cast=True, passes_totals=True, linear=True),
    "copy": OpTraits(copy=True, passes_totals=True, linear=True),
    **dict.fromkeys(("copy_p", "name", "stop_gradient"), _LINEAR),
    BROADCAST: OpTraits(repeats=True, fusible=True, linear=True),
    TRANSPOSE: replace(_MOVED, moves_nothing=True),
    RESHAPE: _MOVED,
    **dict.fromkeys(("squeeze", "expand_dims"), _GROUPED),
    CONSTRAINT: OpTraits(renames=True, moves_nothing=True, fusible=True, passes_totals=True, linear=True),
    # Parts of values.
    **dict.fromkeys((SLICE, SPLIT), OpTraits(cuts=True, fusible=True, linear=True)),
    "dynamic_slice": OpTraits(cuts=True, reads_part=True),
    GATHER: OpTraits(reads_part=True),
    "dynamic_update_slice": OpTraits(updates=True),
    **dict.fromkeys(("scatter", SCATTER_ADD, "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), _SCATTER),
    SELECT: OpTraits(fusible=True, combines=True),
    "concatenate": OpTraits(fusible=True, combines=True, places=True),
    **dict.fromkeys((PAD, REV), OpTraits(fusible=True, places=True)),
    IOTA: _FUSIBLE,
    # Links.
    KEEP: OpTraits(choice=True, moves_nothing=True),
    DERIVE: OpTraits(choice=True, moves_nothing=True, fusible=True),
    RECALL: OpTraits(choice=True, moves_nothing=True, fusible=True, renames=True),
    LOOP_CONST: OpTraits(link=True, enters_loop=True, renames=True, moves_nothing=True),
    LOOP_SLICE: OpTraits(link=True, enters_loop=True),
    LOOP_CARRY: OpTraits(link=True, enters_loop=True),
    LOOP_RESULT: OpTraits(link=True, leaves_loop=True),
    LOOP_STACK: OpTraits(link=True, leaves_loop=True),
    BRANCH_JOIN: OpTraits(link=True, moves_nothing=True),
    PREDICATE: OpTraits(link=True, moves_nothing=True, renames=True),
    # Calls.
    **dict.fromkeys(("custom_partitioning", "ffi_call", "io_callback", "pure_callback"), _FOREIGN),
    **dict.fromkeys(("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"), _FOREIGN),
    # Collectives over named axes.
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), _SUM),
    **dict.fromkeys(("pmax", "pmin"), _EXTREMUM),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), _AXIS_GATHER),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), _AXIS_SCATTER),
    "all_to_all": OpTraits(collective=AxisCollective("all-to-all")),
    "ppermute": OpTraits(collective=AxisCollective("collective-permute")),
}

_REDUCES = (REDUCE_SUM, REDUCE_MAX, REDUCE_OR, "reduce_min", "reduce_and")  # of one number they are that number
_UNKNOWN = OpTraits()
_PRODUCT = _FUSIBLE
_INNER_PRODUCT = _REDUCTION


def traits_of(primitive: str) -> OpTraits:
    """The traits of a primitive; the cautious ones of a primitive without a row."""
    return OP_TRAITS.get(primitive, _UNKNOWN)


def traits_of_shapes(
    primitive: str, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], params: Mapping[str, Any]
) -> OpTraits:
    """The traits of an equation with operands and results of these shapes: dots and reductions are not all alike.

    A reduction of dimensions of size 1 is a reshape.
    """
    if primitive == DOT_GENERAL:
        left, right = operands
        return traits_of_dot(left, right, params["dimension_numbers"])
    if primitive in _REDUCES and prod(operands[0]) == prod(results[0]):
        return traits_of(RESHAPE)
    return traits_of(primitive)


def traits_of_dot(left: Sequence[int], right: Sequence[int], dimension_numbers: Any) -> OpTraits:
    """The traits of a `dot_general` of two shapes.

    A dot that contracts nothing is an element-wise product of its operands, repeated along each other's dimensions.
    A dot in which neither operand has a dimension of its own is a product that is summed. XLA:GPU (jax-cuda12-pjrt
    0.10.2) and XLA:TPU (libtpu 0.0.52) fuse both with their neighbours; only other dots are matrix multiplications.
    """
    (contracted, _), _ = dimension_numbers
    if prod(left[d] for d in contracted) == 1:
        return _PRODUCT
    taken = [{*some, *more} for some, more in zip(*dimension_numbers, strict=True)]
    own = [prod(n for d, n in enumerate(shape) if d not in of) for shape, of in zip((left, right), taken, strict=True)]
    return _INNER_PRODUCT if own == [1, 1] else _CONTRACTION
