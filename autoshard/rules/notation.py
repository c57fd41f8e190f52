"""Notation: a sharding rule written like an einsum, for primitives that autoshard does not know.

    register_rule("my_matmul", "b i k, b k j -> b i j")
    register_rule("ffi_call[my_norm]", "... d, d -> ... d", whole="d")
    register_rule("my_reshape", "(b s) d -> b s d")
    register_rule("my_top1", "b v -> b", reductions={"v": "max"})

Values are separated by commas, dimensions by spaces. A name is a factor; one in
parentheses with others is a part of a dimension, major to minor. `1` is a dimension of
size 1, `_` one that must be whole, `...` leading dimensions that all pass. An empty side
is one scalar, or nothing. A factor that no result contains is a reduction (a sum, unless
`reductions` says otherwise).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard.errors import RuleError
from autoshard.ir.graph import Aval, Eqn
from autoshard.rules.rule import Dim, FactorKind, RuleBuilder, ShardingRule, register, unregister

Terms = tuple[tuple[str, ...], ...]  # one value: the names of each dimension's factors
DOTS, ONE, WHOLE = "...", "1", "_"


def register_rule(
    primitive: Any,
    text: str,
    *,
    whole: str = "",
    permutations: str = "",
    reductions: Mapping[str, str] | None = None,
    linear: Iterable[Iterable[int]] = (),
    replace: bool = False,
) -> None:
    """Registers a sharding rule in einsum-like notation.

    Args:
      primitive: a JAX primitive, or its name. Calls of foreign code share a primitive;
        `"ffi_call[target]"` and `"pallas_call[kernel]"` name one kernel.
      text: the rule, such as `"b i k, b k j -> b i j"`.
      whole: names of factors that must not be split, separated by spaces.
      permutations: names of factors whose split needs an exchange between neighbours.
      reductions: operation of each reduced factor that is not a sum.
      linear: sets of operand positions through which partial sums flow.
      replace: whether the primitive may have a rule already.

    Raises:
      RuleError: the text cannot be read, or the primitive already has a rule.
    """
    name = primitive if isinstance(primitive, str) else str(primitive.name)
    notation = Notation.parse(
        text,
        whole=frozenset(whole.split()),
        permutations=frozenset(permutations.split()),
        reductions=dict(reductions or {}),
        linear=tuple(frozenset(operands) for operands in linear),
    )
    if replace:
        unregister(name)
    register(name)(notation.rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A parsed rule; `rule` gives it the sizes of an equation."""

    text: str
    operands: tuple[Terms, ...]
    results: tuple[Terms, ...]
    whole: frozenset[str]
    permutations: frozenset[str]
    reductions: Mapping[str, str]
    linear: tuple[frozenset[int], ...]

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        whole: frozenset[str] = frozenset(),
        permutations: frozenset[str] = frozenset(),
        reductions: Mapping[str, str] | None = None,
        linear: tuple[frozenset[int], ...] = (),
    ) -> "Notation":
        """From `"b i k, b k j -> b i j"`.

        Raises:
          RuleError: there is not exactly one `->`, a parenthesis is not closed, a name is
            not an identifier, or a keyword names a factor or operand that is not there.
        """
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise RuleError(f"a rule reads `operands -> results`: {text!r}")
        operands, results = (tuple(_terms(value, text) for value in side.split(",")) for side in (left, right))
        reduced = dict(reductions or {})
        names = {name for terms in operands + results for dim in terms for name in dim}
        unknown = (whole | permutations | set(reduced)) - names
        if unknown:
            raise RuleError(f"{sorted(unknown)} are named but not in {text!r}")
        kept = sorted(name for terms in results for dim in terms for name in dim if name in reduced)
        if kept:
            raise RuleError(f"{kept} are in a result and cannot be reduced: {text!r}")
        if any(not 0 <= i < len(operands) for positions in linear for i in positions):
            raise RuleError(f"`linear` names operands 0 to {len(operands) - 1}: {text!r}")
        return cls(
            text=text,
            operands=operands,
            results=results,
            whole=whole,
            permutations=permutations,
            reductions=reduced,
            linear=linear,
        )

    def rule(self, eqn: Eqn) -> ShardingRule:
        """The rule of an equation.

        Raises:
          RuleError: the equation's shapes do not fit the text.
        """
        values = list(zip(self._expand(self.operands, eqn.operands), eqn.operands, strict=True))
        values += list(zip(self._expand(self.results, eqn.results), eqn.results, strict=True))
        sizes = self._sizes(values)
        kept = {name for terms, _ in values[len(eqn.operands) :] for dim in terms for name in dim}
        build = RuleBuilder()
        factors: dict[str, Dim] = {}

        def dim_of(names: tuple[str, ...], size: int) -> Dim:
            if names == (WHOLE,):
                return build.dims((size,), FactorKind.REPLICATE)[0]
            for name in names:
                if name not in factors:
                    factors[name] = build.dims((sizes[name],), *self._kind(name, kept))[0]
            return tuple(f for name in names for f in factors[name])

        dims = [[dim_of(*pair) for pair in zip(terms, aval.shape, strict=True)] for terms, aval in values]
        return build.rule(dims[: len(eqn.operands)], dims[len(eqn.operands) :], self.linear)

    def _kind(self, name: str, kept: set[str]) -> tuple[FactorKind, str]:
        if name in self.whole:
            return FactorKind.REPLICATE, ""
        if name in self.permutations:
            return FactorKind.PERMUTATION, ""
        if name not in kept:
            return FactorKind.REDUCTION, self.reductions.get(name, "sum")
        return FactorKind.PASS, ""

    def _expand(self, values: tuple[Terms, ...], avals: tuple[Aval, ...]) -> list[Terms]:
        """Each value's terms with `...` replaced by as many names as it has dimensions to spare."""
        if values == ((),) and not avals:
            return []
        if len(values) != len(avals):
            raise RuleError(f"{self.text!r} has {len(values)} values on a side where the equation has {len(avals)}")
        expanded: list[Terms] = []
        for terms, aval in zip(values, avals, strict=True):
            spare = aval.ndim - len(terms) + ((DOTS,) in terms)
            if spare < 0 or (spare and (DOTS,) not in terms):
                raise RuleError(f"{self.text!r} does not fit a value of shape {aval.shape}")
            # Numbered from the last: `...` aligns to the right, as broadcasting does.
            dots = tuple((f"{DOTS}{d}",) for d in range(spare - 1, -1, -1))
            at = terms.index((DOTS,)) if (DOTS,) in terms else len(terms)
            expanded.append(terms[:at] + dots + terms[at + 1 :])
        return expanded

    def _sizes(self, values: list[tuple[Terms, Aval]]) -> dict[str, int]:
        """Every factor's size; one unknown part of a dimension follows from the others."""
        open_dims = [pair for terms, aval in values for pair in zip(terms, aval.shape, strict=True)]
        sizes: dict[str, int] = {}
        while open_dims:
            left: list[tuple[tuple[str, ...], int]] = []
            for names, size in open_dims:
                unknown = [name for name in names if name not in sizes]
                known = prod(sizes[name] for name in names if name in sizes)
                if names == (WHOLE,):
                    continue
                if len(unknown) > 1:
                    left.append((names, size))
                elif unknown and known and size % known == 0:
                    sizes[unknown[0]] = size // known
                elif unknown or known != size:
                    raise RuleError(f"{self.text!r}: `{' '.join(names)}` does not make a dimension of {size}")
            if len(left) == len(open_dims):
                raise RuleError(f"{self.text!r} leaves the size of `{' '.join(left[0][0])}` open")
            open_dims = left
        return sizes


def _terms(value: str, text: str) -> Terms:
    """The dimensions of one value, each as the names of its factors; `1` has none."""
    terms: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in value.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            terms.append(tuple(group))
            group = None
        elif token.isidentifier() and (token != WHOLE or group is None):
            if group is None:
                terms.append((token,))
            else:
                group.append(token)
        elif token in (DOTS, ONE) and group is None:
            terms.append((token,) if token == DOTS else ())
        else:
            raise RuleError(f"cannot read `{token}` in {text!r}")
    if group is not None or terms.count((DOTS,)) > 1:
        raise RuleError(f"cannot read `{value.strip()}` in {text!r}")
    return tuple(terms)
