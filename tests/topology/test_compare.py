"""A file held against the machine: it fills gaps, confirms, or conflicts; it never wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from offbench.topology import Evidence, Machine, with_claims
from tests.topology.roots import described, look


def claimed(machine: Machine, where: list[int]) -> Machine:
    """The same machine as some file might describe it."""
    gpus = tuple(replace(gpu, numa=Evidence(node, "medium")) for gpu, node in zip(machine.gpus, where, strict=True))
    return replace(machine, gpus=gpus, source=replace(machine.source, name="claim.xml"), notes=())


def test_a_file_fills_in_what_a_flat_guest_hides(tmp_path: Path) -> None:
    machine = look(tmp_path, described("flat-guest"))
    joined = with_claims(machine, claimed(machine, [0] * 4 + [1] * 4))
    assert [gpu.numa.value for gpu in joined.gpus] == [0] * 4 + [1] * 4
    assert {gpu.numa.confidence for gpu in joined.gpus} == {"medium"}
    assert [gpu.package for gpu in joined.gpus] == [0] * 4 + [1] * 4


def test_a_file_that_agrees_is_a_second_source(tmp_path: Path) -> None:
    text = described("8xh200-two-sockets")
    text["nvml"] = []
    machine = look(tmp_path, text)
    joined = with_claims(machine, claimed(machine, [0] * 4 + [1] * 4))
    assert {gpu.numa.confidence for gpu in joined.gpus} == {"high"}
    assert not joined.noted("conflict")


def test_a_file_that_differs_is_shown_and_loses(tmp_path: Path) -> None:
    machine = look(tmp_path, described("8xh200-two-sockets"))
    joined = with_claims(machine, claimed(machine, [0] * 8))
    assert [gpu.numa.value for gpu in joined.gpus] == [0] * 4 + [1] * 4
    assert [gpu.numa.confidence for gpu in joined.gpus[4:]] == ["conflict"] * 4
    [note] = joined.noted("conflict")
    assert "GPU 4: 1 here, 0 there" in note.text


def test_groups_and_gpus_only_the_file_has_are_conflicts(tmp_path: Path) -> None:
    flat = look(tmp_path / "a", described("two-gpus-bare"))
    paired = look(tmp_path / "b", described("8xh200-two-sockets"))
    codes = [note.code for note in with_claims(flat, replace(paired, source=flat.source)).noted("conflict")]
    assert codes == ["gpu-list", "gpu-list"]
    hidden = replace(paired, groups=())
    codes = [note.code for note in with_claims(hidden, paired).noted("conflict")]
    assert codes == ["sharing-conflict"] * 4
