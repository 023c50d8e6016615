"""The paper's equations read literally, one token at a time, in 60-digit arithmetic. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mpmath import mp, mpf

mp.dps = 60


def softmax(logits: list[mpf]) -> list[mpf]:
    top = max(logits)
    weights = [mp.exp(z - top) for z in logits]
    total = mp.fsum(weights)
    return [w / total for w in weights]


def log_softmax(logits: list[mpf]) -> list[mpf]:
    top = max(logits)
    normalizer = top + mp.log(mp.fsum([mp.exp(z - top) for z in logits]))
    return [z - normalizer for z in logits]


def gradient(p: list[mpf], log_q: list[mpf]) -> list[mpf]:
    """Eq. app_gradient."""
    log_ratio = [mp.log(a) - b if a > 0 else mpf(0) for a, b in zip(p, log_q, strict=True)]
    mean = mp.fsum([a * d for a, d in zip(p, log_ratio, strict=True)])
    return [a * (d - mean) for a, d in zip(p, log_ratio, strict=True)]


def squared_norm(vector: list[mpf]) -> mpf:
    return mp.fsum([v * v for v in vector])


@dataclass
class Reference:
    log_probs: list[mpf]
    rho: mpf
    energy: mpf
    field_energy: list[mpf]
    chi: mpf
    alpha: list[mpf]
    eta: mpf
    loss: mpf
    g_c: list[mpf]
    g_A: list[mpf]


def fire(student, teacher, without, step_scale=1.0, floor=None, attribution=True, projection=True) -> Reference:
    """Eqs. fire_radius to fire_final_target for one token; arguments are `[V]` and `[B, V]` tensors."""
    z = [mpf(v) for v in student.tolist()]
    p, log_p = softmax(z), log_softmax(z)

    def log_target(logits):
        log_q = log_softmax([mpf(v) for v in logits.tolist()])
        return log_q if floor is None else [max(v, mpf(floor)) for v in log_q]

    log_q_c = log_target(teacher)
    log_q_without = [log_target(view) for view in without] if attribution else []
    rho = mp.sqrt(1 - squared_norm(p)) / mpf(step_scale)
    g_c = gradient(p, log_q_c)
    g_without = [gradient(p, log_q) for log_q in log_q_without]
    energy = squared_norm(g_c)
    field_energy = [squared_norm([a - b for a, b in zip(g_c, g_j, strict=True)]) for g_j in g_without]
    chi = mpf(0) if energy <= rho**2 else (energy - rho**2) / energy
    w = [chi * e for e in field_energy]
    total = rho**2 + mp.fsum(w)
    alpha = [rho**2 / total, *[v / total for v in w]] if total > 0 else [mpf(1), *[mpf(0) for _ in w]]
    mixture = [
        alpha[0] * log_q_c[v] + mp.fsum([a * log_q[v] for a, log_q in zip(alpha[1:], log_q_without, strict=True)])
        for v in range(len(z))
    ]
    log_q_A = log_softmax(mixture)
    g_A = gradient(p, log_q_A)
    norm = mp.sqrt(squared_norm(g_A))
    eta = mpf(1) if not projection or norm <= rho else rho / norm
    blend = [eta * b + ((1 - eta) * a if eta < 1 else 0) for a, b in zip(log_p, log_q_A, strict=True)]  # no 0 * infinity
    log_probs = log_softmax(blend)
    loss = mp.fsum([a * (b - c) for a, b, c in zip(p, log_p, log_probs, strict=True) if a > 0])
    return Reference(log_probs, rho, energy, field_energy, chi, alpha, eta, loss, g_c, g_A)


def sft_weight(student, token: int, step_scale=1.0) -> mpf:
    """Eq. fire_correct."""
    p = softmax([mpf(v) for v in student.tolist()])
    rho = mp.sqrt(1 - squared_norm(p)) / mpf(step_scale)
    norm = mp.sqrt(squared_norm([a - (1 if v == token else 0) for v, a in enumerate(p)]))
    return mpf(1) if norm <= rho else rho / norm


def floats(values) -> torch.Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64)
