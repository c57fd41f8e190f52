"""Strict JSON: accepts only texts that every reader of JSON understands alike; else a ValueError says why."""

import json
from collections.abc import Sequence
from typing import Any

LARGEST = 2**63 - 1  # of an integer: other readers hold no more


def loads(text: str) -> Any:
    """The value in a JSON text.

    Raises:
        ValueError: It is no JSON (`json.JSONDecodeError`), nested too deeply, has a key twice,
            or a number that is not finite or does not fit into 64 bits.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
    except RecursionError:
        raise ValueError("lists in lists, too deep to read") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -LARGEST <= (value := int(digits)) <= LARGEST:
        raise ValueError(f"the integer {digits[:20]}… does not fit into 64 bits")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:20]} is not finite")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"the number {name} is not finite")
