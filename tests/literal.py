"""The loss of every method, read literally from its equation: all logits at once, plain Python and autograd, float64.

A loss gets the world, the student's `[T, V]` logits per response, the group size and the method's settings.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import torch

from firedistill.functional import fire_target, sft_weight
from stubs import Result, World, tensor


def literal(world: World, method: str, group_size: int = 1, **options) -> Result:
    return world.literal(lambda logits: LOSSES[method](world, logits, group_size, **options))


def log_p(logits):
    return logits - logits.exp().sum(-1, keepdim=True).log()


def of_tokens(values, token_ids):
    """The sampled token's entry at each position."""
    return values.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def kl(logits, target):
    """`KL(p || q)` of logits."""
    return (log_p(logits).exp() * (log_p(logits) - log_p(target))).sum(-1)


def entropy(logits):
    return -(log_p(logits).exp() * log_p(logits)).sum(-1)


def mean_of_responses(world, group_size, losses):
    """`1/N sum_i 1/M_i sum_t`."""
    return sum(of_one.sum() / max(len(of_one), 1) for of_one in losses) / (world.prompts * group_size)


def mean_of_prompts(world, losses):
    """Over the tokens of the responses to each prompt, then over the prompts."""
    tokens: dict[int, int] = {}
    for rollout in world.rollouts:
        tokens[rollout.prompt_index] = tokens.get(rollout.prompt_index, 0) + len(rollout.response_ids)
    return (
        sum(of_one.sum() / tokens[rollout.prompt_index] for rollout, of_one in zip(world.rollouts, losses, strict=True))
        / world.prompts
    )


# ---- FIRE and its ablations --------------------------------------------------------------------------------------------------------


def fire(world, z, group_size, step_scale=1.0, log_prob_floor=None, excise=False, bounded_sft=True, **ablation):
    """On targets that are built as the pure functions state them."""
    losses = []
    for row, (logits, rollout) in enumerate(zip(z, world.rollouts, strict=True)):
        views = {view: states @ world.weight.T for view, states in world.views[row].items()}
        without = torch.stack([views[j] for j in views if isinstance(j, int)])
        if not len(logits):
            losses.append(logits.sum(-1))
        elif rollout.verdict.correct:
            beta = sft_weight(logits, world.tokens(row), step_scale) if bounded_sft else 1.0
            losses.append(-beta * of_tokens(log_p(logits), world.tokens(row)))
        elif excise:
            losses.append(kl(logits, excised(logits.detach(), views["full"], without, log_prob_floor)))
        else:
            settings = dict(step_scale=step_scale, log_prob_floor=log_prob_floor, **ablation)
            losses.append(kl(logits, fire_target(logits.detach(), views["full"], without, **settings).log_probs))
    return mean_of_responses(world, group_size, losses)


def excised(z, full, without, log_prob_floor):
    """The view without the field that changes the gradient most, by half the L1 norm averaged over tokens; the first on ties."""
    full, *views = (log_p(q) if log_prob_floor is None else log_p(q).clamp(min=log_prob_floor) for q in (full, *without))
    p = log_p(z).exp()

    def gradient(q):
        ratio = log_p(z) - q
        return p * (ratio - (p * ratio).sum(-1, keepdim=True))

    scores = [float((gradient(full) - gradient(view)).abs().sum(-1).mean()) / 2 for view in views]
    return views[scores.index(max(scores))]


# ---- Methods with groups -----------------------------------------------------------------------------------------------------------


def perplexity_weights(mean_logp, prompts, correct, tau=1.0):
    """`PPL^(1/tau)` over its sum for the correct ones, `PPL^(-1/tau)` over its sum for the wrong ones."""
    raw = [math.exp(-s if ok else s) ** (1 / tau) for s, ok in zip(mean_logp, correct, strict=True)]
    keys = list(zip(prompts, correct, strict=True))
    return [w / math.fsum(v for v, key in zip(raw, keys, strict=True) if key == own) for w, own in zip(raw, keys, strict=True)]


def advantages(rewards, prompts, deviation="population"):
    out = []
    for reward, prompt in zip(rewards, prompts, strict=True):
        group = [r for r, other in zip(rewards, prompts, strict=True) if other == prompt]
        mean = math.fsum(group) / len(group)
        squares = math.fsum((r - mean) ** 2 for r in group)
        if len(set(group)) == 1:
            out.append(0.0)
        elif deviation == "none":
            out.append(reward - mean)
        else:
            out.append((reward - mean) / (math.sqrt(squares / (len(group) - (deviation == "sample"))) + 1e-6))
    return out


def entropy_weights(entropies, beta):
    """Of the tokens in a flat list."""
    raw = [math.exp(-beta * h) for h in entropies]
    return [w / (math.fsum(raw) / len(raw)) for w in raw]


def surrogate(ratio, advantage, epsilon, cap=None):
    ratio = min(ratio, cap or math.inf)
    return -min(ratio * advantage, min(max(ratio, 1 - epsilon), 1 + epsilon) * advantage)


def full_context(world, z, group_size):
    return mean_of_responses(world, group_size, [kl(a, b) for a, b in zip(z, world.logits(), strict=True)])


def on_policy_sft(world, z, group_size):
    kept = [row for row, rollout in enumerate(world.rollouts) if rollout.verdict.correct]
    longest = max((len(z[row]) for row in kept), default=1)
    total = sum((of_tokens(log_p(z[row]), world.tokens(row)).sum() / longest for row in kept), torch.zeros(()))
    return -total / (world.prompts * group_size)


