"""Block inputs that travel to the host and back change no bit, and are counted."""

import pytest
import torch

from offbench.errors import OffbenchError
from offbench.workload.activation_offload import ActivationOffload
from offbench.workload.initial import initialise
from offbench.workload.model import Options, Qwen3Moe
from offbench.workload.parallel import build
from offbench.workload.presets import find
from tests.ranks import on_ranks
from tests.workload import jobs


def with_offload(rank, spec):
    job = build(spec, rank, jobs.CPU)
    loss = jobs.backward(job)
    offload = job.activation_offload
    counts = offload.out_bytes, offload.in_bytes, offload.host_bytes, offload.by_kernel
    return loss, jobs.gradients(job), *counts


def both_ways(rank, plain, spec):
    """Without offload, then by the copy engines and by kernels."""
    expected = jobs.loss_and_gradients(rank, plain, torch.bfloat16)
    found = []
    for way in ("copy", "kernel"):
        arm = spec.arm.model_copy(update={"activation_copies": way})
        found.append(with_offload(rank, spec.model_copy(update={"arm": arm})))
    return expected, found


def test_loss_and_gradients_are_bitwise_those_without_offload():
    chosen = {"ep": 2, "layers": 3, "grad_accum": 2}
    specs = jobs.spec(2, **chosen), jobs.spec(2, activation_offload=True, **chosen)
    one_input = 32 * find("tiny").hidden * 2
    for (loss, grads), found in on_ranks(2, both_ways, *specs):
        for loss_too, grads_too, out, back, held, _ in found:
            assert torch.equal(loss, loss_too)
            assert all(torch.equal(grads[name], grads_too[name]) for name in grads)
            assert out == back == 2 * 3 * one_input
            assert held == 3 * one_input
        assert [by_kernel for *_, by_kernel in found] == [0, 2 * 2 * 3]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(1, 4, 6), (1, 3, 5), (1, 512, 2048)])
def test_by_kernels_every_bit_comes_back(device, dtype, size):
    """Zeros of both signs, NaNs with a payload and subnormal numbers, in whole words and not."""
    place = torch.device(device)
    offload = ActivationOffload(1, size, dtype, place, "kernel")
    generator = torch.Generator().manual_seed(0)
    nbytes = dtype.itemsize * size[1] * size[2]
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).view(size).to(place)
    back = offload._load(offload._save(0, tensor))
    assert (back.shape, back.device) == (tensor.shape, tensor.device)
    assert back.data_ptr() != tensor.data_ptr()
    assert torch.equal(back.view(-1).view(torch.uint8).cpu(), raw)
    assert offload.by_kernel == 2


def model_and_tokens():
    shape = find("tiny")
    offload = ActivationOffload(2, (1, 16, shape.hidden), torch.float32, jobs.CPU)
    model = Qwen3Moe(shape, 2, Options(checkpoint=True, activation_offload=offload))
    initialise(model, seed=0)
    return model, torch.zeros(1, 16, dtype=torch.int64), offload


def test_backward_reads_the_host_buffers():
    model, tokens, offload = model_and_tokens()
    loss = model(tokens, tokens)
    for buffer in offload._buffers:
        buffer.fill_(torch.nan)
    loss.backward()
    assert all(p.grad.isnan().any() for p in model.blocks.parameters())


def test_two_forwards_before_a_backward_are_refused():
    model, tokens, _ = model_and_tokens()
    loss = model(tokens, tokens)
    with pytest.raises(OffbenchError, match="block 0 ran forward twice"):
        model(tokens, tokens)
    loss.backward()
    with torch.no_grad():
        model(tokens, tokens)
        model(tokens, tokens)
