"""Bridges above GPUs: who made them, which are emulated, which are parts of one chip or of one card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offbench.topology.facts import AMD, PciDevice
from offbench.topology.links import Bridge, Pcie
from offbench.topology.model import Gpu

_PEX = ("1000:c010", "1000:c030")
"""Broadcom PEX switches, Gen4 and Gen5: two visible levels, one non-blocking chip (NVIDIA/nccl src/graph/topo.cc)."""
_ON_CARD = (AMD, "1022")
_EMULATED_IDS = {
    "104c:8232": "QEMU (as TI XIO3130)",
    "104c:8233": "QEMU (as TI XIO3130)",
    "1d0f:0200": "AWS",
    "1000:0001": "AWS (as an old LSI id)",
}
_EMULATED_VENDORS = {"1b36": "QEMU", "15ad": "VMware", "1414": "Hyper-V"}


def emulator(device: PciDevice) -> str | None:
    """Who emulates a bridge; None for one that is real, or whose ids the source does not give."""
    if device.synthetic or device.bdf.startswith("ffff:"):
        return "a topology file"
    by_vendor = _EMULATED_VENDORS.get(device.vendor or "")
    return by_vendor or _EMULATED_IDS.get(device.ids or "")


def bridges_above(gpus: Sequence[Gpu], devices: Mapping[str, PciDevice]) -> tuple[Bridge, ...]:
    """Every bridge in the chain of a GPU, each once, parents before children."""
    below: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        for bdf in gpu.chain:
            below.setdefault(bdf, []).append(gpu)
    return tuple(_bridge(bdf, members, devices.get(bdf)) for bdf, members in below.items())


def _bridge(bdf: str, members: list[Gpu], device: PciDevice | None) -> Bridge:
    chain = members[0].chain
    depth = chain.index(bdf)
    cards = {gpu.bdf for gpu in members}
    return Bridge(
        bdf=bdf,
        root=members[0].root or "unknown",
        parent=chain[depth - 1] if depth else None,
        vendor_device=device.ids if device else None,
        gpus=tuple(gpu.index for gpu in members),
        pcie=device.pcie if device else Pcie(),
        emulated=emulator(device) if device else None,
        # AMD's own root ports have the same vendor; those hang below the root complex itself.
        on_card=depth > 0 and len(cards) == 1 and device is not None and device.vendor in _ON_CARD,
    )


def merge_chips(bridges: Iterable[Bridge]) -> tuple[Bridge, ...]:
    """Mark the levels of one PEX switch as one chip, named after its uppermost port."""
    done: dict[str, Bridge] = {}
    for bridge in bridges:  # parents come first
        parent = done.get(bridge.parent or "")
        chip = None
        if bridge.vendor_device in _PEX:
            same = parent is not None and parent.vendor_device == bridge.vendor_device
            chip = parent.chip if same and parent is not None else bridge.bdf
        done[bridge.bdf] = Bridge(**{**vars(bridge), "chip": chip})
    return tuple(done.values())
