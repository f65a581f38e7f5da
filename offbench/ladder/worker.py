"""One GPU's copies on the measurement ladder: `python -m offbench.ladder.worker FOLDER GPU`, started by the crew.

Binds itself to the GPU's NUMA node first, then loads torch, pins its buffers, and answers each rung file in the folder
with a file of what arrived. Files that matter are complete or absent. Times are the host's monotonic clock, which all
processes of a host share, so a start time in the rung's file is the barrier.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from offbench import pages, placement
from offbench.failure import die_with_parent, write_json
from offbench.ladder.copy_window import IN_FLIGHT, Copier, Way, bytes_between, copy_bytes, copy_for
from offbench.ladder.plan import SETTLE_S
from offbench.topology import sysfs as kernel

LOOK_EVERY_S = 1e-3
_SENT, _RECEIVED = 197, 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES
_WIDE = (2, 3)  # NVML_VALUE_TYPE_UNSIGNED_LONG and _LONG_LONG
TAIL_S = 0.05
"""Copies go on this long after the window, so that no GPU of the rung ends it early."""


def main(folder: Path, gpu: str) -> None:
    """Serve rungs until the crew says stop or goes away."""
    die_with_parent()
    task = json.loads((folder / "task.json").read_text())
    mine = task["gpus"][gpu]
    bound = placement.bind(mine["bdf"], node=mine["node"])
    copiers = prepare(task, mine)
    nodes = kernel.read_nodes(placement.SYSFS, placement.PROC)
    found = {name: pages.look(copier.ranges, mine["node"], nodes) for name, copier in copiers.items()}
    places = {name: None if place is None else vars(place) for name, place in found.items()}
    health = LinkHealth(mine["bdf"]) if task["device"] == "cuda" else None
    ready = {"pid": os.getpid(), "numa": bound.describe(), "placement": places}
    write_json(folder / f"ready-{gpu}.json", ready)
    number = 0
    while not (folder / "stop").exists():
        path = folder / f"rung-{number}.json"
        if not path.exists():
            time.sleep(LOOK_EVERY_S)
            continue
        rung = json.loads(path.read_text())
        if int(gpu) in rung["gpus"]:
            served = serve(rung, copiers[rung["buffers"]], health.read if health else None)
            write_json(folder / f"done-{number}-{gpu}.json", served | {"placement": places[rung["buffers"]]})
        number += 1


def serve(
    rung: dict[str, Any],
    copier: Copier,
    health: Callable[[], Reading] | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """One repeat of a rung: wait for its start, copy, say what arrived, in how long, over which link."""
    ways: list[Way] = rung["ways"]
    before = health() if health else Reading()
    seen: list[Reading] = []

    def look() -> None:
        if health:
            seen.append(health())

    while (left := rung["start"] - clock()) > 0:
        sleep(min(left, LOOK_EVERY_S))
    if rung["each_way_bytes"] is None:
        begin = rung["start"] + SETTLE_S
        end = begin + rung["window_s"]
        arrivals = copy_for(copier, ways, end + TAIL_S, clock, look)
        nbytes = {way: bytes_between(arrivals[way], copier.piece_bytes, begin, end) for way in ways}
        seconds = rung["window_s"]
    else:
        arrivals = copy_bytes(copier, ways, rung["each_way_bytes"], clock, look)
        nbytes = {way: float(len(arrivals[way]) * copier.piece_bytes) for way in ways}
        seconds = max(times[-1] for times in arrivals.values()) - rung["start"]
    after = health() if health else Reading()
    return {
        "nbytes": nbytes,
        "seconds": seconds,
        "link": seen[0].link if seen else None,
        "replays": _grown(before.replays, after.replays),
        "copied": {way: float(len(arrivals[way]) * copier.piece_bytes) for way in ways},
        "counted": {
            "in": _grown(before.received_bytes, after.received_bytes),
            "out": _grown(before.sent_bytes, after.sent_bytes),
        },
    }


def _grown(before: int | None, after: int | None) -> int | None:
    """What a counter gained; None without one, or where it started again from zero."""
    return after - before if before is not None and after is not None and after >= before else None


def prepare(task: dict[str, Any], mine: dict[str, Any]) -> dict[str, TorchCopier]:
    """Copiers by the names of their buffers: local host memory and, where asked for, that of other nodes."""
    import torch

    from offbench.offload.hoststore import HostStore

    device = torch.device(task["device"], 0) if task["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        from offbench.device import Device

        torch.cuda.set_device(device)
        found = Device.of(device).pci_bus_id
        if mine["bdf"] is not None and mine["mig_parent"] is None and found != mine["bdf"]:
            raise SystemExit(f"CUDA shows GPU {found} where {mine['bdf']} was expected; check CUDA_VISIBLE_DEVICES")

    def copier() -> TorchCopier:
        store = HostStore([task["region_bytes"]] * 2, pin_for=device)
        return TorchCopier(device, store, task["piece_bytes"])

    copiers, made = {"local": copier()}, dict[int, TorchCopier]()
    wanted = [("remote", mine["remote_node"], mine["remote_cpus"])] if mine["remote_node"] is not None else []
    for name, node, cpus in [*wanted, *((f"node {node}", node, cpus) for node, cpus in mine["others"])]:
        if node not in made:
            with elsewhere(node, cpus, mine["node"]):
                made[node] = copier()
        copiers[name] = made[node]
    return copiers


@contextmanager
def elsewhere(node: int, cpus: list[int], home: int | None) -> Iterator[None]:
    """Touch memory from another node's CPUs: pages stay on the node that touched them first."""
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    placement.prefer_node(node)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mask)
        if home is not None:
            placement.prefer_node(home)


