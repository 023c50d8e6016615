"""FIRE: Fisher-informed recalibration (paper section "FIRE", Algorithm 1), and its ablations.

Correct responses are trained by supervised fine-tuning whose per-token weight keeps the logit gradient inside the Fisher radius.
Wrong responses are distilled towards the EMA teacher that sees the feedback. Where this target violates the radius, it is re-weighted
by leave-one-field-out attribution, then contracted onto the radius.

Symbols are the paper's, equations fire_radius to fire_objective. `fire_target` and `sft_weight` state the method on logits;
`firedistill.ops.fire_head` computes the same from hidden states. Leave-one-out views matter only where the gate `chi` is above 0:
they are scored for responses with such a token, up to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from firedistill.config import TeacherKind
from firedistill.metrics import Metrics
from firedistill.models.states import ResponseStates
from firedistill.objectives.base import Objective, refuse_missing_fields, setting
from firedistill.objectives.batches import MicroBatch, map_tokens
from firedistill.objectives.distributions import (
    centred,
    entropy,
    finite_logits,
    fisher_radius,
    induced_gradient,
    log_ratio,
    log_softmax,
    reverse_kl,
    softmax,
)
from firedistill.objectives.registry import register
from firedistill.ops.fire_head import FireHeadOutput, first_pass
from firedistill.prompts import View, field_groups
from firedistill.rollout import Rollout


@dataclass
class FireTarget:
    """The target of the incorrect branch with its intermediate quantities. Every tensor is detached.

    Attributes:
        log_probs: `[..., V]`, log q_FIRE.
        rho: `[...]`, the radius.
        energy: `[...]`, E_c, squared norm of the gradient that the full teacher asks for.
        field_energy: `[B, ...]`, E_j, squared norm of the change when field j is removed. B is 0 without attribution.
        chi: `[...]`, the excess-energy gate (eq. fire_evidence), in [0, 1); rounding can make it 1.
        alpha: `[B+1, ...]`, weight of the full teacher, then of the teacher without field j.
        eta: `[...]`, the radial contraction in (0, 1].
        loss: `[...]`, KL(p || q_FIRE).
    """

    log_probs: Tensor
    rho: Tensor
    energy: Tensor
    field_energy: Tensor
    chi: Tensor
    alpha: Tensor
    eta: Tensor
    loss: Tensor


@torch.no_grad()
def fire_target(
    student_logits: Tensor,
    teacher_logits: Tensor,
    loo_logits: Tensor | None = None,
    *,
    step_scale: float = 1.0,
    log_prob_floor: float | None = None,
    attribution: bool = True,
    projection: bool = True,
) -> FireTarget:
    """The recalibrated target of a wrong response (eqs. fire_gradient_energies to fire_final_target).

    Args:
        student_logits: `[..., V]`, float32 or float64.
        teacher_logits: `[..., V]`, the EMA teacher with all feedback.
        loo_logits: `[B, ..., V]`, the EMA teacher without field j; None without attribution.
        step_scale: `s = max(1, a_k / a_0)`.
        log_prob_floor: natural-log floor on normalized teacher log-probabilities; None disables it.
        attribution: False gives the ablation No Attribution (the full teacher, then the projection).
        projection: False gives the ablation No Projection (q_A itself; the gate still uses rho).

    Raises:
        TypeError: logits that are neither float32 nor float64.
        ValueError: attribution without `loo_logits`, a step scale below 1, or shapes that do not fit.
    """
    if attribution and loo_logits is None:
        raise ValueError("fire_target with attribution=True needs loo_logits [B, ..., V]; pass attribution=False to go without")
    if not attribution or loo_logits is None:
        loo_logits = teacher_logits.new_empty((0, *teacher_logits.shape))
    if step_scale < 1:
        raise ValueError(f"step_scale is {step_scale}; it is max(1, a_k / a_0), at least 1")
    if student_logits.shape != teacher_logits.shape or loo_logits.shape[1:] != teacher_logits.shape:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)}, teacher_logits {tuple(teacher_logits.shape)} and loo_logits "
            f"{tuple(loo_logits.shape)} do not fit: expected [..., V], [..., V] and [B, ..., V]"
        )
    z = finite_logits(student_logits)
    p, top = softmax(z), z.argmax(-1, keepdim=True)
    q_c = floored(teacher_logits, log_prob_floor)
    q_without = [floored(view, log_prob_floor) for view in loo_logits]

    rho = fisher_radius(z, step_scale)
    g_c = centred(p, log_ratio(z, q_c, top))
    energy = g_c.square().sum(-1)
    # delta_j = g_c - g_-j needs only the residual between two teacher views (eq. app_field_contrast).
    delta = [centred(p, log_ratio(view, q_c, top)) for view in q_without]
    field_energy = torch.stack([d.square().sum(-1) for d in delta]) if delta else energy.new_empty((0, *energy.shape))

    chi = excess_gate(energy, rho)
    alpha = attribution_weights(chi, field_energy, rho)

    log_q_c = log_softmax(q_c)
    mixture = alpha[0].unsqueeze(-1) * log_q_c
    for alpha_j, view in zip(alpha[1:], q_without, strict=True):
        mixture = mixture + alpha_j.unsqueeze(-1) * log_softmax(view)
    attributed = ((chi > 0) & (alpha[0] < 1)).unsqueeze(-1)
    log_q_A = torch.where(attributed, log_softmax(mixture), log_q_c)  # chi = 0: exactly the full teacher

    eta = torch.ones_like(rho)
    log_q_fire = log_q_A
    if projection:
        g_A = torch.where(attributed, induced_gradient(z, log_q_A), g_c)
        eta = contraction(g_A.square().sum(-1).sqrt(), rho)
        blend = (1 - eta).unsqueeze(-1) * log_softmax(z) + eta.unsqueeze(-1) * log_q_A
        log_q_fire = torch.where((eta < 1).unsqueeze(-1), log_softmax(blend), log_q_A)
    return FireTarget(log_q_fire, rho, energy, field_energy, chi, alpha, eta, reverse_kl(z, log_q_fire))


def excess_gate(energy: Tensor, rho: Tensor) -> Tensor:
    """`chi`, the share of the gradient energy E_c beyond the radius; 0 iff `E_c <= rho^2` (eq. fire_evidence)."""
    return ((energy - rho.square()) / energy).where(energy > rho.square(), 0.0)


def attribution_weights(chi: Tensor, field_energy: Tensor, rho: Tensor) -> Tensor:
    """`alpha` `[B+1, ...]` from the gate and the field energies `[B, ...]` (eq. fire_attribution_weights); alpha_0 = 1 if Z = 0."""
    evidence = torch.cat([rho.square().unsqueeze(0), chi * field_energy])
    total = evidence.sum(0)
    alpha = evidence / total.where(total > 0, torch.ones_like(total))
    alpha[0] = alpha[0].where(total > 0, torch.ones_like(total))
    return alpha


def contraction(gradient_norm: Tensor, rho: Tensor) -> Tensor:
    """`eta = min(1, rho / ||g(q_A)||)`, 1 for a gradient of 0 (eq. fire_contraction_coefficient)."""
    return (rho / gradient_norm).where(gradient_norm > rho, 1.0)


def floored(logits: Tensor, log_prob_floor: float | None) -> Tensor:
    """Logits whose normalized log-probabilities are at least the floor; the others are unchanged, bit for bit."""
    logits = finite_logits(logits)
    if log_prob_floor is None:
        return logits
    normalizer = logits.amax(-1, keepdim=True) - log_softmax(logits).amax(-1, keepdim=True)
    return torch.maximum(logits, normalizer + log_prob_floor)


@torch.no_grad()
def sft_weight(student_logits: Tensor, token_ids: Tensor, step_scale: float = 1.0) -> Tensor:
    """`beta = min(1, rho / ||p - e_y||)` of the correct branch (eq. fire_correct); `[...]`, detached.

    Args:
        student_logits: `[..., V]`.
        token_ids: `[...]`, the sampled tokens.
        step_scale: `s = max(1, a_k / a_0)`.
    """
    p = softmax(finite_logits(student_logits))
    others = p.scatter(-1, token_ids.unsqueeze(-1), 0.0)
    gradient_norm = (others.sum(-1).square() + others.square().sum(-1)).sqrt()  # 1 - p_y is the sum of the others
    return contraction(gradient_norm, fisher_radius(student_logits, step_scale))


Influence = Literal["half_l1", "energy"]


@torch.no_grad()
def field_influence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    loo_logits: Tensor,
    log_prob_floor: float | None,
    measure: Influence,
) -> Tensor:
    """How much `g_c - g_-j` there is per field and token, the score of hard gradient excision; `[B, ...]`.

    Args:
        student_logits, teacher_logits: `[..., V]`.
        loo_logits: `[B, ..., V]`.
        log_prob_floor: natural-log floor on normalized teacher log-probabilities; None disables it.
        measure: half the L1 norm, as the authors' code has it, or the influence energy E_j, the squared L2 norm
            (eq. fire_gradient_energies).
    """
    z = finite_logits(student_logits)
    p, top = softmax(z), z.argmax(-1, keepdim=True)
    q_c = floored(teacher_logits, log_prob_floor)
    changes = (centred(p, log_ratio(floored(view, log_prob_floor), q_c, top)) for view in loo_logits)
    return torch.stack([(d.abs() / 2 if measure == "half_l1" else d.square()).sum(-1) for d in changes])


@torch.no_grad()
def excised_target(
    student_logits: Tensor,
    teacher_logits: Tensor,
    loo_logits: Tensor,
    mask: Tensor,
    *,
    log_prob_floor: float | None = None,
    measure: Influence = "half_l1",
) -> tuple[Tensor, Tensor]:
    """Hard gradient excision: the teacher without the field that changes the induced gradient most over the response.

    Args:
        student_logits, teacher_logits: `[..., T, V]`.
        loo_logits: `[B, ..., T, V]`.
        mask: `[..., T]`, true at response tokens.
        log_prob_floor: natural-log floor on normalized teacher log-probabilities; None disables it.
        measure: of the change, see `field_influence`.

    Returns:
        Log-probabilities `[..., T, V]` of the chosen leave-one-out view, used at every token of its response, and the removed
        field `[...]` of each response (the first one on ties).

    Raises:
        ValueError: shapes that do not fit, or no leave-one-out view.
    """
    shape = teacher_logits.shape
    if len(loo_logits) == 0 or student_logits.shape != shape or loo_logits.shape[1:] != shape or mask.shape != shape[:-1]:
        raise ValueError(
            f"student_logits {tuple(student_logits.shape)}, teacher_logits {tuple(shape)}, loo_logits {tuple(loo_logits.shape)} and "
            f"mask {tuple(mask.shape)} do not fit: expected [..., T, V] twice, [B, ..., T, V] with B >= 1, and [..., T]"
        )
    influence = field_influence(student_logits, teacher_logits, loo_logits, log_prob_floor, measure)
    mask = mask.bool()
    mean_influence = influence.where(mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    removed = mean_influence.argmax(0)
    index = removed.reshape(1, *removed.shape, 1, 1).expand(1, *loo_logits.shape[1:])
    return log_softmax(floored(loo_logits.gather(0, index).squeeze(0), log_prob_floor)), removed


@register("fire")
@dataclass
class Fire(Objective):
    """Fisher-weighted SFT on correct responses, recalibrated self-distillation on wrong ones."""

    logits_held: ClassVar[int] = 0
    attribution: ClassVar[bool] = True
    projection: ClassVar[bool] = True

    bounded_sft: bool = setting(
        True,
        "Weigh the tokens of correct responses by beta, which keeps their gradient inside the radius; false gives them the weight 1. "
        "Not in the paper.",
    )

    def needs_teacher(self, rollout: Rollout) -> bool:
        return not rollout.verdict.correct

    def check_teacher(self, kind: TeacherKind, feedback: bool) -> None:
        if self.attribution:
            refuse_missing_fields(self.name, feedback, "use method no_attribution")

    def views(self, rollout: Rollout) -> list[View]:
        without = [view for _, view in field_groups(rollout.feedback)] if self.attribution else ()
        return ["full", *without] if self.needs_teacher(rollout) else []

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Algorithm 1: what `sft_weight` and `fire_target` state, without building a target."""
        wrong = [rollout for rollout in batch.rollouts if not rollout.verdict.correct]
        correct = batch.student.per_token([rollout.verdict.correct for rollout in batch.rollouts]).bool()
        full = batch.teacher.full(wrong, keep=self.attribution)
        first = first_pass(
            batch.head,
            batch.student.hidden,
            batch.student.token_weights() / batch.responses,
            token_ids=batch.token_ids(),
            correct=correct,
            teacher_hidden=full.hidden,
            teacher_head=batch.teacher.head,
            step_scale=batch.step_scale,
            log_prob_floor=batch.log_prob_floor,
            attribution=self.attribution,
            projection=self.projection,
            bounded_sft=self.bounded_sft,
        )
        # The views are read up to the last token over the radius; without attribution there is none.
        output = first.attribute(batch.teacher.states_without_fields(wrong, full, first.over))
        return output.loss, self.metrics(batch, correct, output)

    def metrics(self, batch: MicroBatch, correct: Tensor, output: FireHeadOutput) -> Metrics:
        """Token means of the quantities of both branches. Field energies exist only at tokens over the radius."""
        metrics = Metrics()  # by masks: indices of the tokens would make the host wait for the device
        metrics.mean(rho=output.rho, entropy=output.entropy)
        metrics.mean(where=correct, beta=output.beta, clipped_correct=output.beta < 1)
        metrics.mean(
            where=~correct,
            chi=output.chi,
            chi_active=output.chi > 0,
            alpha_full=output.alpha[0],
            eta=output.eta,
            projected=output.eta < 1,
            kl=output.kl,
        )
        metrics.maximum(max_bound_ratio=(output.gradient_norm / output.rho).where(output.rho > 0, 0.0))
        if not self.attribution:
            return metrics
        for names, group in by_views([rollout for rollout in batch.rollouts if not rollout.verdict.correct]).items():
            tokens = batch.student.per_token([rollout in group for rollout in batch.rollouts]).bool()
            for j, name in enumerate(names):
                scored = j < len(output.field_energy)
                alpha = output.alpha[j + 1] if scored else torch.zeros_like(output.rho)
                metrics.mean(where=tokens, **{f"alpha_{name}": alpha})
                if scored:
                    energy = output.field_energy[j]
                    metrics.mean(where=tokens & ~energy.isnan(), **{f"field_energy_{name}": energy})
        return metrics


