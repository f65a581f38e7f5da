"""Compiled kernels: one compilation for all layers, and the same training."""

import pytest
import torch._dynamo

from offbench.workload import parallel
from offbench.workload.kernels import Kernels, compiled
from tests.workload import jobs


def train_without_recompiling(rank, spec):
    """Graphs compiled while training, and what was trained."""
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        seen = jobs.train(rank, spec)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], seen


# Raised and dropped inside torch while it traces a tensor with history.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("ep", [1, 8])
def test_each_kernel_is_compiled_once_for_all_layers_and_steps(monkeypatch, ep):
    """The graphs alone, by a backend without code generation: seconds instead of half a minute."""
    monkeypatch.setattr(parallel, "compiled", lambda: compiled("aot_eager"))
    spec = jobs.spec(8, kind="rehearsal", layers=4, ep=ep, routing="balanced", compile=True)
    graphs, seen = jobs.rehearsed(0, 8, train_without_recompiling, spec)
    assert graphs == len(Kernels()) - (ep == 1)  # `sort_runs` belongs to expert parallelism
    plain = spec.model_copy(update={"workload": spec.workload.model_copy(update={"compile": False})})
    expected = jobs.rehearsed(0, 8, jobs.train, plain)
    for (loss, norm), (loss_too, norm_too) in zip(seen[:1], expected[:1], strict=True):
        assert loss == pytest.approx(loss_too, rel=1e-3)
        assert norm == pytest.approx(norm_too, rel=1e-2)
