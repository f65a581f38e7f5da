"""Step counters: tensors of their own, whatever memory they share."""

from __future__ import annotations

import io

import torch

from offbench.offload.counters import StepCounters


def test_all_are_counted_at_once_and_some_alone() -> None:
    counters = StepCounters()
    first, second = counters.make(3), counters.make(2)
    counters.count([*first, *second])
    counters.count([first[1], second[0]])
    counters.count([])
    assert [float(counter) for counter in (*first, *second)] == [1, 2, 1, 2, 1]
    first[2].fill_(7)  # as loading does
    counters.count([*first, *second])
    assert [float(counter) for counter in (*first, *second)] == [2, 3, 8, 3, 2]


def test_a_counter_that_somebody_put_in_place_of_ours_is_counted() -> None:
    counters = StepCounters()
    ours = counters.make(2)
    other = torch.tensor(4.0)
    counters.count([ours[0], other])
    assert (float(ours[0]), float(ours[1]), float(other)) == (1, 0, 5)


def test_they_look_like_torchs_and_are_saved_alone() -> None:
    with torch.device("meta"):  # a default device
        counter, *_ = StepCounters().make(1000)
    assert (counter.shape, counter.dtype, counter.device) == ((), torch.float32, torch.device("cpu"))
    assert counter.untyped_storage().nbytes() == 4
    file, torchs = io.BytesIO(), io.BytesIO()
    torch.save(counter, file)
    torch.save(torch.tensor(0.0), torchs)
    assert len(file.getvalue()) == len(torchs.getvalue())
