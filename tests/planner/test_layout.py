"""The planner's chunks are the engine's: cut from the sharded model in the order in which FSDP2 gathers it."""

from __future__ import annotations

import pytest
import torch

from offbench import arms
from offbench.offload.chunks import Chunk, plan_chunks
from offbench.offload.deferral import in_gather_order
from offbench.offload.layout import local_of
from offbench.planner.inputs import of_model
from offbench.planner.job import plan_job
from offbench.planner.options import PlanOptions
from offbench.workload.experts import ExpertParallel
from offbench.workload.model import Options, Qwen3Moe
from offbench.workload.parallel import Meshes, shard
from offbench.workload.presets import find
from tests.workload.jobs import rehearsed

LAYERS = 3


def engine_chunks(rank: int, name: str, world: int, ep: int, arm: str) -> tuple[Chunk, ...]:
    """As `OffloadedAdamW` lays them out, of a model without memory; what is gathered last is given first."""
    meshes, shape = Meshes.of("cpu", world, ep), find(name)
    experts = ExpertParallel(meshes.experts["ep"].get_group(), shape.experts, torch.device("cpu"), known=True)
    with torch.device("meta"):
        model = Qwen3Moe(shape, LAYERS, Options(ep=experts))
    shard(model, meshes.dp, meshes.experts["efsdp"], torch.bfloat16)
    schedule = arms.ARMS[arm].schedule(arms.ARMS[arm].resolve(chunk_bytes=shape.chunk_bytes))
    given = sorted(model.named_parameters(), key=lambda item: not item[0].startswith(("norm", "head")))
    ordered = in_gather_order(schedule, model, [(p, 0) for _, p in given])
    sizes = [4 * local_of(p).numel() for p, _ in ordered]
    return plan_chunks(sizes, schedule.chunk_bytes, cut_above=schedule.cut_above)


@pytest.mark.parametrize(
    ("name", "world", "ep", "cut"),
    [("tiny", 8, 2, 0), ("qwen3-30b-a3b", 8, 8, 0), ("qwen3-30b-a3b", 2, 2, 6 * 3 + 2 * 5)],
)
def test_the_planners_chunks_are_the_engines(name: str, world: int, ep: int, cut: int) -> None:
    """On two ranks an expert matrix has 1.5 GiB of state, and embedding and head 1.2: in pieces of 256 MiB at most."""
    shape = find(name)
    schedule = arms.ARMS["stream"].schedule(arms.ARMS["stream"].resolve(chunk_bytes=shape.chunk_bytes))
    planned = of_model(shape, world, ep, LAYERS, schedule.chunk_bytes, cut_above=schedule.cut_above).chunks
    assert rehearsed(0, world, engine_chunks, name, world, ep, "stream") == planned
    assert sum(chunk.piece is not None for chunk in planned) == cut
    job = plan_job(PlanOptions(model=name, world=world, ep=ep, layers=LAYERS), None)
    assert job.cut(schedule.chunk_bytes).chunks == planned
