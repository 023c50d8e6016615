"""Distributions over the vocabulary and the logit gradients that targets induce, without cancellation.

Every function takes `[..., V]` logits of any leading shape in float32 or float64 and returns the same dtype; another
dtype raises TypeError. A target may be log-probabilities or logits: a constant added to all tokens changes nothing.

Two rules keep small numbers accurate. Log-ratios are shifted to be exactly 0 at the student's most likely token, `top`, because a
nearly deterministic student has `1 - p_top` far below the rounding error of `p_top`. And `1 - p_top` is the sum of the other
probabilities, never a subtraction. For the same reason softmax and log-softmax are implemented here: in float32 the built-in ones
lose the tail of a large vocabulary beside the 1 of the top token (1e-4 of the energies at 150,000 tokens), and round
`log p_top = -1e-9` to 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from firedistill.ops.head import with_gradients

# Stands in for an infinite log-ratio (a teacher that forbids a token outright). Its square, summed over a vocabulary, is finite.
LARGEST_LOG_RATIO = {torch.float32: 1e15, torch.float64: 1e100}


def finite_logits(logits: Tensor) -> Tensor:
    """`[..., V]` logits with minus infinity replaced by a value so low that its probability is 0 all the same."""
    if logits.dtype not in LARGEST_LOG_RATIO:
        raise TypeError(f"logits must be float32 or float64, not {logits.dtype}; call .float() on them first")
    return torch.maximum(logits, logits.amax(-1, keepdim=True) - LARGEST_LOG_RATIO[logits.dtype])


def softmax(logits: Tensor) -> Tensor:
    """`[..., V]` probabilities of finite logits."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def log_softmax(logits: Tensor) -> Tensor:
    """`[..., V]` log-probabilities of finite logits; differentiable once."""
    return _LogSoftmax.apply(logits)


def log_ratio(logits: Tensor, target: Tensor, top: Tensor) -> Tensor:
    """`log p - log q` up to a constant that makes it exactly 0 at token `top` (`[..., 1]` indices); `[..., V]`.

    The two differences from the value at `top` are computed with their rounding errors, so that two nearly equal distributions
    have an accurate ratio even where their logits are large.
    """
    student_shift, student_error = _exact_difference(logits, logits.gather(-1, top))
    target_shift, target_error = _exact_difference(target, target.gather(-1, top))
    return (student_shift - target_shift) + (student_error - target_error)


def centred(probabilities: Tensor, ratio: Tensor) -> Tensor:
    """`p (d - E_p[d])`, `[..., V]`: the logit gradient of `KL(p || q)` for the log-ratio `d = log p - log q`."""
    return probabilities * (ratio - (probabilities * ratio).sum(-1, keepdim=True))


