"""Nests of tuples, lists, dicts and namedtuples: what a stage takes, returns and is given gradients for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_leaves(fn: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with `fn(leaf)` for every leaf: elements of a sequence in order, values of a dict as inserted."""
    if isinstance(nest, tuple):
        items = [map_leaves(fn, item) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if isinstance(nest, list):
        return type(nest)([map_leaves(fn, item) for item in nest])
    if isinstance(nest, dict):
        return type(nest)((key, map_leaves(fn, value)) for key, value in nest.items())
    return fn(nest)


def leaves(nest: Any) -> list[Any]:
    """All leaves of `nest`, in the order of `map_leaves`."""
    found: list[Any] = []
    map_leaves(found.append, nest)
    return found


def leaves_like(reference: Any, nest: Any, path: str = "outputs") -> list[Any]:
    """The leaves of `nest`, one for each leaf of `reference`; None anywhere in `nest` means None at all leaves below.

    Errors:
        ValueError: the two nests differ; the message says where.
    """
    if isinstance(reference, dict):
        pairs = list(reference.items())
    elif isinstance(reference, (tuple, list)):
        pairs = list(enumerate(reference))
    else:
        return [nest]
    if nest is None:
        return [leaf for key, item in pairs for leaf in leaves_like(item, None, path)]
    if isinstance(reference, dict) != isinstance(nest, dict) or not isinstance(nest, (tuple, list, dict)):
        raise ValueError(
            f"{path} is a {type(reference).__name__}, but the gradient given for it is a {type(nest).__name__}."
        )
    keys = list(nest) if isinstance(nest, dict) else list(range(len(nest)))
    if set(keys) != {key for key, _ in pairs}:
        raise ValueError(
            f"{path} has the entries {[key for key, _ in pairs]}, but the gradients given for it have {keys}."
        )
    return [leaf for key, item in pairs for leaf in leaves_like(item, nest[key], f"{path}[{key!r}]")]
