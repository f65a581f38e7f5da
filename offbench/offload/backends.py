"""Can the process groups of sharded parameters reduce what is where those parameters are?"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from offbench.offload.layout import local_of


def missing_backend(parameters: Iterable[nn.Parameter]) -> str | None:
    """A line on the first mesh whose process group has no backend for the device that its parameters are on: their
    gradients could be neither reduced nor clipped. None when every one has."""
    seen: set[tuple[DeviceMesh, str]] = set()
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        mesh, device = parameter.device_mesh, local_of(parameter).device.type
        if (mesh, device) in seen:
            continue
        seen.add((mesh, device))
        for dim in range(mesh.ndim):
            config = dist.get_backend_config(mesh.get_group(dim))  # as "cpu:gloo,cuda:nccl"
            if mesh.size(dim) > 1 and device not in {part.partition(":")[0] for part in config.split(",")}:
                return (
                    f"a parameter of shape {tuple(parameter.shape)} is sharded on the {device}, for which its process "
                    f"group has no backend ({config}); name one at init_process_group, as in cpu:gloo,cuda:nccl"
                )
    return None
