"""How many small copies a step makes beside the bulk ones, and how long one waits.

While a watch is open, FSDP2's copy-outs and copy-ins and every read-back run between two stamps of their own stream. A
bracket lasts from the end of the work before it, or from when the host began to launch it, whichever is later, to its
own end. So it holds the wait for the copy engine, the host's launches where the stream had run dry, and the work.

Note [What is taken off]
    A copy-out or copy-in also moves parameters or gradients: in 7 to 270 us for a layer's of Qwen3-30B-A3B over 8
    ranks, in up to 1 ms for its embedding's (H200). That much is taken off a wait: the bytes it reads and writes, at
    the best rate any watched one of its kind reached. If all of them waited, that rate is too low and the waits too
    short; if the multiprocessors were shared, the work is taken for a wait. Of read-backs, which are a few bytes,
    nothing is taken off; nor is the host's time, so a host that takes a millisecond for one launch shows as a wait.

The operators are wrapped above whatever implements them (at autograd's dispatch key, which has nothing to do there):
the watch is the same for FSDP2's own copies and for `offbench.offload.small_copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from offbench.device import Device, Stamp
from offbench.offload.readback import Mailbox
from offbench.offload.small_copies import COPY_IN, COPY_OUT, KernelCopies
from offbench.record import SmallCopies
from offbench.stats import largest

Kind = Literal["copy-out", "copy-in", "readback"]
"""FSDP2's copies out of an all-gather's buffer and into a reduce-scatter's, which upload their pointers; values sent
to the host."""

_KEYS = ("AutogradCPU", "AutogradCUDA")


@dataclass(frozen=True)
class Bracket:
    """One small copy between its two stamps."""

    kind: Kind
    by_kernel: bool
    nbytes: int
    """What it reads and writes on the device, its tables aside."""
    begin: Stamp
    end: Stamp


class SmallCopyWatch:
    """Watches all small copies of the process from `open` to `close`, or inside a `with` block; not while a step is
    measured. One at a time."""

    def __init__(self, device: Device) -> None:
        self.brackets: list[Bracket] = []
        self._device = device
        self._library: Any = None

    def open(self) -> None:
        """Begin; what is queued later is watched."""
        self._library = torch.library.Library("fsdp", "IMPL")  # type: ignore[no-untyped-call]
        for key in _KEYS:
            self._library.impl(COPY_OUT, self._wrapped(COPY_OUT, "copy-out", _moved_out), key, with_keyset=True)
            self._library.impl(COPY_IN, self._wrapped(COPY_IN, "copy-in", _moved_in), key, with_keyset=True)
        Mailbox.around = staticmethod(self._readback)

    def close(self) -> None:
        """End; the brackets are kept."""
        self._library._destroy()
        Mailbox.around = staticmethod(_unwatched)

    def __enter__(self) -> SmallCopyWatch:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def figures(self) -> SmallCopies:
        """What was seen, taken for one step; waits for the watched copies."""
        on_cpu = self._device.torch_device.type == "cpu"
        seconds = [] if on_cpu else [self._device.seconds(one.begin, one.end) for one in self.brackets]
        return summed_up(self.brackets, seconds)

    def _wrapped(self, name: str, kind: Kind, moved: Callable[..., int]) -> Callable[..., None]:
        operator = getattr(torch.ops.fsdp, name).default
        below: Any = torch._C._after_autograd_keyset

        def watched(keys: Any, *arguments: Any, **named: Any) -> None:
            with self._bracket(kind, KernelCopies.in_use > 0, moved(*arguments, **named)):
                operator.redispatch(keys & below, *arguments, **named)

        return watched

    def _readback(self, by_kernel: bool, nbytes: int) -> Any:
        return self._bracket("readback", by_kernel, nbytes)

    @contextmanager
    def _bracket(self, kind: Kind, by_kernel: bool, nbytes: int) -> Iterator[None]:
        begin = self._device.stamp()
        yield
        self.brackets.append(Bracket(kind, by_kernel, nbytes, begin, self._device.stamp()))


_unwatched = Mailbox.around


def _moved_out(gathered: Tensor, *_: Any, **__: Any) -> int:
    return 2 * gathered.nbytes


def _moved_in(tensors: Sequence[Tensor], *_: Any, out: Tensor, **__: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors) + out.nbytes


def summed_up(brackets: Sequence[Bracket], seconds: Sequence[float]) -> SmallCopies:
    """The record's figures of one step; seconds: of each bracket, or none where nobody can tell."""
    timed = list(zip(brackets, seconds, strict=True)) if seconds else []
    rates: dict[Kind, float] = {}
    for one, took in timed:
        if one.kind != "readback" and took > 0:
            rates[one.kind] = max(rates.get(one.kind, 0.0), one.nbytes / took)
    waits = [took - (one.nbytes / rates[one.kind] if rates.get(one.kind) else 0.0) for one, took in timed]
    by_engine = [one.kind == "readback" for one in brackets if not one.by_kernel]
    return SmallCopies(
        uploads_per_step=by_engine.count(False),
        readbacks_per_step=by_engine.count(True),
        by_kernel_per_step=len(brackets) - len(by_engine),
        longest_upload_s=max((took for one, took in timed if one.kind != "readback"), default=None),
        longest_readback_s=max((took for one, took in timed if one.kind == "readback"), default=None),
        longest_wait_s=max(waits, default=None),
    )


def worst(found: Sequence[SmallCopies]) -> SmallCopies:
    """The largest figures of any rank."""
    return SmallCopies(**{name: largest(getattr(one, name) for one in found) for name in SmallCopies.model_fields})
