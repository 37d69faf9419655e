"""Nests of tensors: tuple, list, dict, namedtuple and OrderedDict, taken apart and put together, types preserved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any


class Nest:
    """The shape of a nest without its tensors. Two nests are equal if containers, keys and tensor positions are.

    Constants are kept for the rebuilding, and are no part of the comparison.
    """

    __slots__ = ("children", "keys", "kind", "value")

    def __init__(self, kind: Any, keys: Any = None, children: tuple = (), value: Any = None) -> None:
        self.kind = kind
        self.keys = keys
        self.children = children
        self.value = value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Nest):
            return NotImplemented
        return self.kind is other.kind and self.keys == other.keys and self.children == other.children

    __hash__ = None

    def __repr__(self) -> str:
        if self.kind is _TENSOR:
            return "tensor"
        if self.kind is _CONSTANT:
            return "constant"
        name = self.kind.__name__
        if self.keys is not None:
            return name + "(" + ", ".join(f"{key}: {child!r}" for key, child in zip(self.keys, self.children)) + ")"
        return name + "(" + ", ".join(map(repr, self.children)) + ")"

    def leaf_count(self) -> int:
        """Return how many tensors the nest holds."""
        return 1 if self.kind is _TENSOR else sum(child.leaf_count() for child in self.children)

    def constants(self) -> list:
        """Return what the nest holds besides tensors."""
        if self.kind is _CONSTANT:
            return [self.value]
        return [constant for child in self.children for constant in child.constants()]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Put the nest together again with `leaves` in the places of its tensors."""
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Any) -> Any:
        kind = self.kind
        if kind is _TENSOR:
            return next(leaves)
        if kind is _CONSTANT:
            return self.value
        children = [child._rebuild(leaves) for child in self.children]
        if self.keys is not None:
            return kind(zip(self.keys, children))
        if kind is list:
            return children
        return tuple(children) if kind is tuple else kind(*children)


_TENSOR = object()
_CONSTANT = object()
TENSOR = Nest(_TENSOR)


def is_container(value: Any) -> bool:
    """Return whether a nest is looked into at `value`."""
    kind = type(value)
    return kind in (tuple, list, dict, OrderedDict) or (isinstance(value, tuple) and hasattr(kind, "_fields"))


def flatten(value: Any, is_tensor: Callable[[Any], bool], leaves: list) -> Nest:
    """Append the tensors of `value` to `leaves`, in order, and return the nest that holds them."""
    if is_tensor(value):
        leaves.append(value)
        return TENSOR
    if not is_container(value):
        return Nest(_CONSTANT, value=value)
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return Nest(kind, tuple(value), tuple([flatten(child, is_tensor, leaves) for child in value.values()]))
    return Nest(kind, None, tuple([flatten(child, is_tensor, leaves) for child in value]))
