"""dx and dw as two backward passes over one recorded forward.

The gradients of the inputs (dx) are wanted at once by the stage before; the gradients of the weights (dw) can wait.
The split computes nothing twice and is exact, up to the order in which a weight's three or more parts are added:

1. An operator lies on the input path when its gradient leads to an input. dx runs these operators only.
   A weight leaves the path at a branch: an operator on the path with an edge off the path that leads to a weight.
2. dx keeps, at each branch, the gradient that arrived there in full. So dw starts at all branches at once, in ONE
   engine run, and a weight that is used twice gets its parts added by the engine.
3. Some operators (layer norm, a user's own function) compute the gradients of their weights together with that of their
   input. dx keeps these; dw starts behind the branch, and such an operator runs once.
4. In a recompute session that drops what is read, dx keeps the tensors that a branch reads, for dw. One that retains
   what is read keeps more than dw reads: a tensor that a branch saved holds the operator that made it, cut or not.
5. After dx every edge along the input path is cut. From a branch dw therefore goes to weights only, although another
   branch may lie below it (`h = w(x); v(h) + w(v(h))`), and the operators between branches are freed with all that they
   saved: what is alive between dx and dw is what dw reads, but for rule 8.
6. An output off the input path (`aux ** 2`) waits for dw with the gradient that it was given.
7. Without an input that needs a gradient there is no path: dx does nothing, dw is the full backward.
8. A custom function lives only as long as an operator above holds it. So a branch with one behind it stays until dw,
   with what it saved.
   A branch that is a custom function itself goes when its edge is cut; a weight that is reached from there through
   another custom function gets its gradient in dx, as an input does, and dw hands it out.
9. A user's hook on a branch's tensor changes its gradient in dx; dw takes that gradient, not the hook's second answer.
10. A model may keep a part of the graph and run it. The hooks act in dx and dw only, and are gone after dw.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from mindspore import Parameter, Tensor, ops
from mindspore.nn import Cell

from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.retention import DroppedReads, dropped_reads
from pipeline.execution.nest import leaves, leaves_like, map_leaves
from pipeline.execution.retention import RecomputeSession

Gradients = tuple[Optional[Tensor], ...]

_Branch = tuple[autograd.Node, list[autograd.Edge]]
"""An operator where weights leave the input path, and the edges off it."""


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


class _Path:
    """The graph below some outputs, and what leads where in it.

    Args:
        roots: the nodes of the outputs.
        inputs: the leaf tensors whose gradients dx gives.
        weights: the parameters whose gradients dw gives.
    """

    def __init__(self, roots: Iterable[autograd.Node], inputs: Iterable[Tensor], weights: Iterable[Parameter]) -> None:
        self.to_input = autograd.leaf_ids(inputs)
        to_weight = autograd.leaf_ids(weights)
        self.branches: list[_Branch] = []
        self.others: list[autograd.Node] = []
        """The other operators on the path."""
        self._inner: list[tuple[autograd.Node, int]] = []
        """The edges along the path, from below: a node that an edge goes to comes before the node that has it."""
        for key, node, edges in autograd.nodes_below(roots, self.to_input | to_weight):
            off, on_path = [], False
            for edge in edges:
                if edge[2] in self.to_input:
                    on_path = True
                    self._inner.append((node, edge[0]))
                elif edge[2] in to_weight:
                    off.append(edge)
            if on_path:
                self.to_input.add(key)
                if off:
                    self.branches.append((node, off))
                else:
                    self.others.append(node)
            elif off:
                to_weight.add(key)

    def unreachable(self) -> set[int]:
        """Rule 8: ids of custom functions off the path behind a custom function on it, and of all below."""
        custom = autograd.is_custom_function
        behind = [child for node, off in self.branches if custom(node) for _, child, _, _ in off if custom(child)]
        return {key for key, _, _ in autograd.nodes_below(behind)} if behind else set()

    def cut(self) -> None:
        """Rule 5. Edges off the path stay: dw needs them. From below: a custom function dies with its edge."""
        for node, at in self._inner:
            autograd.cut_edge(node, at)


class _Turn(enum.Enum):
    """Who runs the graph."""

    DX = enum.auto()
    DW = enum.auto()
    OTHER = enum.auto()


class _Visit:
    """The hooks at the operators on the path: they know who runs the graph, and note what dw starts with.

    Holds no node: a node holds its hooks, and that must not become a cycle.

    Args:
        path: where to set them.
        reads: those of the session that dx is in if it drops what is read (rule 4), None where all is kept.
    """

    def __init__(self, path: _Path, reads: DroppedReads | None) -> None:
        self.turn = _Turn.OTHER
        self.arrived: dict[int, Gradients] = {}
        """What arrived in dx at each branch, per output of the operator."""
        self.passed_on: dict[int, Gradients] = {}
        """What each branch handed over to weights in dx, per edge off the path; only of those that hand over at all."""
        self._reads = reads
        self._hooks: list[Any] = []
        note = self._note
        for number, (node, edges) in enumerate(path.branches):
            self._hooks.append(autograd.before_node(node, functools.partial(note, number)))
            if not autograd.computes_what_is_asked(node):
                keep = functools.partial(self._keep, number, [at for at, _, _, _ in edges])
                self._hooks.append(autograd.after_node(node, keep))
        if reads is not None:
            # These drop what they read, although a branch before them kept that.
            readers = [node for node in path.others if not autograd.saves_nothing(node)]
            self._hooks += [autograd.before_node(node, self._drop) for node in readers]

    def end_of_dx(self) -> None:
        """From here on the hooks are silent, and the session drops again what is read."""
        self.turn = _Turn.OTHER
        if self._reads is not None:
            self._reads.drop()

    def release(self) -> None:
        """Take the hooks off, and let go of the gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.arrived.clear()
        self.passed_on.clear()

    def _note(self, branch: int, grads: Gradients) -> Gradients | None:
        """The hook before a branch: dx notes what arrives, dw gets that again (rule 9)."""
        if self.turn is _Turn.DW:
            return self.arrived.get(branch)
        if self.turn is _Turn.DX:
            self.arrived[branch] = grads
            if self._reads is not None:
                self._reads.keep()
        return None

    def _drop(self, _: Gradients) -> None:
        """The hook before another operator: dx drops what it reads."""
        if self.turn is _Turn.DX:
            self._reads.drop()

    def _keep(self, branch: int, to_weights: Sequence[int], passed_on: Gradients, _: Gradients) -> None:
        """The hook after a branch: dx keeps what goes to weights, and of the rest nothing (rule 3)."""
        if self.turn is _Turn.DX:
            self.passed_on[branch] = tuple(passed_on[at] for at in to_weights)


