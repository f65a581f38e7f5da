"""PCIe arithmetic: from GT/s and lanes to bytes per second, and from what files write to GT/s and lanes.

Per lane and direction: GT/s x code / 8, where the code is 8b/10b up to 5 GT/s and 128b/130b up to 32 GT/s (PCI
Express base specification). At 64 GT/s flits of 256 bytes carry 242 bytes of transaction and link-layer packets.
The result is a bound that no copy reaches: packet headers take another 9 to 14 percent at 256-byte payloads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from offbench.topology.links import Direction, Pcie, Rate, RateKind

Number = TypeVar("Number", int, float)

GENERATIONS: dict[float, tuple[int, float]] = {
    2.5: (1, 8 / 10),
    5.0: (2, 8 / 10),
    8.0: (3, 128 / 130),
    16.0: (4, 128 / 130),
    32.0: (5, 128 / 130),
    64.0: (6, 242 / 256),
}
"""GT/s to (generation, line code)."""
WIDTHS = (32, 16, 12, 8, 4, 2, 1)
"""Lanes a link may have (PCI Express base specification); 0 and 255 mean unknown in sysfs."""


def line_rate(gt_s: float | None, width: int | None) -> float | None:
    """Bytes per second in each direction of a link; None where the speed or the width is unknown."""
    if gt_s not in GENERATIONS or width not in WIDTHS:
        return None
    return gt_s * 1e9 * width * GENERATIONS[gt_s][1] / 8


def generation(gt_s: float | None) -> int | None:
    """PCIe generation of a transfer rate; None where it is unknown."""
    return GENERATIONS[gt_s][0] if gt_s in GENERATIONS else None


def gt_of_generation(number: int) -> float | None:
    """GT/s of a PCIe generation, as NVML numbers them; None for 0 (unknown)."""
    return next((gt_s for gt_s, (gen, _) in GENERATIONS.items() if gen == number), None)


def parse_speed(text: str | None) -> float | None:
    """GT/s from `32.0 GT/s PCIe`, `16 GT/s` or `8.0 GT/s`; None for `Unknown`, nothing, or a speed PCIe lacks."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*GT/s", text or "")
    value = float(match[1]) if match else None
    return value if value in GENERATIONS else None


def parse_width(text: str | None) -> int | None:
    """Lanes from `16`; None for 0, 255 (unknown) and nothing."""
    text = (text or "").strip()
    value = int(text) if text.isdigit() else None
    return value if value in WIDTHS else None


def of_gigabytes(gb_s: float) -> tuple[float, int] | None:
    """(GT/s, lanes) of a rate in 10^9 bytes/s, as hwloc writes it; of equal rates the wider, slower link (15.75 is
    8 GT/s x16 and 16 GT/s x8). None for 0, which is unknown, and for a rate no link has."""
    fits = []
    for gt_s in GENERATIONS:
        for width in WIDTHS:
            rate = line_rate(gt_s, width)
            # hwloc 1.x and early 2.x print 31.0 for 31.5: allow two percent.
            if rate is not None and abs(rate / 1e9 - gb_s) <= 0.02 * gb_s and width <= 16:
                fits.append((round(abs(rate / 1e9 - gb_s) / gb_s, 3), -width, gt_s, width))
    return min(fits)[2:] if fits and gb_s > 0 else None


def lesser(device: Pcie, port: Pcie) -> Pcie:
    """The link between two ends that each say what they can do: the lesser of both, where both are known."""
    return replace(
        device,
        max_gt_s=_min(device.max_gt_s, port.max_gt_s),
        max_width=_min(device.max_width, port.max_width),
        current_gt_s=_min(device.current_gt_s, port.current_gt_s),
        current_width=_min(device.current_width, port.current_width),
    )


def rates_of(pcie: Pcie, kind: RateKind = "line rate", remark: str = "") -> tuple[Rate, ...]:
    """Arithmetic rates of a link, in and out; PCIe is full duplex, so both directions add up."""
    rate = line_rate(pcie.max_gt_s, pcie.max_width)
    if rate is None:
        return ()
    source = f"{pcie.max_gt_s:g} GT/s x{pcie.max_width} ({pcie.source}{remark})"
    each: tuple[Direction, ...] = ("in", "out")
    return (*(Rate(way, rate, kind, source) for way in each), Rate("both", 2 * rate, kind, source))


def slowest(links: Iterable[Pcie]) -> Pcie | None:
    """The link of the lowest line rate; links of unknown rate are passed over; None where none is known."""
    known = [(rate, place, pcie) for place, pcie in enumerate(links) if (rate := _rate(pcie)) is not None]
    return min(known)[2] if known else None


def _rate(pcie: Pcie) -> float | None:
    return line_rate(pcie.max_gt_s, pcie.max_width)


def _min(one: Number | None, other: Number | None) -> Number | None:
    known = [value for value in (one, other) if value is not None]
    return min(known) if known else None