class TorchCopier:
    """Pieces between pinned host regions and a few device buffers, each direction on a stream of its own."""

    def __init__(self, device: Any, store: Any, piece_bytes: int) -> None:
        import torch

        self.piece_bytes = piece_bytes
        self._store = store  # keeps the regions pinned
        self.ranges: list[tuple[int, int]] = store.addresses
        regions: dict[Way, Any] = {"in": store.chunk(0), "out": store.chunk(1)}
        self._host = {way: region.split(piece_bytes) for way, region in regions.items()}
        self._device = {
            way: [torch.zeros(piece_bytes, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
            for way in regions
        }
        self._module = torch.get_device_module(device) if device.type == "cuda" else None
        self._streams = {way: self._module.Stream(device) for way in regions} if self._module else {}
        self._count: dict[Way, int] = {"in": 0, "out": 0}

    def submit(self, way: Way) -> Any:
        number = self._count[way]
        self._count[way] += 1
        host, device = self._host[way][number % len(self._host[way])], self._device[way][number % IN_FLIGHT]
        target, source = (device, host) if way == "in" else (host, device)
        if self._module is None:
            target.copy_(source)
            return None
        with self._module.stream(self._streams[way]):
            target.copy_(source, non_blocking=True)
            return self._streams[way].record_event()

    def arrived(self, ticket: Any) -> bool:
        return ticket is None or bool(ticket.query())


class Reading(NamedTuple):
    """What NVML says of a PCIe link at one moment; None for what it lacks."""

    link: str | None = None
    """`Gen5 x16`, as negotiated."""
    replays: int | None = None
    received_bytes: int | None = None
    """Counters since the driver was loaded: what the GPU received and sent over PCIe."""
    sent_bytes: int | None = None


class LinkHealth:
    """PCIe generation, width and counters of one GPU, through NVML by PCI address."""

    def __init__(self, bdf: str | None, nvml: Any = None) -> None:
        from offbench.hardware import load_nvml

        self._nvml = nvml or load_nvml()
        self._handle = None
        try:
            self._nvml.nvmlInit()
            if bdf is not None:
                self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(bdf.encode())
        except self._nvml.NVMLError:
            self._handle = None  # no NVML here: copies are measured all the same

    def read(self) -> Reading:
        """The link now."""
        generation = self._ask("nvmlDeviceGetCurrPcieLinkGeneration")
        width = self._ask("nvmlDeviceGetCurrPcieLinkWidth")
        link = f"Gen{generation} x{width}" if generation and width else None
        return Reading(link, self._ask("nvmlDeviceGetPcieReplayCounter"), *self._bytes())

    def _bytes(self) -> tuple[int | None, int | None]:
        """(received, sent): field values 198 and 197. Counters of 32 bits wrap every few GiB and are left out."""
        query = getattr(self._nvml, "nvmlDeviceGetFieldValues", None)
        if self._handle is None or query is None:
            return None, None
        try:
            received, sent = query(self._handle, [_RECEIVED, _SENT])
        except self._nvml.NVMLError:
            return None, None
        return _wide(received), _wide(sent)

    def _ask(self, name: str) -> int | None:
        query = getattr(self._nvml, name, None)
        if self._handle is None or query is None:
            return None
        try:
            return int(query(self._handle))
        except self._nvml.NVMLError:
            return None


def _wide(value: Any) -> int | None:
    """The 64-bit counter in a field value; None where the GPU has none."""
    return int(value.value.ullVal) if value.nvmlReturn == 0 and value.valueType in _WIDE else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
