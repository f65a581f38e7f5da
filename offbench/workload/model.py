"""Qwen3-MoE in plain PyTorch: the model whose training step is measured.

    embedding -> blocks (attention, routed experts) -> norm -> head with loss

Parameters carry the names and the order of `presets.ModelShape`. The model knows nothing of FSDP; `parallel.py` wraps
its modules. Tensors are [B, T, H] between blocks and [B x T, H] inside the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offbench.workload.activation_offload import ActivationOffload
from offbench.workload.experts import ExpertParallel, Experts, Plan, Router, assign, combine, dispatch
from offbench.workload.kernels import Kernels, rope_tables
from offbench.workload.loss import Head
from offbench.workload.presets import ModelShape


@dataclass(frozen=True)
class Options:
    """How the model computes; none of it changes what it computes, except the routing."""

    routing: Literal["balanced", "natural"] = "natural"
    kernels: Kernels = field(default_factory=Kernels)
    checkpoint: bool = False
    """Full activation checkpointing: a block keeps its input only and is computed again in backward."""
    ep: ExpertParallel | None = None
    """The ranks that share one set of experts; None: this rank holds all of them."""
    activation_offload: ActivationOffload | None = None
    """Where checkpointed block inputs go between forward and backward; None: they stay."""


class Embedding(nn.Module):
    """Token embedding [V, H]."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, H]."""
        return F.embedding(tokens, self.weight)


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., H]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    """Attention, then routed experts, each with a residual connection."""

    def __init__(self, shape: ModelShape, options: Options) -> None:
        super().__init__()
        self.shape, self.options = shape, options
        for name, size in shape.layer_tensors():
            if name != "router" and not name.startswith("experts."):
                self.register_parameter(name, nn.Parameter(torch.empty(size)))
        self.router = Router(shape.experts, shape.hidden, options.kernels)
        self.experts = Experts(shape, options.ep, options.kernels)
        self.expert_tokens: Tensor | None = None
        """[E] tokens this rank has sent to each expert so far. Recomputation counts them again: use ratios."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]; cos, sin [T, head_dim / 2]."""
        kernels = self.options.kernels
        residual, h = kernels.attend(
            x,
            self.attention_norm,
            self.q,
            self.k,
            self.v,
            self.o,
            self.q_norm,
            self.k_norm,
            self.moe_norm,
            cos,
            sin,
            self.shape.norm_eps,
        )
        return torch.ops.aten._unsafe_view(self._moe(residual, h), x.shape)  # type: ignore[no-any-return]

    def _moe(self, residual: Tensor, h: Tensor) -> Tensor:
        """residual + experts(h), both [T, H]."""
        kernels = self.options.kernels
        scores, ids = kernels.route(self.router(h), self.shape.top_k, self.options.routing == "balanced")
        order, places, ends, counts = assign(ids, self.shape.experts)
        self._count(counts)
        ep = self.options.ep
        plan = Plan(ends) if ep is None else ep.plan(counts, order.numel(), kernels)
        rows = self.experts(dispatch(h, order, places, kernels), plan)
        return combine(rows, scores, residual, order, places, kernels)

    @torch.no_grad()
    def _count(self, counts: Tensor) -> None:
        if self.expert_tokens is None:
            self.expert_tokens = torch.zeros(counts.shape, dtype=torch.int64, device=counts.device)
        self.expert_tokens += counts

    def take_expert_tokens(self) -> Tensor | None:
        """`expert_tokens` so far, which then start at zero again."""
        taken, self.expert_tokens = self.expert_tokens, None
        return taken


class Qwen3Moe(nn.Module):
    """The whole model with `layers` blocks; `forward` is the training loss."""

    def __init__(self, shape: ModelShape, layers: int, options: Options | None = None) -> None:
        super().__init__()
        self.shape, self.options = shape, options or Options()
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, self.options) for _ in range(layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.head = Head(shape.vocab, shape.hidden, self.options.kernels)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss, an fp32 scalar, of tokens [B, T] against labels [B, T]."""
        return self.head(self.norm(self.decode(tokens)).flatten(0, 1), labels.flatten())  # type: ignore[no-any-return]

    def decode(self, tokens: Tensor) -> Tensor:
        """The last block's output [B, T, H], before the final norm."""
        cos, sin = rope_tables(tokens.shape[1], self.shape.head_dim, self.shape.rope_theta, tokens.device)
        x: Tensor = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = self._run(index, partial(block, cos=cos, sin=sin), x)
        return x

    def _run(self, index: int, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.options.checkpoint:
            return block(x)
        offload = self.options.activation_offload
        with nullcontext() if offload is None else offload.saving(index):
            again: Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            return again
