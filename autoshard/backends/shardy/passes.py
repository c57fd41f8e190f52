"""Shardy in-process: the rules of lowered ops, and the layouts that propagation chooses.

Stock jaxlib carries the whole partitioning dialect (openxla/shardy). It answers in
milliseconds, without a compiler, which layouts XLA would choose before it partitions.
XLA's SPMD partitioner, not Shardy, inserts the final collectives.

A rule prints as Shardy prints it, `([i, k], [k, j])->([i, j]) {i=32, j=256, k=64}
reduction={k}`: one factor per dimension, or several run together, major to minor
(`[ij, k]` for a dimension that a reshape splits).
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import jax

from autoshard import _jax, _startup
from autoshard.errors import CompileError, ShardyError
from autoshard.ir.layout import Layout

Dims = tuple[tuple[str, ...], ...]

_NUMBER = "autoshard.number"
_ENTERED = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.manual_computation"})
# Names of factors in Shardy's order; more dimensions than any array here has.
_FACTORS = (*"ijklmnopqrstuvwxyz", *(f"z_{i}" for i in range(1, 47)))
_FACTOR = re.compile(r"[i-z](?:_\d+)?")
_TENSOR = re.compile(r"\[([^\]]*)\]")
_KIND = re.compile(r"(\w+)=\{([^}]*)\}")
_SHARDING = re.compile(r"<@[^,]+, \[([^\]]*)\]([^>]*)>")
_DIM = re.compile(r"\{([^}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
_UNREDUCED = re.compile(r"unreduced=[^{]*\{([^}]*)\}")
_SOURCE = re.compile(r'(?:"([^"]*)"\()?"([^"]+)":(\d+):\d+')
_NAME = re.compile(r'loc\("([^"]*)"[()]')


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRule:
    """How one op may be split: the factors of every dimension, and their kinds.

    A factor in no kind passes through. `reduction`: splitting it leaves partial
    results. `permutation`: splitting it costs communication between neighbours.
    `need_replication`: the op needs the whole dimension. `blocked`: propagation
    does not cross it, though it may be split.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduction: tuple[str, ...] = ()
    permutation: tuple[str, ...] = ()
    need_replication: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "FactorRule":
        """From Shardy's text, with or without `#sdy.op_sharding_rule<…>` around it.

        Raises:
          ShardyError: the text is not a rule, or names a factor without a size.
        """
        body = text.removeprefix("#sdy.op_sharding_rule<").removesuffix(">").removesuffix(", custom")
        sides, brace, tail = body.partition("{")
        left, arrow, right = sides.partition("->")
        sizes: dict[str, int] = {}
        if brace:
            listed, _, tail = tail.partition("}")
            for entry in listed.split(", "):
                factor, _, size = entry.partition("=")
                sizes[factor] = int(size)
        operands, results = (
            tuple(
                tuple(tuple(_FACTOR.findall(dim)) for dim in tensor.split(", ") if dim)
                for tensor in _TENSOR.findall(side)
            )
            for side in (left, right)
        )
        kinds = {kind: tuple(listed.split(", ")) for kind, listed in _KIND.findall(tail)}
        named = {f for tensor in operands + results for dim in tensor for f in dim}
        if not arrow or named | {f for factors in kinds.values() for f in factors} != named or named != set(sizes):
            raise ShardyError(f"not a sharding rule: {text!r}")
        return cls(
            operands=operands,
            results=results,
            sizes=sizes,
            reduction=kinds.get("reduction", ()),
            permutation=kinds.get("permutation", ()),
            need_replication=kinds.get("need_replication", ()),
            blocked=kinds.get("blocked_propagation", ()),
        )

    def __str__(self) -> str:
        sides = (
            ", ".join("[" + ", ".join("".join(dim) for dim in tensor) + "]" for tensor in tensors)
            for tensors in (self.operands, self.results)
        )
        text = "->".join(f"({side})" for side in sides)
        if self.sizes:
            text += " {" + ", ".join(f"{f}={n}" for f, n in self.sizes.items()) + "}"
        kinds = {
            "reduction": self.reduction,
            "need_replication": self.need_replication,
            "permutation": self.permutation,
            "blocked_propagation": self.blocked,
        }
        return text + "".join(f" {kind}={{{', '.join(factors)}}}" for kind, factors in kinds.items() if factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLayout:
    """The layout that Shardy gave one op result.

    `number` counts op results in the lowered module and stays the same from probe
    to probe (`propagate`'s `pins` are keyed by it); ops of a function that is
    called twice appear once per call, under one number. It is None for an op
    that Shardy itself made (`sdy.reshard` of a constraint).
    `name` is JAX's name stack, `where` the user's `file:line (function)`.
    """

    op: str
    name: str
    where: str
    number: int | None
    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """Shardy's decision for a whole program: inputs, outputs, every op result in program order.

    Where Shardy splits a mesh axis, the layout names the part as Shardy does,
    `model:(1)2` (the 2-way major half of `model`): no `PartitionSpec` says that.
    """

    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    values: tuple[ValueLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """The layouts of a propagated module's op results, without the names that they have in every probe.

    Attributes:
      numbers: of the op results that are arrays, in program order.
      layouts: theirs; None where Shardy wrote none.
      others: the results of the ops that Shardy made, and of those that were to be read apart; each with how many of
        the former stand before it.
    """

    numbers: tuple[int, ...]
    layouts: tuple[Layout | None, ...]
    others: tuple[tuple[int, ValueLayout], ...]


def factor_rules(fn: Callable[..., Any], *avals: Any) -> list[tuple[str, str]]:
    """Shardy's rule of every op that `fn` lowers to, in program order.

    Ops inside calls and loop bodies count, the scalar bodies of sorts and
    reductions do not; ops without a rule (constants, loops, calls) are left out.

    Args:
      fn: a function that `jax.jit` accepts.
      *avals: its arguments, as `jax.ShapeDtypeStruct` or arrays.

    Returns:
      Pairs such as `("stablehlo.dot_general", "([i, k], [k, j])->([i, j]) {…} reduction={k}")`.
    """
    module = _jax.stablehlo(jax.jit(fn).trace(*avals).lower())
    run(module, "func.func(sdy-populate-op-sharding-rules)")
    rules: list[tuple[str, str]] = []
    for op, _ in walk(module):
        if "sdy.sharding_rule" in op.attributes:
            text = str(op.attributes["sdy.sharding_rule"])
            rules.append((op.name, text.removeprefix("#sdy.op_sharding_rule<").removesuffix(">")))
    return rules


def lowered(traced: Any, platform: str, places: Iterable[tuple[str, str]]) -> Any:
    """A traced program, lowered for a platform.

    Args:
      traced: the result of `jax.jit(…).trace(…)`.
      platform: as JAX names it.
      places: the program's primitives, each with where it is.

    Raises:
      CompileError: JAX cannot lower an equation for the platform, or only with real devices.
    """
    _startup.devices()  # lowering starts JAX's backends: quietly
    try:
        return _jax.lower(traced, platform)
    except ValueError as error:
        if not any(words in str(error) for words in ("devices to be present", "different from the lowering platform")):
            raise
        raise CompileError(
            "a program that calls the host (jax.pure_callback, io_callback, jax.debug) or has cuDNN's attention cannot "
            'be lowered without its devices: leave these out for this, or price it with completion="best"'
        ) from error
    except NotImplementedError as error:
        where = next((f", at {place}" for primitive, place in places if f"'{primitive}'" in str(error)), "")
        raise CompileError(
            f"JAX cannot lower the program for {platform}{where} ({error}): "
            "plan for hardware that has it, or compute this elsewhere"
        ) from error


def propagate(lowered: Any, pins: Mapping[int, Layout] | None = None) -> Propagation:
    """The layout of every value after Shardy's propagation: one probe of a `Lowering`.

    Raises:
      ShardyError: propagation fails, or a pin names no op result.
    """
    return Lowering(lowered).propagate(pins)


class Lowering:
    """A lowered program, ready to be propagated any number of times under various pins.

    The name, place and shape of an op are read once, not per probe: the text of 30,000
    locations takes as long as propagation does.
    """

    def __init__(self, lowered: Any) -> None:
        """Copies the result of `jax.jit(…, in_shardings=…).lower(…)`, for a mesh of two or more devices."""
        self._module = _jax.stablehlo(lowered)
        simplify(self._module)
        self.count = _number_results(self._module)
        self._read: dict[tuple[int, int], tuple[tuple[Layout, ...], tuple[ValueLayout, ...]]] = {}
        self._said: dict[Any, tuple[Layout, ...]] = {}  # an attribute's layouts; it lives no longer than its module
        self._arrays: dict[int, tuple[int, ...]] = {}  # the results of an op that are arrays, by its first number

    def propagate(self, pins: Mapping[int, Layout] | None = None) -> Propagation:
        """The layout of every value after Shardy's propagation.

        Args:
          pins: layouts to hold fixed as `with_sharding_constraint` would, keyed by
            `ValueLayout.number` (a probe without lowering again).

        Raises:
          ShardyError: propagation fails, or a pin names no op result.
        """
        module = self.propagated(lambda module: _pin(module, pins, self.count) if pins else None)
        main = _functions(module)["main"]
        inputs = main.regions[0].blocks[0].arguments
        results = [_shape_of_type(t) for t in main.attributes["function_type"].value.results]
        return Propagation(
            arguments=_signature(main, "arg_attrs", [_shape(x) for x in inputs]),
            results=_signature(main, "res_attrs", results),
            values=tuple(self.values(module)),
        )

    def edit(self, change: Callable[[Any], None]) -> None:
        """Changes the lowered module for all later probes; no op may be added."""
        change(self._module)

    def numbers_of(self, name: str) -> frozenset[int]:
        """The numbers of the ops of a name in the lowered module."""
        ops = (op for op in _jax.operations(self._module, {name}) if _NUMBER in op.attributes)
        return frozenset(int(op.attributes[_NUMBER].value) for op in ops)

    def propagated(self, change: Callable[[Any], None]) -> Any:
        """A copy of the module after Shardy's propagation, changed before it.

        Raises:
          ShardyError: propagation fails.
        """
        module = self._module.clone()
        change(module)
        run(module, "sdy-propagation-pipeline")
        return module

    def values(self, module: Any) -> Iterator[ValueLayout]:
        """The op results of a propagated module."""
        inside: tuple[Any, ...] | None = None
        calls = ""
        met: dict[int, int] = {}  # number → how often an op of it was met: once per call of the function around it
        for op, around in walk(module):
            if not len(op.results):
                continue
            if around is not inside:  # all ops of a block have the same ones around them
                inside, calls = around, calls_of(around)
            layouts, attributes = self.layouts_of(op), op.attributes
            if _NUMBER not in attributes:
                yield from _read_op(op, calls, None, layouts)
                continue
            number = int(attributes[_NUMBER].value)
            visit = met[number] = met.get(number, -1) + 1
            before, values = self._read.get((number, visit), (None, ()))
            if before is None:
                values = _read_op(op, calls, number, layouts)
            elif before is not layouts:  # equal texts are read once
                values = _with_layouts(values, number, layouts)
            self._read[number, visit] = (layouts, values)
            yield from values

    def read(self, module: Any, apart: Container[int]) -> Reading:
        """What a probe changes of a propagated module's op results; some numbers of ops are read apart."""
        numbers: list[int] = []
        layouts: list[Layout | None] = []
        others: list[tuple[int, ValueLayout]] = []
        for op, around in walk(module):
            if not len(op.results):
                continue
            found, attributes = self.layouts_of(op), op.attributes
            first = int(attributes[_NUMBER].value) if _NUMBER in attributes else None
            if first is None or first in apart:
                others.extend((len(numbers), value) for value in _read_op(op, calls_of(around), first, found))
                continue
            if first not in self._arrays:
                self._arrays[first] = tuple(i for i, x in enumerate(op.results) if _shape(x) is not None)
            for offset in self._arrays[first]:
                numbers.append(first + offset)
                layouts.append(found[offset] if found else None)
        return Reading(numbers=tuple(numbers), layouts=tuple(layouts), others=tuple(others))

    def layouts_of(self, op: Any) -> tuple[Layout, ...]:
        """Layouts of an op's results; empty where Shardy wrote none. The text of equal attributes is read once."""
        attribute = _sharding_of(op)
        if attribute is None:
            return ()
        if attribute not in self._said:
            self._said[attribute] = _read_shardings(str(attribute))
        return self._said[attribute]


def _read_op(op: Any, calls: str, number: int | None, layouts: tuple[Layout, ...]) -> tuple[ValueLayout, ...]:
    """The results of an op that are arrays, by the number of the first result."""
    name, where = source_of(op, calls)
    return tuple(
        ValueLayout(
            op=op.name,
            name=name,
            where=where,
            number=None if number is None else number + offset,
            shape=shape,
            layout=layouts[offset] if layouts else Layout.replicated(len(shape)),
        )
        for offset, result in enumerate(op.results)
        if (shape := _shape(result)) is not None
    )


def _with_layouts(values: tuple[ValueLayout, ...], first: int, layouts: tuple[Layout, ...]) -> tuple[ValueLayout, ...]:
    """The same op's results in the layouts of another probe."""
    return tuple(
        replace(v, layout=layouts[(v.number or 0) - first] if layouts else Layout.replicated(len(v.shape)))
        for v in values
    )


def run(module: Any, pipeline: str) -> None:
    """Runs one of Shardy's pass pipelines on a module in place.

    Raises:
      ShardyError: it fails.
    """
    try:
        _jax.run_passes(module, pipeline)
    except _jax.MLIRError as error:
        raise ShardyError(f"Shardy's `{pipeline}` failed: {error}") from error


def simplify(module: Any) -> None:
    """Rewrites a lowered module to the form that XLA propagates, as far as that changes Shardy's layouts.

    XLA first expands CHLO ops (`square`, `erf`, …). Shardy knows none of them, so layouts
    would stop there: pointwise ones get their rule. XLA also turns a broadcast that only adds
    dimensions of size 1 (as a `scan` does before it stacks) into a reshape: Shardy passes layouts
    through reshapes both ways before it passes them through matmuls, through broadcasts one way.
    """
    for op, _ in walk(module):
        if op.name.startswith("chlo."):
            _state_pointwise_rule(op, module)
    for op in _jax.operations(module, {"stablehlo.broadcast_in_dim"}):
        if _adds_ones(op):
            _jax.replace_op(op, "stablehlo.reshape")


def _state_pointwise_rule(op: Any, module: Any) -> None:
    shapes = {_shape(value) for value in (*op.operands, *op.results)}
    if len(shapes) != 1 or shapes <= {None, ()}:
        return
    (shape,) = shapes
    dims = tuple((factor,) for factor in _FACTORS[: len(shape or ())])
    rule = FactorRule(
        operands=(dims,) * len(op.operands),
        results=(dims,) * len(op.results),
        sizes={factor: size for (factor,), size in zip(dims, shape or (), strict=True)},
    )
    op.attributes["sdy.sharding_rule"] = _jax.parse_attribute(f"#sdy.op_sharding_rule<{rule}>", module)


def _adds_ones(op: Any) -> bool:
    """Whether a broadcast keeps all dimensions of its operand, in their order, and repeats nothing."""
    before, after = _shape(op.operands[0]), _shape(op.results[0])
    dims = list(op.attributes["broadcast_dimensions"])
    return before is not None and after is not None and prod(before) == prod(after) and dims == sorted(dims)


def _functions(module: Any) -> dict[str, Any]:
    """Functions of a module by symbol name."""
    operations = (op.operation for op in module.regions[0].blocks[0].operations)
    return {op.attributes["sym_name"].value: op for op in operations if op.name == "func.func"}


def walk(module: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operations in program order, each with the calls, loops and branches around it, outermost first.

    Calls are entered where they stand, as are loops and branches.
    """
    functions = _functions(module)
    found: list[tuple[Any, tuple[Any, ...]]] = []

    def visit(owner: Any, around: tuple[Any, ...]) -> None:
        for region in owner.regions:
            for block in region.blocks:
                for view in block.operations:
                    op = view.operation
                    name = op.name
                    if name in _ENTERED:
                        visit(op, (*around, op))
                    elif name == "func.call":
                        visit(functions[op.attributes["callee"].value], (*around, op))
                    found.append((op, around))

    visit(functions["main"], ())
    return iter(found)


def calls_of(around: Iterable[Any]) -> str:
    """JAX's name stack of the calls around an op."""
    return "/".join(filter(None, (_source(str(o.location))[0] for o in around if o.name == "func.call")))


def source_of(op: Any, calls: str) -> tuple[str, str]:
    """JAX's name stack of an op, that of the calls around it before it, and the user's `file:line (function)`."""
    name, where = _source(str(op.location))
    return "/".join(filter(None, (calls, name))), where


def _number_results(module: Any) -> int:
    """Tags each op with the number of its first result; returns the number of results."""
    count = 0
    for op, _ in walk(module):
        if len(op.results) and _NUMBER not in op.attributes:
            op.attributes[_NUMBER] = _jax.parse_attribute(f"{count} : i64", module)
            count += len(op.results)
    return count


def _pin(module: Any, pins: Mapping[int, Layout], count: int) -> None:
    """Sets pins on a module whose results are numbered up to a count.

    Raises:
      ShardyError: a pin names no op result.
    """
    if beyond := sorted(number for number in pins if not 0 <= number < count):
        raise ShardyError(f"pins name op results {beyond}; the module has {count}")
    mesh, left = _mesh_name(module), set(pins)
    for op, _ in walk(module):
        if not left:
            return
        if not len(op.results):
            continue
        first = int(op.attributes[_NUMBER].value)
        pinned = {i: pins[first + i] for i in range(len(op.results)) if first + i in left}
        if pinned:
            left -= {first + i for i in pinned}
            shardings = ", ".join(f"<@{mesh}, {_dims_text(pinned.get(i), r)}>" for i, r in enumerate(op.results))
            attribute = f"#sdy.sharding_per_value<[{shardings}]>"
            op.attributes["sdy.sharding"] = _jax.parse_attribute(attribute, module)


def _mesh_name(module: Any) -> str:
    """The symbol of the module's mesh."""
    for view in module.regions[0].blocks[0].operations:
        if view.operation.name == "sdy.mesh":
            return view.operation.attributes["sym_name"].value
    raise ShardyError("the module has no mesh: lower it with in_shardings on two or more devices")


def _dims_text(layout: Layout | None, result: Any) -> str:
    """A pin as Shardy writes it; without a pin, every dimension is open."""
    if layout is None:
        return "[" + ", ".join("{?}" for _ in _shape(result) or ()) + "]"
    return "[" + ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in layout.dims) + "]"


def layouts_of(op: Any) -> tuple[Layout, ...]:
    """Layouts of an op's results; empty where Shardy wrote none."""
    attribute = _sharding_of(op)
    return () if attribute is None else _read_shardings(str(attribute))


def _sharding_of(op: Any) -> Any:
    """The attribute with the layouts of an op's results; None where Shardy wrote none."""
    attributes = op.attributes
    for name in ("sdy.sharding", "sharding", "out_sharding", "out_shardings"):
        if name in attributes:
            return attributes[name]
    return None


def _signature(main: Any, name: str, shapes: list[tuple[int, ...] | None]) -> tuple[Layout, ...]:
    """Layouts of the arguments or results of `main`."""
    attributes = main.attributes[name] if name in main.attributes else [{}] * len(shapes)
    return tuple(
        _read_shardings(str(entry["sdy.sharding"]))[0] if "sdy.sharding" in entry else Layout.replicated(len(shape))
        for entry, shape in zip(attributes, shapes, strict=True)
        if shape is not None
    )


def axes_in(text: str) -> list[str]:
    """The axes that an attribute of Shardy's names, in order, parts of one as `model:(1)2`."""
    return [name + part for name, part in _AXIS.findall(text)]


@lru_cache(maxsize=4096)
def _read_shardings(text: str) -> tuple[Layout, ...]:
    """Layouts from the text of one sharding, or of one per value."""
    layouts: list[Layout] = []
    for dims, tail in _SHARDING.findall(text):
        unreduced = _UNREDUCED.search(tail)
        layouts.append(
            Layout(
                tuple(tuple(name + part for name, part in _AXIS.findall(dim)) for dim in _DIM.findall(dims)),
                tuple(name + part for name, part in _AXIS.findall(unreduced[1])) if unreduced else (),
            )
        )
    if not layouts and text.count("<@"):
        raise ShardyError(f"cannot read the sharding {text!r}")
    return tuple(layouts)


def _shape(value: Any) -> tuple[int, ...] | None:
    return _shape_of_type(value.type)


def _shape_of_type(kind: Any) -> tuple[int, ...] | None:
    """The shape of a tensor type; None for a token."""
    return tuple(kind.shape) if hasattr(kind, "shape") else None


@lru_cache(maxsize=2**16)
def _source(location: str) -> tuple[str, str]:
    """JAX's name stack and the user's `file:line (function)` from an MLIR location."""
    name, source = _NAME.match(location), _SOURCE.search(location)
    where = f"{source[2]}:{source[3]} ({source[1]})" if source else "<unknown>"
    return name[1] if name else "", where
