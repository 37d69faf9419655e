"""A Cell whose call is wrapped, and which is the same Cell in every other respect.

The wrapped Cell has a class derived from the given Cell's own, and shares its attribute dictionary. So parameters,
their names, sub-cells, flags, methods and indexing are the given Cell's, whichever of the two is used to change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore._c_expression import Cell_
from mindspore.nn import Cell

PRIVATE_INTERFACES: tuple[str, ...] = ("mindspore._c_expression.Cell_",)


def wrap_cell(cell: Cell, call: Callable[..., Any]) -> Cell:
    """Return a Cell like `cell`, each call of which is `call(original_call, args, kwargs)`."""
    kind = type(cell)

    class Wrapped(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(super().__call__, args, kwargs)

    Wrapped.__name__, Wrapped.__qualname__, Wrapped.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    Wrapped.__doc__ = kind.__doc__
    wrapped = Wrapped.__new__(Wrapped)
    Cell_.__init__(wrapped, kind.__name__)
    Cell.total_instance_count += 1
    wrapped.__dict__ = cell.__dict__
    return wrapped
