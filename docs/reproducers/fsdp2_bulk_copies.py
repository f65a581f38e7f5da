"""FSDP2 and bulk copies between host and device exclude each other, though they are on different streams.

    python fsdp2_bulk_copies.py --direction in --fix      # one GPU with 40 GB, torch 2.11 or newer

One process is rank 0 of 8: torch's fake process group sends nothing (on some versions it leaves its outputs unwritten:
values mean nothing, times do). Forward and backward run while copies of pinned memory are queued on side streams.
`together` near `sum`: they exclude each other; near the larger of `compute` and `copies`: they run side by side.

--direction in   bulk host-to-device copies. FSDP2's copy-out of an all-gather and copy-in of a reduce-scatter each
                 upload a table of pointers, which waits for the bulk copies. --fix: both by torch._foreach_copy_.
--direction out  bulk device-to-host copies, and each layer reads 128 bytes back to the host, as expert parallelism
                 does with token counts. --fix: a kernel writes them into the pinned memory, mapped into the device.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the group "fake", too


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
    address = {"shape": tuple(host.shape), "typestr": "<f4", "data": (host.data_ptr(), False), "version": 3}
    return torch.as_tensor(type("Mapped", (), {"__cuda_array_interface__": address})(), device="cuda")


def copy_out(gathered, sizes, dim=0, *, out):  # out[i] [ranks, sizes[i]] <- columns
    parts = gathered.split_with_sizes(sizes, dim)
    torch._foreach_copy_([row for to in out for row in to.unbind()], [row for part in parts for row in part.unbind()])


def copy_in(tensors, dim, num_chunks, *, out):  # the ranks divide every dim 0 here: no padding
    parts = out.view(num_chunks, -1).split_with_sizes([t.numel() // num_chunks for t in tensors], 1)
    chunks = [chunk.reshape(-1) for t in tensors for chunk in t.chunk(num_chunks, dim)]
    torch._foreach_copy_([row for part in parts for row in part.unbind()], chunks)


def fix_fsdp(key: str) -> torch.library.Library:
    library = torch.library.Library("fsdp", "IMPL")  # in force as long as it lives
    library.impl("split_with_sizes_copy", copy_out, key, allow_override=True)
    into = "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
    library.impl(into, copy_in, key, allow_override=True)
    return library


def median_s(*work) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        _ = [queue() for queue in work]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("in", "out", "both"), default="in")
    parser.add_argument("--fix", action="store_true", help="stock first, then fixed")
    parser.add_argument("--dry", action="store_true", help="one step of a small model on the CPU, nothing timed")
    parser.add_argument("--gib", type=int, default=16, help="copied each way, in copies of 1 GiB")
    args = parser.parse_args()
    device, layers, width, tokens = ("cpu", 2, 64, 8) if args.dry else ("cuda", 32, 4096, 8192)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(device):
        model = nn.Sequential(*(fully_shard(Block(width), mp_policy=policy) for _ in range(layers)))
        fully_shard(model, mp_policy=policy)
        x = torch.randn(tokens, width, dtype=torch.bfloat16)
    ways = () if args.dry else ("in", "out") if args.direction == "both" else (args.direction,)
    pinned, small = ({way: torch.empty(n, pin_memory=True) for way in ways} for n in (1 << 28, 32))  # fp32
    on_card = {way: torch.empty_like(pinned[way], device=device) for way in ways}
    streams = {way: torch.cuda.Stream() for way in ways}

    def compute() -> None:
        model(x).sum().backward()
        model.zero_grad()

    def copies() -> None:
        for way, stream in list(streams.items()) * args.gib:
            with torch.cuda.stream(stream):
                to, source = (on_card, pinned) if way == "in" else (pinned, on_card)
                to[way].copy_(source[way], non_blocking=True)

    for fixed in (False, True) if args.fix else (False,):
        library = fix_fsdp(device.upper()) if fixed else None
        if "out" in ways:
            Block.mailbox = (mapped(small["out"]), True) if fixed else (small["out"], False)
        print("fixed" if library else "stock", end=": ")
        if args.dry:
            compute()
            print("one step on the CPU")
            continue
        a, b, both = median_s(compute), median_s(copies), median_s(copies, compute)
        print(f"compute {a:.3f} s, copies {b:.3f}, together {both:.3f}, sum {a + b:.3f}, larger {max(a, b):.3f}")


if __name__ == "__main__":
    main()
