# pyright: reportMissingImports=false
"""The steps of `benchmarks.processes` by torch: DTensor's tensor parallel, DDP, and DDP that tells the loss of all rows."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.processes import RATE, Step


def join(rank: int, processes: int, address: str) -> None:
    """As torchrun starts them: one thread each."""
    import torch

    host, port = address.split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(processes))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


def leave() -> None:
    import torch

    torch.distributed.destroy_process_group()


def steps(layout: str, weights: list[Any], x: Any, y: Any, optimizer: str) -> dict[str, Step]:
    """By name: one training step each, all from the same weights and on the same batch. Calling it again trains on."""
    import torch
    from torch import distributed, nn

    ranks, rank = distributed.get_world_size(), distributed.get_rank()

    def model() -> Any:
        layers = []
        for kernel, bias in weights:
            layer = nn.Linear(*kernel.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(kernel.T))
                layer.bias.copy_(torch.from_numpy(bias))
            layers.append(layer)
        return nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())][:-1])

    def trained(model: Any, x: Any, y: Any, *, tells_all: bool = False) -> Step:
        parameters = model.parameters()
        tx = (
            torch.optim.SGD(parameters, RATE)
            if optimizer == "sgd"
            else torch.optim.AdamW(parameters, RATE, weight_decay=1e-4)
        )

        def step() -> Any:
            tx.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            tx.step()
            if not tells_all:
                return loss.detach()
            loss = loss.detach()
            distributed.all_reduce(loss)
            return loss / ranks

        return step

    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    if layout == "tensor":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = distributed.init_device_mesh("cpu", (ranks,))
        parts = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return {"DTensor": trained(parts, x, y)}
    part = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
    of_all = nn.parallel.DistributedDataParallel(model())
    return {
        "DDP": trained(nn.parallel.DistributedDataParallel(model()), x[part], y[part]),
        "DDP, loss of all rows": trained(of_all, x[part], y[part], tells_all=True),
    }
