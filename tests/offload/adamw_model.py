"""torch's fused AdamW on CUDA, operation by operation, in NumPy: what the kernel is held against, and the words for
where two results differ."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

F32 = np.float32
Array = np.ndarray


def fma(x: Array, y: Array, z: Array) -> Array:
    """x * y + z rounded once to float32.

    The product is exact in float64; the sum there is rounded to odd (Boldo and Melquiond, 2008), so that rounding it
    once more to float32, which has more than two bits less, gives what one rounding would.
    """
    product, z = np.multiply(x, y, dtype=np.float64), np.float64(z)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64).copy()
    away = (error > 0) == (total > 0)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits += np.where(inexact, np.where(away, 1, -1), 0)
    return bits.view(np.float64).astype(F32)


def step(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    power1: np.float32,
    power2: np.float32,
    hyper: Mapping[str, float],
) -> tuple[Array, Array, Array]:
    """One step over float32 arrays; powers: beta ** t as the device has them."""
    lr, beta1, beta2, eps, weight_decay = (
        F32(hyper[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")
    )
    step_size = lr / (F32(1) - F32(power1))
    correction = np.sqrt(F32(1) - F32(power2))
    if weight_decay != 0:
        p = fma(np.full_like(p, -(lr * weight_decay)), p, p)
    m = fma(np.full_like(m, beta1), m, fma(np.full_like(g, -beta1), g, g))
    square = g * g
    v = fma(np.full_like(v, beta2), v, fma(np.full_like(v, -beta2), square, square))
    return p - (step_size * m) / (np.sqrt(v) / correction + eps), m, v


def ordered(values: Array) -> Array:
    """float32 as integers whose difference counts the floats in between."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def differences(
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
    inputs: Mapping[str, Array],
    modelled: Mapping[str, Array],
) -> list[str]:
    """A line for each result that is not the same bits: how many, how far, and everything about the first."""
    lines = []
    for name, mine in expected.items():
        unequal = np.flatnonzero(mine.view(np.int32) != found[name].view(np.int32))
        if not len(unequal):
            continue
        at = int(unequal[0])
        ulps = int(np.abs(ordered(mine) - ordered(found[name])).max())
        given = ", ".join(f"{key} {float(value[at]).hex()}" for key, value in inputs.items())
        lines.append(
            f"{name}: {len(unequal)} of {mine.size} differ, by {ulps} ulp at most; the first, [{at}], is "
            f"{float(found[name][at]).hex()}, torch's {float(mine[at]).hex()}, the model's "
            f"{float(modelled[name][at]).hex()}; from {given}"
        )
    return lines
