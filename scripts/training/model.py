"""A small mixture-of-experts transformer that predicts the next byte, cut into pipeline stages.

Every parameter carries the number of its layer in its name and is drawn from a generator seeded with that name, so a
model has the same values however it is cut.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Callable, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.platform.mindspore.operators import operators_for

__all__ = ["Block", "ExpertMatmul", "ModelShape", "StageModel", "layers_of_stage"]

Wrapper = Callable[[nn.Cell], Callable[..., Tensor]]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model; two models with equal shapes can load each other's checkpoints."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    experts: int = 4
    experts_per_token: int = 2
    expert_width: int = 128
    length: int = 64
    vocabulary: int = 256
    seed: int = 1


def layers_of_stage(layers: int, stage: int, stages: int) -> range:
    """Return the layers of one stage; when they do not divide evenly, the first stages hold one more.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"a stage needs at least one layer, but {layers} layers are cut into {stages} stages")
    share, rest = divmod(layers, stages)
    first = stage * share + min(stage, rest)
    return range(first, first + share + (1 if stage < rest else 0))


def _drawn(name: str, shape: tuple[int, ...], scale: float, seed: int) -> Parameter:
    """Return a parameter of normal values; the generator is seeded with its name."""
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    return Parameter(Tensor((generator.standard_normal(shape) * scale).astype(np.float32)), name=name)


def _ones(name: str, width: int) -> Parameter:
    return Parameter(Tensor(np.ones(width, np.float32)), name=name)


class ExpertMatmul(nn.Cell):
    """One matmul per expert: (experts, tokens, inner) times (experts, inner, outer). Counts how often it runs."""

    def __init__(self, name: str, experts: int, inner: int, outer: int, seed: int, dtype: ms.Type) -> None:
        super().__init__(auto_prefix=False)
        self.weight = _drawn(name, (experts, inner, outer), 1 / math.sqrt(inner), seed)
        self.dtype = dtype
        self.runs = 0

    def construct(self, x: Tensor) -> Tensor:
        """Multiply each expert's tokens by its weight."""
        self.runs += 1
        return ops.bmm(x, self.weight.astype(self.dtype))


