"""dx and dw as two backward passes over one recorded forward.

The gradients of the inputs (dx) are wanted at once by the stage before; the gradients of the weights (dw) can wait.
The split is exact and computes nothing twice:

1. An operator lies on the input path when its gradient leads to an input. dx runs these operators only.
   A weight leaves the path at a branch: an operator on the path with an edge off the path that leads to a weight.
2. dx keeps, at each branch, the gradient that arrived there in full. So dw starts at all branches at once, in ONE
   engine run, and a weight that is used twice gets its parts added by the engine.
3. Some operators (layer norm, a user's own function) compute the gradients of their weights together with that of their
   input. dx keeps these; dw starts behind the branch, and such an operator runs once.
4. After dx every edge along the input path is cut. From a branch dw therefore goes to weights only, although another
   branch may lie below it (`h = w(x); v(h) + w(v(h))`), and the operators between branches are freed with all that they
   saved: what is alive between dx and dw is what dw reads.
5. An output off the input path (`aux ** 2`) waits for dw with the gradient that it was given.
6. Without an input that needs a gradient there is no path: dx does nothing, dw is the full backward.
7. A user's hook on a branch's tensor changes its gradient in dx; dw takes that gradient, not the hook's second answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from mindspore import Parameter, Tensor, ops

from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.nest import leaves, leaves_like, map_leaves

Gradients = tuple[Optional[Tensor], ...]


class _Start(NamedTuple):
    """A place where a backward starts, and the gradient that it starts with."""

    root: Any
    node: autograd.Node
    grad: Tensor


@dataclass(frozen=True)
class _Output:
    """What is kept of an output that needs a gradient. No tuple, or it would be taken for a nest."""

    root: Any
    node: autograd.Node
    shape: tuple[int, ...]
    dtype: Any

    def default_gradient(self) -> Tensor:
        if self.shape not in ((), (1,)):
            raise ValueError(
                f"Only a scalar output has a gradient of its own (ones), but an output has shape {self.shape}; "
                "give its gradient in output_grads."
            )
        return ops.ones(self.shape, self.dtype)

    def start(self, grad: Tensor) -> _Start:
        if not isinstance(grad, Tensor) or tuple(grad.shape) != self.shape or grad.dtype != self.dtype:
            seen = f"{grad.dtype} {tuple(grad.shape)}" if isinstance(grad, Tensor) else type(grad).__name__
            raise ValueError(f"An output is {self.dtype} {self.shape}, but the gradient given for it is {seen}.")
        return _Start(self.root, self.node, grad)


class _Path(NamedTuple):
    """The graph below some outputs."""

    nodes: dict[int, autograd.Node]
    edges: dict[int, list[tuple[int, int, int]]]
    """Per node: position of the edge, id of the node it goes to, that node's output index."""
    to_input: set[int]
    to_weight: set[int]

    def edges_along(self, key: int) -> list[tuple[int, int, int]]:
        return [edge for edge in self.edges[key] if edge[1] in self.to_input]

    def edges_off(self, key: int) -> list[tuple[int, int, int]]:
        return [edge for edge in self.edges[key] if edge[1] in self.to_weight and edge[1] not in self.to_input]


class _Arrived:
    """The gradients seen at one branch. Holds no node: a node holds its hooks, and that must not become a cycle."""

    def __init__(self) -> None:
        self.grads: Gradients | None = None
        self.passed_on: Gradients = ()

    def before(self, grads: Gradients) -> Gradients | None:
        if self.grads is None:
            self.grads = tuple(grads)
            return None
        return self.grads

    def after(self, passed_on: Gradients, _: Gradients) -> None:
        self.passed_on = self.passed_on or tuple(passed_on)


class _Branch:
    """An operator where weights leave the input path."""

    def __init__(self, path: _Path, key: int) -> None:
        self.node = path.nodes[key]
        self.weight_edges = [(at, path.nodes[child], index) for at, child, index in path.edges_off(key)]
        self.arrived = _Arrived()
        self.hooks = (
            autograd.before_node(self.node, self.arrived.before),
            autograd.after_node(self.node, self.arrived.after),
        )

    def starts(self) -> list[_Start]:
        """Where dw starts: behind the branch if it handed over all its weights' gradients, else at its outputs."""
        if self.arrived.grads is None:
            return []
        passed_on = self.arrived.passed_on
        behind = [_Start(autograd.edge(node, index), node, passed_on[at]) for at, node, index in self.weight_edges]
        given = [start for start in behind if start.grad is not None]
        if len(given) == len(behind) or autograd.is_custom_function(self.node):
            return given
        grads = enumerate(self.arrived.grads)
        return [_Start(autograd.edge(self.node, index), self.node, grad) for index, grad in grads if grad is not None]

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()


