"""The arithmetic of a step as pure functions of tensors, run eagerly or compiled.

Note [What is compiled]. A block cannot be compiled whole without breaking apart: FSDP2's hooks on the router and the
experts, the host's read of the token counts and the all-to-all each end a graph. So the pieces between these points
are functions here, and `compiled()` compiles each once. Parameters come in as arguments, so all blocks share the same
compiled code and nothing is recompiled per layer. Grouped matrix products stay outside: they are one library call
that compilation cannot improve.

The functions that move rows are called from `autograd.Function`s, forward and backward, so their backwards are written
here too, as gathers: no atomic additions, hence no fp32 copies of row buffers and bitwise repeatable gradients. A bare
gather is not compiled: `index_select` already runs at the memory's speed, and costs the host less to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def rope_tables(tokens: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each [tokens, head_dim / 2] in fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angle = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of x [B, T, heads, D], computed in fp32, in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend(
    x: Tensor,
    attention_norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    moe_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The attention half of a block, x [B, T, H], up to the input of its experts.

    Returns x + attention(x) as [B x T, H], and its norm of the same shape.
    """
    batch, tokens, hidden = x.shape
    head = q_norm.shape[0]
    h = F.rms_norm(x, (hidden,), attention_norm, eps)
    queries = F.linear(h, q).view(batch, tokens, -1, head)
    keys = F.linear(h, k).view(batch, tokens, -1, head)
    values = F.linear(h, v).view(batch, tokens, -1, head)
    queries = rotate(F.rms_norm(queries, (head,), q_norm, eps), cos, sin)
    keys = rotate(F.rms_norm(keys, (head,), k_norm, eps), cos, sin)
    heads = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    x = x + F.linear(heads.transpose(1, 2).reshape(batch, tokens, -1), o)
    x = x.view(-1, hidden)
    return x, F.rms_norm(x, (hidden,), moe_norm, eps)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] x weight [E, H] in the weight's dtype: fp32, whatever the activations are."""
    return F.linear(x.to(weight.dtype), weight)


def route(logits: Tensor, top_k: int, balanced: bool) -> tuple[Tensor, Tensor]:
    """Scores and expert ids, both [T, K], from the router's logits [T, E].

    Scores are the softmax in fp32 at the chosen experts, scaled to sum to one. Balanced: choice i (flat over tokens)
    goes to expert i x stride mod E, so every expert gets T x K / E tokens when that is whole; with a stride near E / K
    and coprime to E a token's experts differ and lie E / K apart, one on each rank when ranks are K.
    """
    tokens, experts = logits.shape
    probabilities = logits.float().softmax(dim=-1)
    if balanced:
        choice = torch.arange(tokens * top_k, device=logits.device).view(tokens, top_k)
        ids = choice * balanced_stride(experts, top_k) % experts
        scores = probabilities.gather(1, ids)
    else:
        scores, ids = probabilities.topk(top_k, dim=-1)
    return scores / scores.sum(dim=-1, keepdim=True), ids


def balanced_stride(experts: int, top_k: int) -> int:
    """Smallest number from experts / top_k on that shares no factor with `experts`."""
    stride = max(1, experts // top_k)
    while gcd(stride, experts) != 1:
        stride += 1
    return stride


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) x up of gate_up [rows, 2 I], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate_up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """Write the gradients of `swiglu` for both halves, each [rows, I], from that of its result.

    The halves are given as two views of one buffer: concatenating them would read the inputs twice.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    upstream = grad.float()
    grad_gate.copy_(upstream * up * sigmoid * (1 + gate * (1 - sigmoid)))
    grad_up.copy_(upstream * gate * sigmoid)


def sort_runs(counts: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows came sorted by (source rank, local expert); experts want them by (local expert, source rank).

    counts [ranks, E]: rows of each pair. Returns index [most] with sorted = rows[index], its inverse, and ends [E]
    int32. Whole runs move and keep their order, so a row's shift is that of its run: no sort is needed. Only the
    first counts.sum() entries mean anything: with an upper bound the host need not know the sum yet.
    """
    arrived, wanted = counts.flatten().cumsum(0), counts.T.flatten().cumsum(0)
    first = arrived.view_as(counts) - counts
    shift = (wanted.view_as(counts.T) - counts.T).T - first
    row = torch.arange(most, device=counts.device)
    last = counts.numel() - 1
    index = row - shift.T.flatten()[torch.bucketize(row, wanted, right=True).clamp(max=last)]
    inverse = row + shift.flatten()[torch.bucketize(row, arrived, right=True).clamp(max=last)]
    return index, inverse, counts.sum(dim=0).cumsum(0).to(torch.int32)


def gather_sum(rows: Tensor, places: Tensor) -> Tensor:
    """Sum over k of rows[places[t, k]]: rows [R, H], places [T, K] -> [T, H], added in fp32, k ascending."""
    total = rows.index_select(0, places[:, 0]).float()
    for k in range(1, places.shape[1]):
        total = total + rows.index_select(0, places[:, k]).float()
    return total.to(rows.dtype)


def combine(rows: Tensor, scores: Tensor, places: Tensor, residual: Tensor) -> Tensor:
    """residual[t] + sum over k of scores[t, k] x rows[places[t, k]], in fp32, in the residual's dtype [T, H]."""
    total = residual.float()
    for k in range(places.shape[1]):
        total = total + scores[:, k, None] * rows.index_select(0, places[:, k]).float()
    return total.to(residual.dtype)


def combine_backward(
    grad: Tensor, rows: Tensor, scores: Tensor, order: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `combine` for rows [R, H] and scores [T, K], from that of its result [T, H].

    Both are computed row by row, so that one pass reads `rows` and writes its gradient. `order` [R] is the flat
    (token, choice) of each row, `places` its inverse.
    """
    upstream = grad.index_select(0, order // scores.shape[1]).float()
    grad_rows = (upstream * scores.flatten().index_select(0, order)[:, None]).to(rows.dtype)
    dots = (upstream * rows.float()).sum(dim=-1)
    return grad_rows, dots.index_select(0, places.flatten()).view_as(places)


def cross_entropy(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk (fp32 scalar) and scale x its gradient for the logits [N, V], in the logits' dtype."""
    wide = logits.float()
    lse = wide.logsumexp(dim=-1, keepdim=True)
    loss = (lse - wide.gather(1, labels[:, None])).sum()
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    target = (vocabulary == labels[:, None]).to(wide.dtype)
    return loss, (((wide - lse).exp() - target) * scale).to(logits.dtype)


class Kernels(NamedTuple):
    """The functions of this module as one set, eager or compiled."""

    attend: Callable[..., tuple[Tensor, Tensor]] = attend
    router_logits: Callable[[Tensor, Tensor], Tensor] = router_logits
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]] = route
    swiglu: Callable[[Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor, Tensor, Tensor], None] = swiglu_backward
    sort_runs: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]] = sort_runs
    gather_sum: Callable[[Tensor, Tensor], Tensor] = gather_sum
    combine: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = combine
    combine_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = combine_backward
    cross_entropy: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = cross_entropy


def compiled(backend: str = "inductor") -> Kernels:
    """The kernels, each compiled at its first call and shared by all layers."""
    kernels: Iterator[Any] = (torch.compile(kernel, backend=backend) for kernel in Kernels())
    return Kernels(*kernels)
