"""Veto, DemoPSD, TOP-D and TrOPD: values by hand, literal equations, properties, updates and sampling."""

from __future__ import annotations

import copy
import math
import random
import statistics
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

import literal
import reference
from firedistill.functional import (
    clipped_surrogate,
    demopsd_target,
    entropy,
    forward_kl,
    future_mean_returns,
    induced_gradient,
    jensen_shannon,
    pooled_advantages,
    proximal_rewards,
    reverse_kl,
    tropd_token_loss,
    trust_acceptance,
    veto_target,
)
from firedistill.objectives import load_objective
from firedistill.objectives.distributions import log_softmax
from firedistill.objectives.tropd import Prepared
from firedistill.prompts import PromptEncoder, TokenBudget, teacher_messages
from firedistill.rollout import Prompt, Response, Sampling
from firedistill.rollouts.sampler import Sampler
from stubs import World, assert_printed, random_world
from tiny import ToyTask, byte_tokenizer

# ---- Values computed by hand, on a vocabulary of three tokens --------------------------------------------------------------------


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


P, Q = logs(0.5, 0.3, 0.2), logs(0.1, 0.6, 0.3)  # student and teacher
PULL = [0.546878, -0.362649, -0.184229]  # logit gradient of KL(p || q)


def gradient(function, logits):
    """Gradient of the sum of `function(logits)` with respect to the logits."""
    logits = logits.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(function(logits).sum(), logits)
    return found


def test_the_toy_distributions_have_the_printed_divergences():
    assert_printed(forward_kl(P, Q), 0.376584)
    assert_printed(reverse_kl(P, Q), 0.515682)
    assert_printed(jensen_shannon(P, Q), 0.103295)
    assert_printed(induced_gradient(P, Q), PULL)


# ---- Veto ------------------------------------------------------------------------------------------------------------------------


def veto_loss(logits, teacher, beta):
    return forward_kl(logits, veto_target(logits, teacher, beta))


def test_veto_without_the_students_vote_is_forward_kl_to_the_teacher():
    assert torch.equal(veto_target(P, Q, 0.0), log_softmax(Q))
    assert_printed(veto_target(P, Q, 0.0).exp(), [0.1, 0.6, 0.3], digits=12)
    assert_printed(veto_loss(P, Q, 0.0), 0.376584)


@pytest.mark.parametrize(
    ("beta", "target"),
    [(0.4, [0.125461, 0.613651, 0.260888]), (0.8, [0.155555, 0.620236, 0.224209]), (1.0, [0.172414, 0.620690, 0.206897])],
)
def test_veto_target_by_hand(beta, target):
    assert_printed(veto_target(P, Q, beta).exp(), target)


def test_veto_losses_and_gradients_by_hand():
    assert_printed(veto_loss(P, Q, 0.8), 0.294479)
    assert_printed(gradient(lambda z: veto_loss(z, Q, 0.8), P), [0.344445, -0.320236, -0.024209])
    assert_printed(reverse_kl(P, veto_target(P, Q, 0.8)), 0.343056)
    assert_printed(gradient(lambda z: reverse_kl(z, veto_target(z, Q, 0.8)), P), [0.412276, -0.320812, -0.091464])


def test_veto_does_not_differentiate_its_target():
    def attached(z):
        log_p = z.log_softmax(-1)
        log_target = (Q + 0.8 * log_p).log_softmax(-1)
        return (log_target.exp() * (log_target - log_p)).sum(-1)

    assert_printed(gradient(attached, P), [0.162497, -0.105963, -0.056534])  # what it would be
    student, teacher = P.clone().requires_grad_(), Q.clone().requires_grad_()
    assert not veto_target(student, teacher, 0.8).requires_grad
    veto_loss(student, teacher, 0.8).backward()
    assert teacher.grad is None
    assert_printed(student.grad, [0.344445, -0.320236, -0.024209])


def test_veto_sharpens_a_student_that_equals_its_teacher():
    assert_printed(veto_target(P, P, 0.8).exp(), [0.628574, 0.250627, 0.120799])
    assert_printed(veto_loss(P, P, 0.8), 0.037874)
    assert float(veto_loss(P, P, 0.0)) == 0.0


@pytest.mark.parametrize("beta", [0.3, 0.8, 2.0])
def test_veto_with_a_uniform_student_or_teacher(beta):
    uniform = torch.full_like(P, 5.0)
    torch.testing.assert_close(veto_target(uniform, Q, beta), Q)
    torch.testing.assert_close(veto_target(P, uniform, beta), (beta * P).log_softmax(-1))


def test_veto_is_stationary_where_the_student_is_the_teacher_to_the_power_of_1_over_1_minus_beta():
    student = logs(0.021739, 0.782609, 0.195652)
    assert_printed((2 * Q).log_softmax(-1).exp(), student.exp())
    assert_printed(veto_target(2 * Q, Q, 0.5).exp(), student.exp())
    assert abs(float(veto_loss(2 * Q, Q, 0.5))) < 1e-15
    assert gradient(lambda z: veto_loss(z, Q, 0.5), 2 * Q).abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_veto_keeps_a_token_away_that_the_student_thinks_impossible(dtype):
    student, teacher = torch.tensor([0.0, -40.0, -1.0], dtype=dtype), Q.to(dtype)
    for beta, mass in ((0.8, 0.0), (0.0, 0.6)):
        assert float(veto_target(student, teacher, beta)[1].exp()) == pytest.approx(mass, abs=1e-6)
        slope = gradient(lambda z, beta=beta: veto_loss(z, teacher, beta), student)
        assert torch.isfinite(veto_loss(student, teacher, beta)) and slope.abs().sum() <= 2
        assert float(slope[1]) == pytest.approx(-mass, abs=1e-6)


# ---- DemoPSD ---------------------------------------------------------------------------------------------------------------------


def demopsd_loss(logits, reference_logits, teacher, alpha_max=0.15, beta=50.0):
    return reverse_kl(logits, demopsd_target(reference_logits, teacher, alpha_max, beta)[0])


def two_tokens_with_divergence(divergence):
    """Logits of (1/2 + e, 1/2 - e) and of its mirror image, whose Jensen-Shannon divergence is this."""

    def of(e):
        return math.log(2) + (0.5 + e) * math.log(0.5 + e) + (0.5 - e) * math.log(0.5 - e)

    low, high = 0.0, 0.5 - 1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < divergence else (low, middle)
    return logs(0.5 + low, 0.5 - low), logs(0.5 - low, 0.5 + low)


def test_demopsd_without_leak_is_reverse_kl_to_the_teacher():
    target, alpha = demopsd_target(logs(0.45, 0.35, 0.2), Q, 0.0, 50.0)
    assert float(alpha) == 0.0
    torch.testing.assert_close(target, Q, rtol=1e-15, atol=1e-15)
    assert_printed(demopsd_loss(P, logs(0.45, 0.35, 0.2), Q, alpha_max=0.0), 0.515682)


def test_the_divergence_names_a_type_without_enough_digits():
    with pytest.raises(TypeError, match="log_p must be float32 or float64, not torch.bfloat16"):
        jensen_shannon(Q.bfloat16(), Q.bfloat16())


def test_demopsd_where_feedback_changes_nothing():
    target, alpha = demopsd_target(Q, Q, 0.15, 50.0)
    assert float(jensen_shannon(Q, Q)) == 0.0 and float(alpha) == 0.0
    torch.testing.assert_close(target, Q, rtol=1e-15, atol=1e-15)


DIVERGENCES = {0.001: 0.003749, 0.005: 0.018653, 0.01: 0.036738, 0.02: 0.069318, 0.046: 0.122663, 0.1: 0.147992, 0.25: 0.149999}


