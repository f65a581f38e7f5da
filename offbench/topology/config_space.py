"""What a PCI device's configuration space says of settings that cost copies time: MaxPayload and ACS redirection.

Offsets and fields are those of the PCI Express base specification, capability 10h and extended capability 0Dh. The
kernel shows all of it to root only; the first 64 bytes, which anybody may read, hold neither.
"""

from __future__ import annotations

_POINTER, _EXPRESS = 0x34, 0x10
_DEVICE_CONTROL = 8
_EXTENDED, _ACS = 0x100, 0x0D
_ACS_CONTROL = 6
_REDIRECTS = 0b1100
"""P2P request redirect and completion redirect."""


def max_payload(config: bytes) -> int | None:
    """Largest packet payload the device sends, bytes; None where it is not shown."""
    at = config[_POINTER] if len(config) > 64 else 0
    seen: set[int] = set()
    while at and at not in seen and at + _DEVICE_CONTROL + 2 <= len(config):
        seen.add(at)
        if config[at] == _EXPRESS:
            field = config[at + _DEVICE_CONTROL] >> 5
            return 128 << field if field <= 5 else None
        at = config[at + 1]
    return None


def acs_redirects(config: bytes) -> bool | None:
    """Whether a bridge sends all traffic up to the root complex (ACS); None where it cannot, or nobody says."""
    at, seen = _EXTENDED, set[int]()
    while at >= _EXTENDED and at not in seen and at + 8 <= len(config):
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[at + _ACS_CONTROL : at + 8], "little") & _REDIRECTS)
        at = header >> 20
    return None
