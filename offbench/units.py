"""Sizes and rates as people write them (`1GiB`, `38.8GiB/s`) to bytes and back. No torch here."""

from __future__ import annotations

import re

from offbench.errors import UsageError

GIB = 1 << 30

SIZES = {
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": GIB,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
"""Unit, in capitals, to bytes: powers of 1024 with the i, powers of 1000 without it."""

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(option: str, text: str, least: int = 1) -> int:
    """Bytes of a size such as `512MiB` or `1.5GB`.

    Raises UsageError, naming the option, for a missing or unknown unit and for a size below `least` bytes.
    """
    match = _WRITTEN.fullmatch(text)
    unit = SIZES.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else -1
    if size < least:
        raise UsageError(f"{option} {text}: not a size; write a number and a unit, as in 512MiB or 1GiB")
    return size


def parse_rate(option: str, text: str) -> float:
    """Bytes per second of a rate such as `38.8GiB/s`.

    Raises UsageError, naming the option, when it is not a size followed by `/s`.
    """
    size, slash, second = text.partition("/")
    match = _WRITTEN.fullmatch(size)
    unit = SIZES.get(match[2].upper()) if match else None
    rate = float(match[1]) * unit if match and unit else 0.0
    if slash != "/" or second.strip().lower() != "s" or rate <= 0:
        raise UsageError(f"{option} {text}: not a rate; write a size per second, as in 38.8GiB/s")
    return rate


def gib(size: float) -> str:
    """A size in GiB with one decimal, without the unit; three decimals below 0.1 GiB."""
    value = size / GIB
    return f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.3f}"


def show_size(size: int) -> str:
    """The shortest exact text of a size, as the options take it: 1073741824 -> `1GiB`, 15247133900 -> `14.2GiB`."""
    for unit, power in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        for digits in (0, 1, 2):
            text = f"{size / power:.{digits}f}{unit}"
            if size >= power and parse_size("", text) == size:
                return text
    return f"{size}B"


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`, `8 processes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
