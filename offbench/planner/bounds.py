"""Closed forms: what no order of the same work can beat, as docs/how-fast-can-offload-be.md derives them."""

from __future__ import annotations

from collections.abc import Callable

from offbench.planner.inputs import Compute, Links

SEARCHES = 32
"""Thirds taken off an interval: what is left of it is below a millionth."""


def main_s(nbytes: float, compute: Compute, links: Links) -> float:
    """All in, one update, all out, in turn."""
    return compute.total + nbytes / links.into + nbytes / links.out


def chunked_s(nbytes: float, chunks: int, compute: Compute, links: Links) -> float:
    """In step(), both ways at once: the copies' floor, and one chunk each way alone at the ends. An update beside
    copies takes no time of its own. For equal chunks, and equal rates both ways."""
    ends = nbytes / chunks / links.into + nbytes / chunks / links.out
    inner = (chunks - 1) / chunks * nbytes
    return compute.total - compute.update + links.floor_s(inner) + ends


def deferred_exposed_s(nbytes: float, held: float, compute: Compute, links: Links) -> float:
    """Least exposed seconds of a schedule that updates before the next forward and holds `held` bytes of state on the
    GPU when backward ends: the rest must come in, one way, while clip, updates and forward run, before the loss."""
    return max(0.0, (nbytes - held) / links.into - (compute.total - compute.backward - compute.loss))


def deferred_s(nbytes: float, held: float, compute: Compute, links: Links) -> float:
    """Least step of such a schedule: that, and never below the floor of what must move, nbytes - held each way."""
    step = compute.total + deferred_exposed_s(nbytes, held, compute, links)
    return max(step, links.floor_s(max(0.0, nbytes - held)))


def out_in_forward(nbytes: float, held: float, gradients: float) -> float:
    """Bytes that must have been written back when the last ones come in: what fits neither into `held` nor into the
    gradients' memory, all of which is free by then. gradients: bytes of gradient per byte of state."""
    return max(0.0, nbytes - held - gradients * nbytes)


def window_s(into: float, out: float, links: Links) -> float:
    """Least seconds in which so many bytes move in and so many out: side by side as long as both last, then alone."""
    rate_in, rate_out = links.now(True, True)
    both_s = min(into / rate_in, out / rate_out)
    return both_s + (into - both_s * rate_in) / links.into + (out - both_s * rate_out) / links.out


def stream_s(nbytes: float, held: float, gradients: float, compute: Compute, links: Links) -> float:
    """Least step of a schedule that fetches at most `held` bytes during backward and, beside them, has no memory but
    the freed gradients'. Bytes that never move are in neither.

    A step has two windows. From the end of backward to the end of forward what was not fetched moves in, and at least
    `out_in_forward` moves out, both before the loss; in backward the rest moves. Neither is shorter than its compute.
    How much moves where is chosen for the best: a convex choice, so nested ternary searches find it.
    """
    least, backward_s = out_in_forward(nbytes, held, gradients), compute.backward

    def step(fetched: float, out: float) -> float:
        forward = _forward_s(nbytes - fetched, least, out, compute, links)
        return forward + max(backward_s, window_s(fetched, nbytes - out, links))

    return _least(lambda fetched: _least(lambda out: step(fetched, out), least, nbytes), 0.0, min(held, nbytes))


def resident_s(nbytes: float, held: float, staging: float, gradients: float, compute: Compute, links: Links) -> float:
    """Least step of a schedule with `held` bytes that never move and `staging` bytes of memory from step() on, which
    grow into the freed gradients' until the forward ends. The same two windows; nothing is fetched in backward."""
    moving, backward_s = max(0.0, nbytes - held), compute.backward
    least = max(0.0, moving - staging - gradients * nbytes)

    def step(out: float) -> float:
        forward = _forward_s(moving, least, out, compute, links)
        return forward + max(backward_s, window_s(0.0, moving - out, links))

    return _least(step, least, moving)


def _forward_s(into: float, least: float, out: float, compute: Compute, links: Links) -> float:
    """Seconds from the end of backward to the end of forward: its compute, its copies, or what must have moved before
    the loss and then the loss."""
    before_loss = window_s(into, least, links) + compute.loss
    return max(compute.total - compute.backward, before_loss, window_s(into, out, links))


def _least(value: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a convex function between two places."""
    for _ in range(SEARCHES):
        third = (high - low) / 3
        if value(low + third) <= value(high - third):
            high -= third
        else:
            low += third
    return min(value(low), value(high))


def hidden_at(nbytes: float, compute: Compute, links: Links) -> float:
    """Bytes of state on the GPU when backward ends from which on nothing need be exposed."""
    return max(0.0, nbytes - links.into * (compute.total - compute.backward - compute.loss))
