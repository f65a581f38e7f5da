"""The language-model head and its loss in one module, without ever holding all logits.

16,384 tokens x 151,936 vocabulary entries would be 4.6 GiB of bf16 logits and as much again for their gradient. So
tokens are taken in chunks, and because the gradient of a mean cross-entropy is known as soon as its logits are, the
gradients of hidden states and weight are computed in forward, chunk by chunk; backward only scales them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbench.workload.kernels import Kernels

CHUNK_TOKENS = 2048
"""Tokens per chunk: 0.6 GiB of bf16 logits at Qwen3's vocabulary."""


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, kernels: Kernels) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        scale = 1 / hidden.shape[0]
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = hidden[start : start + CHUNK_TOKENS]
            loss, grad = kernels.cross_entropy(F.linear(rows, weight), labels[start : start + CHUNK_TOKENS], scale)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[start : start + CHUNK_TOKENS])
            if grad_weight is not None:
                grad_weight += torch.mm(grad.T, rows)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        return None if hidden is None else hidden * grad, None if weight is None else weight * grad, None, None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, kernels: Kernels | None = None) -> Tensor:
    """Mean cross-entropy of hidden [T, H] x weight [V, H] against labels [T], as an fp32 scalar.

    Logits are a matrix product in the dtype of `hidden`; logsumexp and softmax are fp32; the weight's gradient is
    added up over chunks in fp32. Equal to `F.cross_entropy(F.linear(hidden, weight).float(), labels)`.
    """
    if not torch.is_grad_enabled():  # inside the function it never is, so it must be asked here
        hidden, weight = hidden.detach(), weight.detach()
    apply: Callable[..., Tensor] = _ChunkedLoss.apply
    return apply(hidden, weight, labels, kernels or Kernels())


class Head(nn.Module):
    """The output projection [V, H]; its forward is the loss, so that FSDP gathers the weight around it."""

    def __init__(self, vocab: int, hidden: int, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.kernels = kernels

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of hidden [T, H] against labels [T]."""
        return chunked_cross_entropy(hidden, self.weight, labels, self.kernels)
