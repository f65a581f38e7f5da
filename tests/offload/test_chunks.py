"""Chunk and staging plans: the counts of the real model, and what every plan must guarantee."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.offload.chunks import ALIGNMENT, least_arena, plan_chunks, plan_staging
from offbench.workload.presets import find

MIB = 1 << 20


def local_bytes(world: int = 8, ep: int = 8) -> list[int]:
    """fp32 bytes of rank 0's shard of each parameter, in declaration order."""
    shape = find("qwen3-30b-a3b")
    others = dict(shape.other_tensors())
    order = [("embedding", others["embedding"]), *list(shape.layer_tensors()) * shape.layers]
    order += [("norm", others["norm"]), ("head", others["head"])]
    sizes = []
    for name, dims in order:
        rows = dims[0] // (ep if name.startswith("experts.") else world)
        rest = 1
        for size in dims[1:]:
            rest *= size
        sizes.append(rows * rest * 4)
    return sizes


@pytest.mark.parametrize(
    ("cap_mib", "count", "largest", "smallest"),
    [(256, 99, 384.0, 18.0), (512, 97, 489.0, 210.3), (1024, 33, 978.3, 489.0), (2048, 17, 1993.0, 296.8)],
)
def test_the_real_model_gives_the_published_counts(cap_mib: int, count: int, largest: float, smallest: float) -> None:
    chunks = plan_chunks(local_bytes(), cap_mib * MIB)
    sizes = [chunk.nbytes / MIB for chunk in chunks]
    assert len(chunks) == count
    assert max(sizes) == pytest.approx(largest, abs=0.3)
    assert min(sizes) == pytest.approx(smallest, abs=0.3)  # the router's 0.25 MiB may fall on either side
    assert sum(chunk.nbytes for chunk in chunks) == pytest.approx(3_816_515_328 * 8, rel=1e-4)


def test_a_byte_arena_wastes_less_than_slots_of_the_largest_chunk() -> None:
    chunks = plan_chunks(local_bytes(), 1024 * MIB)
    for slots in (2, 4, 8):
        staging = plan_staging(chunks, slots)
        assert staging.nbytes <= slots * max(chunk.nbytes for chunk in chunks)
    assert plan_staging(chunks, None).nbytes == sum(chunk.nbytes for chunk in chunks)


@given(
    st.lists(st.integers(256, 512), min_size=4, max_size=30),
    st.integers(2048, 1 << 20),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_a_parameter_above_the_cap_costs_its_own_size_once(
    sizes: list[int], above: int, where: int, slots: int
) -> None:
    """The plan behind IST-DASLab/llmq#19: an embedding is a chunk alone, wherever it comes, and no slot of another
    chunk grows with it."""
    sizes.insert(where % (len(sizes) + 1), above)
    cap = 2 * ALIGNMENT
    chunks = plan_chunks(sizes, cap)
    (alone,) = (chunk for chunk in chunks if chunk.nbytes > cap)
    assert len(alone.members) == 1
    assert plan_staging(chunks, slots).nbytes <= alone.nbytes + slots * cap


@pytest.mark.parametrize(
    ("sizes", "least"),
    [([], 0), ([5], 5), ([0, 5], 5), ([9, 2, 3, 4], 11), ([4, 0, 5, 1], 9), ([2, 9, 3, 9], 12)],
)
def test_the_least_arena_holds_any_two_neighbours_that_move(sizes: list[int], least: int) -> None:
    assert least_arena(sizes) == least


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.integers(512, 20000),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_plans_hold_whole_parameters_and_never_displace_a_neighbour(
    sizes: list[int], cap: int, slots: int | None
) -> None:
    chunks = plan_chunks(sizes, cap)
    assert [m for chunk in chunks for m in chunk.members] == list(range(len(sizes)))
    for chunk in chunks:
        assert len(chunk.members) == 1 or chunk.nbytes <= cap
        spans = []
        for member, offsets in zip(chunk.members, chunk.offsets, strict=True):
            for offset in offsets:
                assert offset % ALIGNMENT == 0
                spans.append((offset, offset + sizes[member]))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[-1][1] <= chunk.nbytes or chunk.nbytes == 0

    staging = plan_staging(chunks, slots)
    assert staging.nbytes <= sum(chunk.nbytes for chunk in chunks)
    for i, chunk in enumerate(chunks):
        assert staging.starts[i] + chunk.nbytes <= staging.nbytes
        displaced = staging.displaced(chunks, i)
        if slots is None:
            assert len(displaced) == 0
        else:
            assert len(displaced) <= max(0, i - slots + 1)
        for j in range(displaced.stop, i):  # whoever is not waited for shares no byte
            a, b = (staging.starts[i], chunk.nbytes), (staging.starts[j], chunks[j].nbytes)
            assert a[0] + a[1] <= b[0] or b[0] + b[1] <= a[0] or not a[1] or not b[1]