class SplitBackward:
    """The backward of one recorded forward: `full`, or `inputs` and then `weights`, which may keep its graph.

    Args:
        outputs: nest of the forward's outputs, still attached to their graph.
        inputs: the leaf tensors whose gradients dx gives.
        weights: the parameters whose gradients dw gives; for one that needs no gradient it is None.
    """

    def __init__(self, outputs: Any, inputs: Sequence[Tensor], weights: Sequence[Parameter]) -> None:
        self._inputs = tuple(inputs)
        self._weights = tuple(weights)
        self._trained = tuple(
            {id(weight): weight for weight in self._weights if autograd.requires_grad(weight)}.values()
        )
        self._outputs: Any = map_leaves(_output, outputs)
        self._found: tuple[_Path, list[Parameter]] | None = None
        self._waiting: tuple[list[_Start], _Visit] | None = None
        """Once dx is done: where dw starts, and the hooks that it passes."""
        self._held: list[autograd.Node] = []
        """Rule 8: what holds custom functions until dw."""
        self._early: dict[int, Tensor | None] = {}
        self._visit: _Visit | None = None

    def explore(self) -> None:
        """Find the input path, unless it is known. That needs no gradient, so it can be done before there is one."""
        if self._found is None:
            outputs = leaves(self._outputs) if self._inputs else ()  # rule 7
            self._found = self._path([output.node for output in outputs if output is not None])

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
        found = dict(zip(map(id, self._trained), grads[count:]))
        self.release()
        return grads[:count], tuple(found.get(id(weight)) for weight in self._weights)

    def inputs(self, output_grads: Any = None) -> Gradients:
        """dx: the gradients of the inputs. Arguments and errors as in `full`."""
        given = self._given(output_grads)
        self.explore()
        (path, early), self._found = self._found, None
        on_path = [start for start in given if autograd.node_id(start.node) in path.to_input]
        off_path = [start for start in given if autograd.node_id(start.node) not in path.to_input]
        if self._visit is not None:
            self._visit.release()  # of a dx that failed
        self._visit = visit = _Visit(path, dropped_reads())
        visit.turn = _Turn.DX
        try:
            grads = _run(on_path, (*self._inputs, *early), keep_graph=True)
        finally:
            visit.end_of_dx()
        path.cut()
        self._waiting = off_path + self._where_dw_starts(path.branches, visit), visit
        self._early = dict(zip(map(id, early), grads[len(self._inputs) :]))
        self._outputs = None
        return grads[: len(self._inputs)]

    def weights(self, keep_graph: bool = False) -> Gradients:
        """dw: the gradients of the weights in one engine run.

        Args:
            keep_graph: keep what dw reads, so that it may be asked for again.

        Errors:
            RuntimeError: there was no dx, or what dw reads is gone.
        """
        if self._waiting is None:
            raise RuntimeError(
                "dw was asked for, but no dx has kept anything for it: ask for dx first, and for a dw that is not the "
                "last one with keep_graph."
            )
        starts, visit = self._waiting
        late = [weight for weight in self._trained if id(weight) not in self._early]
        visit.turn = _Turn.DW
        try:
            found = {**self._early, **dict(zip(map(id, late), _run(starts, late, keep_graph)))}
        finally:
            visit.turn = _Turn.OTHER
        if not keep_graph:
            self.release()
        return tuple(found.get(id(weight)) for weight in self._weights)

    def ones(self) -> Any:
        """A gradient of ones for every output."""
        return map_leaves(
            lambda output: None if output is None else ops.ones(output.shape, output.dtype), self._outputs
        )

    def tensors(self) -> Iterator[Tensor]:
        """What is kept besides what operators saved: outputs that a backward starts from, gradients that wait."""
        starts = [] if self._waiting is None else self._waiting[0]
        roots = [output.root for output in leaves(self._outputs) if output is not None] + [one.root for one in starts]
        yield from (root for root in roots if isinstance(root, Tensor))
        yield from (start.grad for start in starts)
        yield from (grad for grad in self._early.values() if grad is not None)

    def release(self) -> None:
        """Let go of the graph and of all gradients that wait."""
        self._outputs = self._found = self._waiting = None
        self._held, self._early, self._inputs = [], {}, ()
        if self._visit is not None:
            self._visit.release()
            self._visit = None

    def _where_dw_starts(self, branches: Iterable[_Branch], visit: _Visit) -> list[_Start]:
        """Behind a branch if it handed over all its weights' gradients, else at its outputs.

        What dw does not need is let go: the branch, or the gradients that it handed over.
        """
        found: list[_Start] = []
        for number, (node, edges) in enumerate(branches):
            passed_on = visit.passed_on.pop(number, None)
            if passed_on is not None:
                given = [
                    _Start(autograd.edge(child, index), child, grad)
                    for (_, child, _, index), grad in zip(edges, passed_on)
                    if grad is not None
                ]
                if len(given) == len(passed_on) or autograd.is_custom_function(node):
                    del visit.arrived[number]
                    if any(autograd.is_custom_function(start.node) for start in given):
                        self._held.append(node)
                    found += given
                    continue
            for at, grad in enumerate(visit.arrived.get(number, ())):
                if grad is not None:
                    found.append(_Start(autograd.edge(node, at), node, grad))
        return found

    def _path(self, roots: Sequence[autograd.Node]) -> tuple[_Path, list[Parameter]]:
        """The input path, and the weights that rule 8 makes inputs of it."""
        early: list[Parameter] = []
        late: Sequence[Parameter] = self._trained
        while True:
            path = _Path(roots, (*self._inputs, *early), late)
            unreachable = path.unreachable()
            if not unreachable:
                return path, early
            # Each of these leads to a weight, as edges off the path do; so there are fewer each time.
            more = {id(weight): weight for weight in late if autograd.leaf_ids([weight]) & unreachable}
            early += more.values()
            late = [weight for weight in late if id(weight) not in more]

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


