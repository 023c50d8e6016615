"""The teacher's weights: a float32 moving average of the trainable parameters over the one base model (eq. sdpo_updates), or fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from firedistill.files import naming
from firedistill.models.lora import trained_parameters
from firedistill.models.states import inference_mode


class EMAWeights:
    """Exponential moving average of the student's trainable parameters (for LoRA: of A and B, not of their product).

    It starts as an exact copy of the student. It has no modules: `applied` puts its weights into the student's modules for a forward
    pass, so one base model serves both.

    Args:
        model: the student with its adapter.
        rate: `1 - mu`, the weight of the new student in each update. 1 is the student itself, 0 the student before the first update.

    Raises:
        ValueError: no parameter is trainable, or the rate is outside [0, 1].
    """

    def __init__(self, model: nn.Module, rate: float):
        if not 0 <= rate <= 1:
            raise ValueError(f"ema_rate is {rate}; expected 1 - mu, the weight of the new student, in [0, 1]")
        self.model, self.rate = model, rate
        self.parameters = trained_parameters(model)
        if not self.parameters:
            raise ValueError("the model has no trainable parameter; add an adapter before creating the teacher")
        self.shadow = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """`teacher <- mu teacher + (1 - mu) student`."""
        if self.rate == 0:
            return
        students = [p.detach().float() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.shadow.values()), students, self.rate)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the student's modules with the teacher's weights, in evaluation mode (no dropout, caches allowed), without gradient.

        The student's tensors and training flags are restored.
        """
        student = {name: p.data for name, p in self.parameters.items()}
        with inference_mode(self.model):
            try:
                for name, p in self.parameters.items():
                    p.data = self.shadow[name].to(p.dtype)
                yield
            finally:
                for name, p in self.parameters.items():
                    p.data = student[name]

    def values_for(self, module: nn.Module) -> dict[str, Tensor]:
        """The teacher's values of the trainable parameters of `module`, by their names inside it (tied weights included)."""
        owner = {id(p): name for name, p in self.parameters.items()}
        return {
            name: self.shadow[owner[id(p)]].to(p.dtype)
            for name, p in module.named_parameters(remove_duplicate=False)
            if id(p) in owner
        }

    @torch.no_grad()
    def distance(self) -> float:
        """Euclidean distance between teacher and student in parameter space."""
        students = [p.detach().float() for p in self.parameters.values()]
        return float(get_total_norm(torch._foreach_sub(students, list(self.shadow.values()))))

    def save(self, folder: str | Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.shadow.items()}, Path(folder) / "teacher.safetensors")

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote.

        Raises:
            FileNotFoundError, ValueError: the checkpoint has no teacher, or one of another model.
        """
        path = Path(folder) / "teacher.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the checkpoint has no EMA teacher and cannot be resumed exactly")
        try:
            with naming(path):
                stored = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); resume from an earlier checkpoint") from error
        found, expected = ({(name, t.shape, t.dtype) for name, t in of.items()} for of in (stored, self.shadow))
        if mismatch := sorted({name for name, _, _ in found ^ expected}):
            raise ValueError(f"{path} belongs to another model or adapter; parameters that do not fit: {mismatch[:3]}")
        if spoiled := sorted(name for name, tensor in stored.items() if not tensor.isfinite().all()):
            raise ValueError(f"{path} holds values that are not finite, in {spoiled[:3]}; resume from an earlier checkpoint")
        with torch.no_grad():
            for name, tensor in self.shadow.items():
                tensor.copy_(stored[name])  # in place: the address of a tensor can change how products with it round


class FixedWeights:
    """The weights of a teacher that is a separate model: they never change, and checkpoints do not hold them."""

    def __init__(self, model: nn.Module):
        self.model = model

    def update(self) -> None:
        """Change nothing."""

    def applied(self) -> AbstractContextManager[None]:
        """Run the model in evaluation mode, without gradient."""
        return inference_mode(self.model)

    def values_for(self, module: nn.Module) -> dict[str, Tensor]:
        """Nothing: the modules hold the teacher's values."""
        return {}

    def distance(self) -> None:
        """None: student and teacher have different parameters."""

    def save(self, folder: str | Path) -> None:
        """Write nothing."""

    def load(self, folder: str | Path) -> None:
        """Read nothing."""
