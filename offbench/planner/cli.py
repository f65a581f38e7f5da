"""The options of `offbench plan`. Imports nothing heavy before the command runs, as the whole command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    *,
    model: Annotated[str | None, typer.Option(help="Preset whose job is planned (qwen3-30b-a3b).")] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=2048, help="Depth; by default the model's own.")] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks of the job (8).")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel degree.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a rank and step.")] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Instead of a model: state of one rank, as in 28.4GiB.")
    ] = None,
    params: Annotated[
        int | None, typer.Option(min=1, help="Instead of a model: parameters of the whole job, split evenly.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Machine whose links copies cross: seed-8xh200, or a file.")
    ] = None,
    one_way: Annotated[str | None, typer.Option(help="Instead of a machine: a rank's rate, as in 26GiB/s.")] = None,
    both_ways: Annotated[str | None, typer.Option(help="Its rate in both directions at once, summed.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Results file whose none rows give model, compute times and rates.")
    ] = None,
    forward: Annotated[float | None, typer.Option(min=0, help="Seconds of the forward.")] = None,
    backward: Annotated[float | None, typer.Option(min=0, help="Seconds of the backward.")] = None,
    update: Annotated[float | None, typer.Option(min=0, help="Seconds of AdamW and clipping.")] = None,
    tflops: Annotated[
        float | None, typer.Option(min=1, help="Model TFLOP/s a GPU sustains, where no times are known (400).")
    ] = None,
    target: Annotated[float, typer.Option(help="Longest step that will do, in steps of none.")] = 1.05,
    state_budget: Annotated[
        list[str] | None,
        typer.Option(help="State that may stay on the GPU, as in 4GiB; repeatable; by default a few shares of it."),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Memory of a GPU, as in 80GiB: what peaks above it is not recommended.")
    ] = None,
    fsdp_copies: Annotated[
        str, typer.Option(help="kernel, or stock: small copies of FSDP2 wait behind bulk ones.")
    ] = "kernel",
    readbacks: Annotated[
        str, typer.Option(help="kernel, or copy: expert counts read back wait behind bulk copies.")
    ] = "kernel",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="The plan under other circumstances as well: ranks, remote, gen4, gen6, c2c, sequence, accumulation, "
            "bf16-moments, nodes, or all; repeatable."
        ),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Instead of the table: write the plan's figures (SVG) into this folder.")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Instead of a plan: simulate this results file's rows; repeatable.")
    ] = None,
) -> None:
    """Predict the step time of every schedule from model, machine and compute times, and what to choose."""
    from offbench.planner.command import plan_command
    from offbench.planner.options import PlanOptions

    options = PlanOptions(
        model=model,
        layers=layers,
        world=world,
        ep=ep,
        seq_len=seq_len,
        source=source,
        record=record,
        forward=forward,
        backward=backward,
        update=update,
        size=size,
        params=params,
        one_way=one_way,
        both_ways=both_ways,
        tflops=tflops,
        target=target,
        budgets=tuple(state_budget or ()),
        memory_limit=memory_limit,
        fsdp_copies=fsdp_copies,
        readbacks=readbacks,
        what_if=tuple(what_if or ()),
        plot=plot,
        against=tuple(against or ()),
    )
    raise typer.Exit(plan_command(options))