def by_views(rollouts: Sequence[Rollout]) -> dict[tuple[str, ...], list[Rollout]]:
    """Rollouts by the names of what their views leave out; a task may give some responses more fields than others."""
    groups: dict[tuple[str, ...], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(tuple(name for name, _ in field_groups(rollout.feedback)), []).append(rollout)
    return groups


@register("no_attribution")
class NoAttribution(Fire):
    """The full teacher, then the radial projection; no leave-one-out view is scored."""

    attribution = False


@register("no_projection")
class NoProjection(Fire):
    """Target q_A as it is; the gate still uses rho."""

    projection = False


@register("routing")
class Routing(Fire):
    """The full teacher as it is on wrong responses; what is left of FIRE without attribution and projection."""

    attribution = projection = False


@register("hard_gradient_excision")
@dataclass
class HardGradientExcision(Fire):
    """Per response, the teacher without its most influential field, at every token; no gate, no projection."""

    logits_held: ClassVar[int] = 15

    influence: Influence = setting(
        "half_l1",
        "Measure whose token mean selects the removed field: half_l1 (the authors' code) or energy (the paper's E_j).",
    )

    def loss(self, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(batch.correct)
        groups: dict[tuple[tuple[str, View], ...], list[int]] = {}
        for i, rollout in enumerate(batch.rollouts):
            if not rollout.verdict.correct:
                groups.setdefault(tuple(field_groups(rollout.feedback)), []).append(i)
        for removable, members in groups.items():
            part_loss, part_metrics = self.distill_excised(batch.select(members), dict(removable))
            loss, metrics = loss + part_loss, metrics.merge([part_metrics])
        return loss, metrics

    def distill_excised(self, batch: MicroBatch, removable: Mapping[str, View]) -> tuple[Tensor, Metrics]:
        """Reverse KL to the views without the most influential field.

        Args:
            removable: names of the fields, or groups of fields, of the responses, and the views without them.
        """
        metrics, head = Metrics(), batch.teacher.head
        full, *without = batch.teacher.states(batch.rollouts, ["full", *removable.values()])

        def influence(student_logits: Tensor, chunk: slice) -> Tensor:
            loo_logits = torch.stack([head(view.hidden[chunk]) for view in without])
            return field_influence(student_logits, head(full.hidden[chunk]), loo_logits, batch.log_prob_floor, self.influence)

        target = full
        if removable:
            scores = map_tokens(batch.head, batch.student, influence, distributions=2 + 2 * len(without))
            removed = [int(of_response.mean(-1).argmax()) if of_response.numel() else 0 for of_response in scores]
            target = ResponseStates.concatenate([without[j].select([i]) for i, j in enumerate(removed)])
            for j, name in enumerate(removable):
                metrics.mean(**{f"excised_{name}": torch.tensor([index == j for index in removed])})

        def token_loss(student_logits: Tensor, chunk: slice) -> Tensor:
            log_probs = floored(head(target.hidden[chunk]), batch.log_prob_floor)
            metrics.mean(
                rho=fisher_radius(student_logits, batch.step_scale),
                kl=reverse_kl(student_logits.detach(), head(full.hidden[chunk])),
                entropy=entropy(student_logits.detach()),
            )
            return reverse_kl(student_logits, log_probs)

        return batch.token_mean_loss(token_loss), metrics
