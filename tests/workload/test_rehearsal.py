"""One process in place of eight ranks: collectives as documented, true shapes, finite and repeatable training."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from offbench.arms import ARMS
from offbench.offload.hoststore import HostStore
from offbench.rank import make_optimizer
from offbench.workload.parallel import build
from offbench.workload.presets import find
from offbench.workload.rehearsal import RehearsalGroup, init_rehearsal
from tests.workload import jobs


def collectives(rank):
    own = torch.tensor([1.0, 2.0]) + rank
    gathered = torch.zeros(8)
    dist.all_gather_into_tensor(gathered, own)
    in_place = torch.zeros(8)
    in_place[2 * rank : 2 * rank + 2] = own
    dist.all_gather_into_tensor(in_place, in_place[2 * rank : 2 * rank + 2])
    whole, mean, total = torch.arange(8.0), torch.zeros(2), torch.zeros(2)
    dist.reduce_scatter_tensor(mean, whole, op=dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(total, whole, op=dist.ReduceOp.SUM)
    reduced = [own.clone() for _ in range(3)]
    for tensor, op in zip(reduced, (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX), strict=True):
        dist.all_reduce(tensor, op=op)
    objects = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return gathered, in_place, mean, total, reduced, objects


def test_collectives_are_those_of_equal_ranks():
    gathered, in_place, mean, total, reduced, objects = jobs.rehearsed(3, 4, collectives)
    assert gathered.tolist() == in_place.tolist() == [4.0, 5.0] * 4
    assert (mean.tolist(), total.tolist()) == ([6.0, 7.0], [24.0, 28.0])
    assert [t.tolist() for t in reduced] == [[16.0, 20.0], [4.0, 5.0], [4.0, 5.0]]
    assert objects == [{"rank": 3}] * 4


def exchange(rank, send, receive):
    rows = torch.arange(float(sum(send)), dtype=torch.bfloat16)[:, None].expand(-1, 8).contiguous()
    out = torch.full((sum(receive), 8), torch.nan, dtype=torch.bfloat16)
    dist.all_to_all_single(out, rows, receive, send)
    return out[:, 0]


@pytest.mark.parametrize(
    ("send", "receive", "expected"),
    [
        ([2, 2, 2], [2, 2, 2], [2, 3, 2, 3, 2, 3]),  # our segment for rank 1 = ourselves, from each rank
        ([1, 3, 0], [3, 3, 3], [1, 2, 3, 1, 2, 3, 1, 2, 3]),
        ([3, 3, 3], [1, 4, 0], [3, 3, 4, 5, 3]),  # the way back: cut, or repeated from its start
        ([2, 0, 1], [1, 0, 2], [0, 0, 0]),  # nothing to repeat: zeros
    ],
)
def test_all_to_all_repeats_the_own_segment(send, receive, expected):
    assert jobs.rehearsed(1, 3, exchange, send, receive).tolist() == expected


def unknown_reduction(rank):
    with pytest.raises(ValueError, match="knows SUM, AVG, MAX and MIN"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)
    return dist.get_backend()


def test_a_reduction_it_does_not_know_is_refused():
    assert jobs.rehearsed(0, 2, unknown_reduction) == "rehearsal"


def submeshes(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("efsdp", "ep"))
    return [(mesh[name].get_local_rank(), mesh[name].size()) for name in ("efsdp", "ep")]


def test_a_rank_has_its_place_in_submeshes():
    assert jobs.rehearsed(6, 8, submeshes) == [(1, 2), (2, 4)]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(("ep", "routing"), [(8, "balanced"), (1, "balanced"), (8, "natural"), (2, "natural")])
def test_training_is_finite_and_repeatable(rank, ep, routing):
    spec = jobs.spec(8, kind="rehearsal", ep=ep, routing=routing)
    first, again = (jobs.rehearsed(rank, 8, jobs.train, spec) for _ in range(2))
    assert first == again
    assert all(math.isfinite(value) and value > 0 for step in first for value in step)


def local_sizes(rank, ep):
    job = build(jobs.spec(8, kind="rehearsal", ep=ep), rank, jobs.CPU)
    jobs.backward(job)
    return [(tuple(p.to_local().shape), tuple(p.grad.to_local().shape)) for p in job.params]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("ep", [1, 8])
def test_a_rank_holds_its_true_share(rank, ep):
    sizes = jobs.rehearsed(rank, 8, local_sizes, ep)
    shape = find("tiny")
    assert sizes[0][0] == (shape.vocab // 8, shape.hidden)
    assert sizes[11][0] == (1, shape.expert_width, shape.hidden)  # w2 of block 0: one expert of eight, either way
    assert all(parameter == gradient for parameter, gradient in sizes)
    assert sum(math.prod(size) for size, _ in sizes) == shape.local_params(8, ep, 2)


def memory_and_collectives(rank):
    """What happened first: host memory taken for state, or a collective."""
    seen = []
    for name in ("_allgather_base", "_reduce_scatter_base", "alltoall_base", "allreduce", "broadcast", "barrier"):
        known = getattr(RehearsalGroup, name)

        def spy(*call, known=known, **options):
            seen.append("collective")
            return known(*call, **options)

        setattr(RehearsalGroup, name, spy)
    take = HostStore._take

    def taking(store, sizes):
        if sum(sizes):
            seen.append(sum(sizes))
        return take(store, sizes)

    HostStore._take = taking
    spec = jobs.spec(8, kind="rehearsal", ep=8, layers=2)
    arm = ARMS["chunked"].resolve(chunk_bytes=1 << 18)
    job = build(spec.model_copy(update={"arm": arm}), rank, jobs.CPU)
    optimizer = make_optimizer(job.spec, job, 1.0)
    for step in range(2):
        jobs.backward(job, step)
        job.clip()
        optimizer.step()
    return seen, optimizer.bytes_per_step  # each way


def test_all_host_memory_for_state_is_taken_once_before_the_first_collective():
    """Pinning takes one rank longer than another, and a collective would wait for it, maybe until a timeout."""
    (first, *others), moved = jobs.rehearsed(0, 8, memory_and_collectives)
    assert first == moved > 0
    assert set(others) == {"collective"}


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match="cannot rehearse rank 8 of 8 ranks"):
        init_rehearsal(8, 8)
