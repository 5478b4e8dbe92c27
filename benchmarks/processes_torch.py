# pyright: reportMissingImports=false
"""The steps of `benchmarks.processes` by torch: DTensor's tensor parallel, DDP, and DDP that tells the loss of all rows; of a
decoder DTensor's tensor parallel, with and without sequence parallel, FSDP2, and a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.processes import FSDP2, KEPT, RATE, SEQUENCE, TENSOR, Step


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


def decoder_steps(plan: str, sizes: Mapping[str, Any], rows: int, length: int) -> dict[str, Step]:
    """By name: one training step each of the model of `benchmarks.decoder`, with its weights and batch, behind the first."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    if plan == "pipeline":
        return _in_stages(sizes, rows, length)
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    mesh, drawn, tokens = distributed.init_device_mesh("cpu", (ranks,)), *_drawn(sizes, rows, length)

    def trained(model: Any, part: slice) -> Step:
        kinds: dict[type, list[Any]] = {}  # an optimizer takes DTensors or tensors, not both
        for parameter in model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        each = [torch.optim.AdamW(some, 1e-3, weight_decay=1e-4) for some in kinds.values()]
        given = torch.from_numpy(tokens[part]).long()

        def step() -> Any:
            for tx in each:
                tx.zero_grad()
            with loss_parallel():
                loss = torch.nn.functional.cross_entropy(model(given).flatten(0, 1), given.flatten())
                loss.backward()
            for tx in each:
                tx.step()
            return loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()

        step()
        return step

    if plan == "tensor":
        found = {}
        for name in (TENSOR, SEQUENCE):
            model = _decoder(sizes, drawn)
            _parallelize(model, mesh, sequence=name == SEQUENCE)
            found[name] = trained(model, slice(None))
        return found

    def stored(again: bool) -> Step:
        model = _decoder(sizes, drawn)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        model = fully_shard(model, mesh=mesh, reshard_after_forward=again)
        return trained(model, slice(rank * rows // ranks, (rank + 1) * rows // ranks))

    return {FSDP2: stored(again=True), KEPT: stored(again=False)}


def _in_stages(sizes: Mapping[str, Any], rows: int, length: int) -> dict[str, Step]:
    """A step by each of two schedules of torch.distributed.pipelining: as many layers on each rank, a microbatch for each row.
    The last stage knows the loss."""
    import torch
    from torch import distributed, nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    drawn, tokens = _drawn(sizes, rows, length)
    given, layers = torch.from_numpy(tokens).long(), sizes["depth"] // ranks

    def made(schedule: Any) -> Step:
        whole = _decoder(sizes, drawn)
        parts = [*whole.blocks[rank * layers : (rank + 1) * layers]]
        parts = [
            *([whole.embed] if rank == 0 else []),
            *parts,
            *([whole.norm, whole.head] if rank == ranks - 1 else []),
        ]
        part = nn.Sequential(*parts)
        tx = torch.optim.AdamW(part.parameters(), 1e-3, weight_decay=1e-4)
        of_loss = lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        run = schedule(PipelineStage(part, rank, ranks, torch.device("cpu")), rows, loss_fn=of_loss)

        def step() -> Any:
            tx.zero_grad()
            losses: list[Any] = []
            run.step(
                *([given] if rank == 0 else []), **({"target": given, "losses": losses} if rank == ranks - 1 else {})
            )
            tx.step()
            return torch.stack(losses).mean() if losses else float("nan")

        step()
        return step

    return {"torch's GPipe": made(ScheduleGPipe), "torch's 1F1B": made(Schedule1F1B)}


def _drawn(sizes: Mapping[str, Any], rows: int, length: int) -> tuple[dict[str, Any], Any]:
    """The weights that the variants of JAX begin with, by path, and their batch."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import numpy as np
    from flax import nnx

    from benchmarks.decoder import drawn_tokens, model

    state = nnx.to_flat_state(nnx.state(model(sizes), nnx.Param))
    return {"/".join(map(str, path)): np.array(each[...]) for path, each in state}, drawn_tokens(sizes, rows, length)


def _decoder(sizes: Mapping[str, Any], drawn: Mapping[str, Any]) -> Any:
    """The model of `benchmarks.decoder`, as torchtitan writes such models, with these weights."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention, silu

    width, hidden, size = sizes["width"], sizes["hidden"], sizes["width"] // sizes["heads"]

    def rotated(x: Any) -> Any:
        turns = 10_000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(x.shape[1])[:, None, None] * turns.float()
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def linear(path: str, *shape: int, layer: tuple[int, ...] = ()) -> Any:
        made = nn.Linear(*shape, bias=False)
        made.weight.data = torch.tensor(drawn[path][layer].reshape(shape)).T.contiguous()
        return made

    class Attention(nn.Module):
        def __init__(self, *layer: int):
            super().__init__()
            self.q, self.k, self.v, self.o = (
                linear(f"blocks/attn/{name}/kernel", width, width, layer=layer) for name in "qkvo"
            )

        def forward(self, x: Any) -> Any:
            q, k, v = (each(x).unflatten(-1, (-1, size)) for each in (self.q, self.k, self.v))
            q, k, v = (each.transpose(1, 2) for each in (rotated(q), rotated(k), v))
            return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    class MLP(nn.Module):
        def __init__(self, *layer: int):
            super().__init__()
            self.gate, self.up = (
                linear(f"blocks/mlp/{name}/kernel", width, hidden, layer=layer) for name in ("gate", "up")
            )
            self.down = linear("blocks/mlp/down/kernel", hidden, width, layer=layer)

        def forward(self, x: Any) -> Any:
            return self.down(silu(self.gate(x)) * self.up(x))

    class Block(nn.Module):
        def __init__(self, *layer: int):
            super().__init__()
            self.attn_norm, self.attn = nn.RMSNorm(width, eps=1e-6), Attention(*layer)
            self.mlp_norm, self.mlp = nn.RMSNorm(width, eps=1e-6), MLP(*layer)

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.attn_norm(x))
            return x + self.mlp(self.mlp_norm(x))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding.from_pretrained(torch.tensor(drawn["embed/embedding"]), freeze=False)
            self.blocks = nn.ModuleList(map(Block, range(sizes["depth"])))
            self.norm, self.head = nn.RMSNorm(width, eps=1e-6), linear("head/kernel", width, sizes["vocabulary"])

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Decoder()


def _parallelize(model: Any, mesh: Any, *, sequence: bool) -> None:
    """Megatron's tensor parallel by DTensor. With `sequence` it is torchtitan's plan for Llama: activations between layers are
    split too, and so is the embedding's table."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    entry = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    back = RowwiseParallel(output_layouts=between)
    blocks = {"attn": entry, "mlp": entry, "attn.o": back, "mlp.down": back}
    blocks |= dict.fromkeys(("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"), ColwiseParallel())
    blocks |= dict.fromkeys(("attn_norm", "mlp_norm") if sequence else (), SequenceParallel())
    ends: dict[str, Any] = {"head": head}
    if sequence:
        ends |= {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "norm": SequenceParallel(),
        }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, blocks)