@pytest.mark.parametrize(("divergence", "alpha"), DIVERGENCES.items())
def test_demopsd_share_of_the_reference_by_hand(divergence, alpha):
    a, b = two_tokens_with_divergence(divergence)
    assert float(jensen_shannon(a, b)) == pytest.approx(divergence, rel=1e-9)
    assert_printed(demopsd_target(a, b, 0.15, 50.0)[1], alpha)
    as_printed_in_the_paper = 2 * 0.15 * (1 / (1 + math.exp(-50 * divergence)) - 0.5)
    assert float(demopsd_target(a, b, 0.15, 50.0)[1]) == pytest.approx(as_printed_in_the_paper, rel=1e-8)


def test_demopsd_share_grows_strictly_and_stays_below_its_maximum():
    shares = [float(demopsd_target(*two_tokens_with_divergence(d), 0.15, 50.0)[1]) for d in [0.0, *DIVERGENCES, 0.4, 0.6]]
    assert shares[0] == pytest.approx(0.0, abs=1e-15)
    assert all(a < b for a, b in zip(shares, shares[1:], strict=False))
    assert shares[-1] < 0.15


def test_demopsd_with_the_student_as_reference_by_hand():
    target, alpha = demopsd_target(P, Q, 0.15, 50.0)
    assert_printed(alpha, 0.148295)
    assert_printed(target.exp(), [0.133520, 0.569381, 0.297099])
    assert_printed(demopsd_loss(P, P, Q), 0.388798)
    slope = gradient(lambda z: demopsd_loss(z, P, Q), P)
    assert_printed(slope, [0.465779, -0.308870, -0.156909])
    assert_printed(1 - alpha, 0.851705)
    torch.testing.assert_close(slope, (1 - alpha) * induced_gradient(P, Q))


def test_demopsd_on_mild_disagreement_by_hand():
    teacher = logs(0.45, 0.33, 0.22)
    target, alpha = demopsd_target(P, teacher, 0.15, 50.0)
    assert_printed(jensen_shannon(P, teacher), 0.00125366, digits=8)
    assert_printed(alpha, 0.00469969, digits=8)
    assert_printed(target.exp(), [0.450233, 0.329860, 0.219907])
    assert_printed(demopsd_loss(P, P, teacher), 0.00497812, digits=8)


def test_demopsd_with_another_reference_by_hand():
    other = logs(0.45, 0.35, 0.20)
    target, alpha = demopsd_target(other, Q, 0.15, 50.0)
    assert_printed(jensen_shannon(other, Q), 0.081904)
    assert_printed(alpha, 0.145086)
    assert_printed(target.exp(), [0.129284, 0.576717, 0.293999])
    slope = gradient(lambda z: demopsd_loss(z, other, Q), P)
    assert_printed(slope, [0.474710, -0.317023, -0.157687])
    torch.testing.assert_close(slope, (1 - alpha) * induced_gradient(P, Q) + alpha * induced_gradient(P, other))


def test_demopsd_that_leans_back_all_the_way_leaves_the_student_alone():
    target, alpha = demopsd_target(P, Q, 1.0, 1e6)
    assert float(alpha) == 1.0
    torch.testing.assert_close(target, P)
    assert abs(float(reverse_kl(P, target))) < 1e-15
    assert gradient(lambda z: demopsd_loss(z, P, Q, 1.0, 1e6), P).abs().max() < 1e-15


def test_demopsd_target_lies_between_teacher_and_student_in_entropy():
    target, _ = demopsd_target(P, Q, 0.15, 50.0)
    assert_printed(torch.stack([entropy(P), entropy(target), entropy(Q)]), [1.029653, 0.950108, 0.897946])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_jensen_shannon_of_disjoint_and_of_underflowing_distributions(dtype):
    one, other = (torch.tensor(x, dtype=dtype) for x in ([0.0, -math.inf, -math.inf], [-math.inf, 0.0, -math.inf]))
    assert float(jensen_shannon(one, other)) == pytest.approx(math.log(2), rel=1e-6)
    far, farther = torch.tensor([0.0, -200.0, -2000.0], dtype=dtype), torch.tensor([-2000.0, 0.0, -300.0], dtype=dtype)
    assert float(jensen_shannon(far, farther)) == pytest.approx(math.log(2), rel=1e-6)
    target, alpha = demopsd_target(far, farther, 0.15, 50.0)
    assert torch.isfinite(target).all() and float(alpha) == pytest.approx(0.15)
    assert torch.isfinite(reverse_kl(far, target)) and torch.isfinite(gradient(lambda z: reverse_kl(z, target), far)).all()


# ---- TOP-D -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("log_ratio", "reward"),
    [(0, 0), (-1, -0.135160), (-5, -0.221460), (-math.inf, -0.223144), (-1e4, -0.223144), (1, 0.295395), (5, 3.417157)]
    + [(1e4, 1e4 + math.log(0.2))],
)
def test_top_d_reward_by_hand(log_ratio, reward, dtype):
    old = torch.tensor([[-2.0]], dtype=dtype)
    found = proximal_rewards(old + log_ratio, old, 0.2)
    assert found.dtype == dtype
    assert_printed(found.double(), [[reward]], digits=6 if dtype is torch.float64 or log_ratio < 1e4 else 2)


def test_top_d_reward_mixes_probabilities_not_log_probabilities():
    log_ratio = torch.tensor([[-50.0, -1.0, 0.0, 0.3, 7.0]], dtype=torch.float64)
    nothing = torch.zeros_like(log_ratio)
    assert torch.equal(proximal_rewards(log_ratio, nothing, 1.0), log_ratio)
    torch.testing.assert_close(proximal_rewards(log_ratio, nothing, 1e-9), nothing, rtol=0, atol=1e-5)
    assert torch.equal(proximal_rewards(log_ratio, nothing, 0.0), nothing)
    assert ((proximal_rewards(log_ratio, nothing, 0.2) - 0.2 * log_ratio).abs() > 0.01).tolist() == [
        [True, True, False, False, True]
    ]


@pytest.mark.parametrize(
    ("rewards", "returns"),
    [([0.1, -0.2, 0.3], [0.15, 0.1, 0.3]), ([0.7], [0.7]), ([0.4, 0.4, 0.4, 0.4], [0.8, 0.8, 0.8, 0.4])],
)
def test_top_d_return_adds_the_mean_of_what_follows(rewards, returns):
    found = future_mean_returns(torch.tensor([rewards], dtype=torch.float64), torch.ones(1, len(rewards)))
    assert_printed(found, [returns], digits=12)


