"""The planner's chunks are the engine's: cut from the sharded model in the order in which FSDP2 gathers it."""

from __future__ import annotations

import pytest
import torch

from offbench import arms
from offbench.offload.chunks import Chunk, plan_chunks
from offbench.offload.deferral import in_gather_order
from offbench.offload.layout import local_of
from offbench.planner.inputs import of_model
from offbench.workload.experts import ExpertParallel
from offbench.workload.model import Options, Qwen3Moe
from offbench.workload.parallel import Meshes, shard
from offbench.workload.presets import find
from tests.workload.jobs import rehearsed

WORLD, LAYERS = 8, 3


def engine_chunks(rank: int, name: str, ep: int, arm: str) -> tuple[Chunk, ...]:
    """As `OffloadedAdamW` lays them out, of a model without memory; what is gathered last is given first."""
    meshes, shape = Meshes.of("cpu", WORLD, ep), find(name)
    experts = ExpertParallel(meshes.experts["ep"].get_group(), shape.experts, torch.device("cpu"), known=True)
    with torch.device("meta"):
        model = Qwen3Moe(shape, LAYERS, Options(ep=experts))
    shard(model, meshes.dp, meshes.experts["efsdp"], torch.bfloat16)
    schedule = arms.ARMS[arm].schedule(arms.ARMS[arm].resolve(chunk_bytes=shape.chunk_bytes))
    given = sorted(model.named_parameters(), key=lambda item: not item[0].startswith(("norm", "head")))
    ordered = in_gather_order(schedule, model, [(p, 0) for _, p in given])
    return plan_chunks([4 * local_of(p).numel() for p, _ in ordered], schedule.chunk_bytes)


@pytest.mark.parametrize(("name", "ep"), [("tiny", 2), ("qwen3-30b-a3b", 8)])
def test_the_planners_chunks_are_the_engines(name: str, ep: int) -> None:
    shape = find(name)
    cap = arms.ARMS["stream"].schedule(arms.ARMS["stream"].resolve(chunk_bytes=shape.chunk_bytes)).chunk_bytes
    planned = of_model(shape, WORLD, ep, LAYERS, cap).chunks
    assert rehearsed(0, WORLD, engine_chunks, name, ep, "stream") == planned
