"""Host time of an excluded region: one call in the forward, one call in the replay, one saved tensor, one whole step.

Tensors are 4 x 4, so nearly all of the time is the host's. Modes: the region unwrapped in a block without checkpoint
(`none`), the same in a checkpointed block (`full`), under a bare `saved_tensors_hooks` that passes tensors on
(`keep-inputs`), and excluded (`exclude`).

The processes of all modes live at the same time and measure in turn. A figure is the median over the rounds, its
`_min` the smallest. A ratio is the median of the ratios of the rounds, as a busy machine slows all modes of a round.

- forward_us, replay_us: one call of a matmul region, within its block.
- pack_us: what one more saved tensor adds to a call, from a region that saves its input 1 and 65 times.
- step_us: forward and backward of the block RMSNorm -> matmul -> square -> mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import report
from mindspore import Parameter, Tensor, mint, ops, saved_tensors_hooks, value_and_grad
from modes import MODES, checkpointed, exclude

from hyper_parallel.core.activation_checkpoint import is_recomputing
from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.mindspore.environment import prepare_process

FIGURES = ("forward_us", "replay_us", "pack_us", "step_us")
CALLS, STEPS = 20, 40
FEW, MANY = 1, 65

Region = Callable[[Tensor], Tensor]


class SavesRepeatedly(Function):
    """Saves its input a given number of times."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(*([tensor] * times))
        return mint.mul(tensor, 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return mint.mul(grad, 0.5), None


class BareHooks:
    """A region of one output that keeps what it saves; a replay gets the cached output."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._outputs: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if is_recomputing():
            output = self._outputs.pop(0)
            output.requires_grad_()
            return output
        with saved_tensors_hooks(_pass_on, _give_back):
            output = self._region(tensor)
        self._outputs.append(ops.stop_gradient(output))
        return output


def _pass_on(tensor: Tensor) -> Tensor:
    return tensor.data


def _give_back(tensor: Tensor) -> Tensor:
    return tensor


def excluded(mode: str, region: Region) -> Region:
    """Treat a region as the mode says; here `keep-inputs` stands for nothing but the hooks."""
    return BareHooks(region) if mode == "keep-inputs" else exclude(mode, region)


class Stopwatch:
    """Times of single calls in microseconds, those of forwards apart from those of replays."""

    def __init__(self) -> None:
        self.forward: list[float] = []
        self.replay: list[float] = []

    def around(self, region: Region) -> Region:
        """Return the region with every call of it timed."""

        def timed(tensor: Tensor) -> Tensor:
            start = time.perf_counter()
            output = region(tensor)
            duration = (time.perf_counter() - start) * 1e6
            (self.replay if is_recomputing() else self.forward).append(duration)
            return output

        return timed


class Bench:
    """The programs of one mode, measured as often as asked for."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._tensor = Tensor(np.random.default_rng(0).standard_normal((4, 4), np.float32))
        self._weight = Parameter(Tensor(np.random.default_rng(1).standard_normal((4, 4), np.float32)), name="weight")
        self._step = value_and_grad(self._block(excluded(mode, self._multiply), self._normed), 0, [self._weight])

    def measure(self) -> dict[str, float]:
        """Measure every figure once."""
        matmul = self._calls(self._multiply)
        few, many = (self._calls(self._saving(times)) for times in (FEW, MANY))
        figures = {
            "forward_us": statistics.median(matmul.forward),
            "pack_us": (statistics.median(many.forward) - statistics.median(few.forward)) / (MANY - FEW),
            "step_us": self._steps(),
        }
        if matmul.replay:
            figures["replay_us"] = statistics.median(matmul.replay)
        return figures

    def _calls(self, region: Region) -> Stopwatch:
        """Time `CALLS` calls of the region in one block, each with an input that the replay makes again."""
        stopwatch = Stopwatch()
        timed = stopwatch.around(excluded(self._mode, region))

        def total(tensor: Tensor) -> Tensor:
            parts = [mint.mean(timed(mint.mul(tensor, 1.0 + call))) for call in range(CALLS)]
            return ops.addn(parts)

        value_and_grad(checkpointed(self._mode, total), 0)(self._tensor)
        return stopwatch

    def _steps(self) -> float:
        durations = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self._step(self._tensor)
            durations.append((time.perf_counter() - start) * 1e6)
        return statistics.median(durations)

    def _block(self, region: Region, before: Region) -> Callable:
        return checkpointed(self._mode, lambda tensor: mint.mean(mint.square(region(before(tensor)))))

    def _multiply(self, tensor: Tensor) -> Tensor:
        return mint.matmul(tensor, self._weight)

    @staticmethod
    def _normed(tensor: Tensor) -> Tensor:
        return tensor * mint.rsqrt(mint.mean(mint.square(tensor), -1, True) + 1e-6)

    @staticmethod
    def _saving(times: int) -> Region:
        return lambda tensor: SavesRepeatedly.apply(tensor, times)


def measure_here(mode: str) -> None:
    """In the child: serve measurements, after a first one that warms everything up."""
    prepare_process()
    bench = Bench(mode)
    bench.measure()
    report.serve(bench.measure)


def compare(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """What the figures of the modes are to each other, round by round."""

    def ratio(figure: str, mode: str, other: str) -> float:
        pairs = zip(rounds[mode], rounds[other])
        return round(statistics.median(mine[figure] / theirs[figure] for mine, theirs in pairs), 3)

    pack = zip(rounds["exclude"], rounds["keep-inputs"])
    return {
        "forward, exclude / bare hooks": ratio("forward_us", "exclude", "keep-inputs"),
        "forward, exclude / unwrapped": ratio("forward_us", "exclude", "none"),
        "replay, exclude / full recompute": ratio("replay_us", "exclude", "full"),
        "step, exclude / full recompute": ratio("step_us", "exclude", "full"),
        "pack, exclude - bare hooks, us": round(
            statistics.median(mine["pack_us"] - theirs["pack_us"] for mine, theirs in pack), 3
        ),
    }


def main() -> None:
    """Measure all modes in turn and compare them."""
    parser = report.bench_parser(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="how often each mode is measured (default: %(default)s)")
    options = parser.parse_args()
    if options.only:
        measure_here(options.only[1])
        return
    with ExitStack() as running:
        children = [running.enter_context(report.ModeProcess(__file__, "matmul", mode)) for mode in MODES]
        turns = [[child.measure() for child in children] for _ in range(options.rounds)]
    rounds = {mode: [turn[index] for turn in turns] for index, mode in enumerate(MODES)}
    rows = [{"case": "matmul", "mode": mode, **summary(rounds[mode])} for mode in MODES]
    report.show_table("Host time, microseconds (median of rounds)", rows, ("case", "mode", *FIGURES))
    ratios = compare(rounds)
    for name, value in ratios.items():
        print(f"{name}: {value}")
    if options.json:
        report.write_json(options.json, rows, ratios=ratios, rounds=options.rounds)
    if options.plot:
        report.plot_bars(options.plot, rows, {figure: figure for figure in FIGURES})


def summary(measured: list[dict[str, float]]) -> dict[str, float]:
    """Median and minimum of each figure over the rounds."""
    figures: dict[str, float] = {}
    for figure in FIGURES:
        values = [turn[figure] for turn in measured if figure in turn]
        if values:
            figures[figure] = round(statistics.median(values), 3)
            figures[f"{figure}_min"] = round(min(values), 3)
    return figures


if __name__ == "__main__":
    main()
