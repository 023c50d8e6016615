"""The methods: one file each."""

from firedistill.objectives import (  # noqa: F401  (importing a method registers it)
    demopsd,
    fire,
    full_context,
    on_policy_sft,
    scope,
    srpo,
    supervised,
    top_d,
    tropd,
    veto,
)
from firedistill.objectives.base import (
    Averages,
    Objective,
    StepBatch,
    TrainingBatch,
    load_objective,
    objective_class,
    register,
    registered_objectives,
    setting,
    token_log_probs,
)

__all__ = [
    "Averages",
    "Objective",
    "StepBatch",
    "TrainingBatch",
    "load_objective",
    "objective_class",
    "register",
    "registered_objectives",
    "setting",
    "token_log_probs",
]
