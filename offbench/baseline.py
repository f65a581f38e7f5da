"""What a row is set against: a row of `none`, and launch by launch the one of it that ran in the same round.

`none` copies nothing, so where its own link has none a row is set against `none` of the same machine on the native
link. A pair is two launches of one round on one GPU: both bear the same number. Records of before GPUs were told apart
count as of one; where a number comes more than once, as when files of two machines are read together, the first ones
make a pair, and the second ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offbench.record import RunRecord

if TYPE_CHECKING:
    from offbench.compare import Row

NATIVE = "x none: against `none` on the native link, since no launch of it on this one counts; it copies nothing"


class Round(NamedTuple):
    """What the launches of a pair have in common."""

    gpu: str | None
    """Of rank 0 (`environment.gpu_state`)."""
    launch: int
    again: int
    """How many launches of the row on that GPU bore that number before."""


def steps_by_round(records: Iterable[RunRecord]) -> dict[Round, float]:
    """Step times, s, of a row's launches."""
    seen = Counter[tuple[str | None, int]]()
    found = {}
    for record in records:
        if record.step_s is not None:
            place = record.env.get("gpu_id"), record.launch
            found[Round(*place, seen[place])] = record.step_s
            seen[place] += 1
    return found


def ratios(steps: Mapping[Round, float], base: Mapping[Round, float]) -> list[float]:
    """Of the launches that ran in pairs: step time over that of the other. Where a number came to one row more often
    than to the other, as after a failure in one of two files, nobody knows which ones they are."""
    ours, theirs = (Counter((at.gpu, at.launch) for at in found) for found in (steps, base))
    return [step / base[at] for at, step in steps.items() if ours[at[:2]] == theirs[at[:2]]]


def baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """`none` with the same activation axis; the fastest one when there are several, since a slow baseline hides
    copies for free."""
    found = [
        (other.step_s.median, index)
        for index, other in enumerate(rows)
        if other.arm == "none" and other.activation_offload == row.activation_offload and other.step_s is not None
    ]
    return rows[min(found)[1]] if found else None


def native_none(records: Sequence[RunRecord], machine: Sequence[RunRecord]) -> list[RunRecord]:
    """Launches of `none` on the native link, in a window as long, for those of these records that emulate another link
    and have none of their own with the same activation axis. machine: the records of their machine, whatever the
    link."""
    spec = records[0].spec
    if spec.mode.emulate_link is None:
        return []

    def nones(among: Sequence[RunRecord]) -> list[RunRecord]:
        return [record for record in among if record.spec.arm.name == "none" and record.status == "ok"]

    own = {record.spec.workload.activation_offload for record in nones(records)}
    return [
        record
        for record in nones(machine)
        if record.spec.mode.emulate_link is None
        and record.spec.window == spec.window
        and record.spec.workload.activation_offload not in own
    ]
