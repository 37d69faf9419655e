"""What a value at a stage boundary looks like: its structure as text, its tensors, and how to put it together again.

Tensors keep their type. Types that the backend cannot send (bool, small integers) travel as int32. Numbers travel as
one int64 tensor per value, so they may differ between micro-batches. Text, None and the nest are part of the structure.
A structure also says which tensors need a gradient, so the receiver asks for those only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore import autograd

CAST_TO_INT32 = ("Bool", "Int8", "UInt8", "Int16")
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(ms.float32, ms.float16, ms.bfloat16, ms.float64),
        *(ms.int32, ms.int64, ms.bool_, ms.int8, ms.uint8, ms.int16),
    )
}


class TransportError(RuntimeError):
    """A value that cannot be sent, or that is not what the other side expects."""


def encode(value: Any) -> tuple[str, list[Tensor]]:
    """Take a value apart.

    Returns:
        the structure as text, and the tensors to send, numbers last.

    Raises:
        TransportError: something in the value cannot be sent.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    structure = json.dumps(_describe(value, tensors, numbers, "value"), separators=(",", ":"))
    if numbers:
        tensors.append(Tensor(np.asarray(numbers, np.int64)))
    return structure, tensors


def _describe(value: Any, tensors: list[Tensor], numbers: list[int], path: str) -> Any:
    """The structure of one part of a value; its tensors and numbers are added to the lists."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _describe_tensor(value, tensors, path)
    if isinstance(value, (bool, np.bool_)):
        numbers.append(int(value))
        return ["bool"]
    if isinstance(value, (int, np.integer)):
        if not -(2**63) <= int(value) < 2**63:
            raise TransportError(f"Expected an integer of at most 64 bits at {path}, got {value}.")
        numbers.append(int(value))
        return ["int"]
    if isinstance(value, (float, np.floating)):
        numbers.append(struct.unpack("<q", struct.pack("<d", float(value)))[0])
        return ["float"]
    if isinstance(value, str):
        return ["str", value]
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_describe(item, tensors, numbers, f"{path}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return [
            "dict",
            list(value),
            [_describe(item, tensors, numbers, f"{path}[{key!r}]") for key, item in value.items()],
        ]
    raise TransportError(
        "Expected tensors, numbers, text, None, and tuples, lists or dicts (with text keys) of them at a stage "
        f"boundary, got {type(value).__name__} at {path}; give the stage another output."
    )


def _describe_tensor(tensor: Tensor, tensors: list[Tensor], path: str) -> list:
    dtype = str(tensor.dtype)
    if dtype not in DTYPES:
        raise TransportError(f"Expected a tensor of type {', '.join(DTYPES)} at {path}, got {dtype}; cast it.")
    if tensor.size:
        tensors.append(tensor.astype(ms.int32) if dtype in CAST_TO_INT32 else tensor)
    return ["tensor", dtype, list(tensor.shape), autograd.requires_grad(tensor)]


class Blueprint:
    """How to put a value together again: what tensors to receive, and where they go."""

    def __init__(self, structure: str) -> None:
        self._tree = json.loads(structure)
        self.parts: list[tuple[tuple[int, ...], Any]] = []
        self._numbers = 0
        self._list_parts(self._tree)
        if self._numbers:
            self.parts.append(((self._numbers,), ms.int64))

    def _list_parts(self, node: Any) -> None:
        if node is None or node[0] == "str":
            return
        if node[0] == "tensor":
            shape = tuple(node[2])
            if 0 not in shape:
                self.parts.append((shape, ms.int32 if node[1] in CAST_TO_INT32 else DTYPES[node[1]]))
        elif node[0] in ("tuple", "list", "dict"):
            for item in node[-1]:
                self._list_parts(item)
        else:
            self._numbers += 1

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value, from its tensors in the order of `parts`."""
        numbers = iter(tensors[-1].asnumpy().tolist()) if self._numbers else iter(())
        return self._build(self._tree, iter(tensors), numbers)

    def _build(self, node: Any, tensors: Iterator[Tensor], numbers: Iterator[int]) -> Any:
        if node is None:
            return None
        kind = node[0]
        if kind == "tensor":
            return self._build_tensor(node, tensors)
        if kind == "str":
            return node[1]
        if kind == "float":
            return struct.unpack("<d", struct.pack("<q", next(numbers)))[0]
        if kind in ("int", "bool"):
            return bool(next(numbers)) if kind == "bool" else next(numbers)
        items = [self._build(item, tensors, numbers) for item in node[-1]]
        if kind == "dict":
            return dict(zip(node[1], items))
        return tuple(items) if kind == "tuple" else items

    @staticmethod
    def _build_tensor(node: list, tensors: Iterator[Tensor]) -> Tensor:
        _, name, shape, needs_grad = node
        dtype = DTYPES[name]
        tensor = mint.empty(tuple(shape), dtype=dtype) if 0 in shape else next(tensors)
        if tensor.dtype != dtype:
            tensor = tensor.astype(dtype)
        if needs_grad:
            tensor.requires_grad_()
        return tensor
