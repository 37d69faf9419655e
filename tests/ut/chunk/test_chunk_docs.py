"""The scheduler in docs/chunk.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.chunk import ChunkState

PAGE = Path(__file__).resolve().parents[3] / "docs" / "chunk.md"


def tensor(seed: int) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal((16, 8)).astype(np.float32))


def test_the_scheduler_of_the_page_stays_in_its_budget_and_gives_the_plain_gradients() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page: dict[str, Any] = {}
    exec(code, page)
    inputs, grads = [tensor(n) for n in range(4)], [tensor(10 + n) for n in range(4)]
    expected = []
    for x, grad in zip(inputs, grads):
        x.requires_grad_()
        with autograd.recording():
            output = page["stage"](x)
        expected.append(autograd.run_backward([output], [grad], [x, *page["weights"]], keep_graph=False))
    for number, x in enumerate(inputs):
        page["forward"](number, x)
    page["idle"](2)
    held = []
    for number, grad in enumerate(grads):
        np.testing.assert_array_equal(page["dx"](number, grad).asnumpy(), expected[number][0].asnumpy())
        held.append(sum(chunk.held_bytes() for chunk in page["pending"]))
    # Three blocks, each with its input and one gradient that dw reads: 6 times 512 bytes, so one chunk may wait.
    assert held == [3072] * 4
    (waiting,) = page["pending"]
    page["dw"]()
    assert waiting.state is ChunkState.RELEASED and page["pending"] == []
    for at, weight in enumerate(page["weights"], start=1):
        total = sum(one[at].asnumpy().astype(np.float64) for one in expected)
        np.testing.assert_allclose(autograd.gradient_of(weight).asnumpy(), total, rtol=1e-5, atol=1e-6)
