"""Routing, dispatch and combine against the same written naively."""

import pytest
import torch

from offbench.workload.experts import assign, combine, dispatch, swiglu
from offbench.workload.kernels import Kernels, route, sort_runs

KERNELS = Kernels()


def choices(tokens, experts, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(64, 8, 2), (512, 128, 8), (96, 12, 5), (4, 4, 4), (30, 6, 1)]
)
def test_balanced_routing_is_exact_and_spreads_a_token(tokens, experts, top_k):
    scores, ids = route(torch.randn(tokens, experts), top_k, True)
    assert ids.flatten().bincount(minlength=experts).tolist() == [tokens * top_k // experts] * experts
    assert all(len(set(row)) == top_k for row in ids.tolist())
    torch.testing.assert_close(scores.sum(-1), torch.ones(tokens))


def test_balanced_routing_sends_a_token_to_every_rank():
    _, ids = route(torch.randn(32, 128), 8, True)
    assert all(sorted(row) == list(range(8)) for row in (ids // 16).tolist())


def test_balanced_scores_are_the_routers_own_and_carry_gradient():
    logits = torch.randn(16, 8, requires_grad=True)
    scores, ids = route(logits, 2, True)
    chosen = logits.softmax(-1).gather(1, ids)
    torch.testing.assert_close(scores, chosen / chosen.sum(-1, keepdim=True))
    scores[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


def test_rows_are_sorted_by_expert_and_tokens_keep_their_order():
    ids = choices(50, 8, 3)
    order, places, ends, counts = assign(ids, 8)
    by_expert = ids.flatten()[order]
    assert by_expert.tolist() == sorted(ids.flatten().tolist())
    assert counts.tolist() == ids.flatten().bincount(minlength=8).tolist()
    assert ends.tolist() == counts.cumsum(0).tolist()
    assert (ends.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert torch.equal(order[places], torch.arange(150).view(50, 3))
    for expert in range(8):
        rows = order[by_expert == expert]
        assert torch.equal(rows, rows.sort().values)


def test_experts_without_tokens_have_empty_ranges():
    order, _, ends, counts = assign(torch.tensor([[2, 5], [2, 5]]), 7)
    assert counts.tolist() == [0, 0, 2, 0, 0, 2, 0]
    assert ends.tolist() == [0, 0, 2, 2, 2, 4, 4]
    assert order.tolist() == [0, 2, 1, 3]


def test_dispatch_and_combine_equal_autograd_through_indexing():
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, hidden = 40, 3, 16
    order, places, _, _ = assign(choices(tokens, 6, top_k), 6)
    x = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
    residual = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
    scores = torch.rand(tokens, top_k, generator=generator, requires_grad=True)
    scale = torch.randn(tokens * top_k, 1, generator=generator, requires_grad=True)

    mine = combine(dispatch(x, order, places, KERNELS) * scale, scores, residual, order, places, KERNELS)
    rows = x[order // top_k] * scale
    naive = residual + (scores[..., None] * rows[places]).sum(1)
    torch.testing.assert_close(mine, naive)
    upstream = torch.randn(tokens, hidden, generator=generator)
    wanted = (x, residual, scores, scale)
    for a, b in zip(
        torch.autograd.grad(mine, wanted, upstream), torch.autograd.grad(naive, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_swiglu_equals_autograd_through_it():
    gate_up = torch.randn(10, 12, requires_grad=True)
    upstream = torch.randn(10, 6)
    naive = torch.nn.functional.silu(gate_up[:, :6]) * gate_up[:, 6:]
    mine = swiglu(gate_up, KERNELS)
    assert torch.equal(mine, naive)
    (got,), (expected,) = (torch.autograd.grad(y, gate_up, upstream) for y in (mine, naive))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spare", [0, 17])
def test_rows_of_all_sources_are_brought_into_expert_order(seed, spare):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (3, 5), generator=generator, dtype=torch.int32)
    arrived = [(e, r, i) for r in range(3) for e in range(5) for i in range(counts[r, e])]
    index, inverse, ends = sort_runs(counts, len(arrived) + spare)
    index, inverse = index[: len(arrived)], inverse[: len(arrived)]
    assert [arrived[i] for i in index] == sorted(arrived)
    assert index[inverse].tolist() == list(range(len(arrived)))
    assert ends.tolist() == counts.sum(0).cumsum(0).tolist()
    assert ends.dtype == torch.int32


def test_no_rows_at_all_are_sorted_too():
    assert sort_runs(torch.zeros(2, 3, dtype=torch.int32), 4)[2].tolist() == [0, 0, 0]
