"""What optimizer updates do to the policy, on given responses; and an update that is scaled back where they do too much.

The Fisher radius bounds logit gradients, and the optimizer decides what becomes of them. The measures here are of the outcome: the
divergence between the policy before and after, `KL(p_before || p_after)` per response token, and the size of the step in the
trainable weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from firedistill.memory import BatchLimit
from firedistill.metrics import Metrics
from firedistill.models.lora import trained_parameters
from firedistill.models.states import unwrap
from firedistill.objectives.batches import frozen_states, map_tokens
from firedistill.objectives.distributions import reverse_kl
from firedistill.ops import Head
from firedistill.rollout import Rollout

logger = logging.getLogger(__name__)

MOST_TRIES = 12
# Each try multiplies the share by CAUTION times the quadratic estimate, and by at least SMALLEST_CUT.
CAUTION, SMALLEST_CUT = 0.98, 0.1


class PolicyChange:
    """The policy and the trainable weights at one moment, to which later ones are compared.

    It changes neither weights, gradients, training flags nor random numbers.

    Args:
        model: the student with its adapter.
        rollouts: the responses whose tokens are scored.
        limit: padded tokens per forward pass.
        temperature: of the compared distributions.

    Attributes:
        weights: copies of the trainable parameters, by name.
    """

    def __init__(self, model: nn.Module, rollouts: Sequence[Rollout], limit: BatchLimit, temperature: float = 1.0):
        self.model, self.rollouts, self.limit, self.temperature = model, rollouts, limit, temperature
        self.parameters = trained_parameters(model)
        self.weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        projection = unwrap(model).get_output_embeddings()
        copies = {id(p): self.weights[name] for name, p in self.parameters.items()}
        trained = {name: copies[id(p)] for name, p in projection.named_parameters(remove_duplicate=False) if id(p) in copies}
        self.head = Head.of(unwrap(model), temperature, trained)
        self.states = frozen_states(model, rollouts, limit)

    @torch.no_grad()
    def kl(self) -> Tensor:
        """`KL(p_before || p_now)` of every response token, in nats; `[M]` float32 on the CPU."""
        now = frozen_states(self.model, self.rollouts, self.limit)
        head = Head.of(unwrap(self.model), self.temperature)

        def of_chunk(logits: Tensor, chunk: slice) -> Tensor:
            return reverse_kl(logits, head(now.hidden[chunk]))

        return torch.cat([torch.empty(0), *(values.float().cpu() for values in map_tokens(self.head, self.states, of_chunk))])

    @torch.no_grad()
    def weight_step(self) -> tuple[float, float]:
        """Euclidean norm of the change of the trainable parameters, and its ratio to their norm before."""
        steps = [(p.detach().double() - self.weights[name].double()).square().sum() for name, p in self.parameters.items()]
        before = [weight.double().square().sum() for weight in self.weights.values()]
        step, norm = (float(torch.stack(squares).sum().sqrt()) for squares in (steps, before))
        return step, step / norm if norm else math.nan

    def metrics(self) -> Metrics:
        """`policy_kl` and `policy_kl_max` over the tokens, `weight_step` and `weight_step_relative`."""
        metrics, kl = Metrics(), self.kl()
        metrics.mean(policy_kl=kl)
        metrics.maximum(policy_kl_max=kl)
        step, relative = self.weight_step()
        metrics.mean(weight_step=step, weight_step_relative=relative)
        return metrics

    @torch.no_grad()
    def move(self, share: float, weights_after: dict[str, Tensor]) -> None:
        """Set the trainable parameters to `before + share (after - before)`, in place."""
        for name, p in self.parameters.items():
            before = self.weights[name]
            p.copy_(torch.lerp(before, weights_after[name], share) if share else before)  # 0 times infinity is not a number

    def scale_back(self, radius: float, mean: Callable[[Tensor], float]) -> Metrics:
        """Shorten the step since this moment until the mean KL on the tokens is at most `radius`; see docs/policy-step.md.

        For small steps the KL is quadratic in the length, so each try multiplies the share of the step by `sqrt(radius / KL)`,
        slightly less, which usually succeeds at once. If no try does, the step is undone.

        Args:
            radius: nats per token.
            mean: the mean over the tokens of all processes.

        Returns:
            `policy_step_share`, the share of the step that is kept, and `policy_step_tries`, the forward passes that this took.
        """
        after = {name: p.detach().clone() for name, p in self.parameters.items()}
        share, tries = 1.0, 1
        while not (kl := mean(self.kl())) <= radius:
            if tries == MOST_TRIES:
                logger.warning("no share of the update down to %.1e has a policy KL of at most %g: it is undone", share, radius)
                share = 0.0
                self.move(share, after)
                break
            share *= max(CAUTION * math.sqrt(radius / kl), SMALLEST_CUT) if math.isfinite(kl) else SMALLEST_CUT
            self.move(share, after)
            tries += 1
        metrics = Metrics()
        metrics.mean(policy_step_share=share, policy_step_tries=float(tries))
        return metrics
