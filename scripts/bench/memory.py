"""Memory of one checkpointed block: what is alive between its forward and its backward, and the peak of the whole step.

Modes: no checkpoint, full recompute, expensive operators excluded with their saved inputs kept alive, and excluded with
those inputs taken from the replay. One activation is 4096 x 2048 float32, 32 MiB, if not asked otherwise.

Cases:
- norm-matmul: RMSNorm -> matmul (excluded) -> square -> mean; norm-matmul-view: the matmul's input reshaped first.
- moe-each, moe-whole, moe-chain: all-to-all -> constant scale -> grouped matmul -> square -> mean. Either the
  all-to-all and the grouped matmul are excluded alone, or all three as one region, or as three regions in a row of
  which only the last keeps its output.

CPU has no kernel for all-to-all within one process, nor for grouped matmul. Two custom functions stand in for them and
save what the real ones save: the exchange moves rows and saves nothing, the grouped matmul saves its input and weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import report
from mindspore import Parameter, Tensor, mint, value_and_grad
from modes import MODES, checkpointed, exclude

from hyper_parallel.platform.mindspore.autograd import Function
from hyper_parallel.platform.mindspore.environment import prepare_process
from hyper_parallel.platform.mindspore.memory import MIB, memory_meter

EXPERTS = 4
FIGURES = {"alive_mib": "alive between forward and backward, MiB", "peak_mib": "peak of the step, MiB"}

Exclude = Callable[..., Callable]


class Exchange(Function):
    """Stands in for the all-to-all among `EXPERTS` ranks: moves rows, saves nothing."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return _moved(tokens, EXPERTS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _moved(grad, grad.shape[0] // EXPERTS)


class GroupedMatmul(Function):
    """Stands in for the grouped matmul: multiplies each group of rows by its expert's weight, saves its input."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights)
        return mint.bmm(_grouped(tokens), weights).reshape(tokens.shape[0], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weights = ctx.saved_tensors
        grad = _grouped(grad)
        to_tokens = mint.bmm(grad, weights.swapaxes(1, 2)).reshape(tokens.shape)
        return to_tokens, mint.bmm(_grouped(tokens).swapaxes(1, 2), grad)


def _moved(rows: Tensor, groups: int) -> Tensor:
    blocks = rows.reshape(groups, rows.shape[0] // groups, -1).swapaxes(0, 1)
    return mint.mul(blocks, 1.0).reshape(rows.shape)


def _grouped(rows: Tensor) -> Tensor:
    return rows.reshape(EXPERTS, rows.shape[0] // EXPERTS, -1)


def norm_matmul(wrap: Exclude, width: int, reshaped: bool) -> tuple[Callable, list[Parameter]]:
    """RMSNorm -> matmul (excluded) -> square -> mean."""
    scale = Parameter(Tensor(np.ones(width, np.float32)), name="scale")
    weight = _weight((width, width))
    project = wrap(lambda hidden: mint.matmul(hidden, weight))

    def block(tokens: Tensor) -> Tensor:
        root = mint.rsqrt(mint.mean(mint.square(tokens), -1, True) + 1e-6)
        hidden = tokens * root * scale
        if reshaped:
            hidden = hidden.reshape(-1, 2, width).reshape(-1, width)
        return mint.mean(mint.square(project(hidden)))

    return block, [scale, weight]


def experts(wrap: Exclude, width: int, way: str) -> tuple[Callable, list[Parameter]]:
    """All-to-all -> constant scale -> grouped matmul -> square -> mean, excluded in one of three ways."""
    weights = _weight((EXPERTS, width, width))
    exchange, scale, multiply = Exchange.apply, lambda rows: rows * 0.5, lambda rows: GroupedMatmul.apply(rows, weights)
    if way == "chain":
        exchange, scale = wrap(exchange, save_output=False), wrap(scale, save_output=False)
    elif way == "each":
        exchange = wrap(exchange)
    if way != "whole":
        multiply = wrap(multiply)

    def region(tokens: Tensor) -> Tensor:
        return multiply(scale(exchange(tokens)))

    run = wrap(region) if way == "whole" else region
    return lambda tokens: mint.mean(mint.square(run(tokens))), [weights]


def _weight(shape: tuple[int, ...]) -> Parameter:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return Parameter(Tensor(values / np.float32(shape[-1] ** 0.5)), name="weight")


CASES: dict[str, Callable[[Exclude, int], tuple[Callable, list[Parameter]]]] = {
    "norm-matmul": lambda wrap, width: norm_matmul(wrap, width, reshaped=False),
    "norm-matmul-view": lambda wrap, width: norm_matmul(wrap, width, reshaped=True),
    "moe-each": lambda wrap, width: experts(wrap, width, "each"),
    "moe-whole": lambda wrap, width: experts(wrap, width, "whole"),
    "moe-chain": lambda wrap, width: experts(wrap, width, "chain"),
}


def measure(case: str, mode: str, rows: int, width: int) -> dict[str, Any]:
    """Measure one mode in this process, with gradients for the block's input and its weights."""
    prepare_process()
    meter = memory_meter()
    block, weights = CASES[case](partial(exclude, mode), width)
    forward = checkpointed(mode, block)
    tokens = Tensor(np.random.default_rng(1).standard_normal((rows, width), np.float32))
    alive: list[int] = []

    def looking(tokens: Tensor) -> Tensor:
        loss = forward(tokens)
        alive.append(meter.alive_bytes())
        return loss

    peak = _peak_after_warm_up(meter, value_and_grad(forward, 0, weights), tokens)
    before = meter.alive_bytes()
    value_and_grad(looking, 0, weights)(tokens)
    alive_mib = (alive[0] - before) / MIB
    return {
        "alive_mib": round(alive_mib, 2),
        "peak_mib": round(peak / MIB, 2),
        "alive_tensors": round(alive_mib * MIB / tokens.nbytes),
    }


def _peak_after_warm_up(meter: Any, step: Callable, tokens: Tensor) -> int:
    step(tokens)
    return meter.peak_bytes(lambda: step(tokens))


def main() -> None:
    """Measure every mode of every case, each in its own process."""
    parser = report.bench_parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="rows of the activation (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="its width (default: %(default)s)")
    options = parser.parse_args()
    if options.only:
        report.serve(lambda: measure(*options.only, options.rows, options.width))
        return
    size = ("--rows", str(options.rows), "--width", str(options.width))
    rows = []
    for case in options.case or CASES:
        for mode in options.mode or MODES:
            with report.ModeProcess(__file__, case, mode, size) as child:
                rows.append({"case": case, "mode": mode, **child.measure()})
    report.show_table("Memory of one block", rows, ("case", "mode", "alive_mib", "alive_tensors", "peak_mib"))
    if options.json:
        report.write_json(options.json, rows, activation_mib=options.rows * options.width * 4 / MIB)
    if options.plot:
        report.plot_bars(options.plot, rows, FIGURES)


if __name__ == "__main__":
    main()
