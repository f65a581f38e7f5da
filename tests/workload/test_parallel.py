"""Sharded jobs on gloo ranks: whatever the split, the same loss and the same gradients."""

import pytest
import torch

from offbench.errors import UsageError
from offbench.workload import parallel
from offbench.workload.clip import clip_grad_norm
from offbench.workload.parallel import as_fsdp, build
from offbench.workload.presets import find
from offbench.workload.rules import check
from tests.ranks import on_ranks
from tests.workload import jobs


def whole(results, ep=1):
    """Mean loss and full gradients from all ranks' parts; experts lie on ranks in order (r mod ep, r div ep)."""
    order = sorted(range(len(results)), key=lambda r: (r % ep, r // ep))
    full = {}
    for name in results[0][1]:
        parts = [results[r][1][name] for r in (order if ".experts." in name else range(len(results)))]
        full[name] = torch.cat(parts)
    return torch.stack([loss for loss, _ in results]).mean(), full


def assert_same(got, expected, tolerance):
    assert abs(got[0] - expected[0]) < tolerance
    for name, gradient in expected[1].items():
        error = (got[1][name] - gradient).norm() / gradient.norm()
        assert error < tolerance, (name, float(error))


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_expert_parallelism_changes_no_gradient(world, ep):
    plain = on_ranks(world, jobs.loss_and_gradients, jobs.spec(world), torch.float32)
    split = on_ranks(world, jobs.loss_and_gradients, jobs.spec(world, ep=ep), torch.float32)
    assert_same(whole(split, ep), whole(plain), 2e-5)


def test_counts_known_beforehand_change_no_bit():
    asked, known = (
        on_ranks(
            2,
            jobs.loss_and_gradients,
            jobs.spec(2, ep=2, routing="balanced", count_readback=readback),
            torch.float32,
        )
        for readback in (True, False)
    )
    for (loss, gradients), (other_loss, other_gradients) in zip(asked, known, strict=True):
        assert torch.equal(loss, other_loss)
        assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_one_rank_and_two_ranks_agree(monkeypatch):
    """Two ranks with one sample each against one rank with both samples."""
    both = [parallel.data.batch(seed=0, step=0, rank=r, micro=0, **SIZES) for r in range(2)]

    def all_samples(**_):
        return tuple(torch.cat(parts) for parts in zip(*both, strict=True))

    two = on_ranks(2, jobs.loss_and_gradients, jobs.spec(2), torch.float32)
    monkeypatch.setattr(parallel.data, "batch", all_samples)
    one = on_ranks(1, jobs.loss_and_gradients, jobs.spec(1, micro_batch=2), torch.float32)
    assert_same(whole(two), whole(one), 2e-5)


SIZES = {"samples": 1, "seq_len": 32, "vocab": find("tiny").vocab, "device": jobs.CPU}


def test_accumulated_micro_batches_equal_one_batch(monkeypatch):
    samples = [parallel.data.batch(seed=0, step=0, rank=0, micro=m, **SIZES) for m in range(2)]

    def same_samples(micro, **asked):
        if asked["samples"] == 1:
            return samples[micro]
        return tuple(torch.cat(parts) for parts in zip(*samples, strict=True))

    monkeypatch.setattr(parallel.data, "batch", same_samples)
    accumulated = on_ranks(2, jobs.loss_and_gradients, jobs.spec(2, grad_accum=2), torch.float32)
    at_once = on_ranks(2, jobs.loss_and_gradients, jobs.spec(2, micro_batch=2), torch.float32)
    assert_same(whole(accumulated), whole(at_once), 2e-5)


def test_checkpointing_changes_no_bit_of_a_sharded_job():
    full = on_ranks(2, jobs.loss_and_gradients, jobs.spec(2, ep=2, ac="full"), torch.bfloat16)
    none = on_ranks(2, jobs.loss_and_gradients, jobs.spec(2, ep=2, ac="none"), torch.bfloat16)
    for a, b in zip(full, none, strict=True):
        assert torch.equal(a[0], b[0])
        assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def clipped(rank, max_norm):
    job = build(jobs.spec(2, ep=2), rank, jobs.CPU)
    jobs.backward(job)
    before = jobs.gradients(job)
    norm, factor = clip_grad_norm(job.params, max_norm, job.dp.get_group())
    return before, jobs.gradients(job), norm, factor


@pytest.mark.parametrize("max_norm", [0.25, 1e6, None])
def test_clipping_scales_by_the_norm_over_all_meshes(max_norm):
    results = on_ranks(2, clipped, max_norm)
    squares = sum(float(g.double().square().sum()) for before, *_ in results for g in before.values())
    for before, after, norm, factor in results:
        assert float(norm) == pytest.approx(squares**0.5, rel=1e-5)
        expected = 1.0 if max_norm is None else min(1.0, max_norm / (squares**0.5 + 1e-6))
        assert float(factor) == pytest.approx(expected, rel=1e-5)
        for name, gradient in before.items():
            assert torch.equal(after[name], gradient * factor), name


def describe(rank):
    job = build(jobs.spec(2, ep=2, routing="balanced"), rank, jobs.CPU)
    assert job.expert_load() is None
    jobs.backward(job)
    groups = {}
    for name, module in job.model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            groups.setdefault(id(as_fsdp(module)._get_fsdp_state()), []).append(name)
    dtypes = {name: (p.dtype, p.grad.dtype) for name, p in job.model.named_parameters()}
    numel = sum(p.to_local().numel() for p in job.params)
    return list(groups.values()), dtypes, numel, job.expert_load()


def test_fsdp_units_dtypes_sizes_and_balance_are_those_of_the_documented_job():
    groups, dtypes, numel, load = on_ranks(2, describe)[0]
    blocks = [[f"blocks.{i}{part}"] for i in range(2) for part in ("", ".router", ".experts")]
    assert groups == [[""], ["embedding"], *blocks, ["norm", "head"]]
    assert set(dtypes.values()) == {(torch.float32, torch.float32)}
    assert numel == find("tiny").local_params(2, 2, 2)
    assert load == 1.0


def prefetching(rank):
    """Unit -> units it gathers ahead in forward and in backward; and each unit's own precision."""
    model = build(jobs.spec(2, ep=2, layers=3), rank, jobs.CPU).model
    states = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            states.setdefault(as_fsdp(module)._get_fsdp_state(), name)
    forward = {name: [states[s] for s in state._states_to_forward_prefetch] for state, name in states.items()}
    backward = {name: [states[s] for s in state._states_to_backward_prefetch] for state, name in states.items()}
    return forward, backward, {name: state._mp_policy for state, name in states.items()}


def block_units(i):
    return [f"blocks.{i}", f"blocks.{i}.router", f"blocks.{i}.experts"]


def test_each_block_gathers_its_neighbour_ahead_in_both_directions():
    forward, backward, _ = on_ranks(2, prefetching)[0]
    assert {name: after for name, after in forward.items() if after} == {
        "embedding": ["blocks.0"],
        "blocks.0": block_units(1),
        "blocks.1": block_units(2),
        "blocks.2": ["norm"],  # stands for the group [norm, head]
    }
    assert {name: before for name, before in backward.items() if before} == {
        "norm": block_units(2),
        "blocks.2": block_units(1),
        "blocks.1": block_units(0),
        "blocks.0": ["embedding"],
    }


def test_the_router_alone_computes_in_fp32():
    *_, policies = on_ranks(2, prefetching)[0]
    routers = {f"blocks.{i}.router" for i in range(3)}
    assert {name for name, policy in policies.items() if policy.param_dtype == torch.float32} == routers
    assert {policies[name].param_dtype for name in policies.keys() - routers} == {torch.bfloat16}
    assert {policy.reduce_dtype for policy in policies.values()} == {torch.float32}
    assert not any(policy.cast_forward_inputs for policy in policies.values())


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"ep": 3}, "--ep 3 must divide 2 ranks and 8 experts"),
        ({"routing": "balanced", "seq_len": 7}, "7 tokens x 2 choices do not divide by 8 experts"),
        ({"activation_offload": True, "ac": "none"}, "needs --ac full"),
        ({"count_readback": False, "routing": "natural"}, "only balanced routing makes the counts known"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(workload, message):
    with pytest.raises(UsageError, match=message) as caught:
        check(jobs.spec(2, **workload), find("tiny"))
    assert "\n" not in str(caught.value)
