"""`--arm` with options of its own: parsed, put before the shared ones, refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbench.arm_line import COUNTS, SWITCHES, WORDS, parse
from offbench.arms.arm import OPTIONS
from offbench.config import GIB
from offbench.errors import UsageError
from offbench.naming import axes
from offbench.options import Options, flag_of
from offbench.resolve import resolve
from tests.hosts import host


def test_own_options_go_before_shared_ones() -> None:
    texts = ("none", "stream --state-budget=auto --lead 3", "stream --gradient-pool compute", "numa", "chunked --numa")
    job = Options(arm=texts, state_budget="4GiB", readbacks="copy", warmup=5)
    specs = resolve(job, host(1)).specs
    assert [spec.arm.name for spec in specs] == ["none", "stream", "stream", "chunked", "chunked"]
    assert [spec.arm.state_budget for spec in specs] == [None, "auto", 4 * GIB, 4 * GIB, 4 * GIB]
    assert [spec.arm.lead for spec in specs[1:3]] == [3, resolve(Options(arm=("stream",)), host(1)).specs[0].arm.lead]
    assert [spec.arm.gradient_pool for spec in specs] == ["stock", "stock", "compute", "stock", "stock"]
    assert [spec.arm.numa for spec in specs] == [False, False, False, True, True]
    assert {spec.arm.readbacks for spec in specs} == {"copy"}
    assert len({spec.run_id for spec in specs}) == 4, "both ways to say numa are one"


def test_every_option_of_an_arm_can_be_its_own() -> None:
    fields = {flag_of(name).removeprefix("--").replace("-", "_") for name in OPTIONS}
    assert fields < {*SWITCHES, *COUNTS, *WORDS}
    text = "stream --numa --activation-offload --fsdp-copies stock --readbacks copy --memory-limit 99GiB --chunk 1GiB "
    text += "--state-budget 3GiB --pieces 2 --staging 2GiB --at-loss 9GiB --lead 2 --ahead 1 --gradient-pool compute "
    text += "--activation-copies kernel"
    (spec,) = resolve(Options(arm=(text,), layers=48), host(1)).specs
    assert spec.workload.activation_offload
    assert axes(spec) == (
        "numa, gradient pool compute, memory limit 99.0GiB, activation offload by kernels, state budget 3.0GiB, "
        "staging 2.0GiB, at loss 9.0GiB, pieces 2, lead 2, ahead 1"
    ).replace(".0GiB", "GiB")
    said = parse(text, Options())
    given = {f"--{name.replace('_', '-')}" for name in said.own}
    assert given == {word for word in text.split() if word.startswith("--")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "name an arm; there are none, main"),
        ("strem --lead 2", "unknown arm strem: did you mean stream?"),
        ("stream --led 2", "--led is no option of an arm; there are --numa, "),
        ("stream --layers 4", "--layers is no option of an arm; there are --numa, "),
        ("stream lead 2", "lead is no option of an arm; there are --numa, "),
        ("stream --lead", "--lead needs a value"),
        ("stream --lead --ahead 2", "--lead needs a value"),
        ("stream --state-budget=", "--state-budget needs a value"),
        ("stream --lead two", "--lead two: not a whole number"),
        ("stream --numa=yes", "--numa takes no value"),
        ("stream --lead '2", "no closing quotation; quote the arm and its options once"),
        ("none --state-budget 4GiB", "--state-budget: arm none does not use it"),
        ("stream --slots 4", "--slots: arm stream does not use it"),
        ("stream --state-budget lots", "--state-budget lots: not a size"),
        ("stream --lead 0", "--lead 0: input should be greater than or equal to 1"),
        ("stream --memory-limit 999GiB", "--memory-limit 999GiB: the GPU has 140"),
    ],
)
def test_what_is_no_option_or_no_value_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(Options(arm=("none", text)), host(1))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_shared_option_that_one_arm_uses_is_no_error_for_the_others() -> None:
    none, stream = resolve(Options(arm=("none", "stream --lead 2"), ahead=3), host(1)).specs
    assert (none.arm.ahead, stream.arm.ahead, stream.arm.lead) == (None, 3, 2)
    with pytest.raises(UsageError, match="--slots: no chosen arm uses it"):
        resolve(Options(arm=("none", "stream --lead 2"), slots=3), host(1))


def test_one_command_makes_a_table_of_several_budgets_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.test_launch import fork

    results = tmp_path / "budgets.jsonl"
    words = ("--arm", "stream --state-budget 4KiB --chunk 64KiB", "--arm", "stream --chunk 64KiB")
    words += ("--nproc", "1", "--warmup", "1", "--steps", "1", "--resume", "--no-watch")
    code, found = fork(results, *words)
    assert code == 0, found
    rounds = [(record["spec"]["arm"]["name"], record["launch"]) for record in found]
    assert rounds == [("stream", 1), ("stream", 1)]
    code, found = fork(results, *words, "--launches", "2")
    assert code == 0, found
    assert [record["launch"] for record in found] == [1, 1, 2, 2]
    budgets = [record["spec"]["arm"].get("state_budget") for record in found]
    assert budgets == [4096, 0, 0, 4096]
    assert f"resumed: 2 of 4 launches are in {results}" in "".join(capsys.readouterr())
