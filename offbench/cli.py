"""The command line. Imports neither torch nor pydantic before a command runs, so `--help` answers at once.

Exit codes: 0 all arms ok, 1 an arm failed, 2 bad input before anything started, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbench.errors import OffbenchError
from offbench.planner.cli import plan

if TYPE_CHECKING:
    from offbench.launcher import Launcher

BAD_INPUT = 2
INTERRUPTED = 130

app = typer.Typer(
    name="offbench",
    help="What keeping optimizer state in host memory costs, why, and how to make it cost nothing.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)

CommandLineError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""The parser's own error for bad usage; newer typers carry their own parser, so it is reached through typer."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; every expected error is one line on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return app(args=given or ["--help"], prog_name="offbench", standalone_mode=False) or 0
    except CommandLineError as error:
        return _refuse(error.format_message())
    except OffbenchError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _refuse(message: str) -> int:
    if message.strip():
        print("error: " + " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


def make_launcher() -> Launcher:
    """What starts the launches; tests replace it."""
    from offbench.launcher import TorchrunLauncher

    return TorchrunLauncher()


def _version(asked: bool) -> None:
    if asked:
        from offbench import __version__

        print(f"offbench {__version__}")
        raise typer.Exit


@app.callback()
def offbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What keeping optimizer state in host memory costs, why, and how to make it cost nothing."""


@app.command()
def run(
    *,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Arm to run, with options of its own if need be: 'stream --state-budget auto'; repeatable; see "
            "`offbench arms`."
        ),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Run a fixed set of arms: seed (the rows of prime-rl#4427).")
    ] = None,
    numa: Annotated[bool, typer.Option("--numa", help="Bind each rank to its GPU's NUMA node first.")] = False,
    fsdp_copies: Annotated[
        str | None,
        typer.Option(
            help="kernel (default on a GPU): FSDP2 copies without small uploads that wait behind bulk ones; or stock."
        ),
    ] = None,
    readbacks: Annotated[
        str | None,
        typer.Option(
            help="kernel (default on a GPU): expert counts, loss, norm reach the host past bulk write-back; or copy."
        ),
    ] = None,
    gradient_pool: Annotated[
        str | None,
        typer.Option(
            help="stock (default); compute: sharded gradients in memory that activations can have, too; auto: as many "
            "as fit there."
        ),
    ] = None,
    activation_offload: Annotated[
        bool, typer.Option("--activation-offload", help="Saved block inputs go to host memory too.")
    ] = False,
    activation_copies: Annotated[
        str | None,
        typer.Option(
            help="With --activation-offload: copy (default), by the copy engines; or kernel, not behind state."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="qwen3-30b-a3b or tiny; by default tiny without a GPU.")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Depth; by default the model's own, or what fits the GPU.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sample.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per rank and forward.")] = None,
    grad_accum: Annotated[int | None, typer.Option(help="Forward and backward passes per step.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel degree.")] = None,
    ac: Annotated[str | None, typer.Option(help="Activation checkpointing: full or none.")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile pieces of each block; on a GPU by default.")
    ] = None,
    balanced_routing: Annotated[
        bool | None,
        typer.Option("--balanced-routing/--natural-routing", help="Same tokens for every expert (default), or top-k."),
    ] = None,
    count_readback: Annotated[
        bool,
        typer.Option(
            "--count-readback/--no-count-readback",
            help="Read expert counts back to the host once a layer, as real expert parallelism does (default).",
        ),
    ] = True,
    adamw: Annotated[str | None, typer.Option(help="AdamW of every arm: fused or foreach.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data.")] = None,
    max_norm: Annotated[
        float | None, typer.Option(min=0, help="Clip the global gradient norm to this; 0: no clip.")
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate.")] = None,
    world: Annotated[int | None, typer.Option(help="Ranks of the job: 8 for the large model, else --nproc.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes on this host: its GPUs, or 2 on the CPU.")] = None,
    mode: Annotated[
        str, typer.Option(help="real, rehearsal (few processes stand in for a larger job) or auto.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    emulate_link: Annotated[
        str | None, typer.Option(help="Slow the GPU's link to this rate, both ways summed, as in 38.8GiB/s.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Most GPU memory PyTorch may take, as in 37GiB; beyond it a launch fails.")
    ] = None,
    chunk: Annotated[str | None, typer.Option(help="Largest chunk of state moved at once, as in 1GiB.")] = None,
    state_budget: Annotated[
        str | None,
        typer.Option(help="State that stays on the GPU, as in 4GiB: the first layers'. auto: what hides the copies."),
    ] = None,
    pieces: Annotated[
        int | None, typer.Option(help="Parts in which a chunk moves and updates; 1 is upstream's (4).")
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Chunks held on the GPU at once.")] = None,
    staging: Annotated[str | None, typer.Option(help="stream: staging memory taken by step(), as in 4GiB.")] = None,
    at_loss: Annotated[
        str | None, typer.Option(help="stream: most staging memory when the forward ends, as in 14GiB.")
    ] = None,
    lead: Annotated[int | None, typer.Option(help="overlap, stream: chunks queued by step() itself.")] = None,
    ahead: Annotated[
        int | None, typer.Option(help="overlap, stream: chunks kept queued in front of the forward.")
    ] = None,
    first_step: Annotated[
        str | None, typer.Option(help="bounded, or whole: the first step holds all state on the GPU.")
    ] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps before the window (5).")] = None,
    steps: Annotated[int | None, typer.Option(help="Measured steps (15).")] = None,
    broadcast_every: Annotated[
        int | None,
        typer.Option(
            help="Send the bf16 weights to a replica on rank 0 after every so many steps: first all, then deltas."
        ),
    ] = None,
    launches: Annotated[int, typer.Option(min=1, help="Times each arm is launched, interleaved.")] = 1,
    results: Annotated[
        Path | None, typer.Option(help="JSONL file to append to; by default results/local/<date>-<host>.jsonl.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip launches that the results file already has.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the specs and commands; start nothing.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds one launch may take.")] = 1800,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Keep traces of the steps after the window, and of one watched step's memory, of all ranks in this "
            "folder."
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(help="Four steps after the window: the host's lead, small copies, where reserved memory lies."),
    ] = True,
    split: Annotated[
        bool,
        typer.Option(help="On a GPU, trace two steps after the window: where their time went, for the record."),
    ] = True,
    check_window: Annotated[
        bool,
        typer.Option(
            "--check-window",
            help="Two drained windows more, of once and twice the steps: a launch whose step time is not their slope "
            "is invalid.",
        ),
    ] = False,
) -> None:
    """Launch arms under torchrun, measure them, and append one record per launch."""
    from offbench.commands import RunFlags, run_command
    from offbench.extras import Extras
    from offbench.options import Options

    options = Options(
        arm=tuple(arm or ()),
        table=table,
        numa=numa,
        fsdp_copies=fsdp_copies,
        readbacks=readbacks,
        gradient_pool=gradient_pool,
        activation_offload=activation_offload,
        activation_copies=activation_copies,
        model=model,
        layers=layers,
        seq_len=seq_len,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        ep=ep,
        ac=ac,
        compile=compile,
        balanced_routing=balanced_routing,
        count_readback=count_readback,
        adamw=adamw,
        seed=seed,
        max_norm=max_norm,
        lr=lr,
        world=world,
        nproc=nproc,
        mode=mode,
        device=device,
        emulate_link=emulate_link,
        memory_limit=memory_limit,
        chunk=chunk,
        state_budget=state_budget,
        pieces=pieces,
        slots=slots,
        staging=staging,
        at_loss=at_loss,
        lead=lead,
        ahead=ahead,
        first_step=first_step,
        warmup=warmup,
        steps=steps,
        broadcast_every=broadcast_every,
    )
    flags = RunFlags(
        launches=launches,
        results=results,
        resume=resume,
        dry_run=dry_run,
        timeout_s=timeout,
        extras=Extras(watch=watch, check_window=check_window, split=split, profile=profile),
    )
    raise typer.Exit(run_command(options, flags, make_launcher()))


@app.command()
def topo(
    *,
    source: Annotated[
        str | None,
        typer.Option("--from", help="A machine we ship (seed-8xh200), or a file: topo JSON, hwloc or NCCL XML, ..."),
    ] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Floor for this much each way per rank and step, as in 28.4GiB.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Floor for the optimizer state of this model.")] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks of the job; by default one per GPU.")] = None,
    remote: Annotated[
        int | None, typer.Option(min=1, help="Floor with so many ranks' memory on another socket as well.")
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(help="Floor of host memory too, where CPUs step: what a NUMA node carries, as in 300GiB/s."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Copy on every GPU, alone and together, and keep the rates.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the drawing.")] = False,
    save: Annotated[Path | None, typer.Option(help="Also write a snapshot, without UUIDs, for --from.")] = None,
) -> None:
    """Show the machine that copies cross, its links, and the least time a step's copies can take."""
    from offbench.topo.command import TopoOptions, topo_command

    raise typer.Exit(topo_command(TopoOptions(source, size, model, world, remote, measure, json, save, dram)))


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Results files.", metavar="FILE...")],
    format: Annotated[str | None, typer.Option(help="table, md, csv or json.")] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Also write step time against peak memory, an SVG a table.")
    ] = None,
) -> None:
    """Compare the records of results files; unlike groups get tables of their own."""
    from offbench.report import report as print_report

    print_report(files, format, plot)