def scope(world, z, group_size, tau=1.0, old=None):
    """`old` holds the logits of the policy that sampled; by default the current one."""
    rollouts = world.rollouts
    live, frozen, teacher = (
        [of_tokens(log_p(logits), world.tokens(row)) for row, logits in enumerate(of_all)]
        for of_all in (z, old or [logits.detach() for logits in z], world.logits())
    )
    correct = [r.verdict.correct for r in rollouts]
    mean_logp = [float((s if ok else u).mean()) for s, u, ok in zip(frozen, teacher, correct, strict=True)]
    weights = perplexity_weights(mean_logp, [r.prompt_index for r in rollouts], correct, tau)
    total = 0.0
    for lp, lp_old, lq, ok, weight in zip(live, frozen, teacher, correct, weights, strict=True):
        ratio = (lp - lp_old).exp()
        total = total + weight * (-ratio.sum() if ok else (ratio * (lp_old - lq)).sum())
    return total / world.prompts


def srpo(world, z, group_size, beta=1.0, deviation="population"):
    rollouts, teacher = world.rollouts, world.logits()
    of_group = advantages([float(r.verdict.correct) for r in rollouts], [r.prompt_index for r in rollouts], deviation)
    wrong = [row for row, r in enumerate(rollouts) if not r.verdict.correct]
    entropies = [float(h) for row in wrong for h in entropy(teacher[row])]
    weights = iter(entropy_weights(entropies, beta)) if wrong else iter(())
    total = 0.0
    for row, rollout in enumerate(rollouts):
        if rollout.verdict.correct:
            lp = of_tokens(log_p(z[row]), world.tokens(row))
            total = total - ((lp - lp.detach()).exp() * of_group[row]).sum()
        else:
            total = total + sum(next(weights) * of_token for of_token in kl(z[row], teacher[row]))
    return total / sum(len(logits) for logits in z)


# ---- Methods with targets and rewards of their own ---------------------------------------------------------------------------------


def veto(world, z, group_size, beta=0.8):
    losses = []
    for logits, teacher in zip(z, world.logits(), strict=True):
        product = teacher.softmax(-1) * logits.detach().softmax(-1) ** beta
        target = product / product.sum(-1, keepdim=True)
        losses.append((target * (target.log() - logits.log_softmax(-1))).sum(-1))
    return mean_of_responses(world, group_size, losses)


def demopsd(world, z, group_size, alpha_max=0.15, beta=50.0, reference="ema"):
    losses = []
    without = world.logits("none") if reference == "ema" else [logits.detach() for logits in z]
    for logits, teacher, other in zip(z, world.logits(), without, strict=True):
        q, s = teacher.softmax(-1), other.softmax(-1)
        middle = (q + s) / 2
        divergence = 0.5 * (s * (s / middle).log()).sum(-1) + 0.5 * (q * (q / middle).log()).sum(-1)
        alpha = 2 * alpha_max * (torch.sigmoid(beta * divergence) - 0.5)[:, None]
        product = q ** (1 - alpha) * s**alpha
        target = product / product.sum(-1, keepdim=True)
        losses.append((logits.softmax(-1) * (logits.log_softmax(-1) - target.log())).sum(-1))
    return mean_of_responses(world, group_size, losses)


def top_d(world, z, group_size, alpha=0.2, clip=0.2):
    """With the log-probabilities and rewards of the student that sampled."""
    old, returns, losses = [], [], []
    for row, (states, teacher) in enumerate(zip(world.sampled_from, world.logits(), strict=True)):
        log_old, log_q = (of_tokens(log_p(x), world.tokens(row)).tolist() for x in (states @ world.weight.T, teacher))
        rewards = [math.log(alpha * math.exp(b - a) + 1 - alpha) for a, b in zip(log_old, log_q, strict=True)]
        old.append(tensor(log_old))
        returns.append([r + (statistics.fmean(rewards[k + 1 :]) if rewards[k + 1 :] else 0.0) for k, r in enumerate(rewards)])
    prompts = [rollout.prompt_index for rollout in world.rollouts]
    for row, logits in enumerate(z):
        pooled = [value for prompt, values in zip(prompts, returns, strict=True) if prompt == prompts[row] for value in values]
        mean, deviation = (statistics.fmean(pooled), statistics.pstdev(pooled)) if pooled else (0.0, 0.0)
        gain = tensor([(value - mean) / (deviation + 1e-6) for value in returns[row]])
        ratio = (of_tokens(log_p(logits), world.tokens(row)) - old[row]).exp()
        losses.append(-torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain))
    return mean_of_prompts(world, losses)


def tropd(world, z, group_size, beta=1e-3, top_k=64):
    """With the draws that the method prepared."""
    losses = []
    for row, (logits, teacher, rollout) in enumerate(zip(z, world.logits(), world.rollouts, strict=True)):
        q, lp, found = teacher.softmax(-1), logits.log_softmax(-1), [logits.sum() * 0]
        for t, y in enumerate(rollout.response_ids):
            ratio = float(q[t, y] / logits[t].detach().softmax(-1)[y])
            if t < rollout.prefix_length:
                found.append(-beta * lp[t, y])
            elif float(world.prepared[row].uniform[t]) < min(1.0, ratio):
                found.append(-math.log(ratio) * lp[t, y])
            else:
                best = sorted(range(q.shape[-1]), key=lambda v, t=t, q=q: -float(q[t, v]))[:top_k]
                found.append(sum(q[t, v] * (q[t, v].log() - lp[t, v]) for v in best))
        losses.append(torch.stack(found))
    return mean_of_prompts(world, losses)


LOSSES = {method.__name__: method for method in (fire, full_context, on_policy_sft, scope, srpo, veto, demopsd, top_d, tropd)}
LOSSES["no_attribution"] = partial(fire, attribution=False)
LOSSES["no_projection"] = partial(fire, projection=False)
LOSSES["hard_gradient_excision"] = partial(fire, excise=True)