def test_top_d_advantages_of_a_group_by_hand():
    log_ratio = torch.tensor([[0.5, -2.0, 1.0], [-0.3, 99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    rewards = proximal_rewards(log_ratio, torch.zeros_like(log_ratio), 0.2)
    assert_printed(rewards[mask], [0.121991, -0.189870, 0.295395, -0.053228])
    returns = future_mean_returns(rewards, mask)
    assert_printed(returns[mask], [0.174754, 0.105525, 0.295395, -0.053228])
    assert (returns[~mask] == 0).all()
    assert_printed(returns[mask].mean(), 0.130611)
    assert_printed(returns[mask].std(correction=0), 0.126024)
    assert_printed(returns[mask].std(correction=1), 0.145520)  # which is not the one that is used
    advantages = pooled_advantages(returns, mask, torch.zeros(2, dtype=torch.long))
    assert_printed(advantages[mask], [0.350267, -0.199058, 1.307542, -1.458752])


def test_top_d_gradient_of_one_token_rollouts_by_hand():
    tokens, mask = torch.tensor([[0], [0], [1], [2]]), torch.ones(4, 1)
    old, teacher = P[tokens], Q[tokens]
    advantages = pooled_advantages(
        future_mean_returns(proximal_rewards(teacher, old, 0.2), mask), mask, torch.zeros(4, dtype=torch.long)
    )
    assert_printed(advantages[:, 0], [-0.981236, -0.981236, 1.253864, 0.708608])

    def loss(z):
        return clipped_surrogate(z.log_softmax(-1)[tokens], old, advantages, 0.2).mean()

    assert abs(float(loss(P))) < 1e-6
    assert_printed(gradient(loss, P), [0.490618, -0.313466, -0.177152])


def test_top_d_with_a_teacher_equal_to_the_old_student_has_no_advantage():
    same, mask = -torch.arange(24.0, dtype=torch.float64).sqrt().reshape(4, 6), torch.ones(4, 6)
    returns = future_mean_returns(proximal_rewards(same, same, 0.2), mask)
    advantages = pooled_advantages(returns, mask, torch.tensor([0, 0, 1, 1]))
    assert (returns == 0).all() and (advantages == 0).all()
    assert (gradient(lambda live: clipped_surrogate(live, same, advantages, 0.2), same + 0.5) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equal_returns_have_a_deviation_of_zero(dtype):
    """Three times 0.1 is not 0.3: a standard deviation of one rounding error would scale equal returns to size 1."""
    returns, mask = torch.full((5, 7), 0.1, dtype=dtype), torch.ones(5, 7)
    assert pooled_advantages(returns, mask, torch.zeros(5, dtype=torch.long)).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "slope"),
    [
        (1.5, 1, 1.2, 0.0),
        (0.5, 1, 0.5, 0.5),
        (1.5, -1, -1.5, -1.5),
        (0.5, -1, -0.8, 0.0),
        (1.0, 1, 1.0, 1.0),
        (1.0, -1, -1.0, -1.0),
    ],
)
def test_top_d_clips_what_would_be_gained_not_what_would_be_lost(ratio, advantage, surrogate, slope):
    old, advantages = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    live = old + math.log(ratio)
    assert_printed(-clipped_surrogate(live, old, advantages, 0.2), [surrogate], digits=12)
    assert_printed(-gradient(lambda live: clipped_surrogate(live, old, advantages, 0.2), live), [slope], digits=12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_ratio_beyond_all_numbers_is_clipped_like_any_other(cap, dtype):
    """exp(800) overflows in both precisions; after clipping, value and gradient are those of any large ratio."""
    old = torch.tensor([-801.0, -801.0], dtype=dtype)
    live, advantages = torch.full_like(old, -1.0), torch.tensor([1.0, 0.0], dtype=dtype)
    assert (-clipped_surrogate(live, old, advantages, 0.2, cap)).tolist() == pytest.approx([1.2, 0.0])
    assert gradient(lambda z: clipped_surrogate(z, old, advantages, 0.2, cap), live).tolist() == [0.0, 0.0]


def test_top_d_expects_the_pull_to_the_proximal_teacher():
    """Summed over all tokens, the immediate reward as a score function is reverse KL to the mixture (0.42, 0.36, 0.22)."""
    p, proximal = P.exp(), 0.2 * Q.exp() + 0.8 * P.exp()
    assert_printed(proximal, [0.42, 0.36, 0.22], digits=12)
    reward = proximal_rewards(Q[None], P[None], 0.2)[0]
    torch.testing.assert_close(reward, proximal.log() - P)
    slope = gradient(lambda z: p @ clipped_surrogate(z.log_softmax(-1), P, reward, 0.2), P)
    assert_printed(slope, [0.080468, -0.058722, -0.021746])
    torch.testing.assert_close(slope, induced_gradient(P, proximal.log()))


def test_top_d_with_the_teacher_alone_and_immediate_rewards_is_plain_distillation():
    reward = proximal_rewards(Q[None], P[None], 1.0)[0]
    assert_printed(gradient(lambda z: P.exp() @ clipped_surrogate(z.log_softmax(-1), P, reward, 0.2), P), PULL)


# ---- TrOPD -----------------------------------------------------------------------------------------------------------------------

EVERY_TOKEN = torch.arange(3)


def token_class(name):
    """The masks `trusted` and `prefix` for three tokens of one class."""
    return torch.full((3,), name == "trusted"), torch.full((3,), name == "prefix")


def tropd_rows(name, top_k=64, old=P, beta=1e-3):
    """`[3]` losses and `[3, 3]` logit gradients of the three tokens of the toy, all in one class."""

    def loss(z):
        return tropd_token_loss(z, Q.expand(3, 3), old, EVERY_TOKEN, *token_class(name), top_k, beta)

    return loss(P.expand(3, 3)), gradient(loss, P.expand(3, 3))


def test_tropd_acceptance_by_hand():
    acceptance = trust_acceptance(Q, P)
    assert_printed(acceptance, [0.2, 1.0, 1.0], digits=12)
    assert float(P.exp() @ acceptance) == pytest.approx(0.6)  # 1 - TV, the sum of min(p, q)


def test_tropd_trusted_token_by_hand():
    losses, slopes = tropd_rows("trusted")
    assert_printed(losses / -P, [-1.609438, 0.693147, 0.405465])
    assert_printed(slopes[0], [0.804719, -0.482831, -0.321888])
    assert_printed(slopes[1], [0.346574, -0.485203, 0.138629])
    assert_printed(slopes[2], [0.202733, 0.121640, -0.324372])


def test_tropd_that_trusts_everything_expects_plain_distillation():
    assert_printed(P.exp() @ tropd_rows("trusted")[1], PULL)


def test_tropd_expected_gradient_by_hand():
    p, accept = P.exp(), trust_acceptance(Q, P)
    trusted = (p * accept) @ tropd_rows("trusted")[1]
    outlier = (p * (1 - accept)) @ tropd_rows("outlier", top_k=3)[1]
    assert_printed(trusted, [0.224990, -0.169516, -0.055474])
    assert_printed(outlier, [0.16, -0.12, -0.04], digits=12)
    torch.testing.assert_close(outlier, 0.4 * (p - Q.exp()))
    assert_printed(trusted + outlier, [0.384990, -0.289516, -0.095474])


@pytest.mark.parametrize(
    ("top_k", "loss", "slope"),
    [
        (2, 0.537528, [0.45, -0.33, -0.12]),
        (3, 0.376584, [0.4, -0.3, -0.1]),
        (64, 0.376584, [0.4, -0.3, -0.1]),
    ],
)
def test_tropd_outlier_imitates_the_teachers_most_likely_tokens(top_k, loss, slope):
    losses, slopes = tropd_rows("outlier", top_k)
    assert_printed(losses, [loss] * 3)
    assert_printed(slopes, [slope] * 3, digits=12)


def test_tropd_outlier_loss_may_be_negative():
    found = tropd_token_loss(
        P[None], logs(0.4, 0.35, 0.25)[None], P[:1], EVERY_TOKEN[:1], *(x[:1] for x in token_class("outlier")), 1
    )
    assert float(found) == pytest.approx(0.4 * math.log(0.4 / 0.5)) and float(found) < 0


def test_tropd_prefix_is_imitated_with_a_tiny_weight():
    losses, slopes = tropd_rows("prefix")
    assert_printed(losses[1], 0.00120397, digits=8)
    torch.testing.assert_close(slopes, 1e-3 * (P.exp() - torch.eye(3, dtype=torch.float64)))


def test_tropd_prefix_is_a_class_of_its_own_whatever_the_acceptance_test_says():
    prefix = torch.tensor([True, True, True])
    for trusted in (prefix, ~prefix):
        found = tropd_token_loss(P.expand(3, 3), Q.expand(3, 3), P, EVERY_TOKEN, trusted, prefix)
        torch.testing.assert_close(found, -1e-3 * P)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("forbidden", [-math.inf, -40.0, -2e4])
def test_tropd_does_not_trust_a_token_that_the_teacher_forbids(forbidden, dtype):
    student, teacher = P.to(dtype)[None], torch.tensor([[forbidden, 0.0, 1.0]], dtype=dtype)
    token, no = torch.tensor([0]), torch.tensor([False])
    accept = trust_acceptance(log_softmax(teacher)[:, 0], student[:, 0])
    assert float(accept) < 1e-16

    def loss(z):
        return tropd_token_loss(z, teacher, student[:, 0], token, no, no, 3)

    slope = gradient(loss, student)
    assert torch.isfinite(loss(student)).all() and slope.abs().sum() <= 2
    torch.testing.assert_close(slope, student.softmax(-1) - teacher.softmax(-1))


def test_tropd_has_no_loss_for_a_student_that_equals_its_teacher():
    assert (trust_acceptance(P, P) == 1).all()

    def loss(z):
        return tropd_token_loss(z, P.expand(3, 3), P, EVERY_TOKEN, *token_class("trusted"))

    assert (loss(P.expand(3, 3)) == 0).all()
    assert (gradient(loss, P.expand(3, 3)) == 0).all()


# ---- The printed equations, read literally in 60 digits --------------------------------------------------------------------------

REGIMES = ["mild", "large", "all but equal", "nearly deterministic", "nearly deterministic, large", "forbidden"]


def regime(name, seed, vocabulary=13, rows=()):
    """Logits of student, teacher and reference in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(*rows, vocabulary, generator=generator, dtype=torch.float64)

    student = 4 * noise()
    if name.startswith("nearly deterministic"):
        student[..., 1] = student.logsumexp(-1) + 14
    if name.endswith("large"):
        return student, 8 * noise() + 30, 8 * noise() - 30
    gap = {"mild": 0.5, "all but equal": 1e-4}.get(name, 1.0)
    teacher, other = student + gap * noise() + 3, student + gap * noise()
    if name == "forbidden":
        teacher[..., 2] = student[..., 3] = -40.0
        teacher[..., 4] = -2000.0
    return student, teacher, other


def in_words(logits):
    """Probabilities of `[V]` logits in 60 digits."""
    return reference.softmax([mpf(v) for v in logits.tolist()])


def mp_divergence(a, b):
    return mp.fsum([x * mp.log(x / y) for x, y in zip(a, b, strict=True) if x > 0])


def assert_close(found, expected, tolerance=1e-9):
    """Equal relative to the largest element of each distribution."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    scale = expected.abs() if expected.dim() == 0 else expected.abs().amax(-1, keepdim=True)
    error = (found.double() - expected).abs() / scale.clamp(min=1e-300)
    assert float(error.max()) <= tolerance, f"relative error {float(error.max()):.2e}"


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.8, 1.5])
@pytest.mark.parametrize("name", REGIMES)
def test_veto_equals_the_literal_equations(name, beta):
    for seed in range(3):
        student, teacher, _ = regime(name, seed)
        p, q = in_words(student), in_words(teacher)
        product = [a * b ** mpf(beta) for a, b in zip(q, p, strict=True)]
        target = [v / mp.fsum(product) for v in product]
        found = veto_target(student, teacher, beta)
        assert_close(found.exp(), reference.floats(target))
        assert_close(found, reference.floats([mp.log(v) for v in target]))
        assert_close(veto_loss(student, teacher, beta), float(mp_divergence(target, p)))
        slope = reference.floats([a - b for a, b in zip(p, target, strict=True)])
        assert_close(gradient(lambda z, t=teacher: veto_loss(z, t, beta), student), slope)


@pytest.mark.parametrize(("alpha_max", "beta"), [(0.15, 50.0), (0.9, 3.0), (0.0, 50.0)])
@pytest.mark.parametrize("name", REGIMES)
def test_demopsd_equals_the_literal_equations(name, alpha_max, beta):
    for seed in range(3):
        student, teacher, other = regime(name, seed)
        p, q, s = in_words(student), in_words(teacher), in_words(other)
        middle = [(a + b) / 2 for a, b in zip(s, q, strict=True)]
        divergence = (mp_divergence(s, middle) + mp_divergence(q, middle)) / 2
        share = 2 * mpf(alpha_max) * (1 / (1 + mp.exp(-mpf(beta) * divergence)) - mpf(1) / 2)
        product = [a ** (1 - share) * b**share for a, b in zip(q, s, strict=True)]
        target = [v / mp.fsum(product) for v in product]
        found, alpha = demopsd_target(other, teacher, alpha_max, beta)
        assert_close(jensen_shannon(log_softmax(other), log_softmax(teacher)), float(divergence))
        assert_close(alpha, float(share))
        assert_close(found, reference.floats([mp.log(v) for v in target]))
        assert_close(demopsd_loss(student, other, teacher, alpha_max, beta), float(mp_divergence(p, target)))
        slope = gradient(lambda z, s=other, t=teacher: demopsd_loss(z, s, t, alpha_max, beta), student)
        assert_close(slope, reference.floats(reference.gradient(p, [mp.log(v) for v in target])))


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 0.2, 0.9, 0.999999, 1.0])
def test_top_d_reward_equals_the_literal_equation(alpha):
    ratios = [-1e4, -50.0, -5.0, -1.0 - 1e-12, -1.0, -1e-3, -1e-12, 0.0, 1e-9, 0.5, 1.0, 1.0 + 1e-12, 3.0, 60.0, 1e4]
    log_ratio = torch.tensor([ratios], dtype=torch.float64)
    found = proximal_rewards(log_ratio, torch.zeros_like(log_ratio), alpha)[0]
    for value, ratio in zip(found, ratios, strict=True):
        assert_close(value, float(mp.log(mpf(alpha) * mp.exp(mpf(ratio)) + (1 - mpf(alpha)))))


