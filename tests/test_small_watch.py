"""Small copies are counted whoever makes them, and what a wait is does not depend on what a copy moves."""

from __future__ import annotations

import pytest
import torch

from offbench.device import CpuDevice, Device, Stamp
from offbench.offload.readback import Mailbox
from offbench.record import SmallCopies
from offbench.small_watch import Bracket, SmallCopyWatch, summed_up, worst
from tests.offload.test_small_copies import BF16, FP32, course
from tests.ranks import on_ranks

CPU = torch.device("cpu")
STAMP = Stamp(None, 0.0)


def bracket(kind: str, nbytes: int = 0, by_kernel: bool = False) -> Bracket:
    return Bracket(kind, by_kernel, nbytes, STAMP, STAMP)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_wait_is_a_bracket_less_the_work_in_it(by_kernel: bool) -> None:
    """The second copy-out moves 3 GB at the best rate in 3 ms; the third one 1 GB in 1 ms, 4 ms late. A copy-in takes
    its own time."""
    kinds = [("copy-out", 1), ("copy-out", 3), ("copy-out", 1), ("copy-in", 1), ("readback", 0)]
    brackets = [bracket(kind, n * 10**9, by_kernel) for kind, n in kinds]
    found = summed_up(brackets, [2e-3, 3e-3, 5e-3, 6e-3, 1e-3])
    assert (found.longest_upload_s, found.longest_readback_s) == (6e-3, 1e-3)
    assert found.longest_wait_s == pytest.approx(4e-3)
    counts = (found.uploads_per_step, found.readbacks_per_step, found.by_kernel_per_step)
    assert counts == ((0, 0, 5) if by_kernel else (4, 1, 0))


def test_all_of_a_read_back_counts_as_its_wait() -> None:
    found = summed_up([bracket("copy-in", 10**9), bracket("readback", 128)], [1e-3, 7e-3])
    assert found.longest_wait_s == 7e-3


def test_what_nobody_timed_is_null() -> None:
    found = summed_up([bracket("copy-out", 8)], [])
    assert found.uploads_per_step == 1
    assert found.longest_wait_s is found.longest_upload_s is None
    nothing = summed_up([], [])
    assert (nothing.uploads_per_step, nothing.longest_wait_s) == (0, None)


def test_brackets_are_timed_where_there_is_a_clock() -> None:
    """A device whose stamps are the host's clock stands for a GPU."""
    with SmallCopyWatch(CpuDevice(torch.device("cuda", 0))) as watch:
        Mailbox(torch.zeros(4), CPU, "copy").send(torch.ones(3))
    found = watch.figures()
    assert found.longest_wait_s == found.longest_readback_s
    assert 0 < (found.longest_wait_s or 0.0) < 5
    assert found.longest_upload_s is None


def test_the_worst_rank_counts_and_a_null_is_no_zero() -> None:
    one = SmallCopies(uploads_per_step=3, longest_wait_s=0.1)
    other = SmallCopies(uploads_per_step=4, longest_wait_s=0.01)
    found = worst([one, other, SmallCopies()])
    assert (found.uploads_per_step, found.longest_wait_s, found.longest_upload_s) == (4, 0.1, None)


def watched(rank: int, wanted: bool) -> tuple[bool, bool, SmallCopies, tuple[int, int], list[int]]:
    expected, _, _ = course(wanted, BF16, FP32)
    with SmallCopyWatch(Device.of(CPU)) as watch:
        found, *ours = course(wanted, BF16, FP32)
        Mailbox(torch.zeros(4), CPU, "copy").send(torch.ones(3))
    again, _, _ = course(wanted, BF16, FP32)
    Mailbox(torch.zeros(4), CPU, "copy").send(torch.ones(3))
    equal, after = (all(torch.equal(a, b) for a, b in zip(expected, other, strict=True)) for other in (found, again))
    sizes = sorted({one.nbytes for one in watch.brackets if one.kind != "readback"})
    return equal, after, watch.figures(), (ours[0], ours[1]), sizes


@pytest.mark.parametrize("wanted", [False, True])
def test_watching_changes_no_bit_and_ends(wanted: bool) -> None:
    """Two layers, four steps: a copy-out and a copy-in of each, and one value sent by hand."""
    for equal, after, found, ours, sizes in on_ranks(2, watched, wanted):
        assert equal
        assert after
        assert found.uploads_per_step == (0 if wanted else 16)
        assert found.by_kernel_per_step == (16 if wanted else 0)
        assert found.readbacks_per_step == 1
        assert ours == ((8, 8) if wanted else (0, 0))
        # A rank's shard of a layer is padded: 4 rows of 10, 4 and 7 of 7, 1 of 13, 5 of 6, and 4 of the bias.
        padded = 2 * (4 * 10 + 4 + 7 * 7 + 13 + 5 * 6)
        grads = 7 * 10 + 7 + 13 * 7 + 13 + 5 * 12
        assert sizes == sorted({2 * padded * 2, grads * 2 + padded * 4}), "bf16 in and out; bf16 in, fp32 out"
