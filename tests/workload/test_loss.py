"""The chunked loss against torch's own over full logits."""

import pytest
import torch
import torch.nn.functional as F

from offbench.workload import loss as module
from offbench.workload.loss import Head, chunked_cross_entropy


def inputs(dtype, tokens=50, hidden=32, vocab=101):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    w = (0.3 * torch.randn(vocab, hidden, generator=generator)).to(dtype).requires_grad_()
    return x, w, torch.randint(vocab, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk", [7, 25, 2048])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients_equal_full_logits(monkeypatch, chunk, dtype, tolerance):
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    x, w, labels = inputs(dtype)
    got = torch.autograd.grad(loss := chunked_cross_entropy(x, w, labels), (x, w), torch.tensor(0.5))
    whole = F.cross_entropy(F.linear(x, w).float(), labels)
    expected = torch.autograd.grad(whole, (x, w), torch.tensor(0.5))
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == dtype
        assert (mine - other).norm() < tolerance * other.norm()


def test_no_chunk_holds_more_logits_than_asked_for(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 16)
    seen = []

    def spy(logits, labels, scale):
        seen.append(tuple(logits.shape))
        return cross_entropy(logits, labels, scale)

    kernels = module.Kernels()
    cross_entropy = kernels.cross_entropy
    x, w, labels = inputs(torch.float32)
    chunked_cross_entropy(x, w, labels, kernels._replace(cross_entropy=spy))
    assert seen == [(16, 101), (16, 101), (16, 101), (2, 101)]


def products(monkeypatch, run):
    """Matrix products done while `run` runs, beside those that make logits."""
    seen = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: seen.append(args) or real(*args, **kwargs))
    run()
    return len(seen)


def test_gradients_are_computed_only_when_wanted(monkeypatch):
    x, w, labels = inputs(torch.float32)
    head = Head(*w.shape, kernels=module.Kernels())
    head.weight = torch.nn.Parameter(w.detach(), requires_grad=False)
    assert products(monkeypatch, lambda: head(x, labels).backward()) == 1
    assert x.grad is not None
    assert head.weight.grad is None
    with torch.no_grad():
        assert products(monkeypatch, lambda: head(x, labels)) == 0
