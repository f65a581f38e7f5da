"""Copy probe: how fast this rank's host memory and its device exchange bytes, one way and both ways at once.

Rates are payload bytes per second: when an emulated link copies every byte `repeat` times, the repeats take time but
do not count. Copies run on the copy engines, each direction on a stream of its own, and are timed by stamps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from offbench.config import GIB
from offbench.device import Device, Stamp
from offbench.errors import UsageError
from offbench.record import Link

Direction = Literal["in", "out"]
Time = Callable[[Sequence[Direction], int], list[float]]
"""Copy in the given directions at once, so many times in a row; seconds of each time."""


def repeat_for(target_both: float, native_both: float) -> float:
    """How often each byte must be copied (>= 1) so that a link of `native_both` carries only `target_both`.

    Both are bytes/s, both directions summed. Raises UsageError when the target is faster than the native link.
    """
    if target_both > native_both:
        raise UsageError(
            f"cannot emulate a link of {target_both / GIB:.1f} GiB/s: this one reaches {native_both / GIB:.1f} GiB/s "
            "both ways; choose a slower --emulate-link"
        )
    return native_both / target_both


def probe(
    device: torch.device,
    host: Tensor,
    other: Tensor | None = None,
    *,
    repeat: float = 1.0,
    rounds: int = 5,
    together: Callable[[], None] = lambda: None,
) -> Link:
    """Rates of this rank's link, bytes/s; every field None on the CPU.

    host, other: pinned contiguous uint8 tensors of equal size [n]; copies in read `host`, copies out write `other`.
    With `host` alone its first half is read and its second half written. Contents do not change: what is written is
    what was read there before. Takes 2 n bytes of device memory meanwhile (n with `host` alone). `together` is called
    before each of the three measurements (in, out, both); a barrier there makes the ranks of a host contend.
    Raises UsageError for memory that is not pinned, since such copies would measure the host's staging instead.
    """
    if device.type == "cpu":
        return Link()
    if other is None:
        half = host.numel() // 2
        host, other = host[:half], host[half : 2 * half]
    if not (host.is_pinned() and other.is_pinned()):
        raise UsageError("the copy probe was given pageable memory; pin it first")
    copier = _Copier(Device.of(device), host, other, repeat)
    return link_rates(copier.time, host.numel(), rounds, together)


def link_rates(time: Time, nbytes: int, rounds: int, together: Callable[[], None]) -> Link:
    """Median rates over `rounds` timed copies of `nbytes` per direction, each mode after one copy to warm up.

    Both ways: as many bytes in as out, until both have arrived, summed.
    """

    def rate(directions: Sequence[Direction]) -> float:
        together()
        seconds = time(directions, 1 + rounds)[1:]
        return len(directions) * nbytes / statistics.median(seconds)

    return Link(in_bytes_per_s=rate(["in"]), out_bytes_per_s=rate(["out"]), both_bytes_per_s=rate(["in", "out"]))


def worst(links: Sequence[Link]) -> Link:
    """The slowest of the measured rates, field by field, over ranks; None where no rank measured."""
    fields = {
        field: [rate for link in links if (rate := getattr(link, field)) is not None] for field in Link.model_fields
    }
    return Link(**{field: min(rates, default=None) for field, rates in fields.items()})


def pieces(nbytes: int, repeat: float) -> list[int]:
    """Sizes of the copies that move `nbytes` once and then again until repeat x nbytes have crossed the link."""
    total = round(repeat * nbytes)
    whole, rest = divmod(total, nbytes)
    return [nbytes] * whole + [rest] * (rest > 0)


class _Copier:
    """Real copies on two streams made once."""

    def __init__(self, device: Device, host_in: Tensor, host_out: Tensor, repeat: float) -> None:
        at = device.torch_device
        self._device = device
        self._module = torch.get_device_module(at)
        self._sizes = pieces(host_in.numel(), repeat)
        # Filled from the host memory that will be written, so that writing it back changes nothing there.
        device_in = torch.empty_like(host_in, device=at)
        device_out = torch.empty_like(host_out, device=at).copy_(host_out)
        self._ways: dict[Direction, tuple[Any, Tensor, Tensor]] = {
            "in": (self._module.Stream(at), device_in, host_in),
            "out": (self._module.Stream(at), host_out, device_out),
        }

    def time(self, directions: Sequence[Direction], times: int) -> list[float]:
        """Queue all times at once, so that the link never idles between them, then wait for the last."""
        stamps: list[tuple[Stamp, Stamp]] = [self._once(directions) for _ in range(times)]
        return [self._device.seconds(start, end) for start, end in stamps]

    def _once(self, directions: Sequence[Direction]) -> tuple[Stamp, Stamp]:
        compute = self._module.current_stream(self._device.torch_device)
        start = self._device.stamp()
        for direction in directions:
            stream, target, source = self._ways[direction]
            stream.wait_stream(compute)  # both directions start at the stamp, after the time before
            with self._module.stream(stream):
                for size in self._sizes:
                    target[:size].copy_(source[:size], non_blocking=True)
        for direction in directions:
            compute.wait_stream(self._ways[direction][0])  # the end stamp comes after both have arrived
        return start, self._device.stamp()
