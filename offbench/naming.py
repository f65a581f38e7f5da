"""How specs, arms and groups are called in text: one place, so that every line and table says the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbench.arms import ARMS
from offbench.config import RunSpec, Workload
from offbench.units import gib, show_size
from offbench.workload.presets import PRESETS


def axes(spec: RunSpec, numa: str | None = None, auto_budgets: Sequence[int] = ()) -> str:
    """What sets this row apart from its arm's defaults on stock FSDP2; `numa` is what the worker did about --numa,
    `auto_budgets` the bytes that each launch made of --state-budget auto. Small copies made by kernels are said
    although that is the command line's default, since rows without them stand in the same tables."""
    arm, usual = spec.arm, ARMS[spec.arm.name].defaults if spec.arm.name in ARMS else {}
    shape = PRESETS.get(spec.workload.model)
    parts = []
    if arm.numa:
        done = "" if numa is None or numa.startswith("node") else f" {numa.partition(':')[0]}"
        parts.append("numa" + done)
    if arm.fsdp_copies != "stock":
        parts.append(f"fsdp copies {arm.fsdp_copies}")
    if arm.readbacks != "copy":
        parts.append(f"readbacks {arm.readbacks}")
    if arm.gradient_pool != "stock":
        parts.append(f"gradient pool {arm.gradient_pool}")
    if arm.memory_limit is not None:
        parts.append(f"memory limit {show_size(arm.memory_limit)}")
    if spec.workload.activation_offload:
        parts.append("activation offload" + (" by kernels" if arm.activation_copies == "kernel" else ""))
    if arm.first_step == "whole":
        parts.append("whole first step")
    if arm.chunk_bytes is not None and arm.chunk_bytes != (shape.chunk_bytes if shape else None):
        parts.append(f"chunk {show_size(arm.chunk_bytes)}")
    if arm.state_budget:
        ends = list(dict.fromkeys(gib(pick(auto_budgets)) for pick in (min, max))) if auto_budgets else []
        found = f" = {' to '.join(ends)} GiB" if ends else ""
        parts.append("state budget " + (f"auto{found}" if arm.state_budget == "auto" else show_size(arm.state_budget)))
    for name, size in (("staging", arm.staging_bytes), ("at loss", arm.loss_bytes)):
        if size is not None:
            parts.append(f"{name} {show_size(size)}")
    for key in ("pieces", "slots", "lead", "ahead"):
        value = getattr(arm, key)
        if value is not None and value != usual.get(key):
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def arm_name(spec: RunSpec, label: str | None = None) -> str:
    """The arm with its axes, for one line of text: `overlap (numa, slots 8)`."""
    extra = axes(spec)
    name = label or spec.arm.name
    return f"{name} ({extra})" if extra else name


def describe(caption: dict[str, Any]) -> list[str]:
    """The caption as lines: hardware, workload, mode, versions and origin."""
    w, mode, window = caption["workload"], caption["mode"], caption["window"]
    gpus = f"{mode['nproc']} x {caption['gpu'] or 'unknown GPU'}" if mode["device"] == "cuda" else "CPU"
    cpus = f"{caption['cpu_model']}, {caption['cpus']} CPUs" if caption["cpu_model"] else None
    kind = "real"
    if mode["kind"] == "rehearsal":
        ranks = "rank 0" if mode["nproc"] == 1 else f"ranks 0-{mode['nproc'] - 1}"
        kind = f"rehearsal of {mode['world']}, {ranks}"
    link = f"link {'native' if mode['emulate_link'] is None else gib(mode['emulate_link']) + ' GiB/s emulated'}"
    versions = [f"{name} {caption[name]}" for name in ("torch", "offbench", "driver") if caption.get(name)]
    commit = (caption.get("commit") or "")[:12]
    origin = caption["source"] + (f" in {caption['reference']}" if caption["reference"] else "")
    when = caption.get("dates", [])
    return [
        "; ".join(filter(None, [gpus, cpus])),
        _job(caption["job"], mode) if caption["job"] is not None else _workload(w, mode),
        "; ".join(filter(None, [kind, link if mode["device"] == "cuda" else None]))
        + f"; {window['warmup']} warm-up + {window['steps']} measured steps",
        "; ".join(filter(None, [origin, " to ".join(sorted({*when[:1], *when[-1:]})), ", ".join(versions), commit])),
    ]


def _job(job: dict[str, Any], mode: dict[str, Any]) -> str:
    """What a trainer of its own says about itself."""
    told = [f"{key} {value}" for key, value in job.items() if value is not None]
    return ", ".join([*told, f"world {mode['world']}"])


def _workload(w: dict[str, Any], mode: dict[str, Any]) -> str:
    depth = PRESETS[w["model"]].layers if w["model"] in PRESETS else w["layers"]
    layers = f"{w['layers']} layers" if w["layers"] == depth else f"{w['layers']} of {depth} layers"
    batch = f"{w['seq_len']} tokens x {w['micro_batch']} x {w['grad_accum']} a rank"
    ep = f"EP {w['ep']}" + ("" if w["count_readback"] else " without count read-back")
    flags = [ep, f"checkpointing {w['ac']}", "compile" if w["compile"] else "no compile", w["routing"]]
    usual = Workload()
    flags += [
        f"{name.replace('_', ' ')} {w[name]}"
        for name in ("adamw", "lr", "betas", "eps", "weight_decay", "max_norm", "seed")
        if _plain(w[name]) != _plain(getattr(usual, name))
    ]
    if w["broadcast_every"]:
        flags.append(f"weights broadcast every {w['broadcast_every']} steps")
    return f"{w['model']}, {layers}, {batch}, world {mode['world']}, {', '.join(flags)}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
