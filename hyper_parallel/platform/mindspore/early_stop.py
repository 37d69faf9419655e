"""How a replay ends early: in front of the first expensive operator that nobody waits for.

1. A replay has done its work when it has made the last tensor that an operator still waits for. MindSpore's own early
   stop then raises inside a pack hook, which loses a tensor and the caller's random state at each replay. Here the next
   expensive operator ends the replay instead of running, seen through a dispatch mode.
2. The last matmul of a block saves its operands, so nobody waits for its result, but for what it saves. `Endings`
   remembers of earlier replays of the same wrapper which operands the operator at this place saves. Then the operands
   are handed to who waits for them, and the matmul does not run.
3. What is remembered was seen: the saved tensors were those operands, by storage, shape and type, that a product needs
   for its gradient, and nothing else. A place is the operator, how many tensors were saved before it and in the whole
   forward, and what each operand is. At a place that was not seen the operator runs, and is looked at; at one that was
   seen in two ways it always runs.
4. The operands are handed over through the hook that the operator itself would use. Where that is not the replay's own,
   but one that the block's code has entered, nothing that is waited for was handed over, and the operator runs.
5. A dispatch mode costs host time at each operator. So it is entered when no more tensors are waited for than one
   operator saves, and not where a replay of the same wrapper was seen to meet no expensive operator from there on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspore import Tensor
from mindspore.common.recompute import _StopRecomputationError
from mindspore.graph.api import _pynative_executor
from mindspore.utils import MsDispatchMode

from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.recompute_state import ReplayFrame, current_frame

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.common.recompute._RecomputeHandle.placeholders",
    "mindspore.common.recompute._RecomputeHandle.recomputed_data",
    "mindspore.common.recompute._StopRecomputationError",
    "mindspore.graph.api._pynative_executor",
    "mindspore.Tensor._requires_grad",
    "mindspore.utils.MsDispatchMode",
)

_STOPS_AT = frozenset({"BatchMatMul", "BatchMatMulExt", "Dense", "MatMul", "MatMulExt"})
"""Operators in front of which a replay ends. Most operators of one input have made their result's object by then, and
MindSpore never frees it when the call does not come to pass; they are cheap, so they run."""

_OF_PACKING = "StopGradient"
"""What MindSpore calls on a tensor that an operator saves."""

_SAVED_BY_ONE = 2
"""How many tensors one of `_STOPS_AT` saves at most."""


class _Place(NamedTuple):
    """Where in a replay an operator is called, and with what (rule 3)."""

    operator: str
    made: int
    saved_in_all: int
    operands: tuple


class Endings:
    """Which operands the last operators of a wrapper's block save. One for all calls of the wrapper."""

    def __init__(self) -> None:
        self._operands: dict[_Place, tuple[int, ...]] = {}
        self._without_expensive: set[tuple[int, int, int]] = set()

    def operands_saved(self, place: _Place) -> tuple[int, ...]:
        """Return which operand each tensor is that is saved at `place`; nothing if that is not certain."""
        return self._operands.get(place, ())

    def learn(self, place: _Place, operands: tuple[int, ...]) -> None:
        """Remember what was seen at `place`."""
        if self._operands.setdefault(place, operands) != operands:
            self._operands[place] = ()

    def may_end_early(self, start: tuple[int, int, int]) -> bool:
        """Return whether expensive operators may come from `start` on."""
        return start not in self._without_expensive

    def learn_without_expensive(self, start: tuple[int, int, int]) -> None:
        """Remember that none came."""
        self._without_expensive.add(start)


