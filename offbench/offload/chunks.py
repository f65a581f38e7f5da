"""Which parameters' state moves together, and where a chunk sits in staging memory. Pure arithmetic, no torch.

A chunk is whole parameters in their given order, greedily, up to a cap (prime-rl#4008), or a piece of one that is too
large to move at once; a parameter above the cap that is not cut is a chunk alone. Inside a chunk each parameter's
exp_avg and exp_avg_sq start at multiples of 512 bytes.

Between steps a moment is one tensor, whatever it moves in. So a piece has its state in two ranges of its parameter's
memory, which is kept with the first piece's chunk; the chunks of the others keep nothing. AdamW is elementwise: pieces
change no bit, as they begin at multiples of 64 elements, where the CPU's kernels begin a vector, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

ALIGNMENT = 512


@dataclass(frozen=True)
class Piece:
    """Which slice of its parameter a chunk holds."""

    home: int
    """Chunk of the parameter's first piece."""
    start: int
    """Bytes of each moment before the slice."""
    whole: int
    """Bytes of each moment of the parameter; where it is kept, exp_avg_sq follows exp_avg after so many."""


@dataclass(frozen=True)
class Chunk:
    """State that moves in one copy each way, or, as a piece, in one a moment."""

    index: int
    members: tuple[int, ...]
    """Positions of its parameters in the optimizer's order."""
    offsets: tuple[tuple[int, int], ...]
    """Per member: byte offsets of exp_avg and exp_avg_sq in the chunk."""
    nbytes: int
    piece: Piece | None = None
    """None: whole parameters."""

    @property
    def home(self) -> int:
        """Index of the chunk that its memory is kept with: its own, but for later pieces."""
        return self.index if self.piece is None else self.piece.home

    @property
    def home_bytes(self) -> int:
        """Memory that is kept with it: its state, with a first piece all of its parameter's, with later ones none."""
        if self.piece is None:
            return self.nbytes
        return 0 if self.piece.start else 2 * self.piece.whole

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, bytes) of its state in the memory where it is kept, in its own order."""
        if self.piece is None:
            return ((0, self.nbytes),)
        each = self.nbytes // 2
        return (self.piece.start, each), (self.piece.whole + self.piece.start, each)

    @property
    def so_far(self) -> int:
        """Its bytes and those of the pieces before it."""
        return self.nbytes if self.piece is None else self.nbytes + 2 * self.piece.start


def plan_chunks(
    state_bytes: Sequence[int],
    cap: int,
    after: Sequence[Chunk] = (),
    cut_above: int | None = None,
    solid: Collection[int] = (),
) -> tuple[Chunk, ...]:
    """Chunks over parameters whose exp_avg has `state_bytes` bytes (exp_avg_sq the same).

    after: chunks of parameters laid out before; indices and positions continue where they end. cut_above: a parameter
    with more state, both moments, becomes pieces of at most `cap` bytes (1 KiB at least), as equal as can be; None:
    none does. solid: which of these parameters, from 0, cannot be cut.
    """
    first_position = after[-1].members[-1] + 1 if after else 0
    chunks: list[Chunk] = []
    members: list[int] = []
    offsets: list[tuple[int, int]] = []
    used = 0

    def close() -> None:
        nonlocal members, offsets, used
        if members:
            chunks.append(Chunk(len(after) + len(chunks), tuple(members), tuple(offsets), used))
        members, offsets, used = [], [], 0

    for position, nbytes in enumerate(state_bytes, start=first_position):
        padded = _aligned(nbytes)
        is_cut = cut_above is not None and 2 * padded > cut_above and position - first_position not in solid
        if is_cut and (each := _piece_bytes(padded, cap)) < padded:
            close()
            home = len(after) + len(chunks)
            for index, start in enumerate(range(0, padded, each), start=home):
                size = min(each, padded - start)
                chunks.append(Chunk(index, (position,), ((0, size),), 2 * size, Piece(home, start, padded)))
            continue
        if used + 2 * padded > cap:
            close()
        members.append(position)
        offsets.append((used, used + padded))
        used += 2 * padded
    close()
    return tuple(chunks)


def _piece_bytes(nbytes: int, cap: int) -> int:
    """Bytes of each moment in a piece, of `nbytes` in all."""
    most = max(ALIGNMENT, cap // 2 // ALIGNMENT * ALIGNMENT)
    return _aligned(-(-nbytes // -(-nbytes // most)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def ends(chunks: Sequence[Chunk]) -> list[int]:
    """By chunk, the bytes up to its end, which a budget must hold for it to stay on the device with all before it. Of
    a piece, up to the end of its parameter: a moment is in one place."""
    totals = accumulate(chunk.nbytes for chunk in chunks)
    return [
        total if chunk.piece is None else total - chunk.so_far + 2 * chunk.piece.whole
        for total, chunk in zip(totals, chunks, strict=True)
    ]


@dataclass(frozen=True)
class Staging:
    """Where each chunk sits in the staging arena, and whom it displaces."""

    nbytes: int
    starts: tuple[int, ...]

    def displaced(self, chunks: Sequence[Chunk], index: int) -> range:
        """Earlier chunks of the step that may share bytes with this one: only the last of them needs waiting for,
        since write-back is first in, first out."""
        return range(_last_overlapped(self.starts, [chunk.nbytes for chunk in chunks], index) + 1)


def plan_staging(chunks: Sequence[Chunk], slots: int | None) -> Staging:
    """The smallest range of bytes found in which any `slots` neighbouring chunks fit at once; None: all of them.

    Slots of the largest chunk's size would waste the difference to the mean (873 against 607 MiB in Qwen3-30B-A3B). A
    parameter far above the cap that is not cut costs its own size once: the others need no such slots.
    """
    sizes = [chunk.nbytes for chunk in chunks]
    return _side_by_side(sizes) if slots is None else _arena(sizes, slots)


def least_arena(sizes: Iterable[int]) -> int:
    """Smallest staging of arm stream over chunks of these sizes (0: it does not move): any two neighbours fit, so that
    one moves in while the one before it is written back. A large chunk (an embedding) counts once.

    A step whose gradients leave out the chunk between two large ones still ends: they then move one after the other.
    """
    moving = [size for size in sizes if size]
    return max(map(sum, pairwise(moving)), default=sum(moving))


def _arena(sizes: Sequence[int], slots: int) -> Staging:
    side_by_side = _side_by_side(sizes)
    if slots >= len(sizes):
        return side_by_side
    plans = [side_by_side, _narrowest_ring(sizes, slots)]
    if (apart := _large_ones_apart(sizes, slots)) is not None:
        plans.append(apart)
    return min(plans, key=lambda plan: plan.nbytes)


def _side_by_side(sizes: Sequence[int]) -> Staging:
    return Staging(sum(sizes), tuple(sum(sizes[:i]) for i in range(len(sizes))))


def _narrowest_ring(sizes: Sequence[int], slots: int) -> Staging:
    least = max(sum(sizes[i : i + slots]) for i in range(len(sizes)))
    most = slots * max(sizes)
    step = max(ALIGNMENT, (most - least) // 64 // ALIGNMENT * ALIGNMENT)
    for nbytes in range(least, most, step):
        ring = _ring(sizes, nbytes)
        if all(_last_overlapped(ring.starts, sizes, i) <= max(i - slots, -1) for i in range(len(sizes))):
            return ring
    return Staging(most, tuple(i % slots * max(sizes) for i in range(len(sizes))))


def _ring(sizes: Sequence[int], nbytes: int) -> Staging:
    starts: list[int] = []
    cursor = 0
    for size in sizes:
        if cursor + size > nbytes:
            cursor = 0
        starts.append(cursor)
        cursor += size
    return Staging(nbytes, tuple(starts))


def _large_ones_apart(sizes: Sequence[int], slots: int) -> Staging | None:
    """Chunks above half of the largest behind an arena of the others; None when hardly any are left for that."""
    large = [i for i, size in enumerate(sizes) if size > max(sizes) / 2]
    small = [i for i, size in enumerate(sizes) if size <= max(sizes) / 2]
    if not large or len(small) < slots:
        return None
    at_once = max(sum(i <= j < i + slots for j in large) for i in large)
    front = _arena([sizes[i] for i in small], slots)
    behind = _arena([sizes[i] for i in large], at_once)
    starts = dict(zip(small, front.starts, strict=True))
    starts |= {i: front.nbytes + start for i, start in zip(large, behind.starts, strict=True)}
    return Staging(front.nbytes + behind.nbytes, tuple(starts[i] for i in range(len(sizes))))


def _last_overlapped(starts: Sequence[int], sizes: Sequence[int], index: int) -> int:
    """The last chunk before this one that shares bytes with it; -1 when none does."""
    start, stop = starts[index], starts[index] + sizes[index]
    for other in range(index - 1, -1, -1):
        if starts[other] < stop and start < starts[other] + sizes[other]:
            return other
    return -1