def test_top_d_returns_and_advantages_equal_the_literal_equations():
    lengths, prompts = [5, 1, 7, 3, 2, 4], [8, 2, 8, 2, 2, 5]
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    expected = []
    for row, length in zip(rewards.tolist(), lengths, strict=True):
        row = row[:length]
        expected.append([r + (sum(row[k + 1 :]) / (length - k - 1) if k < length - 1 else 0.0) for k, r in enumerate(row)])
    returns = future_mean_returns(rewards, mask)
    advantages = pooled_advantages(returns, mask, torch.tensor(prompts))
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        pooled = [value for other, values in zip(prompts, expected, strict=True) if other == prompt for value in values]
        mean, deviation = statistics.fmean(pooled), statistics.pstdev(pooled)
        assert_close(returns[row, :length], expected[row])
        assert_close(advantages[row, :length], [(value - mean) / (deviation + 1e-6) for value in expected[row]])


@pytest.mark.parametrize("cap", [None, 1.1, 2.0])
def test_clipped_surrogate_equals_the_literal_equation(cap):
    generator = torch.Generator().manual_seed(0)
    live, old, advantages = 0.3 * torch.randn(3, 200, generator=generator, dtype=torch.float64)
    losses = clipped_surrogate(live, old, advantages, 0.2, cap)
    slopes = gradient(lambda z: clipped_surrogate(z, old, advantages, 0.2, cap), live)
    seen = set()
    for loss, slope, a, b, advantage in zip(*(x.tolist() for x in (losses, slopes, live, old, advantages)), strict=True):
        ratio = min(math.exp(a - b), cap or math.inf)
        clipped = min(max(ratio, 0.8), 1.2)
        assert loss == pytest.approx(-min(ratio * advantage, clipped * advantage), rel=1e-12)
        moves = ratio * advantage <= clipped * advantage and ratio != cap
        assert slope == pytest.approx(-ratio * advantage if moves else 0.0, rel=1e-12)
        seen.add((moves, advantage > 0, ratio > 1))
    assert len(seen) >= 6, "both sides of the clip, for both signs"


