"""Arm zerocopy without a GPU: its arithmetic against a model of torch's, its machine code, and where it steps back."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.adamw import adamw as torch_adamw

from offbench import checks
from offbench.arms import find
from offbench.commands import list_arms
from offbench.config import Mode, RunSpec, Workload
from offbench.errors import OffbenchError, ScheduleError, UsageError
from offbench.estimate import estimate
from offbench.offload import OffloadedAdamW, Schedule
from offbench.offload.adversary import AdversarialStreams
from offbench.offload.engines import engine_for
from offbench.offload.hoststore import HostStore
from offbench.offload.zerocopy import rates, support
from offbench.offload.zerocopy.engine import ZeroCopyEngine
from offbench.resolve import Options, resolve
from offbench.verify.cases import PLAIN, Variant, paces
from tests.hosts import host
from tests.offload import adamw_model, sharded, trainer
from tests.ranks import on_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
IN_PLACE = Schedule("zerocopy", offloaded=True, deferred=True, update="host_memory")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: its kernel cannot be compiled"
)


def inputs(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters, gradients and moments, with zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m = (torch.randn(count, generator=generator) for _ in range(3))
    scale = 10.0 ** -torch.arange(count).remainder(24)
    made = {"p": p, "g": g * scale, "m": m * 1e-2 * scale, "v": (m * 1e-2 * scale) ** 2}
    for tensor in (made["p"], made["g"]):
        tensor[::7], tensor[3::11] = 0.0, -0.0
    return made


def powers(hyper: dict[str, float], step: int) -> list[np.float32]:
    counts = torch.tensor([float(step)])
    return [torch.pow(torch.full((1,), hyper[name]), counts).numpy()[0] for name in ("beta1", "beta2")]


def modelled(given: dict[str, torch.Tensor], hyper: dict[str, float], step: int) -> tuple[np.ndarray, ...]:
    arrays = (given[name].numpy() for name in ("p", "g", "m", "v"))
    with np.errstate(under="ignore"):
        return adamw_model.step(*arrays, *powers(hyper, step), hyper)


def test_the_model_rounds_once() -> None:
    generator = np.random.default_rng(0)
    x, y, z = (generator.standard_normal(400).astype(np.float32) for _ in range(3))
    z[::2] = -(x * y)[::2]  # what is left is the product's own rounding error
    y[1::4], z[1::4] = np.float32(1 + 2**-23), x[1::4] * np.float32(2.0**-24)  # close to ties
    for *factors, found in zip(x, y, z, adamw_model.fma(x, y, z), strict=True):
        a, b, c = (Fraction(float(value)) for value in factors)
        exact = a * b + c
        near = [found, *(np.nextafter(found, np.float32(way)) for way in (-np.inf, np.inf))]
        away = [abs(Fraction(float(value)) - exact) for value in near]
        assert away[0] <= min(away)
        assert away[0] < min(away[1:]) or found.view(np.int32) % 2 == 0, "ties go to even"


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_model_is_adamw(weight_decay: float) -> None:
    """Only nearly the CPU's fused AdamW, which rounds in other places."""
    given, hyper = inputs(1000), HYPER | {"weight_decay": weight_decay}
    expected = modelled(given, hyper, 7)
    torch_adamw(
        [given["p"]], [given["g"]], [given["m"]], [given["v"]], [], [torch.tensor(6.0)],
        foreach=False, fused=True, amsgrad=False, maximize=False, **hyper,
    )  # fmt: skip
    for name, mine in zip(("p", "m", "v"), expected, strict=True):
        np.testing.assert_allclose(given[name].numpy(), mine, rtol=2e-5, atol=1e-10)