class GradFunction:
    """The gradients of one recorded forward, as `forward_and_gradfn` returns them.

    Call it for both at once, or `compute_input_grad` and then `compute_weight_grad`. Gradients of the weights are
    returned, and added up where MindSpore keeps them as well. All share one replay of each checkpointed block.
    """

    def __init__(
        self, split: SplitBackward, session: RecomputeSession, weights: Sequence[Parameter], places: Any
    ) -> None:
        self._split = split
        self._session = session
        self._weights = tuple(weights)
        self._places = places
        self._next = "compute_input_grad or a full call"

    def __call__(self, sens: Any = None) -> tuple[Any, Gradients]:
        """Gradients of the inputs and of the weights. The graph is gone afterwards.

        Args:
            sens: gradients of the outputs, a nest like them; None means ones.

        Errors:
            ValueError: a gradient does not fit its output.
            RuntimeError: the gradients have been asked for before.
        """
        with self._step("compute_input_grad or a full call", "nothing more", retain=False):
            input_grads, weight_grads = self._split.full(self._split.ones() if sens is None else sens)
        return self._placed(input_grads), self._added(weight_grads)

    def compute_input_grad(self, sens: Any = None) -> Any:
        """Gradients of the inputs only. Arguments and errors as in the full call."""
        with self._step("compute_input_grad or a full call", "compute_weight_grad", retain=False):
            return self._placed(self._split.inputs(self._split.ones() if sens is None else sens))

    def compute_weight_grad(self, keep_graph: bool = False) -> Gradients:
        """Gradients of the weights, after `compute_input_grad`. None for a weight that is not reached.

        Args:
            keep_graph: whether they may be asked for again.
        """
        with self._step("compute_weight_grad", "compute_weight_grad" if keep_graph else "nothing more", keep_graph):
            grads = self._split.weights(keep_graph)
        return self._added(grads)

    @contextlib.contextmanager
    def _step(self, step: str, following: str, retain: bool) -> Iterator[None]:
        """Run a step in its turn; after the last one, or one that fails, everything is let go."""
        if self._next != step:
            raise RuntimeError(f"{step} was asked for, but {self._next} comes next; run the forward again.")
        self._next = "nothing more"
        try:
            with self._session.reading(retain):
                yield
            self._next = following
        finally:
            if self._next == "nothing more":
                self._split.release()
                self._session.clear()

    def _placed(self, grads: Gradients) -> Any:
        found = iter(grads)
        return map_leaves(lambda wanted: next(found) if wanted else None, self._places)

    def _added(self, grads: Gradients) -> Gradients:
        for weight, grad in {id(weight): (weight, grad) for weight, grad in zip(self._weights, grads)}.values():
            if grad is not None:
                autograd.add_gradient(weight, grad)
        return grads