class Stopper(MsDispatchMode):
    """While entered, the next expensive operator on this thread that nobody waits for ends the replay of `frame`."""

    def __init__(self, frame: ReplayFrame, start: tuple[int, int, int]) -> None:
        super().__init__()
        self._frame = frame
        self._start = start
        self._met_expensive = False
        self._ran: tuple[_Place, tuple] | None = None

    def __ms_dispatch__(self, func: Any, args: tuple, kwargs: dict | None = None) -> Any:
        if func.name != _OF_PACKING and current_frame.get() is self._frame:  # an operator of the block itself
            self._learn_saved()
            if func.name in _STOPS_AT:
                self._met_expensive = True
                self._stop_if_not_needed(func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def learn(self) -> None:
        """Remember what a replay that raised no error has shown."""
        self._learn_saved()
        if not self._met_expensive:
            self._frame.handle.endings.learn_without_expensive(self._start)

    def _learn_saved(self) -> None:
        """Look at what the last expensive operator has saved, which it does after it was dispatched."""
        if self._ran is None:
            return
        frame, (place, args), self._ran = self._frame, self._ran, None
        holders = [holder() for holder in frame.handle.placeholders[place.made : frame.made]]
        # What was saved does not tell which operand is saved first where both are one.
        if None not in holders and not _same(*args[:2]):
            made = frame.handle.recomputed_data[frame.key]
            frame.handle.endings.learn(place, _operands_among([made.get(holder) for holder in holders], args))

    def _stop_if_not_needed(self, func: Any, args: tuple, kwargs: dict | None) -> None:
        """End the replay if nothing is waited for, or nothing but the operands."""
        frame = self._frame
        stop_if_satisfied(frame)
        if kwargs or not _pynative_executor.requires_grad() or not all(isinstance(arg, Tensor) for arg in args[:2]):
            return
        place = _Place(func.name, frame.made, len(frame.handle.placeholders), tuple(map(_describe, args)))
        saved = frame.handle.endings.operands_saved(place)
        waited_for = frame.needed - frame.made
        if waited_for <= len(saved) and frame.satisfied_but_for_tensors():
            _Save.apply(saved[:waited_for], *args[:2])
            stop_if_satisfied(frame)  # not where a hook of the user's own has saved them (rule 4)
        self._ran = place, args


class _Save(Function):
    """Saves operands as the operator that multiplies them would, and multiplies nothing. Never differentiated."""

    @staticmethod
    def forward(ctx: Any, saved: tuple[int, ...], *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*[operands[at] for at in saved])
        return operands[0].data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return None, grad, None


def stop_near_the_end(frame: ReplayFrame) -> None:
    """Let an operator end the replay once little enough is still waited for (rule 5)."""
    if frame.ended:
        raise _StopRecomputationError  # the block has caught the one that ended its replay
    if frame.stopper is None and frame.needed - frame.made <= _SAVED_BY_ONE and frame.satisfied_but_for_tensors():
        start = frame.made, frame.needed, frame.next_record
        if frame.handle.endings.may_end_early(start):
            frame.stopper = Stopper(frame, start)
            frame.stopper.__enter__()


def stop_if_satisfied(frame: ReplayFrame) -> None:
    """End the replay here if nothing that is still waited for remains to be made."""
    if frame.satisfied():
        frame.ended = True
        raise _StopRecomputationError


def _describe(operand: Any) -> Any:
    if not isinstance(operand, Tensor):
        return type(operand)
    return operand.dtype, operand.ndim, operand.is_contiguous(), operand._requires_grad


def _operands_among(saved: list[Tensor | None], args: tuple) -> tuple[int, ...]:
    """Return which operands were saved if these are what a product needs: each for the other's gradient; else nothing.

    More may have been saved before the next operator was called: by the operator, or by a user's function after it.
    """
    needed = tuple([at for at in (0, 1) if args[1 - at]._requires_grad])
    seen = len(saved) == len(needed) and all(map(_same, saved, [args[at] for at in needed]))
    return needed if seen else ()


def _same(saved: Tensor | None, arg: Any) -> bool:
    return (
        saved is not None
        and isinstance(arg, Tensor)
        and saved.data_ptr() == arg.data_ptr()
        and saved.shape == arg.shape
        and saved.dtype == arg.dtype
        and saved.stride() == arg.stride()
    )
