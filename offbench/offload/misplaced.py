"""Where parameters are: on one device, which the process groups that they are sharded over can reach?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from offbench.offload.layout import local_of


def misplaced(parameters: Iterable[nn.Parameter]) -> str | None:
    """A line on the first parameter that cannot be served where it is: on the meta device, on another device than the
    first one, or on a mesh whose process group has no backend for its device, so that gradients could be neither
    reduced nor clipped. None when there is none."""
    seen: set[tuple[DeviceMesh, str]] = set()
    found: torch.device | None = None
    for parameter in parameters:
        here = local_of(parameter).device
        found = found or here
        if here.type == "meta":
            return f"a parameter of shape {tuple(parameter.shape)} is on the meta device; call to_empty() first"
        if here != found:
            return f"parameters are on {found} and {here}: staging has one device; make an optimizer for each"
        if not isinstance(parameter, DTensor):
            continue
        mesh, device = parameter.device_mesh, here.type
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
