"""Keeps FSDP2's pointer tables off the copy engine.

FSDP2's all-gather copy-out and reduce-scatter copy-in hand their kernels a table of pointers, which they upload from
host memory, about four uploads a layer and step. Such an upload of 10 KB waits behind whatever bulk copy the
host-to-device engine is serving, and compute waits with it: bulk prefetch and FSDP exclude each other. Here the same
copies go through `torch._foreach_copy_`, whose pointers travel as kernel arguments. Values are bit for bit the same.
Every view made here costs the host about a microsecond just before a layer's first kernel, so there are few: the
gathered buffer is cut in one call, and what it is copied into, which FSDP2 keeps, is cut once.

The operators are FSDP2's own (`torch.ops.fsdp`): torch 2.11 copies in with `chunk_cat`, 2.15 with
`chunk_cat_mixed_dtype`, which may mix dtypes in one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed.fsdp  # defines the operators
from torch import Tensor

_KEYS = ("CPU", "CUDA")
_ROWS = "_offbench_rows"
COPY_OUT = "split_with_sizes_copy"
COPY_IN = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"


class KernelCopies:
    """Replaces FSDP2's copy-in and copy-out for the whole process until `restore`."""

    in_use: ClassVar[int] = 0
    """Replacements that are not restored yet."""

    def __init__(self) -> None:
        self.copies_out = 0
        """All-gather copy-outs made so far."""
        self.copies_in = 0
        """Reduce-scatter copy-ins made so far."""
        self._library: Any = torch.library.Library("fsdp", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # That a kernel is replaced is the point; torch 2.11 says so once.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            register: Any = self._library.impl
            for key in _KEYS:
                register(COPY_OUT, self._copy_out, key, allow_override=True)
                register(COPY_IN, self._copy_in, key, allow_override=True)
        KernelCopies.in_use += 1

    def restore(self) -> None:
        """Give FSDP2 its own operators back."""
        self._library._destroy()
        KernelCopies.in_use -= 1

    def _copy_out(self, gathered: Tensor, sizes: Sequence[int], dim: int = 0, *, out: list[Tensor]) -> None:
        """out[i] [world, sizes[i]] <- columns of gathered [world, sum(sizes)]."""
        self.copies_out += 1
        if dim != 1 or gathered.dim() != 2:
            raise ValueError(f"FSDP2 splits rows of a matrix, not dim {dim} of {tuple(gathered.shape)}")
        rows = [_rows(target, gathered.shape[0]) for target in out]
        targets = [row for of_rank in zip(*rows, strict=True) for row in of_rank]
        _copy(targets, list(gathered.reshape(-1).split_with_sizes(list(sizes) * gathered.shape[0])))

    def _copy_in(self, tensors: list[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
        """out [chunks, columns] <- each tensor cut into `num_chunks` equal runs of rows, padded with zeros, side by
        side."""
        self.copies_in += 1
        if dim != 0:
            raise ValueError(f"FSDP2 concatenates chunks of dim 0, not of dim {dim}")
        rows = [-(-tensor.shape[0] // num_chunks) for tensor in tensors]
        widths = [r * (tensor.numel() // max(tensor.shape[0], 1)) for r, tensor in zip(rows, tensors, strict=True)]
        whole = out.view(num_chunks, -1)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        padding: list[Tensor] = []
        columns = whole[:, : sum(widths)].split_with_sizes(widths, 1)
        for tensor, slots, width, each in zip(tensors, columns, widths, rows, strict=True):
            if tensor.is_contiguous() and tensor.numel() == num_chunks * width:
                targets += slots.unbind(0)
                sources += tensor.view(num_chunks, width).unbind(0)
                continue
            for chunk, slot in enumerate(slots.unbind(0)):
                piece = tensor[chunk * each : (chunk + 1) * each]
                if piece.numel():
                    targets.append(slot[: piece.numel()].view(piece.shape))
                    sources.append(piece)
                if piece.numel() < width:
                    padding.append(slot[piece.numel() :])
        if padding:
            torch._foreach_zero_(padding)
        _copy(targets, sources)


def _rows(target: Tensor, world: int) -> Sequence[Tensor]:
    """A tensor's memory cut into `world` equal rows. FSDP2 hands over a new view, each time, of a tensor it keeps: the
    rows are kept with that one, and hold on to its memory only, or it would never be freed."""
    kept = target._base
    if kept is None or not target.is_contiguous():
        return target.view(world, -1).unbind(0)
    key = (world, target.dtype, target.storage_offset(), target.numel(), target.untyped_storage()._cdata)
    known = getattr(kept, _ROWS, None)
    if known is None or known[0] != key:
        width = target.numel() // world
        flat = torch.empty(0, dtype=target.dtype, device=target.device)
        flat.set_(target.untyped_storage(), target.storage_offset(), (world, width), (width, 1))
        known = (key, flat.unbind(0))
        setattr(kept, _ROWS, known)
    rows: Sequence[Tensor] = known[1]
    return rows


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """One call per source dtype: a list of mixed dtypes would fall back to a copy a tensor."""
    dtypes = dict.fromkeys(source.dtype for source in sources)
    if len(dtypes) == 1:
        torch._foreach_copy_(targets, sources)
        return
    for dtype in dtypes:
        chosen = [i for i, source in enumerate(sources) if source.dtype == dtype]
        torch._foreach_copy_([targets[i] for i in chosen], [sources[i] for i in chosen])


@contextmanager
def kernel_copies(wanted: bool = True) -> Iterator[KernelCopies | None]:
    """FSDP2 with its copies as kernels, inside the block; nothing changes when not `wanted`."""
    if not wanted:
        yield None
        return
    copies = KernelCopies()
    try:
        yield copies
    finally:
        copies.restore()
