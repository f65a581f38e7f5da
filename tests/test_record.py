from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from offbench import seed
from offbench.config import RunSpec
from offbench.errors import RecordError
from offbench.record import SCHEMA, RunRecord
from offbench.results_file import ResultsFile, read_records

RESULTS = Path(__file__).parent.parent / "results"


def record(launch: int = 1) -> RunRecord:
    return RunRecord(run_id=RunSpec().run_id, launch=launch, status="ok", spec=RunSpec(), step_s=1.5)


def append(path: Path, *records: RunRecord) -> None:
    results = ResultsFile(path)
    for item in records:
        results.append(item)
    results.close()


def test_records_round_trip_and_missing_figures_are_null(tmp_path: Path) -> None:
    path = tmp_path / "a" / "r.jsonl"
    append(path, record(1), record(2))
    found = read_records([path])
    assert (found.records, found.problems) == ([record(1), record(2)], [])
    line = json.loads(path.read_text().splitlines()[0])
    assert line["tok_s"] is None
    assert line["peak"]["steady_allocated_bytes"] is None


def test_a_torn_last_line_is_named_and_the_next_record_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record(1))
    with path.open("a") as file:
        file.write('{"schema_version": 1, "run_id": "to')
    append(path, record(2))
    found = read_records([path])
    assert [item.launch for item in found.records] == [1, 2]
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{path}:2: ")


def test_a_newer_schema_is_refused_and_new_keys_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    newer = json.loads(record().model_dump_json()) | {"schema_version": SCHEMA + 1}
    known = json.loads(record().model_dump_json()) | {"mood": "good"}
    path.write_text(json.dumps(newer) + "\n" + json.dumps(known) + "\n")
    found = read_records([path])
    assert [item.model_extra for item in found.records] == [{"mood": "good"}]
    assert "newer" in found.problems[0]


def test_paths_that_cannot_be_used_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*: No such file"):
        read_records([tmp_path / "none.jsonl"])
    with pytest.raises(RecordError, match=r"cannot write results to .*choose another --results"):
        ResultsFile(tmp_path)


def _append_many(path: Path, first: int) -> None:
    append(path, *(record(first + i) for i in range(20)))


def test_two_writers_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, first)) for first in (0, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read_records([path])
    assert found.problems == []
    assert sorted(item.launch for item in found.records) == [*range(20), *range(100, 120)]


def test_the_run_id_names_the_whole_spec() -> None:
    spec = RunSpec()
    assert spec.run_id == RunSpec.model_validate_json(spec.canonical()).run_id
    changed = spec.model_copy(update={"window": spec.window.model_copy(update={"steps": 16})})
    assert changed.run_id != spec.run_id


def test_records_from_before_an_option_say_that_it_was_not_in_use() -> None:
    """Whatever the command line's default is now."""
    path = RESULTS / "h200-rehearsal-native.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert not any("readbacks" in line["spec"]["arm"] for line in lines)
    for line in lines:
        del line["spec"]["arm"]["fsdp_copies"]
    for record in (*read_records([path]).records, *map(RunRecord.model_validate, lines)):
        arm = record.spec.arm
        assert (arm.fsdp_copies, arm.readbacks, arm.gradient_pool) == ("stock", "copy", "stock")
        assert record.spec.run_id == record.run_id


def test_the_published_rows_are_what_the_generator_writes(tmp_path: Path) -> None:
    seed.write(tmp_path)
    for name in seed.FILES:
        assert (RESULTS / name).read_text() == (tmp_path / name).read_text(), (
            f"python -m offbench.seed results: {name}"
        )


def test_published_rows_agree_with_their_own_rates() -> None:
    rows = read_records([RESULTS / name for name in seed.FILES]).records
    assert [(row.source, row.reference) for row in rows] == [("published", "prime-rl#4427")] * 12
    for row in rows:
        assert row.step_s is not None
        assert 131072 / row.step_s == pytest.approx(row.tok_s, rel=0.01)
        assert row.tokens_per_step == row.spec.tokens_per_step == 131072


def test_a_reason_may_hold_any_line_separator(tmp_path: Path) -> None:
    """JSON leaves U+2028 and U+0085 as they are; `str.splitlines` would cut a record there."""
    reason = "first\u2028second\u0085third"
    append(tmp_path / "r.jsonl", record().model_copy(update={"status": "crash", "reason": reason}))
    found = read_records([tmp_path / "r.jsonl"])
    assert (found.problems, [r.reason for r in found.records]) == ([], [reason])


def test_a_full_disk_is_a_clear_error_that_keeps_the_record_in_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ResultsFile(tmp_path / "r.jsonl")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(RecordError, match=r"No space left on device; the record was: \{") as caught:
        results.append(record())
    assert '"run_id"' in str(caught.value)
