"""The methods: one file each."""

from firedistill.metrics import Metrics
from firedistill.objectives import (  # noqa: F401  (importing a method registers it)
    demopsd,
    fire,
    full_context,
    negative_advantage,
    on_policy_sft,
    rlcsd,
    scope,
    sdpg,
    srpo,
    supervised,
    top_d,
    tropd,
    veto,
)
from firedistill.objectives.base import Objective, setting
from firedistill.objectives.batches import MicroBatch, Step, map_tokens, token_log_probs
from firedistill.objectives.registry import load_objective, objective_class, register, registered_objectives

__all__ = [
    "Metrics",
    "MicroBatch",
    "Objective",
    "Step",
    "load_objective",
    "map_tokens",
    "objective_class",
    "register",
    "registered_objectives",
    "setting",
    "token_log_probs",
]
