"""The ways to treat a block and its expensive region that the benches compare.

none: no checkpoint. full: the whole block is recomputed. keep-inputs: the region is excluded the plain way, under bare
`saved_tensors_hooks` that pass its saved tensors on. exclude: the region is excluded with `checkpoint_exclude_wrapper`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops, saved_tensors_hooks

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper, is_recomputing

MODES = ("none", "full", "keep-inputs", "exclude")

Region = Callable[..., Tensor]


class BareHooks:
    """A region of one output that keeps what it saves; a replay gets the cached output."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any) -> Tensor:
        if is_recomputing():
            return self._outputs.pop(0)
        with saved_tensors_hooks(_pass_on, _give_back):
            output = self._region(*args)
        self._outputs.append(ops.stop_gradient(output))
        return output


def _pass_on(tensor: Tensor) -> Tensor:
    return tensor.data


def _give_back(tensor: Tensor) -> Tensor:
    return tensor


def exclude(mode: str, region: Region, save_output: bool = True) -> Region:
    """Treat an expensive region as the mode says. The plain way always keeps the output."""
    if mode == "exclude":
        return checkpoint_exclude_wrapper(region, save_output=save_output)
    return BareHooks(region) if mode == "keep-inputs" else region


def checkpointed(mode: str, block: Callable) -> Callable:
    """Treat a block as the mode says."""
    return block if mode == "none" else checkpoint_wrapper(block)
