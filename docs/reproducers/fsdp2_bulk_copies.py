"""FSDP2 and bulk copies between host and device exclude each other, though they are on different streams.

    python fsdp2_bulk_copies.py --direction in      # one GPU with 40 GB, torch 2.11 or newer

One process is rank 0 of 8: torch's fake process group sends nothing (on some versions it leaves its outputs unwritten:
values mean nothing, times do). Forward and backward run while copies of pinned memory are queued on side streams: once
as torch is, once with each remedy, round after round, so that all of them see the same GPU. One table comes out.

--direction in   bulk host-to-device copies. FSDP2's copy-out of an all-gather and copy-in of a reduce-scatter each
                 upload a table of pointers, which waits for the bulk copies.
--direction out  bulk device-to-host copies, and each layer reads 128 bytes back to the host, as expert parallelism
                 does with token counts.
--direction both the two at once

stock      as torch is; bulk copies of 1 GiB
operators  FSDP2's two operators registered anew, on torch._foreach_copy_, whose pointers are kernel arguments; and a
           kernel writes what is read back into the pinned memory, mapped into the device
offbench   the same with the operators of the package offbench, if it is installed
extension  the same without a new operator: a custom all-gather and reduce-scatter (set_custom_all_gather,
           set_custom_reduce_scatter) allocate buffers whose class handles the two operators itself
trunks     FSDP2 and read-backs as they are; bulk copies in trunks, a tiny kernel behind each (torchrec#4339)
sms        FSDP2 and read-backs as they are; a Triton kernel of few thread blocks makes the bulk copies
"""

import argparse
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the group "fake", too

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

COPY_IN = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
BLOCK, STAGES = 4096, 3  # of the kernel of few blocks: elements a block moves at a time, and how many it has in flight
QUEUE = 1000  # about what a stream takes before the host has to wait


class Variant(NamedTuple):
    tables: str  # who makes the copies that upload tables
    reads_by_kernel: bool
    bulk: str


VARIANTS = {
    "stock": Variant("stock", False, "engine"),
    "operators": Variant("operators", True, "engine"),
    "offbench": Variant("offbench", True, "engine"),
    "extension": Variant("extension", True, "engine"),
    "trunks": Variant("stock", False, "trunks"),
    "sms": Variant("stock", False, "sms"),
}


class Block(nn.Module):
    mailbox: tuple[torch.Tensor, bool] | None = None  # where a layer's 128 bytes go; whether by a kernel

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mailbox is not None:
            to, by_kernel = self.mailbox
            values = x.detach().reshape(-1)[:32].float()
            torch.add(values, 0, out=to) if by_kernel else to.copy_(values, non_blocking=True)
            torch.cuda.current_stream().record_event().synchronize()  # the host needs them now
        return x + self.down(nn.functional.gelu(self.up(x)))


def mapped(host: torch.Tensor) -> torch.Tensor:  # the same pinned memory as a tensor of the device
    kind = {torch.float32: "<f4", torch.int32: "<i4"}[host.dtype]
    address = {"shape": tuple(host.shape), "typestr": kind, "data": (host.data_ptr(), False), "version": 3}
    return torch.as_tensor(type("Mapped", (), {"__cuda_array_interface__": address})(), device="cuda")


# Tables of pointers: the two operators without one, and two ways to have FSDP2 call them.

calls = Counter()  # of the two below


def copy_out(gathered, sizes, dim=0, *, out):  # out[i] [ranks, sizes[i]] <- columns
    calls["out"] += 1
    parts = gathered.split_with_sizes(sizes, dim)
    torch._foreach_copy_([row for to in out for row in to.unbind()], [row for part in parts for row in part.unbind()])


