"""The methods: one file each."""

from firedistill.objectives import fire, full_context, supervised  # noqa: F401  (importing a method registers it)
from firedistill.objectives.objective import Averages, Objective, TrainingBatch, load_objective, register

__all__ = ["Averages", "Objective", "TrainingBatch", "load_objective", "register"]