@pytest.mark.parametrize("top_k", [1, 4, 13, 64])
@pytest.mark.parametrize("name", REGIMES)
def test_tropd_equals_the_literal_equations(name, top_k):
    for seed in range(2):
        student, teacher, other = regime(name, seed)
        p, q, old = in_words(student), in_words(teacher), in_words(other)
        best = sorted(range(13), key=lambda v: -q[v])[:top_k]
        for token in (0, 1, 2):
            one_hot = [mpf(v == token) for v in range(13)]
            log_old = reference.floats([mp.log(old[token])])[0]
            reward = mp.log(q[token]) - mpf(float(log_old))
            weight = {"trusted": reward, "prefix": mpf(1e-3)}
            expected = {
                kind: (-w * mp.log(p[token]), [w * (a - b) for a, b in zip(p, one_hot, strict=True)])
                for kind, w in weight.items()
            }
            mass = mp.fsum([q[v] for v in best])
            expected["outlier"] = (
                mp.fsum([q[v] * mp.log(q[v] / p[v]) for v in best]),
                [mass * p[v] - (q[v] if v in best else 0) for v in range(13)],
            )
            for kind, (value, slope) in expected.items():
                where = [x[0] for x in token_class(kind)]

                def loss(z, t=teacher, log_old=log_old, token=token, where=where):
                    return tropd_token_loss(z, t, log_old, torch.tensor(token), *where, top_k)

                # Values of close distributions cancel to first order: what float64 can promise is relative to the log-ratios.
                size = 1.0 if name == "all but equal" and kind != "prefix" else float(abs(value))
                assert abs(float(loss(student)) - float(value)) <= 1e-9 * size
                assert_close(gradient(loss, student), reference.floats(slope), 1e-9 if name != "all but equal" else 1e-8)
            accepted = min(mpf(1), q[token] / mp.exp(mpf(float(log_old))))
            assert float(trust_acceptance(log_softmax(teacher)[token], log_old)) == pytest.approx(float(accepted), rel=1e-9)


# ---- Float32 against float64, on logits as language models have them -------------------------------------------------------------

SINGLE = 1e-5


def in_both_precisions(name, vocabulary):
    """Student, teacher and reference `[4, V]` in float32, and the same numbers in float64."""
    single = [x.float() for x in regime(name, 0, vocabulary, rows=(4,))]
    return single, [x.double() for x in single]


@pytest.mark.parametrize("vocabulary", [13, 1000])
@pytest.mark.parametrize("name", [name for name in REGIMES if name != "all but equal"])
def test_targets_in_float32(name, vocabulary):
    found = {}
    for student, teacher, other in in_both_precisions(name, vocabulary):
        target, alpha = demopsd_target(other, teacher, 0.15, 50.0)
        found[student.dtype] = {
            "veto target": veto_target(student, teacher, 0.8).exp(),
            "veto loss": veto_loss(student, teacher, 0.8)[:, None],
            "veto gradient": gradient(lambda z, t=teacher: veto_loss(z, t, 0.8), student),
            "divergence": jensen_shannon(log_softmax(other), log_softmax(teacher))[:, None],
            "alpha": alpha[:, None],
            "demopsd target": target.exp(),
            "demopsd loss": reverse_kl(student, target)[:, None],
            "demopsd gradient": gradient(lambda z, t=target: reverse_kl(z, t), student),
        }
    for key, value in found[torch.float32].items():
        assert value.dtype == torch.float32, key
        assert_close(value, found[torch.float64][key], SINGLE)


@pytest.mark.parametrize("vocabulary", [13, 1000])
@pytest.mark.parametrize("kind", ["trusted", "prefix", "outlier"])
@pytest.mark.parametrize("name", [name for name in REGIMES if name != "all but equal"])
def test_tropd_in_float32(name, kind, vocabulary):
    tokens, size = torch.arange(4), max(1.0, float(regime(name, 0, vocabulary, rows=(4,))[1].abs().max()))
    where = [x[:1].expand(4) for x in token_class(kind)]
    found = {}
    for student, teacher, other in in_both_precisions(name, vocabulary):
        old = log_softmax(other).gather(-1, tokens[:, None])[:, 0]

        def loss(z, teacher=teacher, old=old):
            return tropd_token_loss(z, teacher, old, tokens, *where, 8)

        # Rewards are differences of log-probabilities: divide by the reward, whose own rounding is checked on its own.
        reward = log_softmax(teacher).gather(-1, tokens[:, None])[:, 0] - old if kind == "trusted" else torch.ones(4)
        found[student.dtype] = loss(student) / reward, gradient(loss, student) / reward[:, None], reward
    (loss, slope, reward), (exact_loss, exact_slope, exact_reward) = found[torch.float32], found[torch.float64]
    assert slope.dtype == torch.float32
    assert_close(slope, exact_slope, SINGLE)
    scale = exact_loss.abs()
    if kind == "outlier":  # its terms have both signs: relative to the terms, not to what is left of them
        _, (student, teacher, _) = in_both_precisions(name, vocabulary)
        top, ids = log_softmax(teacher).topk(8)
        scale = (top.exp() * (top - log_softmax(student).gather(-1, ids))).abs().sum(-1)
    assert ((loss - exact_loss).abs() <= SINGLE * scale).all()
    assert float((reward - exact_reward).abs().max()) <= 5e-7 * size


