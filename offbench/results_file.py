"""A results file: one JSON line a record, appended and synced as a launch ends, read tolerantly. No torch here."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from offbench.errors import RecordError
from offbench.record import SCHEMA, RunRecord


@dataclass(frozen=True)
class ReadResult:
    """Records of a file and a line for each part that could not be read."""

    records: list[RunRecord]
    problems: list[str]


class ResultsFile:
    """A JSONL file opened for append before the first launch; each append is locked and synced to disk.

    Raises RecordError when the path cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _unwritable(path, error.strerror) from error

    def append(self, record: RunRecord) -> None:
        """Write one line and wait until it is on disk. A torn last line of a killed writer is closed first."""
        line = record.model_dump_json() + "\n"
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                line = "\n" + line
            data = line.encode()
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise RecordError(f"cannot append to {self.path}: {error.strerror}; the record was: {line}") from error
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; append must not be called afterwards."""
        os.close(self._fd)


def check_writable(path: Path) -> None:
    """Raise RecordError where ResultsFile would, as far as permissions tell, and create nothing."""
    nearest = next(part for part in (path, *path.absolute().parents) if os.path.exists(part))
    if nearest != path and not nearest.is_dir():
        raise _unwritable(path, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK):
        raise _unwritable(path, os.strerror(errno.EACCES))


def _unwritable(path: Path, why: str | None) -> RecordError:
    return RecordError(f"cannot write results to {path}: {why}; choose another --results")


def read_records(paths: Iterable[Path]) -> ReadResult:
    """Read every record of the files, keep order, name what could not be read.

    Raises RecordError when a file does not exist or cannot be opened.
    """
    records: list[RunRecord] = []
    problems: list[str] = []
    for path in paths:
        for number, line in _lines(path):
            try:
                record = RunRecord.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "line"
                problems.append(f"{path}:{number}: {where}: {first['msg']}")
                continue
            if record.schema_version > SCHEMA:
                problems.append(
                    f"{path}:{number}: schema {record.schema_version} is newer than {SCHEMA}; upgrade offbench"
                )
                continue
            records.append(record)
    return ReadResult(records, problems)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may hold U+2028 as it is
        if line.strip():
            yield number, line
