"""Router, routed experts, and the way of a token's rows to its experts and back, on one rank or over many.

Rows: a token chosen by K experts becomes K rows of H values. `Assignment` sorts them by expert. With expert
parallelism (EP) rank r holds experts [r x E / n, (r + 1) x E / n), so rows sorted by expert are also sorted by rank:

    gather rows -> all-to-all -> sort by local expert -> experts -> unsort -> all-to-all -> weighted sum

Each step is one pass over a buffer of T x K rows (512 MiB at 16,384 tokens of Qwen3-30B-A3B), and its backward is the
mirrored step. See Note [The host's wait] for the one copy to the host per layer and pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from offbench.offload import meanwhile
from offbench.offload.readback import Mailbox, Way
from offbench.workload.kernels import Kernels
from offbench.workload.presets import ModelShape


class Router(nn.Module):
    """Linear map to one logit per expert, in fp32 (its own FSDP unit, never cast to bf16)."""

    def __init__(self, experts: int, hidden: int, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Logits [T, E] of x [T, H]."""
        return self.kernels.router_logits(x, self.weight)


class Assignment(NamedTuple):
    """Which row belongs to which token, rows sorted by expert."""

    order: Tensor
    """[T x K] flat (token, choice) of each row."""
    places: Tensor
    """[T, K] row of each (token, choice): the inverse of `order`."""
    ends: Tensor
    """[E] int32, one past each expert's last row."""
    counts: Tensor
    """[E] int32, rows of each expert."""


def assign(ids: Tensor, experts: int) -> Assignment:
    """Sort the choices ids [T, K] by expert, tokens in order within one. No host synchronization.

    Keys are 16-bit: a radix sort of them takes two passes instead of eight.
    """
    by_expert, order = ids.flatten().to(torch.int16).sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    every = torch.arange(experts, dtype=torch.int16, device=ids.device)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    return Assignment(order, places.view_as(ids), ends, ends.diff(prepend=ends.new_zeros(1)))


