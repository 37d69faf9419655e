"""The ways to treat a block and its expensive region that the benches compare.

none: no checkpoint. full: the whole block is recomputed. keep-inputs: the region is excluded and what it saves for its
backward is kept alive. exclude: the region is excluded and takes its saved inputs from the replay.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspore import Tensor

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper

MODES = ("none", "full", "keep-inputs", "exclude")

Region = Callable[..., Tensor]


def exclude(mode: str, region: Region, save_output: bool = True) -> Region:
    """Treat an expensive region as the mode says."""
    if mode in ("none", "full"):
        return region
    return checkpoint_exclude_wrapper(region, save_output=save_output, keep_inputs=mode == "keep-inputs")


def checkpointed(mode: str, block: Callable) -> Callable:
    """Treat a block as the mode says."""
    return block if mode == "none" else checkpoint_wrapper(block)
