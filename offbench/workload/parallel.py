"""From a RunSpec to a sharded model on a device: meshes, expert parallelism, checkpointing, compile, FSDP2, weights.

The order is that of the trainers this workload stands for: experts are split first, blocks are checkpointed, their
pieces compiled, then FSDP2 wraps experts, router, block, embedding, [norm, head], root; only then memory is taken.
A rank needs no more than its own shards at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from offbench.config import RunSpec
from offbench.workload import data
from offbench.workload.activation_offload import ActivationOffload
from offbench.workload.clip import clip_grad_norm
from offbench.workload.experts import ExpertParallel
from offbench.workload.initial import initialise
from offbench.workload.kernels import Kernels, compiled
from offbench.workload.model import Options, Qwen3Moe
from offbench.workload.presets import ModelShape, find
from offbench.workload.rules import check


@dataclass(frozen=True)
class Job:
    """One rank's part of the training job. A step without its optimizer:

        for tokens, labels in job.micro_batches(step):
            loss = job.model(tokens, labels) / spec.workload.grad_accum
            loss.backward()
        norm, factor = job.clip()

    `micro_batches` turns gradient reduction on for the last micro batch only. Gradients are then averaged over all
    ranks and sharded like the parameters (`DTensor`s).
    """

    spec: RunSpec
    shape: ModelShape
    rank: int
    device: torch.device
    model: Qwen3Moe
    dp: DeviceMesh
    """All ranks; everything but the experts is sharded over it."""
    efsdp: DeviceMesh
    """Ranks that hold the same experts; those are sharded over it."""
    activation_offload: ActivationOffload | None
    params: list[nn.Parameter] = field(default_factory=list)
    """In declaration order: embedding, blocks, norm, head."""

    def batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels [micro_batch, seq_len] of this rank, made on the device."""
        w = self.spec.workload
        return data.batch(
            seed=w.seed,
            step=step,
            rank=self.rank,
            micro=micro,
            samples=w.micro_batch,
            seq_len=w.seq_len,
            vocab=self.shape.vocab,
            device=self.device,
        )

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This step's batches. Each must go forward and backward before the next one is taken."""
        count = self.spec.workload.grad_accum
        for micro in range(count):
            if count > 1:
                as_fsdp(self.model).set_requires_gradient_sync(micro == count - 1)
            yield self.batch(step, micro)

    def clip(self) -> tuple[Tensor, Tensor]:
        """Global gradient norm before clipping and the factor applied, on the device (`clip.clip_grad_norm`)."""
        return clip_grad_norm(self.params, self.spec.workload.max_norm, self.dp.get_group())

    def expert_load(self) -> float | None:
        """Tokens of the busiest expert of any layer over the mean, all ranks, since the last call; None before a
        forward. A collective that waits for the device: not for use inside a measured window."""
        counts = [block.take_expert_tokens() for block in self.model.blocks]  # type: ignore[operator]
        if any(c is None for c in counts):
            return None
        total = torch.stack(counts)
        dist.all_reduce(total, group=self.dp.get_group())
        return float((total.amax(dim=1) / total.double().mean(dim=1)).max())


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a job; several jobs of one process can share them."""

    dp: DeviceMesh
    """All ranks [world]."""
    experts: DeviceMesh
    """The same ranks as [world / ep, ep], dimensions `efsdp` and `ep`."""

    @staticmethod
    def of(device_type: str, world: int, ep: int) -> Meshes:
        """Meshes over the default process group, with new groups for the experts. `ep` divides `world`."""
        dp = init_device_mesh(device_type, (world,), mesh_dim_names=("dp",))
        return Meshes(dp, init_device_mesh(device_type, (world // ep, ep), mesh_dim_names=("efsdp", "ep")))


def build(
    spec: RunSpec,
    rank: int,
    device: torch.device,
    *,
    param_dtype: torch.dtype = torch.bfloat16,
    meshes: Meshes | None = None,
) -> Job:
    """This rank's sharded, initialised model. The default process group must exist, with `spec.mode.world` ranks.

    Parameters are fp32; forward and backward run in `param_dtype`, gradients are reduced in fp32. meshes: those of an
    earlier job of this process with the same world and degree of expert parallelism; new ones by default.

    Raises UsageError when the degree of expert parallelism, the routing or the offload do not fit the job.
    """
    shape = find(spec.workload.model)
    check(spec, shape)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # the router's products: TF32 still has more bits than bf16
    world, ep = spec.mode.world, spec.workload.ep
    meshes = meshes or Meshes.of(device.type, world, ep)
    dp, experts_mesh = meshes.dp, meshes.experts
    options = Options(
        routing=spec.workload.routing,
        kernels=compiled() if spec.workload.compile else Kernels(),
        checkpoint=spec.workload.ac == "full",
        ep=_expert_parallel(spec, shape, experts_mesh, device),
        activation_offload=_activation_offload(spec, shape, device, param_dtype),
    )
    with torch.device("meta"):
        model = Qwen3Moe(shape, spec.workload.layers, options)
    shard(model, dp, experts_mesh["efsdp"], param_dtype)
    model.to_empty(device=device)
    initialise(model, spec.workload.seed, expert_rank=rank % ep)
    params = list(model.parameters())
    return Job(spec, shape, rank, device, model, dp, experts_mesh["efsdp"], options.activation_offload, params)


def _expert_parallel(
    spec: RunSpec, shape: ModelShape, mesh: DeviceMesh, device: torch.device
) -> ExpertParallel | None:
    if spec.workload.ep == 1:
        return None
    known = not spec.workload.count_readback
    return ExpertParallel(mesh["ep"].get_group(), shape.experts, device, known, spec.arm.readbacks)


def _activation_offload(
    spec: RunSpec, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> ActivationOffload | None:
    w = spec.workload
    if not w.activation_offload:
        return None
    size = (w.micro_batch, w.seq_len, shape.hidden)
    return ActivationOffload(w.layers, size, dtype, device, spec.arm.activation_copies)


def shard(model: Qwen3Moe, dp: DeviceMesh, efsdp: DeviceMesh, param_dtype: torch.dtype) -> None:
    """Wrap with FSDP2, bottom up, and say who is gathered ahead of whom.

    Inputs are not cast: activations have `param_dtype` from the embedding on, and the rotary tables stay fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        _shard_experts(block.experts, dp, efsdp, policy)  # type: ignore[arg-type]
        fully_shard(block.router, mesh=dp, mp_policy=fp32)  # type: ignore[arg-type]
        fully_shard(block, mesh=dp, mp_policy=policy)
    fully_shard(model.embedding, mesh=dp, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=dp, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=dp, mp_policy=policy)
    _prefetch(model)


