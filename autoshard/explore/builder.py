"""Builder: `package.module:builder` → a function and its arguments."""

import contextlib
import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoshard import _children
from autoshard.errors import AutoshardError, TargetError
from cost_models import CostModelError

MODELS = "models"  # the package of reference models, which is not installed with this one

_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|/autoshard/(cli/)?\w+\.py$|^<frozen")


def load_target(target: str, keywords: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Imports and calls a builder: `(fn, args)`.

    Args:
      target: `package.module:builder`.
      keywords: arguments of the builder.

    Raises:
      TargetError: no such module or builder, keywords that it does not take, or another result.
    """
    builder = load_builder(target)
    open_ended = True
    with contextlib.suppress(ValueError):  # of a callable without a signature
        try:
            signature = inspect.signature(builder)
            signature.bind(**keywords)
        except TypeError as error:
            raise _no_call(target, keywords, error) from error
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            built: Any = builder(**keywords)
    except (AutoshardError, CostModelError):
        raise
    except Exception as error:
        inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        if isinstance(error, TypeError) and (not inside or (keywords and open_ended)):  # its error says it
            raise _no_call(target, keywords, error) from error
        raise TargetError(f"`{target}` raised {raised(error)}{_more_devices(error)}") from error
    if not (isinstance(built, tuple) and len(built) == 2 and callable(built[0]) and isinstance(built[1], tuple)):
        raise TargetError(f"`{target}` returned a {type(built).__name__}; a builder returns (fn, args), args a tuple")
    return built[0], built[1]


def _no_call(target: str, keywords: Mapping[str, Any], error: TypeError) -> TargetError:
    return TargetError(
        f"`{target}` cannot be called with {', '.join(keywords) or 'no arguments'}: {error}\n"
        "  a target is a function that returns (fn, args); --set key=value gives it arguments"
    )


def load_builder(target: str) -> Callable[..., Any]:
    """Imports a builder.

    Args:
      target: `package.module:builder`.

    Raises:
      TargetError: no such module or builder.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise TargetError(f"cannot read the target `{target}`: write package.module:builder, such as models:gpt2_small")
    if module_name.endswith(".py") or "/" in module_name:
        written = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise TargetError(f"`{module_name}` is a file; write its module: {written}:{name}")
    if not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise TargetError(f"cannot read the target `{target}`: write package.module:builder, such as models:gpt2_small")
    sys.path[:] = _children.standard_first([str(Path.cwd()), *sys.path])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            way_out = f"it is neither in {Path.cwd()} nor installed"
            if error.name == MODELS:
                way_out += "; autoshard's reference models lie in its repository alone: run this in a clone of it"
        else:
            way_out = f"`{module_name}` needs it: install it"
        raise TargetError(f"no module named `{error.name}`; {way_out}") from error
    except (AutoshardError, CostModelError):
        raise
    except Exception as error:
        raise TargetError(f"importing `{module_name}` raised {raised(error)}{_more_devices(error)}") from error
    builder = getattr(module, name, None)
    if builder is None:
        near = difflib.get_close_matches(name, dir(module), n=3)
        raise TargetError(f"`{module_name}` has no `{name}`" + (f"; near it: {', '.join(near)}" if near else ""))
    if not callable(builder):
        raise TargetError(f"`{target}` is a {type(builder).__name__}, not a function that returns (fn, args)")
    return builder


def takes_keyword(target: str, name: str) -> bool:
    """Whether a builder says that it takes an argument of this name; one that passes on all of them does.

    Raises:
      TargetError: no such module or builder.
    """
    try:
        parameters = inspect.signature(load_builder(target)).parameters.values()
    except ValueError:  # of a callable without a signature
        return False
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _more_devices(error: BaseException) -> str:
    """The way out where a mesh has more devices than this machine: JAX's error, or numpy's of its only device."""
    if not re.search(r"product of mesh_shape|array of size 1 into shape", str(error)):
        return ""
    return (
        "\n  if these are a mesh's devices: none are needed, take a jax.sharding.AbstractMesh of that shape; or set\n"
        "  JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES=8, as many as the mesh has"
    )


def raised(error: BaseException) -> str:
    """An exception of somebody else's code in a line, and where: the innermost place outside of libraries."""
    places = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not _LIBRARIES.search(place[0])] or places
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{text}\n  at {own[-1][0]}:{own[-1][1]} ({own[-1][2]})" if own else text
