"""Sampling parameters applied to logits: which tokens may follow, with which probability, and the draw.

The order is that of `transformers`: repetition penalty, temperature, top-k, top-p, and the distribution is the same. Only the largest
scores are sorted, since a nucleus has tens of tokens and a vocabulary 150,000; where a nucleus is wider, more of them are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firedistill.rollout import Sampling

CANDIDATES = 128


def penalise_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
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
        FloatingPointError: a distribution is not finite.
    """
    if sampling.temperature == 0:
        return scores.argmax(-1)
    return _draw(scores / sampling.temperature, sampling, uniforms, max(CANDIDATES, sampling.top_k + 1))


def _draw(scores: Tensor, sampling: Sampling, uniforms: Tensor, width: int) -> Tensor:
    probabilities, tokens, complete = candidates(scores, sampling, width)
    cumulated = probabilities.cumsum(-1)
    # `right`: the first entry above the threshold, so never a token of probability zero. A float64 number below 1 times the
    # sum is below the sum, also after rounding.
    place = torch.searchsorted(cumulated, uniforms.unsqueeze(-1) * cumulated[:, -1:], right=True)
    chosen = tokens.gather(-1, place.clamp(max=tokens.shape[-1] - 1)).squeeze(-1)
    if not complete.all():
        rest = ~complete
        chosen[rest] = _draw(scores[rest], sampling, uniforms[rest], 16 * width)
    return chosen


def candidates(scores: Tensor, sampling: Sampling, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distribution of the next token over the `width` best tokens.

    Where the nucleus ends among tokens of equal score, the sort order decides which of them belong to it, as in `transformers`.

    Args:
        scores: `[B, V]` logits after repetition penalty and temperature.

    Returns:
        Weights `[B, K]` in float64, proportional to the probabilities, 0 for tokens that top-k or top-p excludes; their tokens
        `[B, K]`; and `[B]` true where no allowed token is missing.
    """
    vocabulary = scores.shape[-1]
    best = scores.amax(-1, keepdim=True)
    if sampling.top_k == 0 and sampling.top_p >= 1:
        weights = (scores - best).exp().double()
        _check_finite(weights.sum(-1))
        tokens = torch.arange(vocabulary, device=scores.device).expand_as(scores)
        return weights, tokens, torch.ones_like(best[:, 0], dtype=torch.bool)
    width = min(width, vocabulary)
    values, tokens = scores.topk(width)
    weights = (values - best).exp().double()
    if sampling.top_k > 0:
        kth = values[:, min(sampling.top_k, width) - 1, None]
        allowed = values >= kth  # with all that tie with the k-th
        weights = weights.masked_fill(~allowed, 0)
        total = weights.sum(-1, keepdim=True)
    else:
        allowed = torch.ones_like(values, dtype=torch.bool)
        total = (scores - best).exp().sum(-1, keepdim=True, dtype=torch.float64)
    _check_finite(total)
    may_continue = allowed[:, -1]
    if sampling.top_p < 1:
        inside = weights.cumsum(-1) - weights < sampling.top_p * total
        inside[:, 0] = True
        weights = weights.masked_fill(~inside, 0)
        if sampling.top_k == 0:  # with top-k, `total` itself is only known once all that tie with the k-th are there
            may_continue = inside[:, -1]
    return weights, tokens, ~may_continue if width < vocabulary else torch.ones_like(may_continue)


def _check_finite(total: Tensor) -> None:
    if not total.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: no token can be drawn from them")
