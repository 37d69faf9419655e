"""The arguments and the result of an excluded region, taken apart into tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from hyper_parallel.platform.mindspore.activation_checkpoint.output_mark import is_tensor
from hyper_parallel.platform.nest import Nest, flatten

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic, mstype.Type)


def arguments(args: tuple, kwargs: dict) -> tuple[tuple, list]:
    """Return the keywords, sorted, and all arguments: the positional ones, then those of the keywords."""
    keys = tuple(sorted(kwargs)) if kwargs else ()
    return keys, [*args, *[kwargs[key] for key in keys]]


def take_apart(args: tuple, kwargs: dict, leaves: list[Tensor]) -> tuple[tuple, tuple[Nest, ...]]:
    """Append the tensors of all arguments to `leaves`; return the keywords and each argument's nest."""
    keys, values = arguments(args, kwargs)
    return keys, tuple([flatten(value, is_tensor, leaves) for value in values])


def put_together(keys: tuple, nests: Sequence[Nest], leaves: Sequence[Tensor]) -> tuple[list, dict]:
    """Return positional and keyword arguments with `leaves` in the places of their tensors."""
    remaining = iter(leaves)
    values = [nest.rebuild([next(remaining) for _ in range(nest.leaf_count())]) for nest in nests]
    positional = len(values) - len(keys)
    return values[:positional], dict(zip(keys, values[positional:]))


def describe(keys: tuple, nests: Sequence[Nest]) -> str:
    """Return the arguments as an error message shows them."""
    names = [""] * (len(nests) - len(keys)) + [f"{key}=" for key in keys]
    return "(" + ", ".join(f"{name}{nest!r}" for name, nest in zip(names, nests)) + ")"


def check_output(region: str, nest: Nest) -> None:
    """Raise if a region returned something that may hide a tensor."""
    for constant in nest.constants():
        if not isinstance(constant, _CONSTANTS):
            raise ValueError(
                f"Excluded region '{region}' returned a {type(constant).__name__}; it must return tensors and "
                "constants, alone or in tuple, list, dict, namedtuple and OrderedDict, so that a replay can return "
                "them again."
            )