def interpreted(rank: int) -> list[str]:
    """Differences between the kernel, run by Triton's interpreter in this process, and the model."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules.pop("offbench.offload.zerocopy.kernel", None)  # decorated anew, for the interpreter
    from offbench.offload.zerocopy import kernel

    found = []
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (1, 1, {}),
        (kernel.BLOCK, 8, {"weight_decay": 0.0}),
        (4 * kernel.BLOCK + 5, 2, {"lr": 0.0}),
        (2 * kernel.BLOCK - 1, 3, {"beta1": 0.0, "beta2": 0.999, "lr": 0.5, "eps": 1e-6}),
    ]
    for count, programs, changed in cases:
        hyper = HYPER | changed
        given = inputs(count, seed=count)
        counter = torch.tensor(4.0)
        for step in (5, 6):
            expected = modelled(given, hyper, step)
            before = {name: tensor.numpy().copy() for name, tensor in given.items()}
            lists = [[given[name]] for name in ("p", "g", "m", "v")]
            kernel.adamw(*lists, [counter], programs=programs, **hyper)
            names = dict(zip(("p", "m", "v"), expected, strict=True))
            result = {name: given[name].numpy() for name in names}
            found += adamw_model.differences(names, result, before, names)
            hyper = hyper | {"lr": hyper["lr"] / 3}
        found += [] if float(counter) == 6 else [f"counted {float(counter)} steps"]
    return found


def compared(rank: int) -> list[str | None]:
    """What the comparison at the start says, with the interpreter for a device, of torch's CPU kernel, which rounds in
    other places, and of the same kernel."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules.pop("offbench.offload.zerocopy.kernel", None)
    from offbench.offload.zerocopy import kernel

    class Done:
        def synchronize(self) -> None:
            """Nothing is ever in flight."""

    torch.cuda.current_stream = lambda device: Done()
    other = support.differs(CPU)
    support.differs.cache_clear()
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    support.torch_adamw = lambda p, g, m, v, _, steps, **options: kernel.adamw(
        p, g, m, v, steps, **{name: options[name] for name in names}
    )
    return [other, support.differs(CPU)]


