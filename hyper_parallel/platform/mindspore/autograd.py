"""MindSpore's autograd graph and engine: the few private calls that a split backward needs.

1. A graph is recorded only while the thread's gradient flag is on; `recording` restores what it found, even on error.
2. A node's Python object is made anew at each access, so nodes are compared by `node_id`, never by `is`.
   The id is an address: it stays valid only as long as somebody holds the node.
3. The engine computes only what the requested inputs need, also inside one operator.
4. The executor and the memory pool belong to the process. Two threads that run operators at the same time write into
   each other's tensors, or crash (seen on CPU). So whoever uses several threads runs operators inside `one_thread`.
5. An edge that was cut is gone for good: the engine neither follows it nor computes a gradient for it, and the node
   behind it is freed with what it saved, if nobody else holds it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mindspore import Tensor, ops
from mindspore._c_expression import run_backward as _engine_run
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _GradientEdge, _no_grad, _pynative_executor

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore._c_expression.run_backward",
    "mindspore.common._grad_function._Function",
    "mindspore.graph.api._GradientEdge",
    "mindspore.graph.api._no_grad",
    "mindspore.graph.api._pynative_executor",
    "mindspore.Tensor._grad",
    "mindspore.Tensor._grad_node",
    "mindspore.Tensor._requires_grad",
    "mindspore._c_expression.BackwardNodePy._input_metadata",
    "mindspore._c_expression.BackwardNodePy._set_next_edge",
    "mindspore._c_expression.BackwardNodePy._unique_id",
    "mindspore._c_expression.BackwardNodePy.name",
    "mindspore._c_expression.BackwardNodePy.next_functions",
    "mindspore._c_expression.BackwardNodePy.register_hook",
    "mindspore._c_expression.BackwardNodePy.register_prehook",
)

Function = _Function
"""MindSpore's base class of custom functions: static `forward(ctx, ...)`, `backward(ctx, ...)`; run by `apply`."""

one_thread = threading.RLock()
"""Held while a thread runs operators, where there are several (rule 4)."""

Node = Any
"""A node of the autograd graph: MindSpore's BackwardNode, or the `_Function` object of a custom function."""

Edge = tuple[int, Node, int, int]
"""An operator's input, the node that its gradient goes to, that node's id, and which of that node's outputs it is."""


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record operators into the autograd graph on this thread, and restore the thread's flags afterwards."""
    flag, enabled = _pynative_executor.grad_flag(), _pynative_executor.enable_grad()
    _pynative_executor.set_grad_flag(True)
    _pynative_executor.set_enable_grad(True)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(flag)
        _pynative_executor.set_enable_grad(enabled)


def requires_grad(tensor: Tensor) -> bool:
    """Whether a gradient can flow into `tensor`."""
    return bool(tensor._requires_grad) and tensor.is_floating_point()


def detached(tensor: Tensor, needs_grad: bool = False) -> Tensor:
    """A tensor that shares `tensor`'s values but not its graph; a leaf of its own where `needs_grad`."""
    with _no_grad():
        copy = ops.stop_gradient(tensor)
    if needs_grad:
        copy.requires_grad_()
    return copy


def node_of(tensor: Tensor) -> Node | None:
    """The node that made `tensor`, its leaf node for a leaf that needs a gradient, None where there is no graph."""
    return tensor._grad_node


def node_id(node: Node) -> int:
    """What two Python objects of one node have in common, as long as one of them is held."""
    return node._unique_id()


