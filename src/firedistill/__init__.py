"""Feedback-based on-policy self-distillation of language models that stays stable: FIRE and its ablations.

from firedistill import SelfDistillConfig, SelfDistillTrainer

SelfDistillTrainer(args=SelfDistillConfig(model="smollm2", task="arithmetic")).train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firedistill.tasks import Example, Task, Verdict, load_task
from firedistill.tasks.types import FeedbackField

if TYPE_CHECKING:
    from firedistill.config import SelfDistillConfig
    from firedistill.trainer import SelfDistillTrainer

__version__ = "0.1.0"

__all__ = ["Example", "FeedbackField", "SelfDistillConfig", "SelfDistillTrainer", "Task", "Verdict", "load_task"]


def __getattr__(name: str) -> Any:
    """Import what needs torch and transformers on first use: tasks and verifiers import quickly."""
    if name == "SelfDistillConfig":
        from firedistill.config import SelfDistillConfig

        return SelfDistillConfig
    if name == "SelfDistillTrainer":
        from firedistill.trainer import SelfDistillTrainer

        return SelfDistillTrainer
    raise AttributeError(f"module 'firedistill' has no attribute {name!r}")
