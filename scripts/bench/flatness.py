"""Does anything grow over many steps? Tensor objects, Python objects and resident memory, over 1,000 steps.

The model has four blocks, RMSNorm -> matmul (excluded) -> tanh -> matmul, each checkpointed. Every other step pre-fires
its replays in a session and splits the backward in two. Modes: no checkpoint (`none`), MindSpore's own recompute
(`full`), and the first matmul excluded (`exclude`).

Cases: `clean`, and `errors`, in which every tenth step raises in a block: in turn in the forward, in the replay, and
inside the excluded region.

MindSpore itself loses some resident memory with every operator on CPU, so only the growth beside that of its own
recompute means something. Python objects must not grow at all. A backward must leave the random state as it was.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
import psutil
import report
from mindspore import Parameter, Tensor, mint, nn, ops
from modes import exclude

from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore.autograd import recording, run_backward
from hyper_parallel.platform.mindspore.environment import prepare_process
from hyper_parallel.platform.mindspore.memory import live_tensor_count

MODES = ("none", "full", "exclude")
CASES = ("clean", "errors")
BLOCKS, ROWS, WIDTH = 4, 8, 16
WARM_UP, ERROR_EVERY = 100, 10
FIGURES = {"tensors": "Tensor objects", "objects": "Python objects", "resident_kib_per_step": "resident KiB a step"}


class PlannedError(Exception):
    """What a step of the `errors` case raises."""


class Trouble:
    """Where the step is, and where it is to raise: in the `forward`, in the `replay`, in the `region`, or nowhere."""

    def __init__(self) -> None:
        self.phase = "forward"
        self.place = ""

    def visit(self, place: str) -> None:
        if self.place == place:
            raise PlannedError(place)


class Block(nn.Cell):
    """RMSNorm -> matmul (excluded) -> tanh -> matmul."""

    def __init__(self, index: int, trouble: Trouble, mode: str) -> None:
        super().__init__()
        values = np.random.default_rng(index)
        self.first = Parameter(Tensor(values.standard_normal((WIDTH, WIDTH), np.float32)), name=f"first{index}")
        self.second = Parameter(Tensor(values.standard_normal((WIDTH, WIDTH), np.float32)), name=f"second{index}")
        self.trouble = trouble
        self.region = exclude(mode, self.project)

    def project(self, hidden: Tensor) -> Tensor:
        self.trouble.visit("region")
        return mint.matmul(hidden, self.first)

    def construct(self, tokens: Tensor) -> Tensor:
        hidden = tokens * mint.rsqrt(mint.mean(mint.square(tokens), -1, True) + 1e-6)
        mixed = mint.tanh(self.region(hidden))
        self.trouble.visit(self.trouble.phase)  # before the last matmul, which a replay need not run
        return mint.matmul(mixed, self.second)


def checkpointed(mode: str, block: Block) -> Callable:
    """Checkpoint a block as the mode says. `full` is MindSpore's own, without the early stop, which loses Tensors."""
    if mode == "full":
        return lambda tokens: mindspore.recompute(block, tokens, use_reentrant=False, early_stop=False)
    return block if mode == "none" else checkpoint_wrapper(block)


class Training:
    """The model of one mode, and its steps."""

    def __init__(self, case: str, mode: str) -> None:
        self._with_errors = case == "errors"
        self._trouble = Trouble()
        blocks = [Block(index, self._trouble, mode) for index in range(BLOCKS)]
        self._blocks = [checkpointed(mode, block) for block in blocks]
        self._weights = [weight for block in blocks for weight in (block.first, block.second)]
        self._tokens = Tensor(np.random.default_rng(9).standard_normal((ROWS, WIDTH), np.float32))
        self._tokens.requires_grad_()
        self._platform = get_platform()
        self.errors = 0

    def run(self, steps: int) -> None:
        for step in range(steps):
            fails = self._with_errors and step % ERROR_EVERY == 0
            places = ("forward", "replay", "region")
            self._trouble.place = places[step // ERROR_EVERY % len(places)] if fails else ""
            state = mindspore.get_rng_state().asnumpy().tobytes()
            try:
                with recording():
                    self._step(("step", step) if step % 2 else None)
            except PlannedError:
                self.errors += 1
            if mindspore.get_rng_state().asnumpy().tobytes() != state:
                raise AssertionError(f"step {step} left another random state behind")

    def _step(self, session: Any) -> None:
        self._trouble.phase = "forward"
        with self._platform.recompute_handle_collector_ctx() as handles:
            value = self._tokens
            for block in self._blocks:
                value = block(value)
            loss = mint.mean(mint.square(value))
        self._trouble.phase = "replay"
        if session is None:
            self._backward(loss, [self._tokens, *self._weights], keep_graph=False)
            return
        try:
            with self._platform.recompute_session_ctx(session, retain_on_unpack=True):
                for handle in handles:
                    self._platform.recompute_handle(handle, session)
                self._backward(loss, [self._tokens], keep_graph=True)
            with self._platform.recompute_session_ctx(session, retain_on_unpack=False):
                self._backward(loss, self._weights, keep_graph=False)
        finally:
            self._platform.clear_recompute_session(session)

    @staticmethod
    def _backward(loss: Tensor, wanted: Sequence[Tensor], keep_graph: bool) -> None:
        run_backward([loss], [ops.ones_like(loss)], wanted, keep_graph)


def object_counts() -> Counter:
    """Python's objects by type, after a collection."""
    gc.collect()
    return Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())


def measure(case: str, mode: str, steps: int) -> dict[str, Any]:
    """Measure one mode in this process: what there is more of after `steps` steps than before them."""
    prepare_process()
    training = Training(case, mode)
    training.run(WARM_UP)
    training.errors = 0
    process = psutil.Process()
    objects = object_counts()
    # Counted twice, so that the counter itself is among the counted.
    objects = object_counts()
    tensors, resident = live_tensor_count(), process.memory_info().rss
    training.run(steps)
    resident = process.memory_info().rss - resident
    more = object_counts()
    more.subtract(objects)
    return {
        "tensors": live_tensor_count() - tensors,
        "objects": sum(more.values()),
        "grown": {name: count for name, count in more.items() if count > 0},
        "resident_kib_per_step": round(resident / 1024 / steps, 2),
        "errors": training.errors,
    }


def main() -> None:
    """Measure every mode of every case, each in its own process."""
    parser = report.bench_parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps after the warm-up (default: %(default)s)")
    options = parser.parse_args()
    if options.only:
        report.serve(lambda: measure(*options.only, options.steps))
        return
    rows = []
    for case in options.case or CASES:
        for mode in options.mode or MODES:
            with report.ModeProcess(__file__, case, mode, ("--steps", str(options.steps))) as child:
                rows.append({"case": case, "mode": mode, **child.measure()})
    report.show_table(f"Growth over {options.steps} steps", rows, ("case", "mode", *FIGURES, "errors"))
    growth = {(row["case"], row["mode"]): row["resident_kib_per_step"] for row in rows}
    ratios = {
        case: round(growth[case, "exclude"] / growth[case, "full"], 3)
        for case in options.case or CASES
        if {(case, "exclude"), (case, "full")} <= growth.keys()
    }
    print(f"resident growth, exclude / MindSpore's own recompute: {ratios}")
    if options.json:
        report.write_json(options.json, rows, steps=options.steps, resident_ratio=ratios)
    if options.plot:
        report.plot_bars(options.plot, rows, FIGURES)


if __name__ == "__main__":
    main()