class _Dispatch(torch.autograd.Function):
    """rows[i] = x[token of row i]; backward sums each token's K rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(places)
        ctx.kernels = kernels
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ctx.kernels.gather_sum(grad, places), None, None, None


class _Combine(torch.autograd.Function):
    """residual + weighted sum of each token's K rows. The scores are applied here, after the experts, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        scores: Tensor,
        residual: Tensor,
        order: Tensor,
        places: Tensor,
        kernels: Kernels,
    ) -> Tensor:
        ctx.save_for_backward(rows, scores, order, places)
        ctx.kernels = kernels
        return kernels.combine(rows, scores, places, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        rows, scores, order, places = ctx.saved_tensors
        grad_rows, grad_scores = ctx.kernels.combine_backward(grad, rows, scores, order, places)
        return grad_rows, grad_scores, grad, None, None, None


class _Permute(torch.autograd.Function):
    """rows[index], where `inverse` undoes `index`; the gradient is gathered back, not scattered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Swiglu(torch.autograd.Function):
    """silu(gate) x up; keeps nothing but its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        ctx.kernels.swiglu_backward(grad, gate_up, *out.chunk(2, dim=-1))
        return out, None


class _AllToAll(torch.autograd.Function):
    """Send `send[r]` rows to each rank r, receive `receive[r]` from it; the gradient goes the way back.

    For eager code only: under torch.compile some torch versions return zero gradients for a collective inside an
    `autograd.Function`. Nothing here is compiled (see Note [What is compiled]).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.splits
        return _exchange(grad.contiguous(), receive, send, group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, receive, send, group=group)
    return out


# torch's stubs leave `apply` untyped in some versions.
dispatch: Callable[..., Tensor] = _Dispatch.apply
combine: Callable[..., Tensor] = _Combine.apply
permute: Callable[..., Tensor] = _Permute.apply
swiglu: Callable[..., Tensor] = _Swiglu.apply
all_to_all: Callable[..., Tensor] = _AllToAll.apply
_make_event: Callable[[], Any] = torch.cuda.Event


@dataclass(frozen=True)
class Plan:
    """How rows, sorted by expert, get to the experts: what `Experts` needs beside the rows.

    A class, not a tuple: FSDP2 looks for tensors in tuples and would move `splits` to the device.
    """

    ends: Tensor
    """[local experts] int32, one past each expert's last row once rows are sorted by local expert."""
    into: Tensor | None = None
    """[most] sorted = arrived[into], valid up to the rows that arrive; None without expert parallelism."""
    back: Tensor | None = None
    """[most] its inverse: arrived = sorted[back]."""
    splits: Tensor | None = None
    """[2, ranks] on the host: rows to send to and to receive from each rank, valid once `ready` is."""
    ready: Any = None
    """The event after the copy to the host; None on the CPU."""


class ExpertParallel:
    """Experts over the ranks of `group`. One instance serves all layers, which use it one after the other.

    Note [The host's wait]. The splits of an all-to-all must be known to the host, so it waits for the device once a
    layer, and then has to launch kernels faster than the device runs them or the device idles. Hence everything that
    can be launched without the splits is launched before the wait: index arithmetic (over an upper bound of rows), the
    gather of the rows to send, and, as the wait is inside the forward of the experts' FSDP unit, its unsharding.

    known: every expert gets equally many rows (balanced routing), so the host need not ask. readbacks: how the splits
    reach the host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        experts: int,
        device: torch.device,
        known: bool = False,
        readbacks: Way = "copy",
    ) -> None:
        self.group = group
        self.ranks = group.size()
        self.local = experts // self.ranks
        self.known = known
        self.mailbox = (
            Mailbox(torch.empty((2, self.ranks), dtype=torch.int64, pin_memory=True), device, readbacks)
            if device.type == "cuda"
            else None
        )

    def plan(self, counts: Tensor, rows: int, kernels: Kernels) -> Plan:
        """Exchange counts [E] of our `rows` rows and start copying the splits to the host; does not wait."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        both = torch.cat((counts, received)).view(2, self.ranks, self.local)
        if self.known:
            into, back, ends = kernels.sort_runs(both[1], rows)
            return Plan(ends, into, back, torch.full((2, self.ranks), rows // self.ranks))
        splits = both.sum(dim=-1)
        ready = None
        if self.mailbox is not None:
            self.mailbox.send(splits)
            splits = self.mailbox.buffer
            ready = _make_event()
            ready.record()
        into, back, ends = kernels.sort_runs(both[1], self.ranks * rows)
        return Plan(ends, into, back, splits, ready)

    def through(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, plan: Plan) -> Tensor:
        """Send rows to their experts' ranks, through the experts, and back into the same order."""
        assert plan.into is not None and plan.back is not None and plan.splits is not None  # noqa: PT018
        if plan.ready is not None:
            meanwhile.wait(plan.ready)
        send, receive = plan.splits.tolist()
        into, back = plan.into[: sum(receive)], plan.back[: sum(receive)]
        rows = all_to_all(rows, send, receive, self.group)
        rows = permute(rows, into, back)
        rows = experts(rows, plan.ends)
        rows = permute(rows, back, into)
        return all_to_all(rows, receive, send, self.group)


class Experts(nn.Module):
    """The SwiGLU experts this rank holds, as grouped matrix products. w13 [E, H, 2I] (gate first), w2 [E, I, H]."""

    def __init__(self, shape: ModelShape, ep: ExpertParallel | None, kernels: Kernels) -> None:
        super().__init__()
        experts = shape.experts if ep is None else ep.local
        self.w13 = nn.Parameter(torch.empty(experts, shape.hidden, 2 * shape.expert_width))
        self.w2 = nn.Parameter(torch.empty(experts, shape.expert_width, shape.hidden))
        self.ep = ep
        self.kernels = kernels

    def forward(self, rows: Tensor, plan: Plan) -> Tensor:
        """rows [R, H] sorted by expert, of all experts; their results in the same order."""
        if self.ep is None:
            return self._local(rows, plan.ends)
        return self.ep.through(self._local, rows, plan)

    def _local(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner = swiglu(F.grouped_mm(rows, self.w13, offs=ends), self.kernels)
        return F.grouped_mm(inner, self.w2, offs=ends)