@app.command()
def verify(
    *,
    arm: Annotated[list[str] | None, typer.Option(help="Arm to prove; repeatable; default every exact one.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks: 1, 2 or 4; by default each of them in turn.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Each condition once, instead of all combinations.")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
    drop_wait: Annotated[str | None, typer.Option(hidden=True, help="Plant a fault: leave out such waits.")] = None,
) -> None:
    """Prove on this host that arms train to the same bits as torch.optim.AdamW; exit code 1 where they do not."""
    from offbench.verify.command import VerifyFlags, verify_command

    flags = VerifyFlags(tuple(arm or ()), nproc, quick, device, format, drop_wait)
    raise typer.Exit(verify_command(flags))


@app.command()
def trace(
    path: Annotated[Path, typer.Argument(help="Chrome trace of torch.profiler, .json or .json.gz.", metavar="PATH")],
    *,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps in it; by default as many as the profiler was told of.")
    ] = None,
    small: Annotated[str | None, typer.Option(help="Copies below this size count as small (4MiB).")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Trace of `none`: say by cause what its steps do not have.", metavar="PATH")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Show where a profiled step's time went: each cause of idle compute, streams, copies and what they waited for."""
    from offbench.trace.command import TraceOptions, trace_command

    raise typer.Exit(trace_command(TraceOptions(path, steps, small, json, against)))


app.command()(plan)


@app.command()
def arms() -> None:
    """List the arms: what moves, when, how much state stays on the GPU, exact or not."""
    from offbench.commands import list_arms

    for line in list_arms():
        print(line)