class SplitBackward:
    """The backward of one recorded forward: `full`, or `inputs` and then `weights`. Each runs once.

    Args:
        outputs: nest of the forward's outputs, still attached to their graph.
        inputs: the leaf tensors whose gradients dx gives.
        weights: the parameters whose gradients dw gives; for one that needs no gradient it is None.
    """

    def __init__(self, outputs: Any, inputs: Sequence[Tensor], weights: Sequence[Parameter]) -> None:
        self._inputs = tuple(inputs)
        self._weights = tuple(weights)
        self._trained = tuple(weight for weight in weights if autograd.requires_grad(weight))
        self._outputs: Any = map_leaves(_output, outputs)
        self._starts: list[_Start] = []
        self._branches: list[_Branch] = []

    def full(self, output_grads: Any = None) -> tuple[Gradients, Gradients]:
        """The gradients of inputs and weights in one engine run, which frees the graph. None for what is not reached.

        Args:
            output_grads: nest like the outputs, None for an output without gradient; None alone: ones for a scalar.

        Errors:
            ValueError: a gradient does not fit its output, or is missing for an output that is no scalar.
        """
        starts = self._given(output_grads)
        grads = _run(starts, self._inputs + self._trained, keep_graph=False)
        count = len(self._inputs)
        self.release()
        return grads[:count], self._aligned(grads[count:])

    def inputs(self, output_grads: Any = None) -> Gradients:
        """dx: the gradients of the inputs. Arguments and errors as in `full`."""
        given = self._given(output_grads)
        path = _explore([start.node for start in given], self._inputs, self._trained)
        on_path = [start for start in given if autograd.node_id(start.node) in path.to_input]
        self._branches = [_Branch(path, key) for key in path.nodes if key in path.to_input and path.edges_off(key)]
        grads = _run(on_path, self._inputs, keep_graph=True)
        _cut_input_path(path)
        off_path = [start for start in given if autograd.node_id(start.node) not in path.to_input]
        self._starts = off_path + [start for branch in self._branches for start in branch.starts()]
        self._outputs = None
        return grads

    def weights(self, keep_graph: bool = False) -> Gradients:
        """dw: the gradients of the weights in one engine run.

        Args:
            keep_graph: keep what dw reads, so that it may be asked for again.
        """
        grads = self._aligned(_run(self._starts, self._trained, keep_graph))
        if not keep_graph:
            self.release()
        return grads

    def pending(self) -> list[Tensor]:
        """The gradients that wait for dw."""
        return [start.grad for start in self._starts]

    def release(self) -> None:
        """Let go of the graph and of all gradients that wait."""
        for branch in self._branches:
            branch.release()
        self._outputs, self._starts, self._branches, self._inputs = None, [], [], ()

    def _aligned(self, trained_grads: Gradients) -> Gradients:
        grads = iter(trained_grads)
        return tuple(next(grads) if autograd.requires_grad(weight) else None for weight in self._weights)

    def _given(self, output_grads: Any) -> list[_Start]:
        """Where the backward starts: at every output that needs a gradient and is given one."""
        outputs = leaves(self._outputs)
        if output_grads is None:
            return [output.start(output.default_gradient()) for output in outputs if output is not None]
        pairs = zip(outputs, leaves_like(self._outputs, output_grads))
        return [output.start(grad) for output, grad in pairs if output is not None and grad is not None]


def _run(starts: Sequence[_Start], wanted: Sequence[Tensor], keep_graph: bool) -> Gradients:
    return autograd.run_backward([start.root for start in starts], [start.grad for start in starts], wanted, keep_graph)


def _output(leaf: Any) -> _Output | None:
    """What to keep of an output; the tensor itself only where its node does not tell which output it is."""
    if not isinstance(leaf, Tensor) or not autograd.requires_grad(leaf):
        return None
    node = autograd.node_of(leaf)
    if node is None:
        return None
    root = autograd.edge(node, 0) if autograd.output_count(node) == 1 else leaf
    return _Output(root, node, tuple(leaf.shape), leaf.dtype)


def _explore(roots: Iterable[autograd.Node], inputs: Iterable[Tensor], weights: Iterable[Parameter]) -> _Path:
    """Walk the graph below `roots` once, depth first, marking on the way back what leads to an input or a weight."""
    to_input = {autograd.node_id(autograd.node_of(tensor)) for tensor in inputs}
    to_weight = {autograd.node_id(autograd.node_of(tensor)) for tensor in weights}
    path = _Path({}, {}, to_input, to_weight)
    pending = [(node, False) for node in roots]
    while pending:
        node, below_is_done = pending.pop()
        key = autograd.node_id(node)
        if below_is_done:
            children = {child for _, child, _ in path.edges[key]}
            for leading in (to_input, to_weight):
                if not leading.isdisjoint(children):
                    leading.add(key)
        elif key not in path.nodes:
            path.nodes[key] = node
            edges = [
                (at, child, index) for at, (child, index) in enumerate(autograd.next_edges(node)) if child is not None
            ]
            path.edges[key] = [(at, autograd.node_id(child), index) for at, child, index in edges]
            pending.append((node, True))
            pending.extend((child, False) for _, child, _ in edges)
    return path


def _cut_input_path(path: _Path) -> None:
    """Rule 4. Edges off the path stay: dw needs them."""
    for key in path.nodes:
        for at, _, _ in path.edges_along(key):
            autograd.cut_edge(path.nodes[key], at)
