"""On a CUDA device: the kernel of arm zerocopy against torch's fused AdamW, bit for bit, and how fast it is.

Each test runs in a process of its own: later tests of the same run fork, which CUDA would not survive. A difference is
printed with all that is needed to find its cause: how many bits, the first element's inputs and three answers, and
which neighbouring values of beta ** t would explain torch's parameters.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.optim.adamw import adamw as torch_adamw

from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.hoststore import HostStore
from offbench.offload.zerocopy import rates, support
from offbench.offload.zerocopy.engine import ZeroCopyEngine
from tests.offload import adamw_model

pytestmark = pytest.mark.gpu

SIZES = (1, 77, 4095, 4096, 4097, 3 * 4096 + 5, 1 << 22, (1 << 22) + 3)
STEPS = 5
SOME = 1 << 16
"""Elements that the search for an explanation looks at."""


def on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(device, *arguments)` in a fresh process."""
    queue = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(_child, (function, arguments, queue), nprocs=1, start_method="spawn")
    return queue.get()


def _child(_: int, function: Callable[..., Any], arguments: tuple[Any, ...], queue: mp.SimpleQueue) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with torch.no_grad():
        queue.put(function(device, *arguments))


def gradients(device: torch.device, step: int) -> Iterator[torch.Tensor]:
    """Of all magnitudes, so that second moments are subnormal too, with zeros of both signs."""
    generator = torch.Generator(device).manual_seed(step)
    for count in SIZES:
        made = torch.randn(count, generator=generator, device=device)
        made *= 10.0 ** -torch.arange(count, device=device).remainder(25)
        made[::7], made[3::11] = 0.0, -0.0
        yield made


def bits(device: torch.device, hyper: dict[str, float], first: int) -> list[str]:
    """STEPS steps, the step counter at `first` before them, the learning rate another one each time and once zero."""
    from offbench.offload.zerocopy import kernel

    generator = torch.Generator(device).manual_seed(100)
    torchs = [[torch.randn(count, generator=generator, device=device) for count in SIZES]]
    torchs += [[torch.zeros(count, device=device) for count in SIZES] for _ in range(2)]
    store = HostStore([2 * 4 * count + -2 * 4 * count % 512 for count in SIZES], pin_for=device)
    memory = [store.visible(i).view(torch.float32) for i in range(len(SIZES))]
    ours = [[p.clone() for p in torchs[0]]]
    ours += [[both[at * n : (at + 1) * n] for n, both in zip(SIZES, memory, strict=True)] for at in range(2)]
    counters = [[torch.full((), float(first), device=device) for _ in SIZES] for _ in range(2)]
    for step in range(STEPS):
        hyper = hyper | {"lr": 0.0 if step == 2 else 1e-2 / (step + 1)}
        grads = list(gradients(device, step))
        before = [[tensor.clone() for tensor in which] for which in torchs]
        torch_adamw(
            torchs[0], grads, torchs[1], torchs[2], [], counters[0],
            foreach=False, fused=True, amsgrad=False, maximize=False, **hyper,
        )  # fmt: skip
        kernel.adamw(ours[0], grads, ours[1], ours[2], counters[1], **hyper)
        torch.cuda.current_stream().synchronize()
        for i, count in enumerate(SIZES):
            given = dict(zip("pmv", (which[i] for which in before), strict=True)) | {"g": grads[i]}
            expected, found = (dict(zip("pmv", (w[i] for w in which), strict=True)) for which in (torchs, ours))
            if any(not torch.equal(expected[k].view(torch.int32), found[k].view(torch.int32)) for k in "pmv"):
                where = f"{count} elements, step {first + step + 1}, {hyper}"
                return [where, *explained(expected, found, given, hyper, first + step + 1)]
    return [] if all(torch.equal(a, b) for a, b in zip(*counters, strict=True)) else ["step counters differ"]


def explained(
    expected: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    hyper: dict[str, float],
    step: int,
) -> list[str]:
    """What differs, and for which powers the model has torch's parameters."""
    mine, theirs, inputs = ({k: v.cpu().numpy() for k, v in of.items()} for of in (expected, found, given))
    counts = torch.full((1,), float(step), device=given["p"].device)
    powers = [torch.pow(torch.full_like(counts, hyper[k]), counts).cpu().numpy()[0] for k in ("beta1", "beta2")]

    def model(power1: np.float32, power2: np.float32, most: int | None = None) -> dict[str, np.ndarray]:
        arrays = (inputs[k][:most] for k in "pgmv")
        with np.errstate(all="ignore"):
            return dict(zip("pmv", adamw_model.step(*arrays, power1, power2, hyper), strict=True))

    lines = adamw_model.differences(mine, theirs, inputs, model(*powers))
    lines.append(
        f"beta1 ** {step} = {float(powers[0]).hex()}, beta2 ** {step} = {float(powers[1]).hex()} by torch.pow"
    )
    for ulps in sorted(itertools.product(range(-3, 4), repeat=2), key=lambda pair: sum(map(abs, pair))):
        nudged = [(p.view(np.int32) + n).view(np.float32) for p, n in zip(powers, ulps, strict=True)]
        wrong = int((model(*nudged, SOME)["p"].view(np.int32) != mine["p"][:SOME].view(np.int32)).sum())
        if wrong == 0 or ulps == (0, 0):
            lines.append(f"the model with powers {ulps} ulp away: {wrong} of torch's first parameters differ")
        if wrong == 0:
            break
    return lines


def all_bits(device: torch.device) -> list[str]:
    """Every combination; those that differ."""
    lines = []
    for betas, weight_decay, first in itertools.product(
        [(0.9, 0.95), (0.9, 0.999), (0.1, 0.3)], [0.0, 0.1], [0, 6, 12345]
    ):
        hyper = {"beta1": betas[0], "beta2": betas[1], "eps": 1e-8, "weight_decay": weight_decay}
        lines += bits(device, hyper, first)
    return lines


def test_the_kernel_leaves_the_bits_of_torchs_fused_adamw() -> None:
    lines = on_gpu(all_bits)
    assert not lines, "\n".join(lines)


def at_start(device: torch.device) -> tuple[bool, str | None, str, bool]:
    """Does the device map host memory, what the start-up comparison says, and what an optimizer then uses."""
    parameter = torch.nn.Parameter(torch.ones(5000, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer = OffloadedAdamW([parameter], schedule=Schedule("zerocopy", offloaded=True, update="host_memory"))
    parameter.grad = torch.ones(5000, device=device)
    optimizer.step()
    moved = float(optimizer.state[parameter]["exp_avg"].min()) > 0
    used = isinstance(optimizer._engine, ZeroCopyEngine) and optimizer.schedule.update == "host_memory"
    return support.maps_host_memory(device), support.differs(device), optimizer.schedule.update, used and moved


def test_an_optimizer_uses_it_without_a_warning() -> None:
    assert on_gpu(at_start) == (True, None, "host_memory", True)


def measured(device: torch.device) -> dict[str, Any]:
    return dict(rates.rates(1 << 30, device))


def test_eight_programs_come_near_the_copy_engines() -> None:
    """A prototype reached 88 % of their rate on an H200; the line is printed."""
    found = on_gpu(measured)
    print(found)
    assert found["both_ways_gib_per_s"]["8"] >= 0.7 * found["copies_both_ways_gib_per_s"]