def _shard_experts(experts: nn.Module, dp: DeviceMesh, efsdp: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """An expert sees the tokens of all `dp` ranks, but its gradients are reduced over `efsdp` only: the mean over the
    job divides by the former."""
    fully_shard(experts, mesh=efsdp, mp_policy=policy)
    if efsdp.size() == dp.size():
        return
    as_fsdp(experts).set_gradient_divide_factor(dp.size())
    # Other backends than NCCL cannot scale inside a reduction. Not on one rank: there FSDP2 divides by itself, and
    # with this setting would divide a second time.
    if efsdp.size() > 1 and dist.get_backend(efsdp.get_group()) != "nccl":
        as_fsdp(experts).set_force_sum_reduction_for_comms(True)


def _prefetch(model: Qwen3Moe) -> None:
    """Name each module's successors, since the host's wait for token counts keeps FSDP2 from running ahead itself."""
    blocks = list(model.blocks)
    units = [[as_fsdp(b), as_fsdp(b.router), as_fsdp(b.experts)] for b in blocks]  # type: ignore[arg-type]
    embedding, head = as_fsdp(model.embedding), as_fsdp(model.norm)  # norm stands for the group [norm, head]
    after = [*units[1:], [head]]
    before = [[embedding], *units[:-1]]
    embedding.set_modules_to_forward_prefetch(units[0][:1])
    for unit, following, preceding in zip(units, after, before, strict=True):
        unit[0].set_modules_to_forward_prefetch(following)
        unit[0].set_modules_to_backward_prefetch(preceding)
    head.set_modules_to_backward_prefetch(units[-1])


def as_fsdp(module: nn.Module) -> FSDPModule:
    """The module, typed as what `fully_shard` made of it."""
    assert isinstance(module, FSDPModule)
    return module