def interpreter_fails() -> str | None:
    """Why Triton's interpreter cannot run the kernel here; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: there is no interpreter"
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return f"the interpreter of Triton {version} cannot count a loop under NumPy {np.__version__}"
    return None


@pytest.mark.skipif(interpreter_fails() is not None, reason=str(interpreter_fails()))
def test_the_interpreted_kernel_leaves_the_bits_of_the_model() -> None:
    assert on_ranks(1, interpreted) == [[]]


@pytest.mark.skipif(interpreter_fails() is not None, reason=str(interpreter_fails()))
def test_the_comparison_at_the_start_sees_other_bits() -> None:
    ((other, same),) = on_ranks(1, compared)
    assert re.fullmatch(r"its kernel leaves \d+ of 12370 parameters other than torch's fused AdamW does", other)
    assert same is None


@needs_triton
def test_the_compiled_kernel_rounds_every_operation_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to compile. Five fused products an element, no other; nothing approximate, nothing flushed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from offbench.offload.zerocopy import kernel

    pointers = ("weights", "grads", "exp_avgs", "exp_avg_sqs", "powers1", "powers2")
    constants = {"DECAY": True, "BLOCK": kernel.BLOCK, "STAGES": kernel.STAGES}
    kinds = dict.fromkeys(pointers, "*fp32") | {"which": "i32", "count": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "fp32") for name in kernel.update.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(pointers))}
    compiled = triton.compile(
        ASTSource(kernel.update, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "num_warps": kernel.WARPS},
    )
    code = compiled.asm["ptx"]
    found = Counter(re.findall(r"\b([a-z0-9]+\.[a-z0-9.]*f32)\b", code))
    each = 2 * kernel.BLOCK // (32 * kernel.WARPS)  # whole blocks and the last one, elements a thread
    arithmetic = {name: number for name, number in found.items() if not name.startswith(("mov", "ld", "st", "selp"))}
    assert set(arithmetic) <= {f"{name}.rn.f32" for name in ("fma", "mul", "add", "sub", "div", "sqrt")} | {"neg.f32"}
    assert found["fma.rn.f32"] == 5 * each
    assert found["div.rn.f32"] == 2 * each + 1
    assert found["sqrt.rn.f32"] == each + 1
    assert found["add.rn.f32"] == each
    assert 2 * each <= found["mul.rn.f32"] <= 2 * each + 3
    assert "cp.async.cg.shared.global" in code, "whole blocks are read 16 bytes at a time"
    assert "st.global.v4.b32" in code


@needs_triton
def test_triton_binds_the_arguments_of_a_launch() -> None:
    """What a launch does first, and needs no GPU: Triton writes a function whose own names a parameter may hide."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from offbench.offload.zerocopy import kernel

    bind = create_function_from_signature(
        kernel.update.signature, kernel.update.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    tensor = torch.zeros(64)
    bound, kinds, options = bind(
        *(tensor,) * 6, 0, 64, *(0.1,) * 5, DECAY=True, BLOCK=kernel.BLOCK, STAGES=kernel.STAGES, num_warps=8
    )
    assert list(bound) == kernel.update.arg_names
    assert [kind for kind, _ in kinds] == ["*fp32"] * 6 + ["i32"] * 2 + ["fp32"] * 5 + ["constexpr"] * 3
    assert options == {"num_warps": 8}


def test_the_books_count_every_byte_both_ways_and_no_staging() -> None:
    engines = []

    def watch(engine: ZeroCopyEngine) -> None:
        engine.ledger.keep = True
        engines.append(engine)

    schedule = Schedule(
        "zerocopy", offloaded=True, chunk_bytes=trainer.CAP, deferred=True, update="host_memory", resident_bytes=5000
    )
    trainer.run(schedule, AdversarialStreams(), watch)
    (engine,) = engines
    assert isinstance(engine, ZeroCopyEngine)
    ledger, moving = engine.ledger, [c for c in engine.chunks if c.index not in engine._resident]
    assert 0 < len(moving) < len(engine.chunks)
    assert ledger.in_bytes == ledger.out_bytes == trainer.STEPS * sum(chunk.nbytes for chunk in moving)
    assert len(ledger.copies) == 2 * trainer.STEPS * len(moving)
    assert (ledger.arenas, engine.staging_bytes, engine.staging_peak) == ([], 0, 0)


def test_updates_are_queued_by_lead_and_then_ahead_of_the_reads() -> None:
    schedule = Schedule(
        "zerocopy", offloaded=True, chunk_bytes=trainer.CAP, deferred=True, update="host_memory", lead=2, ahead=1
    )
    queued = []

    def watch(engine: ZeroCopyEngine) -> None:
        before_read = engine.before_read

        def spy(chunks: Any) -> Any:
            events = before_read(chunks)
            queued.append((max(chunks), engine.ledger.in_copies))
            return events

        engine.before_read = spy

    trainer.run(schedule, AdversarialStreams(), watch)
    n = max(chunk for chunk, _ in queued) + 1
    second_step = queued[2 * n : 3 * n]
    assert (second_step[0], second_step[2], second_step[-1]) == ((0, 2), (2, 4), (n - 1, n))


def test_a_schedule_that_contradicts_itself_is_refused() -> None:
    for bad in (
        {"offloaded": False},
        {"offloaded": True, "first_step": "whole"},
        {"offloaded": True, "deferred": True, "write_back": "backward"},
    ):
        with pytest.raises(ScheduleError, match="zerocopy: "):
            Schedule("zerocopy", update="host_memory", **bad)  # type: ignore[arg-type]


def test_bytes_that_no_copy_moves_cannot_be_repeated() -> None:
    with pytest.raises(OffbenchError, match="copy no bytes that could be repeated"):
        OffloadedAdamW([torch.nn.Parameter(torch.zeros(4))], schedule=synchronous(), copy_repeat=2.0)


def synchronous() -> Schedule:
    return Schedule("zerocopy", offloaded=True, update="host_memory")


def test_on_the_cpu_nothing_steps_back() -> None:
    assert support.in_host_memory(IN_PLACE, CPU, "foreach", [torch.zeros(1, dtype=torch.bfloat16)]) is IN_PLACE
    store = HostStore([512])
    assert store.visible(0).data_ptr() == store.chunk(0).data_ptr()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"implementation": "foreach"}, "computes the bits of the fused AdamW, not of foreach"),
        (
            {"parameters": [torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)]},
            "is for float32, not for torch.bfloat16",
        ),
        ({"device": torch.device("xpu")}, "is for CUDA, not for xpu"),
        ({"triton": None}, "Triton is not installed"),
        ({"maps": False}, "cannot reach pinned host memory"),
        ({"differs": "its kernel leaves 3 of 9 exp_avg other"}, "leaves 3 of 9 exp_avg other"),
        (
            {"differs": RuntimeError("Failed to find C compiler.\nMore")},
            r"\(RuntimeError: Failed to find C compiler.\)",
        ),
    ],
)
def test_where_it_cannot_be_used_one_warning_says_why_and_state_is_staged(
    changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(device: torch.device) -> str | None:
        answer = changed.get("differs")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: changed.get("triton", "found"))
    monkeypatch.setattr(support, "maps_host_memory", lambda device: changed.get("maps", True))
    monkeypatch.setattr(support, "differs", differs)
    asked = (changed.get("device", CUDA), changed.get("implementation", "fused"), changed.get("parameters", []))
    with pytest.warns(
        UserWarning, match=f"zerocopy: .*{why}.*; state is staged on the device as under overlap"
    ) as said:
        found = support.in_host_memory(IN_PLACE, *asked)
    assert len(said) == 1
    assert (found.update, found.deferred) == ("device", True)


