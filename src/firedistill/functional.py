"""The equations of the methods as pure functions, re-exported from `firedistill.objectives`.

Logits `[..., V]` are float32 or float64; another dtype raises TypeError. Results have the dtype of the logits.
"""

from firedistill.objectives.demopsd import demopsd_target
from firedistill.objectives.distributions import (
    entropy,
    fisher_radius,
    fisher_trace,
    forward_kl,
    induced_gradient,
    jensen_shannon,
    reverse_kl,
)
from firedistill.objectives.fire import FireTarget, excised_target, fire_target, sft_weight
from firedistill.objectives.scope import perplexity_weights
from firedistill.objectives.srpo import entropy_weights, group_advantages
from firedistill.objectives.top_d import clipped_surrogate, future_mean_returns, pooled_advantages, proximal_rewards
from firedistill.objectives.tropd import tropd_token_loss, trust_acceptance
from firedistill.objectives.veto import veto_target

__all__ = [
    "FireTarget",
    "clipped_surrogate",
    "demopsd_target",
    "entropy",
    "entropy_weights",
    "excised_target",
    "fire_target",
    "fisher_radius",
    "fisher_trace",
    "forward_kl",
    "future_mean_returns",
    "group_advantages",
    "induced_gradient",
    "jensen_shannon",
    "perplexity_weights",
    "pooled_advantages",
    "proximal_rewards",
    "reverse_kl",
    "sft_weight",
    "tropd_token_loss",
    "trust_acceptance",
    "veto_target",
]
