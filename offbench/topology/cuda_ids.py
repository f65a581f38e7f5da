"""Prints CUDA's own list of devices as JSON, one object a line. Run as a script, in a process of its own.

cuInit and the attribute calls create no context and allocate nothing on a device; still the driver keeps state for
the life of a process, so the caller never loads it. Standard library only: no torch, nothing of this package.
Calls and numbers are those of the CUDA driver API (cuda.h).
"""

from __future__ import annotations

import ctypes
import json
import sys

HOST_NUMA_ID = 134  # CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: -1 without NUMA; drivers before 12.x refuse it


def listed(cuda: ctypes.CDLL) -> list[dict[str, object]]:
    """One dict per device in CUDA's order: ordinal, bdf, uuid (16 bytes in hex), name, host_numa."""
    devices: list[dict[str, object]] = []
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(count.value):
        device, text, raw, node = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), None
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetPCIBusId(text, len(text), device)
        bdf = text.value.decode()
        cuda.cuDeviceGetName(text, len(text), device)
        cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device)  # that of the MIG instance where this is one
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), HOST_NUMA_ID, device) == 0:
            node = value.value
        name = text.value.decode()
        devices.append({"ordinal": ordinal, "bdf": bdf, "uuid": bytes(raw).hex(), "name": name, "host_numa": node})
    return devices


def main() -> int:
    """Exit code 0 with the list (empty where no device is visible), 3 without a driver, 4 where it refuses."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 3
    code = cuda.cuInit(0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE
        return 0
    if code != 0:
        return 4
    for device in listed(cuda):
        print(json.dumps(device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
