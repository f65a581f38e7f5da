"""The reproducers run without a GPU as far as they can; remedies copy what FSDP2's operators and a plain copy do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
import torch
import torch.distributed.fsdp

from tests.offload.test_zerocopy import interpreter_fails

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "reproducers" / "fsdp2_bulk_copies.py"
WAITING = SCRIPT.with_name("waiting_streams.py")
RANKS = 8


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reproducer() -> ModuleType:
    return load(SCRIPT)


def test_a_dry_run_takes_every_remedy_to_where_it_acts() -> None:
    """Two layers: a gather each and one more each behind resharding, a reduce-scatter each. Every bulk copy is
    compared with its source."""
    interpreted = interpreter_fails() is None
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": str(int(interpreted))}
    words = [sys.executable, str(SCRIPT), "--dry", "--direction", "both"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(rows) == ["stock", "operators", "offbench", "extension", "trunks", "sms"]
    step = "one step on the CPU, copies out / in without a table "
    for name in ("operators", "offbench", "extension"):
        assert rows[name] == step + "4 / 2; bulk copies by engine checked"
    assert rows["stock"] == step + "0 / 0; bulk copies by engine checked"
    assert rows["trunks"] == step + "0 / 0; bulk copies by trunks checked"
    assert rows["sms"] == step + "0 / 0; bulk copies by sms checked" if interpreted else "skipped" in rows["sms"]


def test_it_stands_alone_and_is_one_file(reproducer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SCRIPT.read_text()
    assert re.findall(r"^( *)(?:from|import) offbench", text, re.MULTILINE) == [" " * 8]
    assert len(text.splitlines()) < 380
    monkeypatch.setattr(reproducer, "triton", None)
    monkeypatch.setattr(reproducer, "find_spec", lambda name: None)
    skipped = {name: reproducer.why_not(variant, "cuda") for name, variant in reproducer.VARIANTS.items()}
    assert {name: why for name, why in skipped.items() if why} == {
        "offbench": "offbench is not installed",
        "sms": "Triton is not installed",
    }


@pytest.mark.parametrize("extension", [False, True])
def test_it_copies_out_what_fsdp_does(reproducer: ModuleType, extension: bool) -> None:
    sizes = [6, 4, 10]
    gathered = torch.randn(RANKS * sum(sizes))
    ours, theirs = ([torch.empty(RANKS, size) for size in sizes] for _ in range(2))
    torch.ops.fsdp.split_with_sizes_copy(gathered.view(RANKS, -1), sizes, dim=1, out=theirs)
    before = reproducer.calls["out"]
    if extension:
        buffer = gathered.as_subclass(reproducer.Buffer).view(RANKS, -1)
        torch.ops.fsdp.split_with_sizes_copy(buffer, sizes, dim=1, out=ours)
    else:
        reproducer.copy_out(gathered.view(RANKS, -1), sizes, dim=1, out=ours)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert reproducer.calls["out"] == before + 1


@pytest.mark.parametrize("extension", [False, True])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_it_copies_in_what_fsdp_does(reproducer: ModuleType, into: torch.dtype, extension: bool) -> None:
    stock = getattr(torch.ops.fsdp, reproducer.COPY_IN)
    tensors = [torch.randn(shape).bfloat16() for shape in ((16, 3), (8, 5, 2), (24,))]
    ours, theirs = (torch.empty(sum(t.numel() for t in tensors), dtype=into) for _ in range(2))
    stock(tensors, dim=0, num_chunks=RANKS, out=theirs.view(RANKS, -1))
    before = reproducer.calls["in"]
    copy_in, out = (stock, ours.as_subclass(reproducer.Buffer)) if extension else (reproducer.copy_in, ours)
    copy_in(tensors, dim=0, num_chunks=RANKS, out=out.view(RANKS, -1))
    assert torch.equal(ours, theirs)
    assert reproducer.calls["in"] == before + 1


def test_gradients_are_plain_tensors_under_the_extension(reproducer: ModuleType) -> None:
    """FSDP2 cuts them from the reduced buffer by `as_strided`."""
    buffer = torch.zeros(12).as_subclass(reproducer.Buffer)
    assert type(torch.as_strided(buffer, (3, 4), (4, 1))) is type(buffer[:2]) is torch.Tensor
    assert type(buffer.view(3, 4)) is reproducer.Buffer


@pytest.mark.parametrize("elements", [1, 999, 1000, 1001])
def test_trunks_cover_all_bytes_with_a_kernel_behind_each(reproducer: ModuleType, elements: int) -> None:
    source, to, tick = torch.arange(1000, dtype=torch.int32), torch.zeros(1000, dtype=torch.int32), torch.zeros(1)
    reproducer.copy_in_trunks(to, source, elements, tick)
    assert torch.equal(to, source)
    assert tick.item() == -(-1000 // elements)


def test_the_kernel_refuses_what_it_would_leave_out(reproducer: ModuleType) -> None:
    odd = torch.zeros(reproducer.BLOCK + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="moves blocks of 4096 elements, not 4097"):
        reproducer.copy_by_few(odd, odd, 8)


def test_the_table_compares_with_stock_and_no_bulk(reproducer: ModuleType) -> None:
    alone = {"stock": [2.0, 2.0, 9.0], "trunks": [2.5, 2.5, 2.5]}
    beside = {"stock": [(3.0, 1.0)] * 3, "trunks": [(2.5, 4.0)] * 3}
    lines = reproducer.table(
        alone, beside, {"engine": [1.0], "trunks": [2.0]}, 8.0, {"sms": "Triton is not installed"}
    )
    assert lines[2:] == [
        "| no bulk traffic | 2.000 | 2.000 | 1.00 | 1.00 | - | - |",
        "| stock | 2.000 | 3.000 | 1.50 | 1.50 | 8.0 | 8.0 |",
        "| trunks | 2.500 | 4.000 | 2.00 | 1.25 | 4.0 | 2.0 |",
        "| sms | skipped: Triton is not installed | - | - | - | - | - |",
    ]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gib 0", "argument --gib: '0' is not a whole number of at least 1"),
        ("--dry --trunk-mib 8", "--trunk-mib 8 with --gib 16 queues 4096 copies and kernels"),
        ("--variants magic", "invalid choice: 'magic'"),
    ],
)
def test_bad_input_is_one_line(
    reproducer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp2_bulk_copies.py", *words.split()])
    with pytest.raises(SystemExit) as stop:
        reproducer.parse()
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_waiting_streams_has_every_row_once_and_one_without_for_each() -> None:
    found = load(WAITING).rows()
    assert len(set(found)) == len(found)
    without = {(row.direction, row.model) for row in found if not row.waiting}
    assert {(row.direction, row.model) for row in found} == without
    assert len(without) == 6
    assert {(row.behind, row.waiting) for row in found if row.model == "products" and row.waiting} == {
        *(("a kernel", waiting) for waiting in (1, 2, 4)),
        *((behind, waiting) for behind in ("a copy", "nothing") for waiting in (1, 4)),
    }
    assert "offbench" not in WAITING.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_waiting_streams_says_what_it_lacks() -> None:
    for words, line in (
        ((), "waiting_streams.py: no GPU here: run it on a machine with an NVIDIA GPU"),
        (("--rounds", "0"), "waiting_streams.py: error: --rounds is 0, must be at least 1"),
    ):
        done = subprocess.run([sys.executable, str(WAITING), *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == line
        assert done.stdout == ""


@pytest.mark.gpu
def test_streams_that_wait_with_a_copy_behind_slow_nothing(tmp_path: Path) -> None:
    """The table and the file say the same, and only a kernel behind a wait may cost a copy its rate."""
    file = tmp_path / "rates.jsonl"
    words = [sys.executable, str(WAITING), "--rounds", "3", "--json", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.split()[-1] for line in done.stdout.splitlines()[2:]] == [
        f"{median(row['gib_s']):.1f}" for row in rows
    ]
    alone = {(row["direction"], row["model"]): median(row["gib_s"]) for row in rows if not row["waiting"]}
    for row in rows:
        if row["behind"] != "a kernel":
            assert median(row["gib_s"]) > 0.9 * alone[row["direction"], row["model"]], row
