"""Weights and data depend on seed, name and position, never on how they are split."""

import pytest
import torch

from offbench.workload import data
from offbench.workload.initial import STD, fill_normal, initialise
from offbench.workload.model import Qwen3Moe
from offbench.workload.parallel import build
from offbench.workload.presets import find
from tests.ranks import on_ranks
from tests.workload import jobs


def weights(rank, spec):
    return {name: p.to_local() for name, p in build(spec, rank, jobs.CPU).model.named_parameters()}


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_shards_are_pieces_of_the_same_weights(world, ep):
    model = Qwen3Moe(find("tiny"), 2)
    initialise(model, seed=0)
    ranks = on_ranks(world, weights, jobs.spec(world, ep=ep))
    order = sorted(range(world), key=lambda r: (r % ep, r // ep))
    for name, whole in model.named_parameters():
        parts = [ranks[r][name] for r in (order if ".experts." in name else range(world))]
        assert torch.equal(torch.cat(parts), whole), name


def test_weights_are_normal_and_norms_one():
    model = Qwen3Moe(find("tiny"), 1)
    initialise(model, seed=0)
    for name, parameter in model.named_parameters():
        p = parameter.detach()
        if p.dim() == 1:
            assert (p == 1).all(), name
        else:
            assert abs(p.mean()) < 5 * STD / p.numel() ** 0.5, name
            assert float(p.std()) == pytest.approx(STD, rel=5 / p.numel() ** 0.5), name
    # Kurtosis 3 and independent neighbours, where there are enough elements to tell.
    e = model.embedding.weight.detach().flatten().double() / STD
    assert float(e.pow(4).mean()) == pytest.approx(3, rel=0.05)
    assert abs(float((e[1:] * e[:-1]).mean())) < 0.02


def test_seed_and_name_give_other_weights_and_a_piece_equals_its_place():
    first, other, piece = torch.empty(1000), torch.empty(1000), torch.empty(100)
    fill_normal(first, key=1, start=0)
    fill_normal(other, key=2, start=0)
    fill_normal(piece, key=1, start=333)
    assert torch.equal(piece, first[333:433])
    assert (first == other).sum() < 5


def test_data_is_seeded_by_seed_step_rank_and_micro_batch():
    base = {"seed": 1, "step": 2, "rank": 3, "micro": 4, "samples": 2, "seq_len": 64, "vocab": 1000}
    tokens, labels = data.batch(**base, device=jobs.CPU)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert tokens.shape == labels.shape == (2, 64)
    assert 0 <= int(tokens.min()) < int(tokens.max()) < 1000
    assert torch.equal(tokens, data.batch(**base, device=jobs.CPU)[0])
    for key in ("seed", "step", "rank", "micro"):
        assert not torch.equal(tokens, data.batch(**base | {key: 9}, device=jobs.CPU)[0]), key