def induced_gradient(student_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """Gradient of `KL(softmax(z) || q)` with respect to the student's logits `z` (eq. app_gradient).

    Args:
        student_logits: `[..., V]`.
        target_log_probs: `[..., V]` log-probabilities (or logits) of the detached target.

    Returns:
        `[..., V]`, detached; sums to 0 over the vocabulary.
    """
    logits, target = finite_logits(student_logits.detach()), finite_logits(target_log_probs.detach())
    return centred(softmax(logits), log_ratio(logits, target, logits.argmax(-1, keepdim=True)))


def fisher_trace(student_logits: Tensor) -> Tensor:
    """Trace of the softmax Fisher matrix, `sum_v p_v (1 - p_v) = 1 - ||p||^2` (eq. app_fisher); `[...]`, detached."""
    probabilities = softmax(finite_logits(student_logits.detach()))
    top = probabilities.argmax(-1, keepdim=True)
    others = probabilities.scatter(-1, top, 0.0)
    top_variance = probabilities.gather(-1, top).squeeze(-1) * others.sum(-1)
    return top_variance + (others * (1 - others)).sum(-1)


def fisher_radius(student_logits: Tensor, step_scale: float = 1.0) -> Tensor:
    """The radius `rho = sqrt(tr F) / s` with `s = max(1, a_k / a_0)` (eq. fire_radius, app_radius); `[...]`, detached.

    Args:
        student_logits: `[..., V]`.
        step_scale: `s`, at least 1 (not checked).
    """
    return fisher_trace(student_logits).sqrt() / step_scale


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of `[..., V]` logits; `[...]`, differentiable once."""
    log_probs = log_softmax(finite_logits(logits))
    return -(log_probs.exp() * log_probs).sum(-1)


def reverse_kl(student_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`KL(softmax(z) || q)` per position in nats (eq. app_reverse_kl), differentiable once in `student_logits` only; `[...]`.

    The gradient is `induced_gradient`, in closed form. The target need not be normalized.
    """
    logits, target = finite_logits(student_logits.detach()), finite_logits(target_log_probs.detach())
    p = softmax(logits)
    ratio = log_ratio(logits, target, logits.argmax(-1, keepdim=True))
    return with_gradients(_divergence(logits, target, p, ratio), [student_logits], [centred(p, ratio)])


def forward_kl(student_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`KL(q || softmax(z))` per position in nats, differentiable once in `student_logits` only; `[...]`. The gradient is `p - q`.

    The target need not be normalized.
    """
    logits, target = finite_logits(student_logits.detach()), finite_logits(target_log_probs.detach())
    q, top = softmax(target), target.argmax(-1, keepdim=True)
    # p - q at the target's top token is minus the sum of the other differences: there both may be 1 up to rounding.
    difference = (softmax(logits) - q).scatter(-1, top, 0.0)
    gradient = difference.scatter(-1, top, -difference.sum(-1, keepdim=True))
    return with_gradients(_divergence(target, logits, q, log_ratio(target, logits, top)), [student_logits], [gradient])


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of two distributions in nats, at most log 2; `[...]`, detached.

    Args:
        log_p, log_q: `[..., V]` normalized log-probabilities; minus infinity is allowed.
    """
    # With u = (log p - log q) / 2 a token adds (p + q) / 2 * (u tanh u - log cosh u), which is never negative: nothing cancels
    # between tokens. Near 0 and far from 0 the bracket is arranged so that nothing cancels within it either.
    if log_p.dtype not in LARGEST_LOG_RATIO:
        raise TypeError(f"log_p must be float32 or float64, not {log_p.dtype}; call .float() on it first")
    largest = LARGEST_LOG_RATIO[log_p.dtype]
    log_p, log_q = (log_probs.detach().clamp(min=-largest) for log_probs in (log_p, log_q))
    u = ((log_p - log_q) / 2).abs()
    tanh, decay = torch.tanh(u), torch.exp(-2 * u)
    far = math.log(2.0) - torch.log1p(decay) - 2 * u * decay / (1 + decay)
    near = u * tanh + 0.5 * torch.log1p(-tanh.clamp(max=0.8).square())  # unused beyond u = 1, where tanh u is 0.76
    return (0.5 * (log_p.exp() + log_q.exp()) * torch.where(u > 1, far, near)).sum(-1)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        top = logits.argmax(-1, keepdim=True)
        shifted = logits - logits.gather(-1, top)
        weights = shifted.exp()
        others = weights.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weights / (1 + others), top)
        return shifted - others.log1p()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> Tensor:
        """`g - p sum(g)`, at the top token as `g_top (1 - p_top) - p_top` times the sum of the other `g`."""
        probabilities, top = ctx.saved_tensors
        at_top, others = grad_output.gather(-1, top), grad_output.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        rest = probabilities.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        gradient_at_top = at_top * rest - probabilities.gather(-1, top) * others
        return (grad_output - probabilities * (at_top + others)).scatter(-1, top, gradient_at_top)


def _divergence(logits: Tensor, other: Tensor, probabilities: Tensor, ratio: Tensor) -> Tensor:
    """`KL(p || q)` `[...]` of two finite logits, given `p` and the log-ratio `d`, which is 0 at the top token of `p`.

    `KL = E_p[d] + log(p_top / q_top)`, and `log(p_top / q_top) = log E_p[exp(-d)]`. The second form, arranged so that first-order
    parts cancel before they are rounded, is for close distributions; the first for far ones.
    """
    top = logits.argmax(-1, keepdim=True)
    log_ratio_at_top = log_softmax(logits).gather(-1, top) - log_softmax(other).gather(-1, top)
    far = (probabilities * ratio).sum(-1) + log_ratio_at_top.squeeze(-1)
    change = torch.expm1((-ratio).clamp(max=20.0))
    mean_change = (probabilities * change).sum(-1)
    near = (probabilities * (ratio + change)).sum(-1) + (torch.log1p(mean_change) - mean_change)
    return torch.where((-ratio).amax(-1) > 10.0, far, near)


def _exact_difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`a - b` as a rounded difference and its rounding error (Knuth's two-sum)."""
    difference = a - b
    b_virtual = a - difference
    error = (a - (difference + b_virtual)) + (b_virtual - b)
    return difference, error
