"""The operators of which a model wants one kind on CPU and another on Ascend, and the dtype it computes in.

CPU lacks kernels for most fused operators and for bfloat16, so the CPU column is made of plain ones. The Ascend column
uses the fused NPU operators. It is written from MindSpore's documentation and has not yet been run.
"""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import Tensor, ops

__all__ = ["AscendOperators", "CpuOperators", "operators_for"]


class CpuOperators:
    """Plain operators in float32."""

    dtype = ms.float32

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
        """Scale the last axis of ``x`` to a root mean square of one, times ``weight``."""
        return x * ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + epsilon) * weight

    @staticmethod
    def causal_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """Attend over earlier positions; tensors are (batch, heads, length, width), ``hidden`` is true where masked."""
        scores = ops.matmul(query, key.swapaxes(-1, -2)) * (1.0 / math.sqrt(query.shape[-1]))
        return ops.matmul(ops.softmax(ops.masked_fill(scores, hidden, -1e9), -1), value)

    @staticmethod
    def swiglu(x: Tensor) -> Tensor:
        """Gate one half of the last axis with the SiLU of the other."""
        gate, up = ops.split(x, x.shape[-1] // 2, -1)
        return ops.silu(gate) * up


class AscendOperators:
    """Fused NPU operators in bfloat16. Not yet run."""

    dtype = ms.bfloat16

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
        """Scale the last axis of ``x`` to a root mean square of one, times ``weight``."""
        return ops.rms_norm(x, weight, epsilon)[0]

    @staticmethod
    def causal_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        """Attend over earlier positions; tensors are (batch, heads, length, width), ``hidden`` is true where masked."""
        return ops.flash_attention_score(
            query,
            key,
            value,
            head_num=query.shape[1],
            attn_mask=hidden,
            scalar_value=1.0 / math.sqrt(query.shape[-1]),
            input_layout="BNSD",
        )

    @staticmethod
    def swiglu(x: Tensor) -> Tensor:
        """Gate one half of the last axis with the SiLU of the other."""
        return ops.swiglu(x, -1)


def operators_for(target: str) -> type:
    """Return the operators of a device target, ``CPU`` or ``Ascend``."""
    return {"CPU": CpuOperators, "Ascend": AscendOperators}[target]