@pytest.mark.parametrize("name", [name for name in REGIMES if name != "all but equal"])
def test_top_d_in_float32(name):
    mask, prompts = torch.arange(6) < torch.tensor([6, 3, 1, 5])[:, None], torch.tensor([0, 0, 1, 1])
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(0))
    found = {}
    for student, teacher, other in in_both_precisions(name, 13):
        live, old, q = (log_softmax(x).gather(-1, tokens) for x in (student, other, teacher))
        returns = future_mean_returns(proximal_rewards(q, old, 0.2), mask)
        found[student.dtype] = returns, pooled_advantages(returns, mask, prompts), clipped_surrogate(live, old, returns, 0.2)
    for value, exact in zip(found[torch.float32], found[torch.float64], strict=True):
        assert value.dtype == torch.float32
        assert_close(value, exact, SINGLE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_token_forbidden_by_minus_infinity_leaves_everything_finite(dtype):
    student, teacher, other = (x.to(dtype) for x in regime("mild", 0, rows=(4,)))
    teacher[:, 2] = -math.inf
    other[2:, 2] = -math.inf
    tokens = torch.full((4,), 2)
    old = log_softmax(student)[:, 2]
    target, alpha = demopsd_target(other, teacher, 0.15, 50.0)
    assert (target[:, 2].exp() == 0).all() and (veto_target(student, teacher, 0.8)[:, 2].exp() == 0).all()
    assert (alpha > 0).all() and (alpha < 0.15 + 1e-6).all()
    losses = [lambda z: veto_loss(z, teacher, 0.8), lambda z: reverse_kl(z, target)]
    for kind in ("outlier", "prefix"):
        where = [x[:1].expand(4) for x in token_class(kind)]
        losses.append(lambda z, where=where: tropd_token_loss(z, teacher, old, tokens, *where, 13))
    for loss in losses:
        assert torch.isfinite(loss(student)).all() and torch.isfinite(gradient(loss, student)).all()
    assert (trust_acceptance(log_softmax(teacher)[:, 2], old) == 0).all()
    floor = torch.full((4,), math.log(0.8), dtype=dtype)
    torch.testing.assert_close(proximal_rewards(log_softmax(teacher)[:, 2], old, 0.2), floor)


# ---- Properties ------------------------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))
quickly = settings(max_examples=40, deadline=None)


def rows_of_logits(generator, spread, gap):
    student = spread * torch.randn(5, 11, generator=generator, dtype=torch.float64)
    return student, *(student + gap * torch.randn(5, 11, generator=generator, dtype=torch.float64) for _ in range(2))


def every_loss(student, teacher, other, old, tokens, beta=0.8):
    """Token losses and logit gradients of the three methods that compare complete distributions."""
    losses = {
        "veto": lambda z: veto_loss(z, teacher, beta),
        "demopsd": lambda z: demopsd_loss(z, other, teacher),
        **{
            kind: lambda z, kind=kind: tropd_token_loss(
                z, teacher, old, tokens, *(x[:1].expand(len(z)) for x in token_class(kind)), 4
            )
            for kind in ("trusted", "outlier", "prefix")
        },
    }
    return {name: (loss(student), gradient(loss, student)) for name, loss in losses.items()}


@quickly
@given(generator=seeds, spread=st.floats(0.1, 20), gap=st.floats(0.01, 20), beta=st.floats(0, 2), shift=st.floats(-100, 100))
def test_gradients_sum_to_zero_and_constants_in_the_logits_change_nothing(generator, spread, gap, beta, shift):
    student, teacher, other = rows_of_logits(generator, spread, gap)
    tokens = torch.randint(11, (5,), generator=generator)
    old = log_softmax(other).gather(-1, tokens[:, None])[:, 0]
    shifts = shift * torch.randn(3, 5, 1, generator=generator, dtype=torch.float64)
    plain = every_loss(student, teacher, other, old, tokens, beta)
    moved = every_loss(student + shifts[0], teacher + shifts[1], other + shifts[2], old, tokens, beta)
    for name, (loss, slope) in plain.items():
        size = slope.abs().sum(-1)
        assert (slope.sum(-1).abs() <= 1e-12 * size + 1e-15).all(), name
        if name in ("veto", "outlier"):
            assert (size <= 2 * (1 + 1e-12)).all(), name
        torch.testing.assert_close(moved[name][0], loss, rtol=1e-9, atol=1e-10, msg=name)
        torch.testing.assert_close(moved[name][1], slope, rtol=1e-9, atol=1e-10, msg=name)


@quickly
@given(generator=seeds, spread=st.floats(0.1, 20), gap=st.floats(1e-3, 40))
def test_jensen_shannon_is_symmetric_and_at_most_log_2(generator, spread, gap):
    student, teacher, other = rows_of_logits(generator, spread, gap)
    a, b = log_softmax(teacher), log_softmax(other)
    found = jensen_shannon(a, b)
    assert torch.equal(found, jensen_shannon(b, a))
    assert ((found > 0) & (found <= math.log(2) * (1 + 1e-15))).all()
    middle = torch.logaddexp(a, b) - math.log(2)
    literal = 0.5 * (a.exp() * (a - middle)).sum(-1) + 0.5 * (b.exp() * (b - middle)).sum(-1)
    torch.testing.assert_close(found, literal, rtol=1e-9, atol=1e-13)


@quickly
@given(
    generator=seeds,
    spread=st.floats(0.1, 10),
    gap=st.floats(0.01, 20),
    alpha_max=st.floats(0.01, 1),
    beta=st.floats(0.1, 100),
    own=st.booleans(),
)
def test_demopsd_gradient_is_the_mean_of_both_pulls(generator, spread, gap, alpha_max, beta, own):
    """`(1 - alpha) g(p, q) + alpha g(p, s)`, the second of which is 0 when the reference is the student."""
    student, teacher, other = rows_of_logits(generator, spread, gap)
    other = student if own else other
    _, alpha = demopsd_target(other, teacher, alpha_max, beta)
    assert ((alpha >= 0) & (alpha <= alpha_max)).all()
    alpha = alpha[:, None]
    slope = gradient(lambda z: demopsd_loss(z, other, teacher, alpha_max, beta), student)
    expected = (1 - alpha) * induced_gradient(student, teacher) + (0 if own else alpha * induced_gradient(student, other))
    assert ((slope - expected).abs() <= 1e-9 * expected.abs().amax(-1, keepdim=True) + 1e-14).all()


@quickly
@given(generator=seeds, size=st.floats(1e-6, 100), alpha=st.floats(0.001, 0.999))
def test_top_d_rewards_are_bounded_below_and_advantages_sum_to_zero(generator, size, alpha):
    old, teacher = size * torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    rewards = proximal_rewards(teacher, old, alpha)
    assert (rewards >= math.log1p(-alpha) * (1 + 1e-12)).all()
    assert ((rewards > 0) == (teacher > old)).all()
    mask = torch.arange(8) < torch.randint(1, 9, (6, 1), generator=generator)
    prompts = torch.randint(3, (6,), generator=generator)
    advantages = pooled_advantages(future_mean_returns(rewards, mask), mask, prompts)
    assert (advantages[~mask] == 0).all()
    for prompt in prompts.unique():
        group = advantages[prompts == prompt][mask[prompts == prompt]]
        assert abs(float(group.sum())) <= 1e-9 * len(group)
        assert float(group.std(correction=0)) <= 1 + 1e-12


@quickly
@given(generator=seeds, junk=st.sampled_from([1e30, -math.inf, math.nan]), width=st.integers(7, 12))
def test_padding_never_matters_to_top_d(generator, junk, width):
    lengths, prompts = torch.randint(1, 7, (5,), generator=generator), torch.tensor([0, 0, 1, 1, 1])
    rewards = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < lengths[:, None]
    wide, wide_mask = torch.full((5, width), junk, dtype=torch.float64), torch.arange(width) < lengths[:, None]
    wide[wide_mask] = rewards[mask]
    plain, padded = future_mean_returns(rewards, mask), future_mean_returns(wide, wide_mask)
    torch.testing.assert_close(padded[wide_mask], plain[mask])
    assert (padded[~wide_mask] == 0).all()
    padded[~wide_mask] = junk
    found = pooled_advantages(padded, wide_mask, prompts)
    torch.testing.assert_close(found[wide_mask], pooled_advantages(plain, mask, prompts)[mask])
    assert (found[~wide_mask] == 0).all()


def test_nothing_flows_into_teacher_reference_or_frozen_log_probabilities():
    student, teacher, other = (x.requires_grad_() for x in regime("mild", 0, rows=(4,)))
    old, tokens = student.detach().log_softmax(-1)[:, 0].requires_grad_(), torch.arange(4)
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    losses = [veto_loss(student, teacher, 0.8), demopsd_loss(student, other, teacher), demopsd_loss(student, student, teacher)]
    for kind in ("trusted", "outlier", "prefix"):
        losses.append(tropd_token_loss(student, teacher, old, tokens, *(x[:1].expand(4) for x in token_class(kind)), 4))
    losses.append(clipped_surrogate(student.log_softmax(-1)[:, 0], old, advantages, 0.2))
    for loss in losses:
        loss.sum().backward()
        assert student.grad.abs().sum() > 0
        assert teacher.grad is None and other.grad is None and old.grad is None and advantages.grad is None
        student.grad = None
    for detached in (
        veto_target(student, teacher, 0.8),
        *demopsd_target(other, teacher, 0.15, 50.0),
        jensen_shannon(student, teacher),
        trust_acceptance(old, old * 2),
        proximal_rewards(old[None], 2 * old[None], 0.2),
    ):
        assert not detached.requires_grad


def test_log_softmax_has_the_gradient_of_log_softmax():
    logits = regime("mild", 0, rows=(3,))[0].requires_grad_()
    assert torch.autograd.gradcheck(log_softmax, (logits,))
    assert_close(log_softmax(logits.detach()), logits.detach().log_softmax(-1), 1e-14)


# ---- The methods on batches ------------------------------------------------------------------------------------------------------


def two_groups(prefix=4, **options) -> World:
    """Two responses to one prompt and three to another; a teacher also without feedback. Correct and wrong ones alternate."""
    case = [[(5, True), (1, False)], [(7, True, prefix), (3, False), (2, True)]]
    return random_world(case, views=("none",), **options)


# ---- Limits ----------------------------------------------------------------------------------------------------------------------


def test_demopsd_without_leak_is_full_context():
    world = two_groups()
    found = world.run(load_objective("demopsd", {"alpha_max": 0.0}))
    expected = world.run(load_objective("full_context"))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("method_settings", "progress"), [({"beta_start": 0.0}, 0.0), ({}, 1.0)])
