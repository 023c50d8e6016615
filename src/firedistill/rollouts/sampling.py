"""Sampling parameters applied to logits: which tokens may follow, with which probability, and the draw.

The order is that of `transformers`: repetition penalty, temperature, top-k, top-p, and the distribution is the same. Only the largest
scores are sorted, since a nucleus has tens of tokens and a vocabulary 150,000; where a nucleus is wider, more of them are.

Probabilities are cumulated as integers. Their sums are exact, so that the order in which a device adds them has no effect. The
exception is one float64 sum over the vocabulary, which decides where the nucleus ends if top-p is used without top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firedistill.models import kernels
from firedistill.rollout import Sampling

CANDIDATES = 128
# What `draw` returns instead of a token
TOO_FEW, NOT_FINITE = -1, -2
NOT_FINITE_LOGITS = (
    "the model's logits, divided by the temperature, are not finite, so that no token can be drawn from them: load other weights, "
    "lower learning_rate, or raise temperature"
)
# Weights in [0, 1] as integers: 2^18 of them, more than a vocabulary has, sum to less than 2^63.
UNIT = 2**44


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive scores of the tokens seen so far by `penalty`, multiply the negative ones by it; `[B, V]`.

    Args:
        seen: `[B, V]`, true for the tokens of prompt and response, false for padding (which `generate` penalizes too).
    """
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def choose_tokens(scores: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """One token per row.

    Args:
        scores: `[B, V]` float32 logits, the repetition penalty already applied.
        uniforms: `[B]` numbers in [0, 1), float64, that decide the draw.

    Returns:
        `[B]` token ids.

    Raises:
        ValueError: a distribution is not finite.
    """
    width = CANDIDATES
    tokens = draw(scores, sampling, uniforms, width)
    while int(tokens.min()) < 0:
        if bool((tokens == NOT_FINITE).any()):
            raise ValueError(NOT_FINITE_LOGITS)
        width, missing = 16 * width, tokens == TOO_FEW
        tokens[missing] = draw(scores[missing], sampling, uniforms[missing], width)
    return tokens


def draw(scores: Tensor, sampling: Sampling, uniforms: Tensor, width: int) -> Tensor:
    """One token per row among at least the `width` best ones, without a look at a value by the host.

    Returns:
        `[B]` token ids; `TOO_FEW` where the draw depends on further tokens, `NOT_FINITE` where there is no distribution. Greedy choice
        (temperature 0) always returns a token.
    """
    if sampling.temperature == 0:
        return scores.argmax(-1)
    scores = scores if sampling.temperature == 1 else scores / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p < 1 and kernels.takes_scores(scores, width):
        best = scores.topk(min(width, scores.shape[-1]))
        return kernels.nucleus_token(scores, *best, uniforms, sampling.top_p, UNIT, (TOO_FEW, NOT_FINITE))
    weights, tokens, complete, finite = candidates(scores, sampling, max(width, sampling.top_k + 1))
    cumulated = weights.cumsum_(-1)
    total = cumulated[:, -1:]
    # The first entry above the threshold, which is below the total: never a token of weight zero.
    threshold = torch.minimum((uniforms.unsqueeze(-1) * total.double()).long(), total - 1)
    place = torch.searchsorted(cumulated, threshold, right=True)
    chosen = tokens.gather(-1, place.clamp(max=tokens.shape[-1] - 1)).squeeze(-1)
    return torch.where(finite, torch.where(complete, chosen, TOO_FEW), NOT_FINITE)


def candidates(scores: Tensor, sampling: Sampling, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distribution of the next token over the `width` best tokens.

    Where the nucleus ends among tokens of equal score, the sort order decides which of them belong to it, as in `transformers`.

    Args:
        scores: `[B, V]` logits after repetition penalty and temperature.

    Returns:
        Weights `[B, K]` in int64, proportional to the probabilities, 0 for tokens that top-k or top-p excludes; their tokens
        `[B, K]`; `[B]` true where no allowed token is missing; and `[B]` true where the scores give a distribution.
    """
    vocabulary = scores.shape[-1]
    if sampling.top_k == 0 and sampling.top_p >= 1:
        best = scores.amax(-1, keepdim=True)
        weights = (scores - best).exp_().double().mul_(UNIT).long()
        tokens = torch.arange(vocabulary, device=scores.device).expand_as(scores)
        finite = is_distribution(best)
        return weights, tokens, torch.ones_like(finite), finite
    width = min(width, vocabulary)
    values, tokens = scores.topk(width)
    best = values[:, :1]
    weights = (values - best).exp_().double().mul_(UNIT).long()
    if sampling.top_k > 0:
        kth = values[:, min(sampling.top_k, width) - 1, None]
        allowed = values >= kth  # with all that tie with the k-th
        weights = weights.masked_fill(~allowed, 0)
        total = weights.sum(-1, keepdim=True).double()
    else:
        allowed = torch.ones_like(values, dtype=torch.bool)
        total = (scores - best).exp().sum(-1, keepdim=True, dtype=torch.float64) * UNIT
    may_continue = allowed[:, -1]
    if sampling.top_p < 1:
        inside = (weights.cumsum(-1) - weights).double() < sampling.top_p * total
        inside[:, 0] = True
        weights = weights.masked_fill(~inside, 0)
        if sampling.top_k == 0:  # with top-k, `total` itself is only known once all that tie with the k-th are there
            may_continue = inside[:, -1]
    complete = ~may_continue if width < vocabulary else torch.ones_like(may_continue)
    return weights, tokens, complete, is_distribution(best)


def is_distribution(best: Tensor) -> Tensor:
    """`[B]`, whether scores whose largest ones are `best` `[B, 1]` give a distribution: the largest is NaN if any is."""
    return best.squeeze(-1).isfinite()
