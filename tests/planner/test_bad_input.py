"""What `offbench plan` refuses, each with one line and exit code 2."""

from __future__ import annotations

import pytest

from offbench import cli
from offbench.planner import command
from tests.planner.test_command import NATIVE, ROOT, nowhere

REFUSED = [
    (("--model", "qwen"), "did you mean qwen3-30b-a3b"),
    (("--model", "tiny", "--bytes", "1GiB"), "--model and --bytes each say"),
    (("--record", str(NATIVE), "--layers", "4"), "--layers: the times of --record"),
    (("--from", "seed-8xh200", "--one-way", "1GiB/s"), "--one-way and --from"),
    (("--both-ways", "1GiB/s"), "--both-ways needs --one-way"),
    (("--one-way", "2GiB/s", "--both-ways", "1GiB/s"), "is less than --one-way"),
    (("--from", "seed-8xh200", "--update", "1"), "--forward and --backward go together"),
    (("--from", "seed-8xh200", "--bytes", "1GiB"), "how long does a step compute"),
    (("--from", "seed-8xh200", "--target", "0.9"), "--target 0.9"),
    (("--from", "seed-8xh200", "--target", "nan"), "--target nan"),
    (("--from", "seed-8xh200", "--target", "inf"), "--target inf"),
    (("--from", "seed-8xh200", "--tflops", "inf"), "--tflops inf: give the TFLOP/s"),
    (("--record", str(NATIVE), "--tflops", "500"), "--tflops: --record says how long"),
    (("--from", "seed-8xh200", "--forward", "0", "--backward", "0"), "--forward 0 --backward 0"),
    (("--from", "seed-8xh200", "--model", ""), "unknown model"),
    (("--from", "seed-8xh200", "--plot", ""), "--plot: names no folder"),
    (("--from", "seed-8xh200", "--plot", "x", "--what-if", "gen4"), "--what-if: the figures of --plot"),
    (("--against", str(NATIVE), "--bytes", "1GiB"), "so --bytes changes nothing"),
    (("--against", "/dev/null"), "--against /dev/null: no records in it; `offbench run`"),
    (("--against", str(ROOT / "LICENSE")), "LICENSE:1: line: Invalid JSON"),
    (
        ("--bytes", "9999999999GiB", "--one-way", "1GiB/s"),
        "--bytes 9999999999GiB: 9999999999.0 GiB of state for a rank",
    ),
    (("--params", str(10**15), "--from", "seed-8xh200"), "more than the 1024.0 that are planned"),
    (("--layers", "2048", "--world", "1", "--from", "seed-8xh200"), "--layers 2048: "),
    (("--layers", "4096"), "--layers"),
    (("--record", "/dev/null"), "--record /dev/null: no records in it"),
    (("--from", "seed-8xh200", "--what-if", "gen7"), "--what-if gen7: there are all, ranks, remote, gen4"),
    (("--from", "seed-8xh200", "--state-budget", "4"), "--state-budget 4: not a size"),
    (("--from", "seed-8xh200", "--fsdp-copies", "none"), "--fsdp-copies none: stock or kernel"),
    (("--from", "seed-8xh200", "--readbacks", "stock"), "--readbacks stock: copy or kernel"),
    (("--from", "seed-8xh200", "--plot", "/dev/null/here"), "cannot write figures to /dev/null/here"),
    (("--from", "seed-8xh200", "--ep", "3"), "--ep 3: must divide"),
    (("--params", "1000", "--ep", "2"), "--ep needs a --model"),
    (("--record", str(ROOT / "results" / "seed-table-a.jsonl")), "no measured row of arm none"),
    ((), "no GPU here"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_bad_input_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "this_host", nowhere)
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