def forward_and_gradfn(
    fn: Callable,
    *inputs: Any,
    weights: Sequence[Parameter] | None = None,
    has_aux: bool = False,
    grad_position: int | Sequence[int] = -1,
    **kwargs: Any,
) -> tuple[Any, GradFunction]:
    """Run `fn(*inputs, **kwargs)`; return its result and what computes the gradients, whole or split.

    Args:
        fn: a Cell or function.
        inputs: its positional arguments, nests of tensors and constants.
        weights: parameters that get gradients. None: the trainable parameters of a Cell, none for a function.
        has_aux: only the first output is differentiated, the others are passed on.
        grad_position: of which inputs gradients are wanted: -1 of all, else one position or several. The gradients come
            in the same form: those of one position bare, else a tuple. Tensors that are not floating point have None.
        kwargs: keyword arguments of `fn`; they get no gradients.

    Errors:
        ValueError: there is no input at `grad_position`, or `has_aux` and `fn` returns one output only.
    """
    positions = range(len(inputs)) if grad_position == -1 else grad_position
    wanted = (positions,) if isinstance(positions, int) else tuple(positions)
    if any(not 0 <= position < len(inputs) for position in wanted):
        raise ValueError(f"grad_position is {grad_position}, but there are {len(inputs)} inputs, counted from 0.")
    if weights is None:
        weights = fn.trainable_params() if isinstance(fn, Cell) else ()
    weights = tuple(weights)
    own = [map_leaves(_own, value) if position in wanted else value for position, value in enumerate(inputs)]
    places = tuple(map_leaves(_is_differentiable, own[position]) for position in wanted)
    input_leaves = [leaf for position in wanted for leaf in leaves(own[position]) if _is_differentiable(leaf)]
    session = RecomputeSession("forward_and_gradfn")
    with session.collecting(), autograd.recording():
        outputs = fn(*own, **kwargs)
    if has_aux and not (isinstance(outputs, (tuple, list)) and outputs):
        raise ValueError(
            f"has_aux says that fn returns an output and more, in a tuple, but it returned a {type(outputs).__name__}; "
            "return both, or leave has_aux out."
        )
    split = SplitBackward(outputs[0] if has_aux else outputs, input_leaves, weights)
    result = map_leaves(lambda leaf: autograd.detached(leaf) if isinstance(leaf, Tensor) else leaf, outputs)
    return result, GradFunction(split, session, weights, places[0] if isinstance(positions, int) else places)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _own(leaf: Any) -> Any:
    """A differentiable tensor as a leaf of a graph of its own."""
    return autograd.detached(leaf, needs_grad=True) if _is_differentiable(leaf) else leaf