def test_on_cuda_it_is_used_where_nothing_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(support, "maps_host_memory", lambda device: True)
    monkeypatch.setattr(support, "differs", lambda device: None)
    assert support.in_host_memory(IN_PLACE, CUDA, "fused", [torch.zeros(1)]) is IN_PLACE


def stepped_back(rank: int) -> list[str]:
    """Differences to torch's AdamW after three steps in host memory and three staged ones."""
    model = sharded.build(CPU)
    optimizer = sharded.optimizer_of("zerocopy", model, AdversarialStreams({}), lead=2, ahead=1)
    sharded.train(model, optimizer, rank, CPU, steps=range(3))
    before = optimizer._engine
    assert isinstance(before, ZeroCopyEngine)
    optimizer.schedule = find("overlap")[0].schedule(find("overlap")[0].resolve(chunk_bytes=1 << 20, slots=2))
    optimizer._engine = engine_for(
        optimizer._engine, optimizer.schedule, optimizer.store, optimizer._streams, 1.0, optimizer._resident, False
    )
    optimizer._engine.extend(optimizer.chunks, optimizer.schedule)
    optimizer._watch(optimizer._engine)
    assert optimizer.ledger is before.ledger
    sharded.train(model, optimizer, rank, CPU, steps=range(3, 6))
    found = sharded.snapshot(model, optimizer)

    reference = sharded.build(CPU)
    plain = torch.optim.AdamW(reference.parameters(), **sharded.OPTIONS, fused=True)
    sharded.train(reference, plain, rank, CPU)
    return sharded.differences(sharded.snapshot(reference, plain), found)


def test_the_engine_is_exchanged_for_overlaps_in_the_middle_of_a_run() -> None:
    assert on_ranks(2, stepped_back) == [[], []]


def test_a_slower_link_cannot_be_imitated_nor_another_adamw() -> None:
    for options, line in (
        (Options(arm=("zerocopy",), emulate_link="38.8GiB/s"), "--emulate-link: arm zerocopy makes no copies whose "),
        (
            Options(arm=("none", "zerocopy"), adamw="foreach"),
            "--adamw foreach: arm zerocopy computes the bits of fused",
        ),
    ):
        with pytest.raises(UsageError, match=line):
            resolve(options, host(1))
    assert resolve(Options(arm=("zerocopy",), adamw="foreach"), host()).specs[0].arm.name == "zerocopy"


def test_what_is_not_shown_yet_is_said() -> None:
    lines = list(list_arms())
    after = lines[lines.index("zerocopy  (exact)") + 1]
    assert after.startswith("  caveat  not yet shown on CUDA")
    assert "overlap  (exact)" in lines


def test_a_launch_that_staged_its_state_is_invalid() -> None:
    spec = RunSpec(arm=find("zerocopy")[0].resolve())
    for ran, verdict in (
        ("deferred, in host memory", "ok"),
        ("deferred", "rank 0 ran updates that were deferred; the arm's are deferred, in host memory"),
    ):
        assert (checks._schedule(spec, [SimpleNamespace(rank=0, schedule=ran)]) or "ok") == verdict


def test_on_a_gpu_it_is_proven_at_the_links_own_speed() -> None:
    schedule = Variant("zerocopy").schedule(1 << 20)
    assert paces("cuda", 2, schedule, 0, 0, quick=True) == [PLAIN]


def test_the_gpu_holds_no_state_and_no_staging() -> None:
    def bytes_of(arm: str, **options: object) -> int:
        spec = RunSpec(
            workload=Workload(ep=8),
            arm=find(arm)[0].resolve(**options),
            mode=Mode(kind="rehearsal", device="cuda", world=8, nproc=1),
        )
        return estimate(spec).gpu_bytes

    assert bytes_of("none") - bytes_of("zerocopy") == 8 * 3_816_515_328  # two fp32 moments
    assert bytes_of("overlap", slots=16) > bytes_of("zerocopy")
    assert bytes_of("zerocopy", state_budget=4 << 30) - bytes_of("zerocopy") == 4 << 30


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--bytes", "8"], "error: --bytes 8: not a size"),
        ([], "error: no CUDA device: run this on a machine with a GPU"),
    ],
)
def test_without_a_gpu_or_with_bad_input_rates_say_so(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rates.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert (captured.err.count("\n"), captured.out) == (1, "")
