"""The mathematics of the methods as pure functions on tensors: a flat, public face on `firedistill.objectives`."""

from firedistill.objectives.distributions import entropy, fisher_radius, fisher_trace, induced_gradient, reverse_kl
from firedistill.objectives.fire import FireTarget, excised_target, fire_target, sft_weight

__all__ = [
    "FireTarget",
    "entropy",
    "excised_target",
    "fire_target",
    "fisher_radius",
    "fisher_trace",
    "induced_gradient",
    "reverse_kl",
    "sft_weight",
]