def leaf_ids(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of the nodes of leaf tensors that need a gradient."""
    return {tensor._grad_node._unique_id() for tensor in tensors}


def next_edges(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """Per input of the operator: the node that its gradient goes to (None: none is needed), and that node's output."""
    return node.next_functions


def nodes_below(roots: Iterable[Node], leaves: Iterable[int] = ()) -> Iterator[tuple[int, Node, list[Edge]]]:
    """What gradients that start at `roots` reach: each node after those that its edges go to.

    Args:
        roots: nodes.
        leaves: ids of nodes not to look at.

    Yields:
        per node its id, itself, and the edges that a gradient goes along.
    """
    seen = set(leaves)
    pending: list[tuple[int, Node, list[Edge] | None]] = [(node._unique_id(), node, None) for node in roots]
    while pending:
        entry = pending.pop()
        key, node, edges = entry
        if edges is not None:
            yield entry
        elif key not in seen:
            seen.add(key)
            edges = []
            pending.append((key, node, edges))
            for at, (child, index) in enumerate(node.next_functions):
                if child is not None:
                    child_key = child._unique_id()
                    edges.append((at, child, child_key, index))
                    if child_key not in seen:
                        pending.append((child_key, child, None))


_COMPUTE_WHAT_IS_ASKED = frozenset(
    {
        *("Add", "AddExt", "BiasAdd", "Div", "Mul", "Sub", "SubExt"),
        *("BatchMatMul", "BatchMatMulExt", "Dense", "MatMul", "MatMulExt"),
    }
)
"""Operators that compute, of the gradients of their inputs, only those that are asked for."""


def computes_what_is_asked(node: Node) -> bool:
    """Whether the operator of `node` is known to compute only those gradients of its inputs that are asked for.

    Others compute all at once, such as a layer norm, a concatenation, or a user's own function.
    """
    return not is_custom_function(node) and node.name() in _COMPUTE_WHAT_IS_ASKED


_SAVE_NOTHING = frozenset(
    {
        *("Add", "AddExt", "AddN", "BiasAdd", "Divs", "Muls", "Neg", "ReduceMean", "Sub", "SubExt", "SumExt"),
        *("BroadcastToView", "Cast", "Concat", "Contiguous", "ExpandDimsView", "Reshape", "SplitTensorView"),
        *("StridedSlice", "Transpose", "TransposeView"),
    }
)
"""Operators whose gradient needs no tensor of the forward."""


def saves_nothing(node: Node) -> bool:
    """Whether the operator of `node` is known to have saved no tensor."""
    return not is_custom_function(node) and node.name() in _SAVE_NOTHING


def output_count(node: Node) -> int:
    """How many outputs the operator of `node` has. Custom functions do not tell: 0."""
    return 0 if is_custom_function(node) else len(node._input_metadata)


def is_custom_function(node: Node) -> bool:
    """Whether `node` is a user's own autograd function, whose backward computes all gradients whatever is asked for."""
    return isinstance(node, _Function)


def cut_edge(node: Node, position: int) -> None:
    """Remove the edge for the operator's input `position`."""
    node._set_next_edge(position, None)


def edge(node: Node, output_index: int) -> Any:
    """The output `output_index` of `node`, as a place where a backward can start."""
    return _GradientEdge(node, output_index, None)


def before_node(node: Node, hook: Callable) -> Any:
    """Call `hook(grads)` before `node` runs; what it returns (a tuple, or None for no change) is the node's input."""
    return node.register_prehook(hook)


def after_node(node: Node, hook: Callable) -> Any:
    """Call `hook(passed_on, grads)` after `node` ran: what it passes on per edge, what it was given per output."""
    return node.register_hook(hook)


def run_backward(
    roots: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[Tensor], keep_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, None for one that is not reached.

    Args:
        roots: tensors or `edge`s to start from.
        grads: one gradient for each root.
        inputs: leaf tensors; only what these need is computed.
        keep_graph: whether the nodes that run keep their saved tensors for another run.
    """
    if not roots or not inputs:
        return (None,) * len(inputs)
    return tuple(_engine_run(tuple(roots), tuple(grads), keep_graph, False, tuple(inputs), True, accumulate_grad=False))


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient that has been added up for `tensor` so far."""
    return tensor._grad


def add_gradient(tensor: Tensor, grad: Tensor) -> None:
    """Add `grad` to the gradient of `tensor`. Never in place: the engine may hand one tensor to several receivers.

    (The engine's own accumulation copies a gradient that is shared, and CPU has no kernel for that copy.)
    """
    with _no_grad():
        tensor._grad = grad if tensor._grad is None else tensor._grad + grad


def clear_gradient(tensor: Tensor) -> None:
    """Forget the gradient of `tensor`, as at the start of a step."""
    tensor._grad = None
