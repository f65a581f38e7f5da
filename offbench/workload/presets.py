"""Model shapes by name, and what follows from a shape alone: parameters, local shards, FLOPs. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from offbench.errors import UsageError
from offbench.units import GIB


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3-MoE decoder: RMSNorm, grouped-query attention with q/k norm, RoPE, top-k routed SwiGLU experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    vocab: int
    seq_len: int
    """Default tokens per sample."""
    chunk_bytes: int
    """Default cap of one chunk of optimizer state."""
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    def layer_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each parameter of one block; names that start with `experts.` are the routed experts'."""
        h, q, kv, e, w = (
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.experts,
            self.expert_width,
        )
        yield "attention_norm", (h,)
        yield "q", (q, h)
        yield "k", (kv, h)
        yield "v", (kv, h)
        yield "o", (h, q)
        yield "q_norm", (self.head_dim,)
        yield "k_norm", (self.head_dim,)
        yield "moe_norm", (h,)
        yield "router", (e, h)
        yield "experts.w13", (e, h, 2 * w)
        yield "experts.w2", (e, w, h)

    def other_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each parameter outside the blocks."""
        yield "embedding", (self.vocab, self.hidden)
        yield "norm", (self.hidden,)
        yield "head", (self.vocab, self.hidden)

    def params(self, layers: int | None = None) -> int:
        """Parameters of the whole model with that many blocks (default: the preset's own)."""
        block = sum(_numel(shape) for _, shape in self.layer_tensors())
        return (self.layers if layers is None else layers) * block + sum(_numel(s) for _, s in self.other_tensors())

    def dense_params(self, layers: int | None = None) -> int:
        """Parameters outside the routed experts."""
        block = sum(_numel(s) for name, s in self.layer_tensors() if not name.startswith("experts."))
        return (self.layers if layers is None else layers) * block + sum(_numel(s) for _, s in self.other_tensors())

    def local_params(self, world: int, ep: int = 1, layers: int | None = None) -> int:
        """Parameters rank 0 holds under FSDP over `world` and experts split `ep` ways (dim-0 shards, rounded up)."""

        def local(name: str, shape: tuple[int, ...]) -> int:
            rows, ways = (shape[0] // ep, world // ep) if name.startswith("experts.") else (shape[0], world)
            return -(-rows // ways) * _numel(shape[1:])

        block = sum(local(*item) for item in self.layer_tensors())
        return (self.layers if layers is None else layers) * block + sum(local(*item) for item in self.other_tensors())

    def flops_per_token(self, seq_len: int, layers: int | None = None) -> float:
        """Model FLOPs per trained token: 6 x active parameters without the embedding table, plus 12 x layers x
        (heads x head_dim) x seq_len for attention, causality not discounted (the PaLM appendix B convention)."""
        depth = self.layers if layers is None else layers
        idle = 1 - self.top_k / self.experts
        block = sum(_numel(s) * (1 - idle * name.startswith("experts.")) for name, s in self.layer_tensors())
        active = depth * block + self.hidden + self.vocab * self.hidden
        return 6 * active + 12 * depth * self.heads * self.head_dim * seq_len

    def loss_share(self, seq_len: int, layers: int | None = None) -> float:
        """Part of a forward's FLOPs that head and loss have. `workload.loss` makes their gradients in the forward, so
        they are three products there; of attention half is counted, as it is causal.

        0.136 at 48 layers and 16,384 tokens. Forwards of `none` on H200s took 0.483 s with 48 layers and 0.277 with 24
        (results/h200-stream-fourth.jsonl, h200-x2-rehearsal.jsonl): what no layer takes is 0.071 s.
        """
        depth = self.layers if layers is None else layers
        head = 6 * self.vocab * self.hidden
        attention = 12 * depth * self.heads * self.head_dim * seq_len
        blocks = (self.flops_per_token(seq_len, depth) - head - attention / 2) / 3
        return head / (head + blocks)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape(
            "qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            experts=128,
            top_k=8,
            expert_width=768,
            vocab=151936,
            seq_len=16384,
            chunk_bytes=GIB,
        ),
        ModelShape(
            "tiny",
            layers=4,
            hidden=128,
            heads=4,
            kv_heads=2,
            head_dim=32,
            experts=8,
            top_k=2,
            expert_width=64,
            vocab=1024,
            seq_len=128,
            chunk_bytes=1 << 18,
        ),
    )
}


def find(name: str) -> ModelShape:
    """The preset of that name.

    Raises UsageError, with the nearest name, for an unknown one.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        raise UsageError(
            f"unknown model {name}: {f'did you mean {near[0]}?' if near else 'there are ' + ', '.join(PRESETS)}"
        )
    return PRESETS[name]