class Attention(nn.Cell):
    """Causal attention with several heads."""

    def __init__(self, name: str, shape: ModelShape, target: str) -> None:
        super().__init__(auto_prefix=False)
        self.heads, self.width = shape.heads, shape.width
        self.operators = operators_for(target)
        scale = 1 / math.sqrt(shape.width)
        self.qkv = _drawn(f"{name}.qkv", (shape.width, 3 * shape.width), scale, shape.seed)
        self.out = _drawn(f"{name}.out", (shape.width, shape.width), scale, shape.seed)
        self.hidden = Tensor(np.triu(np.ones((shape.length, shape.length), np.bool_), 1))

    def construct(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        qkv = ops.matmul(x, self.qkv.astype(x.dtype)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (part.squeeze(0) for part in ops.split(qkv.permute(2, 0, 3, 1, 4), 1, 0))
        mixed = self.operators.causal_attention(query, key, value, self.hidden)
        return ops.matmul(mixed.permute(0, 2, 1, 3).reshape(batch, length, width), self.out.astype(x.dtype))


class MixtureOfExperts(nn.Cell):
    """Each token goes through its ``experts_per_token`` best experts; no token is dropped.

    ``exclude`` wraps the two expert matmuls: they are the costly part, so a replay of the block skips them.
    """

    def __init__(self, name: str, shape: ModelShape, target: str, exclude: Optional[Wrapper]) -> None:
        super().__init__(auto_prefix=False)
        self.experts, self.choices = shape.experts, shape.experts_per_token
        self.operators = operators_for(target)
        dtype, seed = self.operators.dtype, shape.seed
        self.router = _drawn(f"{name}.router", (shape.width, shape.experts), 1 / math.sqrt(shape.width), seed)
        self.matmul_up = ExpertMatmul(f"{name}.up", shape.experts, shape.width, 2 * shape.expert_width, seed, dtype)
        self.matmul_down = ExpertMatmul(f"{name}.down", shape.experts, shape.expert_width, shape.width, seed, dtype)
        self.regions = [exclude(cell) if exclude else cell for cell in (self.matmul_up, self.matmul_down)]

    def construct(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        up, down = self.regions
        tokens = x.reshape(-1, x.shape[-1])
        odds = ops.softmax(ops.matmul(tokens.astype(ms.float32), self.router), -1)
        weights, chosen = ops.topk(odds, self.choices)
        weights = weights / weights.sum(-1, keepdims=True)
        token_of_place, place_of_token = _places(chosen.asnumpy(), self.experts)
        padded = ops.cat((tokens, ops.zeros((1, tokens.shape[-1]), tokens.dtype)))
        outputs = down(self.operators.swiglu(up(ops.gather(padded, Tensor(token_of_place), 0))))
        outputs = ops.gather(outputs.reshape(-1, x.shape[-1]), Tensor(place_of_token), 0)
        return (outputs * weights.expand_dims(-1).astype(x.dtype)).sum(1).reshape(x.shape)


def _places(chosen: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Give every choice of every token a place in its expert's row.

    Returns the token of each place, (experts, places), where places without a token name the row after the last token;
    and the place of each choice, (tokens, choices). Tokens keep their order, so the same choices give the same places.
    """
    flat = chosen.reshape(-1)
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    places = int(counts.max())
    rank_in_row = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
    place_of_choice = np.empty(flat.size, np.int32)
    place_of_choice[order] = flat[order] * places + rank_in_row
    token_of_place = np.full(experts * places, chosen.shape[0], np.int32)
    token_of_place[place_of_choice] = np.arange(flat.size) // chosen.shape[1]
    return token_of_place.reshape(experts, places), place_of_choice.reshape(chosen.shape)


class Block(nn.Cell):
    """Attention, then experts, each behind a norm and a residual. Counts how often it runs."""

    def __init__(self, layer: int, shape: ModelShape, target: str, exclude: Optional[Wrapper] = None) -> None:
        super().__init__(auto_prefix=False)
        name = f"layer{layer}"
        self.operators = operators_for(target)
        self.attention_norm = _ones(f"{name}.attention_norm", shape.width)
        self.attention = Attention(f"{name}.attention", shape, target)
        self.experts_norm = _ones(f"{name}.experts_norm", shape.width)
        self.mixture = MixtureOfExperts(f"{name}.experts", shape, target, exclude)
        self.runs = 0

    def construct(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        self.runs += 1
        x = x + self.attention(self.operators.rms_norm(x, self.attention_norm.astype(x.dtype)))
        return x + self.mixture(self.operators.rms_norm(x, self.experts_norm.astype(x.dtype)))


class StageModel(nn.Cell):
    """One stage: the embedding on the first, its layers, and norm, head and loss on the last.

    Args:
        shape: the sizes of the whole model.
        stage: which stage this is.
        stages: into how many the model is cut; 1 gives the whole model.
        target: device target, ``CPU`` or ``Ascend``.
        checkpoint: wraps each block, so that its activations are recomputed; None keeps them.
        exclude: wraps each expert matmul inside the blocks; None leaves it to the replay.
    """

    def __init__(
        self,
        shape: ModelShape,
        stage: int = 0,
        stages: int = 1,
        target: str = "CPU",
        checkpoint: Optional[Wrapper] = None,
        exclude: Optional[Wrapper] = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.shape, self.stage, self.stages = shape, stage, stages
        self.operators = operators_for(target)
        layers = layers_of_stage(shape.layers, stage, stages)
        self.blocks = nn.CellList([Block(layer, shape, target, exclude) for layer in layers], auto_prefix=False)
        self.wrapped = [checkpoint(block) if checkpoint else block for block in self.blocks]
        if self.is_first:
            self.bytes = _drawn("embedding.bytes", (shape.vocabulary, shape.width), 0.5, shape.seed)
            self.positions = _drawn("embedding.positions", (shape.length, shape.width), 0.1, shape.seed)
        if self.is_last:
            self.norm = _ones("head.norm", shape.width)
            self.head = _drawn("head.weight", (shape.width, shape.vocabulary), 0.5 / math.sqrt(shape.width), shape.seed)

    @property
    def is_first(self) -> bool:
        """Whether bytes come in here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss goes out here."""
        return self.stage == self.stages - 1

    def hidden_states(self, x: Tensor) -> Tensor:
        """Map bytes (batch, length) or hidden states (batch, length, width) to this stage's hidden states."""
        if self.is_first:
            x = (ops.gather(self.bytes, x, 0) + self.positions).astype(self.operators.dtype)
        for block in self.wrapped:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Map the last layer's hidden states to (batch, length, vocabulary) in float32."""
        x = self.operators.rms_norm(x, self.norm.astype(x.dtype))
        return ops.matmul(x, self.head.astype(x.dtype)).astype(ms.float32)

    def construct(self, x: Tensor, labels: Optional[Tensor] = None) -> Tensor:
        """Return hidden states, or on the last stage the mean loss over ``labels`` (batch, length)."""
        x = self.hidden_states(x)
        if not self.is_last:
            return x
        logits = self.logits(x)
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    def runs(self) -> dict[str, int]:
        """Return how often each ``block`` and each ``excluded`` expert matmul of this stage has run so far, by name."""
        counts = {}
        for layer, block in zip(layers_of_stage(self.shape.layers, self.stage, self.stages), self.blocks):
            counts[f"block layer{layer}"] = block.runs
            counts[f"excluded layer{layer}.up"] = block.mixture.matmul_up.runs
            counts[f"excluded layer{layer}.down"] = block.mixture.matmul_down.runs
        return counts
