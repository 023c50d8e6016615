"""Feedback-based on-policy self-distillation of language models: FIRE, its ablations and baselines.

from firedistill import SelfDistillConfig, SelfDistillTrainer

SelfDistillTrainer(args=SelfDistillConfig(model="Qwen/Qwen2.5-0.5B-Instruct", task="arithmetic")).train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firedistill.checks import preflight
    from firedistill.config import SelfDistillConfig
    from firedistill.tasks import Example, FeedbackField, Task, Verdict, load_task
    from firedistill.tasks.decorator import task
    from firedistill.trainer import SelfDistillTrainer

__version__ = "0.1.0"

__all__ = [
    "Example",
    "FeedbackField",
    "SelfDistillConfig",
    "SelfDistillTrainer",
    "Task",
    "Verdict",
    "load_task",
    "preflight",
    "task",
]
HOMES = {"SelfDistillConfig": "config", "SelfDistillTrainer": "trainer", "preflight": "checks", "task": "tasks.decorator"}


def __getattr__(name: str) -> Any:
    """Import what is asked for on first use: torch and transformers take seconds, and the command line first cleans the module path."""
    from importlib import import_module

    if name == "functional":
        return import_module("firedistill.functional")
    if name not in __all__:
        raise AttributeError(f"module 'firedistill' has no attribute {name!r}")
    return getattr(import_module(f"firedistill.{HOMES.get(name, 'tasks')}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__")), "functional"])