def test_veto_at_its_end_is_forward_kl_to_the_teacher(method_settings, progress):
    world = two_groups()

    def forward_kls(logits):
        pairs = zip(logits, world.logits(), strict=True)
        losses = [
            torch.nn.functional.kl_div(z.log_softmax(-1), q.log_softmax(-1), log_target=True, reduction="none")
            for z, q in pairs
        ]
        return literal.mean_of_responses(world, 1, [of_one.sum(-1) for of_one in losses])

    found, expected = world.run(load_objective("veto", method_settings), progress=progress), world.literal(forward_kls)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("method", "method_settings"),
    [("demopsd", {}), ("demopsd", {"reference": "student"}), ("top_d", {}), ("tropd", {})],
    ids=str,
)
def test_a_teacher_that_equals_the_student_moves_nothing(method, method_settings, dtype):
    result = two_groups(prefix=0, gap=0.0, dtype=dtype).run(load_objective(method, method_settings))
    tiny = 1e-14 if dtype is torch.float64 else 1e-6  # of the rounded target, where there is one
    assert abs(float(result.loss)) <= tiny and float(result.gradient.abs().max()) <= (tiny if method == "demopsd" else 0.0)
    assert method == "demopsd" or float(result.loss) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_teacher_that_equals_the_student_moves_veto_until_its_end(dtype):
    world = two_groups(gap=0.0, dtype=dtype)
    start, end = (world.run(load_objective("veto"), progress=progress) for progress in (0.0, 1.0))
    assert float(start.loss) > 0.01 and float(start.gradient.norm()) > 0.01
    assert abs(float(end.loss)) <= 1e-6 and float(end.gradient.abs().max()) <= 1e-6


# ---- Veto's schedule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 7, 200])
def test_vetos_exponent_falls_in_a_line_from_start_to_end(steps):
    objective = load_objective("veto")
    betas = [objective.beta(k / (steps - 1)) for k in range(steps)]
    assert betas[0] == 0.8 and betas[-1] == 0.0
    assert betas == pytest.approx([0.8 * (1 - k / (steps - 1)) for k in range(steps)])
    assert all(a > b for a, b in zip(betas, betas[1:], strict=False))


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_veto_reads_the_progress_of_the_batch(progress):
    world = two_groups()
    found = world.run(load_objective("veto"), progress=progress)
    expected = literal.literal(world, "veto", beta=0.8 * (1 - progress))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-9, atol=1e-12)
    assert found.metrics["veto_beta"] == pytest.approx(0.8 * (1 - progress))


# ---- TOP-D's updates -------------------------------------------------------------------------------------------------------------


def test_top_d_makes_an_update_per_prompt_in_a_seeded_order():
    objective = load_objective("top_d")
    plan = objective.updates(range(8), random.Random("1 0"))
    assert [len(update) for update in plan] == [1] * 8
    assert sorted(prompt for (prompt,) in plan) == list(range(8))
    assert plan == objective.updates(range(8), random.Random("1 0"))
    orders = {tuple(prompt for (prompt,) in objective.updates(range(8), random.Random(seed))) for seed in range(5)}
    assert len(orders) == 5 and tuple(range(8)) not in orders


def test_top_d_passes_over_the_step_several_times():
    objective = load_objective("top_d", {"epochs": 2, "minibatch_prompts": 3})
    plan = objective.updates(range(8), random.Random(0))
    assert [len(update) for update in plan] == [3, 3, 2, 3, 3, 2]
    first, second = ([prompt for update in half for prompt in update] for half in (plan[:3], plan[3:]))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_top_d_keeps_the_old_log_probabilities_between_updates():
    world, objective = two_groups(), load_objective("top_d")
    world.prepare(objective)
    for row, logits in enumerate(world.logits("student")):
        old = logits.log_softmax(-1).gather(-1, world.tokens(row)[:, None])[:, 0]
        torch.testing.assert_close(world.prepared[row].old_log_probs, old)
    frozen = copy.deepcopy(world.prepared)
    first = world.backward(objective)
    assert abs(float(first.loss)) < 1e-9 and float(first.gradient.norm()) > 1e-3, (
        "the surrogate starts at 0, its gradient does not"
    )
    assert first.metrics["top_d_ratio_max"] == pytest.approx(1.0)
    for _ in range(2):
        world.move()
        moved = world.backward(objective).metrics
        assert moved["top_d_ratio_max"] > 1.2 and moved["top_d_clip_fraction"] > 0
    for row, before in frozen.items():
        after = world.prepared[row]
        assert after.group_tokens == before.group_tokens
        assert torch.equal(after.old_log_probs, before.old_log_probs) and torch.equal(after.advantages, before.advantages)


def test_top_d_groups_do_not_mix_when_a_rollout_is_dropped():
    whole, partial, objective = two_groups(), two_groups(), load_objective("top_d")
    whole.prepare(objective)
    partial.prepare(objective, [4, 0, 1, 3])
    for row in (0, 1):  # the other prompt
        torch.testing.assert_close(partial.prepared[row].advantages, whole.prepared[row].advantages)
        assert partial.prepared[row].group_tokens == whole.prepared[row].group_tokens == 6
    assert [whole.prepared[row].group_tokens for row in (2, 3, 4)] == [12] * 3
    assert [partial.prepared[row].group_tokens for row in (3, 4)] == [5] * 2
    assert 2 not in partial.prepared
    for group in ((0, 1), (2, 3, 4)):
        advantages = torch.cat([whole.prepared[row].advantages for row in group])
        assert abs(float(advantages.sum())) < 1e-9 and float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-4)


# ---- TrOPD's mask ----------------------------------------------------------------------------------------------------------------


def test_tropds_seed_changes_the_acceptance_draws_and_nothing_else():
    first, again, other = two_groups(), two_groups(), two_groups()
    objective = load_objective("tropd")
    for world, seed in ((first, 7), (again, 7), (other, 8)):
        world.prepare(objective, seed=seed)
    draws = [torch.cat([world.prepared[row].uniform for row in range(5)]) for world in (first, again, other)]
    assert torch.equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all() and len(draws[0].unique()) == len(draws[0])
    assert ((draws[0] >= 0) & (draws[0] < 1)).all()
    for world in (first, other):
        assert all(vars(prepared).keys() == {"uniform", "group_tokens"} for prepared in world.prepared.values())
        assert [world.prepared[row].group_tokens for row in range(5)] == [6, 6, 12, 12, 12]
        assert world.backward(objective).metrics["tropd_prefix_share"] == pytest.approx(4 / 18)


def toy(tokens, uniform=None, prefix=0) -> World:
    """One response over the three tokens of the toy."""
    count = len(tokens)
    world = World([P.repeat(count, 1)], [Q.repeat(count, 1)], [tokens], [False], prefixes=[prefix])
    if uniform is not None:
        world.prepared = {0: Prepared(count, torch.as_tensor(uniform))}
    return world


def test_tropd_expects_the_printed_gradient_over_all_tokens_and_draws():
    """Every token as often as the student samples it, with every tenth of the unit interval as its draw."""
    tokens = [y for y, count in enumerate((5, 3, 2)) for _ in range(count * 10)]
    result = toy(tokens, [(k % 10 + 0.5) / 10 for k in range(100)]).backward(load_objective("tropd", {"top_k": 3}))
    assert_printed(result.gradient.sum(0), [0.384990, -0.289516, -0.095474])
    assert result.metrics["tropd_trusted"] == pytest.approx(0.6)