def copy_in(tensors, dim, num_chunks, *, out):  # the ranks divide every dim 0 here: no padding
    calls["in"] += 1
    parts = out.view(num_chunks, -1).split_with_sizes([t.numel() // num_chunks for t in tensors], 1)
    chunks = [chunk.reshape(-1) for t in tensors for chunk in t.chunk(num_chunks, dim)]
    torch._foreach_copy_([row for part in parts for row in part.unbind()], chunks)


@contextmanager
def without_tables(how: str, key: str):
    if how == "offbench":
        from offbench.offload.small_copies import kernel_copies

        with kernel_copies() as theirs:
            yield
        calls.update({"out": theirs.copies_out, "in": theirs.copies_in})
    elif how == "operators":
        library = torch.library.Library("fsdp", "IMPL")
        library.impl("split_with_sizes_copy", copy_out, key, allow_override=True)
        library.impl(COPY_IN, copy_in, key, allow_override=True)
        yield
        library._destroy()  # torch's own are back
    else:  # stock, or the model brings its own
        yield


class Buffer(torch.Tensor):  # what FSDP2 gathers into, or reduces from
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        ops, kwargs = torch.ops.fsdp, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is ops.split_with_sizes_copy:
                return copy_out(*args, **kwargs)
            if func is getattr(ops, COPY_IN):
                return copy_in(*args, **kwargs)
            result = func(*args, **kwargs)
        if func is ops.all_gather_copy_in:  # (its part, the whole): FSDP2 goes on with these
            return result[0], args[1]
        return result.as_subclass(cls) if func is torch.Tensor.view else result  # gradients are plain tensors


class Comm:  # of either kind; FSDP2 asks it for the buffers, too
    def __init__(self, collective) -> None:
        self.collective = collective

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device).as_subclass(Buffer)

    def __call__(self, output_tensor, input_tensor, **how):
        to, source = (tensor.as_subclass(torch.Tensor) for tensor in (output_tensor, input_tensor))
        return self.collective(to, source, **how)


def make_model(device: str, layers: int, width: int, extension: bool) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(device):
        model = nn.Sequential(*(fully_shard(Block(width), mp_policy=policy) for _ in range(layers)))
        fully_shard(model, mp_policy=policy)
    for module in model.modules():
        if extension and isinstance(module, FSDPModule):
            module.set_custom_all_gather(Comm(dist.all_gather_into_tensor))
            module.set_custom_reduce_scatter(Comm(dist.reduce_scatter_tensor))
    return model


# Bulk copies, all on the current stream.


def copy_in_trunks(to: torch.Tensor, source: torch.Tensor, elements: int, tick: torch.Tensor) -> None:
    for part, of_source in zip(to.split(elements), source.split(elements), strict=True):
        part.copy_(of_source, non_blocking=True)
        tick.add_(1)  # while it runs this stream has no copy that may start: the engine serves another stream


if triton is not None:

    @triton.jit
    def move(to, source, count, BLOCK: tl.constexpr, STAGES: tl.constexpr):
        first = tl.program_id(0).to(tl.int64)
        for block in tl.range(first, count // BLOCK, tl.num_programs(0), num_stages=STAGES):
            at = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(source + at))


def copy_by_few(to: torch.Tensor, source: torch.Tensor, programs: int) -> None:  # both as the device sees them
    if to.numel() % BLOCK:
        raise ValueError(f"the kernel moves blocks of {BLOCK} elements, not {to.numel()}")
    move[(programs,)](to, source, to.numel(), BLOCK=BLOCK, STAGES=STAGES, num_warps=8, enable_fp_fusion=False)


class Bulk:
    """`repeats` copies of one buffer each way, which are queued without waiting."""

    def __init__(self, ways: tuple[str, ...], device: str, elements: int, repeats: int, trunk: int, programs: int):
        self.repeats, self.trunk, self.programs = repeats, trunk, programs
        self.streams, self.ends = {}, {}
        for way in ways:
            host = torch.empty(elements, dtype=torch.int32, pin_memory=device == "cuda")
            card = torch.empty(elements, dtype=torch.int32, device=device)
            seen = mapped(host) if device == "cuda" else host
            tick = torch.zeros(1, device=device)
            self.ends[way] = (card, host, card, seen, tick) if way == "in" else (host, card, seen, card, tick)
            self.streams[way] = torch.cuda.Stream() if device == "cuda" else None

    @property
    def gib(self) -> float:
        return sum(to.nbytes for to, *_ in self.ends.values()) * self.repeats / (1 << 30)

    def queue(self, kind: str) -> None:
        for _ in range(self.repeats):
            for way, (to, source, to_seen, source_seen, tick) in self.ends.items():
                with torch.cuda.stream(self.streams[way]):
                    if kind == "engine":
                        to.copy_(source, non_blocking=True)
                    elif kind == "trunks":
                        copy_in_trunks(to, source, self.trunk, tick)
                    else:
                        copy_by_few(to_seen, source_seen, self.programs)

    def check(self, kind: str) -> None:
        for to, source, *_ in self.ends.values():
            source.copy_(torch.arange(source.numel(), dtype=torch.int32, device=source.device))
            to.zero_()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the fills are on another stream
        self.queue(kind)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for way, (_, _, to, source, _) in self.ends.items():
            if not torch.equal(to, source):
                raise RuntimeError(f"{kind}: what was copied {way} is not what was to be copied")


def why_not(variant: Variant, device: str) -> str | None:
    if variant.tables == "offbench" and find_spec("offbench") is None:
        return "offbench is not installed"
    if variant.bulk == "sms" and triton is None:
        return "Triton is not installed"
    if variant.bulk == "sms" and device == "cpu" and not triton.knobs.runtime.interpret:
        return "Triton needs a GPU, or TRITON_INTERPRET=1"
    return None


def timed(step, bulk: Bulk | None, kind: str) -> tuple[float, float]:
    """Seconds until compute is done, and until the bulk copies are; 0 for what is not run."""
    torch.cuda.synchronize()
    start, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(2 + len(bulk.streams if bulk else ())))
    start.record()
    if bulk:
        bulk.queue(kind)
        for end, stream in zip(ends[1:], bulk.streams.values(), strict=True):
            end.record(stream)
    if step:
        step()
    ends[0].record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for end in ends]
    return seconds[0] if step else 0.0, max(seconds[1:], default=0.0)


