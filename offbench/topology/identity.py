"""Which GPU CUDA calls 0, 1, 2, ...: from CUDA itself, else from rules that leave no doubt, else nobody's guess.

NVML's index is never used: the two orders differ under CUDA_VISIBLE_DEVICES and, on boxes of mixed cards, under the
default CUDA_DEVICE_ORDER=FASTEST_FIRST.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbench import hardware
from offbench.placement import sysfs_address
from offbench.topology.facts import GpuFacts, NodeClaim, address_order
from offbench.topology.model import Note


@dataclass(frozen=True)
class CudaDevice:
    """One device in CUDA's own list."""

    ordinal: int
    bdf: str
    uuid: str
    """32 hex digits, without `GPU-` or `MIG-` and dashes."""
    name: str
    host_numa: int | None = None
    """-1: CUDA knows of no NUMA."""


Answer = Callable[[float], tuple[CudaDevice, ...] | None]
"""Waits that many seconds for what CUDA lists; None: no answer."""


def ask_cuda(env: Mapping[str, str]) -> Answer:
    """Start a short-lived child that asks CUDA under `env`; call the result once to wait for its answer.

    None where there is no driver, or it refused or took longer than the seconds given (the first use of a GPU without
    persistence mode takes seconds). This process loads no CUDA and holds no context.
    """
    script = Path(__file__).with_name("cuda_ids.py")
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)],
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def wait(seconds: float) -> tuple[CudaDevice, ...] | None:
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return None
        return parse_cuda(output) if child.returncode == 0 else None

    return wait


def patience(gpus: Sequence[GpuFacts], env: Mapping[str, str]) -> float:
    """Seconds to wait for CUDA: few where the rules give the same order, more where nobody else knows."""
    whole = [gpu for gpu in gpus if gpu.mig_parent is None]
    decided = bool(whole) and len(whole) == len(gpus) and not _by_rule(whole, (), env)[1]
    return 0.7 if decided else 5.0


def parse_cuda(output: str) -> tuple[CudaDevice, ...]:
    """The devices that `cuda_ids.py` printed."""
    rows = [json.loads(line) for line in output.splitlines()]
    return tuple(
        CudaDevice(int(row["ordinal"]), sysfs_address(row["bdf"]), row["uuid"], row["name"], row["host_numa"])
        for row in rows
    )


def number(
    gpus: Sequence[GpuFacts], cuda: Sequence[CudaDevice] | None, env: Mapping[str, str]
) -> tuple[tuple[GpuFacts, ...], tuple[Note, ...]]:
    """GPUs in CUDA's order with their ordinals, those CUDA does not see behind them by address, and what to say.

    `gpus` are NVML's: full GPUs and, behind their parents, MIG instances. A MIG instance that CUDA shows replaces
    its parent; instances it does not show are left out.
    """
    whole = [gpu for gpu in gpus if gpu.mig_parent is None]
    if cuda is None:
        ordered, notes = _by_rule(whole, [gpu for gpu in gpus if gpu.mig_parent is not None], env)
    else:
        ordered, notes = [_joined(device, gpus) for device in cuda], ()
    parents = {gpu.bdf for gpu in ordered}
    rest = sorted((gpu for gpu in whole if gpu.bdf not in parents), key=lambda gpu: address_order(gpu.bdf or "0"))
    return (*ordered, *rest), notes


def _joined(device: CudaDevice, gpus: Sequence[GpuFacts]) -> GpuFacts:
    """NVML's facts for a CUDA device: by UUID, else by address, else CUDA's own alone."""
    same = [gpu for gpu in gpus if gpu.uuid is not None and _bare(gpu.uuid) == device.uuid]
    same = same or [gpu for gpu in gpus if gpu.bdf == device.bdf and gpu.mig_parent is None]
    found = same[0] if same else GpuFacts(device.bdf, uuid=f"GPU-{_dashed(device.uuid)}", name=device.name)
    claim: tuple[NodeClaim, ...] = ()
    if device.host_numa is not None:
        nodes = frozenset({device.host_numa} if device.host_numa >= 0 else ())
        claim = (NodeClaim("CUDA host_numa_id", nodes, str(device.host_numa)),)
    return replace(found, cuda_ordinal=device.ordinal, numa=(*found.numa, *claim))


def _by_rule(
    whole: Sequence[GpuFacts], instances: Sequence[GpuFacts], env: Mapping[str, str]
) -> tuple[list[GpuFacts], tuple[Note, ...]]:
    """CUDA's documented rules, where they decide: UUIDs name devices whatever the order; ordinals count in PCI order
    under CUDA_DEVICE_ORDER=PCI_BUS_ID, and where all cards are alike."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    alike = len({gpu.name for gpu in whole}) <= 1 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    by_uuid = text is not None and all(item.strip().startswith(("GPU-", "MIG-")) for item in text.split(","))
    if not whole or not (alike or by_uuid):
        doubt = Note(
            "degraded",
            "cuda-order",
            "CUDA did not answer and the cards differ, so nobody says which of them CUDA calls 0",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES",
        )
        return [], (doubt,) if whole else ()
    in_order = sorted(whole, key=lambda gpu: address_order(gpu.bdf or "0"))
    plain = [_named(gpu) for gpu in in_order]
    by_name = {_named(gpu).uuid: gpu for gpu in (*whole, *instances)}

    def find(uuid: str) -> hardware.Gpu | None:
        match = [gpu for gpu in instances if gpu.uuid is not None and gpu.uuid.startswith(uuid)]
        return _named(match[0]) if match else None

    chosen = hardware.filter_visible(plain, text, find)
    return [replace(by_name[gpu.uuid], cuda_ordinal=place) for place, gpu in enumerate(chosen)], ()


def _named(gpu: GpuFacts) -> hardware.Gpu:
    """As `hardware.filter_visible` takes it; a driver that keeps the UUID leaves the address to tell cards apart."""
    return hardware.Gpu(gpu.name or "", gpu.uuid or gpu.bdf or "", gpu.bdf or "", 0, 0)


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()


def _dashed(uuid: str) -> str:
    return "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