def test_tropd_trusts_as_often_as_student_and_teacher_overlap():
    generator = torch.Generator().manual_seed(0)
    world = toy(torch.multinomial(P.exp(), 20_000, replacement=True, generator=generator).tolist())
    world.prepare(load_objective("tropd"), seed=3)
    trusted = world.backward(load_objective("tropd")).metrics["tropd_trusted"]
    assert trusted == pytest.approx(0.6, abs=4 * math.sqrt(0.6 * 0.4 / 20_000))


def test_tropd_prefix_counts_in_the_divisor_but_is_neither_trusted_nor_an_outlier():
    result = toy([2, 2, 1, 1], [0.0, 0.99, 0.0, 0.0], prefix=2).backward(load_objective("tropd"))
    one_hot = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(result.gradient[:2], (1e-3 * (P.exp() - one_hot[2]) / 4).expand(2, 3))
    torch.testing.assert_close(result.gradient[2:], (math.log(2) * (P.exp() - one_hot[1]) / 4).expand(2, 3))
    assert_printed(result.loss, (2e-3 * -math.log(0.2) + 2 * math.log(2) * -math.log(0.3)) / 4, digits=12)
    assert result.metrics["tropd_trusted"] == 1.0 and result.metrics["tropd_prefix_share"] == 0.5
    assert result.metrics["tropd_reward"] == pytest.approx(math.log(2))


# ---- Sampling --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "cap"), [(0, 384), (50, 327), (99, 194), (100, 190), (150, 55), (198, 0), (199, 0)])
def test_tropds_longest_prefix_over_200_steps(k, cap):
    assert load_objective("tropd").prefix_cap(k / 199) == cap


class ScriptedEngine:
    """Records its calls. The teacher returns prepared drafts, the student as many tokens as the limits allow, up to 4."""

    def __init__(self, drafts):
        self.drafts, self.who, self.calls = drafts, "student", []

    @contextmanager
    def teacher(self):
        self.who = "teacher"
        yield
        self.who = "student"

    def generate(self, prompts, sampling, seed, progress=None, limits=None):
        self.calls.append((self.who, [list(ids) for ids in prompts], limits, seed))
        if self.who == "teacher":
            return [Response(list(ids), "", True) for ids in self.drafts[: len(prompts)]]
        return [Response([99] * min(limit, 4), "cccc", False) for limit in limits]


def sampled(method, drafts, progress=0.0, method_settings=None, max_new_tokens=8, context=2560):
    """Rollouts for one prompt per draft, the prompts, the engine and the encoder."""
    task, encoder, engine = ToyTask(), PromptEncoder(byte_tokenizer()), ScriptedEngine(drafts)
    prompts = [Prompt(example, [20 + k, 30], index=10 + k) for k, example in enumerate(task.examples("train", len(drafts)))]
    teacher = SimpleNamespace(
        weights=SimpleNamespace(applied=engine.teacher),
        feedback=True,
        encode=lambda example, fitted: encoder.encode(teacher_messages(task, example, fitted)),
    )
    budget, sampling = TokenBudget(context=context), Sampling(max_new_tokens=max_new_tokens)
    sampler = Sampler(engine, task, encoder, sampling, budget, teacher, seed=11)
    return load_objective(method, method_settings).sample(sampler, prompts, progress), prompts, engine, encoder


def test_tropd_samples_four_ordinary_responses_and_a_guided_one_per_prompt():
    drafts = [[*range(40, 49), 2], [50, 51, 2]]
    rollouts, prompts, engine, encoder = sampled("tropd", drafts, method_settings={"max_prefix": 5})
    assert [r.prompt_index for r in rollouts] == [10] * 5 + [11] * 5
    assert [r.prefix_length for r in rollouts] == [0, 0, 0, 0, 5, 0, 0, 0, 0, 2]
    assert [r.draft_tokens for r in rollouts] == [0, 0, 0, 0, 10, 0, 0, 0, 0, 3]
    assert [r.response_ids for r in rollouts[:4]] == [[99] * 4] * 4
    assert rollouts[4].response_ids == [40, 41, 42, 43, 44, 99, 99, 99]
    assert rollouts[9].response_ids == [50, 51, 99, 99, 99, 99]
    assert [r.generated_tokens for r in rollouts] == [4, 4, 4, 4, 10 + 3, 4, 4, 4, 4, 3 + 4]
    assert all(r.prompt_ids == prompts[r.prompt_index - 10].token_ids for r in rollouts)
    assert rollouts[4].response.text == encoder.decode(rollouts[4].response_ids)
    assert rollouts[4].verdict.submitted == str(len(rollouts[4].response.text)), "judged with its prefix"
    (who, requests, _, draft_seed), (then, continued, limits, seed) = engine.calls
    assert (who, then) == ("teacher", "student") and draft_seed != seed
    assert all("The length 0 is odd." in encoder.decode(request) for request in requests), "the feedback on an empty response"
    assert continued[:5] == [prompts[0].token_ids] * 4 + [prompts[0].token_ids + drafts[0][:5]]
    assert limits == [8, 8, 8, 8, 3, 8, 8, 8, 8, 6]


@pytest.mark.parametrize(
    ("draft", "max_new_tokens", "prefix"),
    [([2], 8, 0), ([40, 2], 8, 1), ([40] * 8, 8, 7), ([40] * 20, 6, 5), ([40, 41, 42, 2], 8, 3), ([40, 2], 2, 1)],
)
def test_tropd_prefix_never_holds_the_drafts_last_token_nor_fills_the_response(draft, max_new_tokens, prefix):
    rollouts, _, _, _ = sampled("tropd", [draft], max_new_tokens=max_new_tokens)
    guided = rollouts[-1]
    assert guided.prefix_length == prefix < len(draft) and guided.response_ids[:prefix] == draft[:prefix]
    assert prefix < len(guided.response_ids) <= max_new_tokens
    assert guided.draft_tokens == len(draft)
    assert guided.generated_tokens == len(draft) + len(guided.response_ids) - prefix


@pytest.mark.parametrize(
    "options",
    [{"progress": 1.0}, {"progress": 198 / 199}, {"method_settings": {"max_prefix": 0}}, {"max_new_tokens": 1}],
    ids=str,
)
def test_tropd_samples_no_draft_where_no_prefix_is_allowed(options):
    rollouts, prompts, engine, _ = sampled("tropd", [[40, 41, 2], [50, 51, 2]], **options)
    assert [call[0] for call in engine.calls] == ["student"]
    assert engine.calls[0][1] == [p.token_ids for p in prompts for _ in range(5)]
    assert all(r.prefix_length == r.draft_tokens == 0 and r.generated_tokens == len(r.response_ids) for r in rollouts)


def test_tropd_samples_no_draft_where_the_teachers_prompt_leaves_no_room():
    rollouts, _, engine, _ = sampled("tropd", [[40, 41, 2]], context=50)
    assert [len(requests) for _, requests, _, _ in engine.calls] == [0, 5]
    assert [(r.prefix_length, r.draft_tokens) for r in rollouts] == [(0, 0)] * 5


@pytest.mark.parametrize(
    ("method", "method_settings", "size"),
    [
        ("full_context", {}, 1),
        ("on_policy_sft", {}, 4),
        ("scope", {}, 4),
        ("srpo", {}, 4),
        ("srpo", {"group_size": 2}, 2),
        ("veto", {}, 1),
        ("demopsd", {}, 1),
        ("top_d", {}, 4),
    ],
)
def test_other_methods_sample_the_members_of_a_group_side_by_side(method, method_settings, size):
    rollouts, prompts, engine, _ = sampled(method, [[]] * 8, method_settings=method_settings)
    assert [r.prompt_index for r in rollouts] == [10 + k for k in range(8) for _ in range(size)]
    assert [r.example for r in rollouts] == [prompt.example for prompt in prompts for _ in range(size)]
    assert [call[0] for call in engine.calls] == ["student"]
    assert sum(r.generated_tokens for r in rollouts) == 8 * size * 4