def table(alone: dict, beside: dict, bulk_alone: dict, gib: float, skipped: dict) -> list[str]:
    """The first dict: seconds by variant; the second: (compute, bulk) seconds; the third: by kind of bulk copies."""
    no_bulk = median(alone["stock"])
    lines = [
        "| variant | forward + backward, no bulk s | both done s | x no bulk | compute done, x no bulk "
        "| bulk alone GiB/s | bulk beside compute GiB/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| no bulk traffic | {no_bulk:.3f} | {no_bulk:.3f} | 1.00 | 1.00 | - | - |",
    ]
    for name, variant in VARIANTS.items():
        if name in skipped:
            lines.append(f"| {name} | skipped: {skipped[name]} | - | - | - | - | - |")
        elif name in alone:
            both = median(max(pair) for pair in beside[name])
            computed, copied = (median(pair[which] for pair in beside[name]) for which in (0, 1))
            lines.append(
                f"| {name} | {median(alone[name]):.3f} | {both:.3f} | {both / no_bulk:.2f} | {computed / no_bulk:.2f} "
                f"| {gib / median(bulk_alone[variant.bulk]):.1f} | {gib / copied:.1f} |"
            )
    return lines


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("in", "out", "both"), default="in")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS), metavar="NAME",
                        help="these, and stock (default: all)")  # fmt: skip
    parser.add_argument("--gib", type=positive, default=16, help="copied each way, in copies of 1 GiB (default 16)")
    parser.add_argument("--trunk-mib", type=positive, default=64, help="of the variant trunks (default 64)")
    parser.add_argument("--programs", type=positive, default=8, help="thread blocks each way of sms (default 8)")
    parser.add_argument("--rounds", type=positive, default=5, help="measured, after one that is not (default 5)")
    parser.add_argument("--dry", action="store_true", help="one step of a small model on the CPU, nothing timed")
    args = parser.parse_args()
    queued = 2 * args.gib * -(-1024 // args.trunk_mib)
    if "trunks" in args.variants and queued > QUEUE:
        parser.error(f"--trunk-mib {args.trunk_mib} with --gib {args.gib} queues {queued} copies and kernels, and a "
                     f"stream takes about {QUEUE} before the host waits: larger trunks or fewer GiB")  # fmt: skip
    if not args.dry and not torch.cuda.is_available():
        parser.error("no GPU: --dry runs what runs without one")
    return args


def main() -> None:
    args = parse()
    device, layers, width, tokens = ("cpu", 2, 64, 8) if args.dry else ("cuda", 32, 4096, 8192)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    ways = ("in", "out") if args.direction == "both" else (args.direction,)
    elements, trunk = (12 * BLOCK, 10_000) if args.dry else (1 << 28, args.trunk_mib << 18)
    bulk = Bulk(ways, device, elements, args.gib, trunk, args.programs)
    chosen = {name: variant for name, variant in VARIANTS.items() if name in ("stock", *args.variants)}
    skipped = {name: why for name, variant in chosen.items() if (why := why_not(variant, device))}
    running = {name: variant for name, variant in chosen.items() if name not in skipped}
    extensions = {variant.tables == "extension" for variant in running.values()}
    models = {extension: make_model(device, layers, width, extension) for extension in extensions}
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    if not args.dry:
        small = torch.empty(32, pin_memory=True)
        boxes = {False: (small, False), True: (mapped(small), True)}
    kinds = list(dict.fromkeys(variant.bulk for variant in running.values()))
    for kind in kinds:
        bulk.check(kind)

    def step_of(variant: Variant):
        model = models[variant.tables == "extension"]

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return step

    if args.dry:
        for name, variant in running.items():
            calls.clear()
            with without_tables(variant.tables, "CPU"):
                step_of(variant)()
            made = f"copies out / in without a table {calls['out']} / {calls['in']}"
            print(f"{name}: one step on the CPU, {made}; bulk copies by {variant.bulk} checked")
        for name, why in skipped.items():
            print(f"{name}: skipped: {why}")
        return

    alone, beside = {name: [] for name in running}, {name: [] for name in running}
    bulk_alone = {kind: [] for kind in kinds}
    for turn in range(1 + args.rounds):
        for kind in kinds:
            bulk_alone[kind].append(timed(None, bulk, kind)[1])
        for name, variant in running.items():
            Block.mailbox = boxes[variant.reads_by_kernel] if "out" in ways else None
            with without_tables(variant.tables, "CUDA"):
                alone[name].append(timed(step_of(variant), None, "")[0])
                beside[name].append(timed(step_of(variant), bulk, variant.bulk))
        if turn == 0:  # first use of everything
            for times in (*alone.values(), *beside.values(), *bulk_alone.values()):
                times.clear()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; direction {args.direction}, {bulk.gib:.0f} GiB "
          f"in all, trunks of {args.trunk_mib} MiB, {args.programs} blocks each way; medians of {args.rounds} rounds"
          )  # fmt: skip
    print(*table(alone, beside, bulk_alone, bulk.gib, skipped), sep="\n")


if __name__ == "__main__":
    main()
