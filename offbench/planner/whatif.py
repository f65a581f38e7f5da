"""The same plan under other circumstances: each what-if turns the inputs of a plan into others and says what it
assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from offbench.errors import UsageError
from offbench.planner.choose import Candidate, Setting, at_budget, least_stream, stream_at
from offbench.planner.gather import Inputs
from offbench.planner.inputs import Links
from offbench.planner.reality import REMOTE
from offbench.planner.sources import links_of_machine
from offbench.topology.capacity import generation as pcie_generation
from offbench.topology.links import LinkKind
from offbench.topology.model import Machine
from offbench.workload import presets

PCIE: tuple[LinkKind, ...] = ("gpu_link", "uplink")
USUAL_GENERATION = 5
"""Of PCIe, where nobody says: what an H200 has."""
C2C = Links(330e9, 330e9, 330e9)
"""GB200, device to host from local memory, as published (torchtitan#3519); both ways together taken to be no more."""


@dataclass(frozen=True)
class WhatIf:
    """One circumstance."""

    name: str
    said: str
    """What changes, and what is assumed."""
    change: Callable[[Inputs], Inputs]
    exact: bool = True
    basis: Callable[[Inputs], str] | None = None
    """What it assumes of these inputs."""

    def assumes(self, inputs: Inputs) -> str:
        """All of that in one line."""
        return self.said if self.basis is None else f"{self.said}; {self.basis(inputs)}"


@dataclass(frozen=True)
class Outcome:
    """A plan in a nutshell."""

    name: str
    inputs: Inputs
    none: Candidate
    chunked: Candidate
    overlap: Candidate
    stream: Candidate
    """With half of the state as its budget."""
    least: Candidate | None
    """stream with the least budget that meets the target."""


def setting(inputs: Inputs) -> Setting:
    """What schedules are simulated in."""
    job = inputs.job
    in_place = inputs.emulated is None
    return Setting(
        cache(job.cut), inputs.compute, inputs.links, job.chunk_bytes, job.footprint, inputs.small, in_place
    )


def outcome(name: str, inputs: Inputs, target: float) -> Outcome:
    """The main schedules under these inputs."""
    at = setting(inputs)
    none = at_budget(at, "none", 0)
    return Outcome(
        name,
        inputs,
        none,
        at_budget(at, "chunked", 0),
        at_budget(at, "overlap", 0, 4),
        stream_at(at, at.nbytes // 2),
        least_stream(at, target * none.simulated.step_s * (1 + 1e-9)),
    )


def chosen(names: tuple[str, ...]) -> list[WhatIf]:
    """The what-ifs of those names; `all` stands for every one. Raises UsageError for an unknown name."""
    known = {what.name: what for what in WHAT_IFS}
    unknown = [name for name in names if name not in known and name != "all"]
    if unknown:
        raise UsageError(f"--what-if {unknown[0]}: there are all, {', '.join(known)}")
    return list(WHAT_IFS) if "all" in names else [known[name] for name in dict.fromkeys(names)]


def _rates(share: float) -> Callable[[Inputs], Inputs]:
    return lambda inputs: replace(inputs, links=inputs.links.scaled(share))


def generation(inputs: Inputs) -> int | None:
    """PCIe generation of the plan's GPUs, of several the lowest; None where nothing says."""
    if inputs.pcie is not None:
        return inputs.pcie
    gpus = inputs.machine.gpus if inputs.machine is not None else ()
    return min((found for gpu in gpus if (found := pcie_generation(gpu.pcie.max_gt_s))), default=None)


def _pcie(wanted: int) -> Callable[[Inputs], Inputs]:
    """PCIe links of another generation, each twice as fast as the one before; what is known of sockets and memory
    stays."""

    def change(inputs: Inputs) -> Inputs:
        factor = 2.0 ** (wanted - (generation(inputs) or USUAL_GENERATION))
        if inputs.machine is None:
            return replace(inputs, links=inputs.links.scaled(factor))
        ranks = min(inputs.job.world, len(inputs.machine.gpus))
        links, _ = links_of_machine(_faster(inputs.machine, factor), ranks)
        return replace(inputs, links=links)

    return change


def _pcie_basis(inputs: Inputs) -> str:
    if inputs.machine is None:
        known = f"is Gen{inputs.pcie}" if inputs.pcie else f"is taken for Gen{USUAL_GENERATION}: nothing says"
        return f"the planned one {known}; all of its rates are taken for PCIe's"
    if not any(link.kind in PCIE and link.rates for link in inputs.machine.links):
        return "no PCIe link is described, so nothing changes"
    found = generation(inputs)
    known = f"Gen{found} by its description" if found else f"taken for Gen{USUAL_GENERATION}: nothing says"
    return f"the planned machine is {known}; its sockets and memory as they are"


def _faster(machine: Machine, factor: float) -> Machine:
    links = tuple(
        replace(link, rates=tuple(replace(r, bytes_s=factor * r.bytes_s) for r in link.rates))
        if link.kind in PCIE
        else link
        for link in machine.links
    )
    return replace(machine, links=links)


def _longer(inputs: Inputs) -> Inputs:
    """Twice the tokens a sample: compute grows by model FLOPs where they are known, else by two."""
    job, c, times = inputs.job, inputs.compute, 2.0
    if job.seq_len is not None and job.model is not None:
        shape = presets.find(job.model)
        times *= shape.flops_per_token(2 * job.seq_len, job.layers) / shape.flops_per_token(job.seq_len, job.layers)
    longer = replace(job, seq_len=None if job.seq_len is None else 2 * job.seq_len)
    compute = replace(c, forward=times * c.forward, backward=times * c.backward, loss=2 * c.loss)
    return replace(inputs, job=longer, compute=compute)


def _accumulating(inputs: Inputs) -> Inputs:
    """Four passes a step; all but the first forward count as backward, since updates run before the first."""
    c, passes = inputs.compute, 4
    backward = passes * (c.forward + c.backward) - c.forward
    job = replace(inputs.job, grad_accum=passes * inputs.job.grad_accum)
    return replace(inputs, job=job, compute=replace(c, backward=backward))


def _bf16(inputs: Inputs) -> Inputs:
    """Half the bytes of state; a gradient has as many bytes as they have. The update moves 20 bytes instead of 28."""
    job, c = inputs.job, inputs.compute
    halved = replace(job, moment=job.moment // 2, state=None if job.state is None else job.state // 2)
    return replace(inputs, job=halved, compute=replace(c, update=c.update * 20 / 28))


def _nodes(inputs: Inputs) -> Inputs:
    """Twice the ranks on a second, equal node; their collectives are taken to stay hidden."""
    job, c = inputs.job, inputs.compute
    wider = replace(job, world=2 * job.world, state=None if job.state is None else job.state // 2)
    return replace(inputs, job=wider, compute=replace(c, update=c.update * wider.layout.nbytes / job.layout.nbytes))


def _longer_basis(inputs: Inputs) -> str:
    if inputs.job.model is None or inputs.job.seq_len is None:
        return "no model is known, so forward and backward take twice as long"
    return "forward and backward grow with model FLOPs, the loss with tokens, at the same FLOP/s; so do activations"


def _accumulating_basis(inputs: Inputs) -> str:
    held = "gradients add up unsharded in fp32" if inputs.job.model is not None else "gradients stay sharded"
    return f"each pass takes as long as a planned one, updates run before the first one's forward only, {held}"


WHAT_IFS = (
    WhatIf("ranks", "twice the ranks on every link, of other jobs: half of each rate, the same shards", _rates(0.5)),
    WhatIf(
        "remote", f"buffers on the other socket: {REMOTE:g} of the rates, inferred from prime-rl#4427", _rates(REMOTE)
    ),
    WhatIf("gen4", "PCIe Gen4: half the rate of Gen5", _pcie(4), basis=_pcie_basis),
    WhatIf("gen6", "PCIe Gen6: twice the rate of Gen5", _pcie(6), basis=_pcie_basis),
    WhatIf(
        "c2c",
        "CPU and GPU on one C2C link: 307 GiB/s, published for GB200; both ways taken as no more, compute as planned",
        lambda i: replace(i, links=C2C),
    ),
    WhatIf("sequence", "twice the tokens a sample", _longer, basis=_longer_basis),
    WhatIf("accumulation", "four times the passes a step", _accumulating, basis=_accumulating_basis),
    WhatIf(
        "bf16-moments",
        "inexact: both moments in bf16, half the bytes; parameters and gradients stay fp32, so a gradient frees as "
        "many bytes as its moments take; AdamW is taken to be as fast as memory, 20 bytes a parameter instead of 28",
        _bf16,
        exact=False,
    ),
    WhatIf(
        "nodes",
        "a second, equal node: twice the ranks and tokens, half of the state and of AdamW a rank, the same links and "
        "expert parallelism inside a node; forward and backward as planned, as if the network hid its collectives",
        _nodes,
    ),
)
