"""A frozen base model whose weights are spread over processes, by FSDP2 as `transformers` applies it (`DistributedConfig`).

Every layer gathers its weights from the other processes when it is called, so all processes must make equally many forward passes of
the whole model. Sampling and the teacher's views make as many as the responses of a process need; `Lockstep` fills up the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from firedistill.models.errors import ModelError
from firedistill.models.states import inference_mode, is_sharded, unwrap

Value = TypeVar("Value")


def distributed_config(fsdp_size: int, dp_replicate_size: int | None, processes: int) -> Any:
    """The `transformers.distributed.DistributedConfig` of a base model that is spread over `fsdp_size` processes.

    Args:
        dp_replicate_size: copies of the base model; by default as many as `processes` have room for.

    Raises:
        ModelError: the sizes do not fit the number of processes, or the installed transformers lacks them.
    """
    advice = f"start with: torchrun --no-python --standalone --nproc_per_node {fsdp_size} firedistill ..."
    if processes == 1:
        raise ModelError(f"fsdp_size is {fsdp_size}, but there is one process: {advice} (or leave fsdp_size out)")
    if processes % fsdp_size:
        raise ModelError(f"fsdp_size is {fsdp_size}: expected a divisor of the number of processes ({processes}); {advice}")
    replicas = processes // fsdp_size
    if dp_replicate_size not in (None, replicas):
        raise ModelError(
            f"dp_replicate_size is {dp_replicate_size}: expected {replicas}, the {processes} processes divided by fsdp_size "
            f"({fsdp_size})"
        )
    if not hasattr(transformers.Trainer, "_sync_replicated_trainable_parameters"):
        raise ModelError(f"fsdp_size needs transformers 5.19 or newer; {transformers.__version__} is installed")
    from transformers.distributed import DistributedConfig

    if replicas == 1:
        return DistributedConfig(fsdp_size=fsdp_size)
    if "dp_replicate_size" not in {field.name for field in fields(DistributedConfig)}:
        raise ModelError(
            f"fsdp_size {fsdp_size} with {processes} processes needs transformers 5.23 or newer; {transformers.__version__} is "
            f"installed, which shards over all processes only: set fsdp_size to {processes}"
        )
    return DistributedConfig(fsdp_size=fsdp_size, dp_replicate_size=replicas)


class Lockstep:
    """Makes all processes pass through a sharded model equally often.

    Before a forward pass, a process says so to the others. One that waits for them (`wait`) makes a pass over a single token whenever
    another one makes a pass.

    Args:
        model: a sharded model. All processes must create their `Lockstep` at the same point of the program.

    Attributes:
        head: weight `[V, H]` and, if there is one, bias `[V]` of the output projection, whole. Products with them are not passes of
            the model.

    Raises:
        ModelError: the model computes its logits for all tokens of a pass.
    """

    def __init__(self, model: PreTrainedModel):
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ModelError(f"{type(model).__name__} has no logits_to_keep, without which its base cannot be sharded")
        self.model = model
        self.head = {name: whole(p.detach()) for name, p in model.get_output_embeddings().named_parameters()}
        self._answering = self._unfinished = False
        model.register_forward_pre_hook(self._announce, prepend=True)
        model.register_forward_hook(self._finish)

    def wait(self) -> None:
        """Return when all processes wait. Called wherever they communicate in another way after unequally many passes."""
        token = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        while self._passes(0):
            self._answering = True
            with inference_mode(self.model):
                self.model(input_ids=token, use_cache=False, logits_to_keep=1)
            self._answering = False

    def _announce(self, module: nn.Module, inputs: Any) -> None:
        if not self._answering:
            self._passes(1)
        self._unfinished = True

    def _finish(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._unfinished = False

    def _passes(self, mine: int) -> Tensor:
        """The number of processes that make a pass. On an accelerator, only reading it waits for the others."""
        if self._unfinished:
            raise RuntimeError("a forward pass of the sharded model failed: the processes cannot continue together")
        total = torch.full((), mine, device=self.model.device)  # `torch.tensor` would wait for the device
        dist.all_reduce(total)
        return total


def lockstep(model: nn.Module) -> Lockstep | None:
    """The `Lockstep` of a model, created on the first call; None for a model that is not sharded."""
    causal_lm: Any = unwrap(model)
    if not is_sharded(causal_lm):
        return None
    if not hasattr(causal_lm, "firedistill_lockstep"):
        causal_lm.firedistill_lockstep = Lockstep(causal_lm)
    return causal_lm.firedistill_lockstep


def wait_for_processes(model: nn.Module) -> None:
    """Return when all processes have made their forward passes; at once for a model that is not sharded."""
    if steps := lockstep(model):
        steps.wait()


def gather(model: nn.Module, values: list[Value]) -> list[Value]:
    """The values of all processes, after their forward passes through `model`."""
    wait_for_processes(model)
    return gather_object(values)


@torch.no_grad()
def copy_from_first_process(parameters: Iterable[Tensor], device: torch.device) -> None:
    """Give these parameters the values of the first process, in all processes.

    Args:
        device: where the backend of the process group communicates.
    """
    for parameter in parameters:
        parameter.copy_(broadcast(parameter.to(device)))


def reshard(model: nn.Module) -> None:
    """Give up the weights that the last forward pass has left whole; all processes must call it at the same point."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def shown_whole(model: nn.Module) -> Iterator[None]:
    """Show every sharded weight as an ordinary tensor of its whole shape, without values and without memory.

    peft takes the weights of replicated shards for those of tensor parallelism, and makes factors of the shape of a shard.
    """
    sharded = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
    try:
        for module, name, parameter in sharded:
            shape = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            module._parameters[name] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in sharded:
            parameter.requires_grad_(getattr(module, name).requires_grad)
            module._parameters[name] = parameter


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all processes; all of them must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def limit_waiting(model: nn.Module, seconds: float) -> None:
    """Limit the seconds that all communication may take, the gathering of weights included; nothing if there is one process.

    transformers passes `ddp_timeout` on to accelerators only.
    """
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    groups = [dist.group.WORLD] if dist.is_initialized() else []
    for group in groups + [group for mesh in meshes for group in mesh.get_all_groups()]:
        _set_pg_timeout(timedelta(seconds=seconds), group)
