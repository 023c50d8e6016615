"""Head and loss: `fire_head_loss` compared with the literal equations under autograd, and with plain self-distillation.

States and head are random. The step scale is chosen so that the wanted share of tokens violates the radius. All tokens belong to wrong
responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from firedistill.benchmarks import harness
from firedistill.ops import Head, fire_head_loss
from firedistill.ops.fire_head import default_chunk, first_pass

TITLE = "Head and loss, forward and backward, from the last hidden states"


@dataclass
class Sizes:
    # The base point: M, V, H, B, and the shares of tokens over the radius.
    tokens: int = 220
    vocabulary: int = 151_936
    width: int = 1536
    fields: int = 4
    over: tuple[float, ...] = (0.0, 0.1, 1.0)
    # Values around the base point, all tokens over the radius.
    token_sweep: tuple[int, ...] = (55, 110, 220, 440, 880)
    vocabulary_sweep: tuple[int, ...] = (32_768, 65_536, 151_936)
    field_sweep: tuple[int, ...] = (1, 2, 4, 8)
    whole_step: int = 8 * 384  # tokens of a whole step; 0 skips it
    whole_step_over: float = 0.1
    whole_step_repeats: int = 1
    literal_tokens: tuple[int, ...] = (55, 110)  # where the equations also run on all tokens at once; memory allows few
    repeats: int = 5  # at the base point
    sweep_repeats: int = 1

    @property
    def base(self) -> dict[str, float]:
        return {"tokens": self.tokens, "vocabulary": self.vocabulary, "fields": self.fields, "over": 1.0}

    @property
    def swept(self) -> dict[str, tuple[int, ...]]:
        return {"tokens": self.token_sweep, "vocabulary": self.vocabulary_sweep, "fields": self.field_sweep}


QUICK = Sizes(
    64, 32_768, 512, token_sweep=(64,), vocabulary_sweep=(32_768,), field_sweep=(4,), whole_step=0, literal_tokens=(), repeats=3
)
SIZES = {"full": Sizes(), "quick": QUICK}


def sweeps(sizes: Sizes) -> dict[str, dict[str, float]]:
    return {name: {k: v for k, v in sizes.base.items() if k != name} for name, values in sizes.swept.items() if len(values) > 1}


class Problem:
    """One problem: M tokens, V logits, H hidden units, B fields.

    Args:
        case: M, V and B as `tokens`, `vocabulary` and `fields`; the share of tokens over the radius as `over`.

    Attributes:
        embedding: `[V, H]`, the weight of the head.
        student: `[M, H]` states with gradient.
        views: `[B+1, M, H]` states of the full teacher, then of the teacher without field j.
    """

    def __init__(self, case: Mapping[str, Any], width: int, dtype: str, device: str):
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int, size: float = 1.0) -> Tensor:
            return (size * torch.randn(*shape, generator=generator)).to(device, getattr(torch, dtype))

        self.over: float = case["over"]
        self.embedding = output_embedding(case["vocabulary"], width, dtype, device)
        self.head = Head.of_weight(self.embedding)
        self.student: Tensor = noise(case["tokens"], width)
        full = self.student + noise(case["tokens"], width, size=0.3)
        without = full + noise(case["fields"], case["tokens"], width, size=0.2)
        self.views = torch.cat([full.unsqueeze(0), without])
        excess = gradient_excess(self.head, self.student, full)
        self.step_scale = step_scale_for(self.over, excess)
        self.tokens_over_radius = float((excess > 1 / self.step_scale).float().mean())
        self.student.requires_grad_()

    def backward(self, loss: Tensor) -> Tensor:
        self.student.grad = None
        loss.backward()
        return loss.detach()

    def fire(self, function: Callable[..., Any] = fire_head_loss, **settings: Any) -> Any:
        """What `fire_head_loss` or `first_pass` returns."""
        return all_wrong(function, self.head, self.student, self.views[0], step_scale=self.step_scale, **settings)


@lru_cache(maxsize=1)  # drawing takes seconds
def output_embedding(vocabulary: int, width: int, dtype: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    blocks = [min(8192, vocabulary - start) for start in range(0, vocabulary, 8192)]
    draws = (0.05 * torch.randn(rows, width, generator=generator) for rows in blocks)
    return torch.cat([draw.to(device, getattr(torch, dtype)) for draw in draws])


def all_wrong(function: Callable[..., Any], head: Head, student: Tensor, full: Tensor, **settings: Any) -> Any:
    """`fire_head_loss` or `first_pass` on tokens of equal weight that all belong to wrong responses."""
    ids = torch.zeros(len(student), dtype=torch.long, device=student.device)
    weights = torch.full((len(student),), 1 / len(student), device=student.device)
    return function(head, student, weights, token_ids=ids, correct=ids.bool(), teacher_hidden=full, **settings)


@torch.no_grad()
def gradient_excess(head: Head, student: Tensor, full: Tensor, **settings: Any) -> Tensor:
    """Norm of the full teacher's gradient over the radius, at step scale 1; `[M]`."""
    output = all_wrong(fire_head_loss, head, student, full, attribution=False, **settings)
    return output.energy.sqrt() / output.rho


def step_scale_for(share: float, excess: Tensor) -> float:
    """The step scale at which this share violates the radius, where `excess` `[n]` is gradient norm over radius at step scale 1.

    At least 1, as in training, even if more than the share violates the radius there.
    """
    thresholds = (1 / excess.double().clamp(min=1e-9)).sort().values  # the step scales at which one more violates it
    bounds = torch.cat([thresholds[:1] * 0.98, thresholds, thresholds[-1:] * 1.02])
    position = round(share * len(excess))
    return max(1.0, float(bounds[position] + bounds[position + 1]) / 2)


def literal_fire(z: Tensor, views: Tensor, step_scale: float) -> Tensor:
    """Eqs. fire_radius to fire_final_target and the KL of eq. fire_objective, as written; logits `[C, V]`, `[B+1, C, V]` to `[C]`."""
    log_p_live = F.log_softmax(z, -1)
    with torch.no_grad():
        log_p, log_q = log_p_live.detach(), F.log_softmax(views, -1)
        p = log_p.exp()

        def induced(log_q: Tensor) -> Tensor:
            ratio = log_p - log_q
            return p * (ratio - (p * ratio).sum(-1, keepdim=True))

        rho = (1 - p.square().sum(-1)).sqrt() / step_scale
        g_c, g_without = induced(log_q[0]), induced(log_q[1:])
        energy, field_energy = g_c.square().sum(-1), (g_c - g_without).square().sum(-1)
        chi = ((energy - rho.square()) / energy).clamp(min=0)
        evidence = torch.cat([rho.square().unsqueeze(0), chi * field_energy])
        alpha = evidence / evidence.sum(0)
        log_q_A = F.log_softmax((alpha.unsqueeze(-1) * log_q).sum(0), -1)
        eta = (rho / induced(log_q_A).norm(dim=-1)).clamp(max=1).unsqueeze(-1)
        log_q_fire = F.log_softmax((1 - eta) * log_p + eta * log_q_A, -1)
    return (log_p_live.exp() * (log_p_live - log_q_fire)).sum(-1)


def run_literal(problem: Problem, chunk: int = 32) -> Tensor:
    """All views at all tokens, autograd through the student's head; in chunks, because it would not fit otherwise."""
    problem.student.grad = None
    total = torch.zeros((), device=problem.student.device)
    for student, states in zip(problem.student.split(chunk), problem.views.split(chunk, dim=1), strict=True):
        with torch.no_grad():
            views = problem.head(states.flatten(0, 1)).unflatten(0, states.shape[:2])  # a batched product copies the head
        loss = literal_fire(problem.head(student), views, problem.step_scale).sum() / len(problem.student)
        loss.backward()
        total += loss.detach()
    return total


def run_fused(problem: Problem, **settings: Any) -> Tensor:
    return problem.backward(problem.fire(loo_hidden=problem.views[1:], **settings).loss)


def run_two_passes(problem: Problem, **settings: Any) -> Tensor:
    """As in training: the states without a field are requested after the first pass, at the tokens over the radius."""
    first = problem.fire(first_pass, **settings)
    return problem.backward(first.attribute(problem.views[1:, first.over]).loss)


def run_full_context(problem: Problem, **settings: Any) -> Tensor:
    return problem.backward(problem.fire(attribution=False, projection=False, **settings).loss)


def run_products(problem: Problem) -> None:
    """The lower bound: only the matrix products with the head that every implementation needs.

    Forward for the student, the full teacher and, where the radius is violated, each view; backward once.
    """
    size = default_chunk(problem.head.vocabulary_size, problem.student.is_cuda)
    for student, views in zip(problem.student.split(size), problem.views.split(size, dim=1), strict=True):
        products = problem.head.project(student)
        with torch.no_grad():
            problem.head.project(views[0])
            if over := round(problem.over * len(student)):
                problem.head.project(views[1:, :over].flatten(0, 1))
        torch.autograd.grad(products, [student], products.detach())


# One forward and backward pass each; all but the last return the loss.
VARIANTS: dict[str, Callable[[Problem], Tensor | None]] = {
    "literal equations": run_literal,
    "literal equations, unchunked": lambda problem: run_literal(problem, chunk=len(problem.student)),
    "fire_head_loss": run_fused,
    "fire_head_loss, views asked for when needed": run_two_passes,
    "full context": run_full_context,
    "matrix products alone": run_products,
}
LITERAL, UNCHUNKED, FUSED, TWO_PASSES, FULL_CONTEXT, PRODUCTS = VARIANTS
EVERY = (LITERAL, FUSED, TWO_PASSES, FULL_CONTEXT, PRODUCTS)


def prepared(variants: tuple[str, ...], *arguments: Any) -> dict[str, Callable[[], Tensor | None]]:
    problem = Problem(*arguments)
    return {variant: partial(VARIANTS[variant], problem) for variant in variants}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    common = sizes.width, options.dtype, options.device

    def timed(case: dict[str, float], variants: tuple[str, ...], repeats: int, warm_up: bool) -> list[harness.Row]:
        problem = Problem(case, *common)
        facts = {"tokens_over_radius": problem.tokens_over_radius, "step_scale": problem.step_scale}
        functions = {variant: partial(VARIANTS[variant], problem) for variant in variants}
        return harness.rows(case, functions, repeats, warm_up=warm_up, details=lambda loss: facts)

    for over in sizes.over:
        yield from timed(sizes.base | {"over": over}, EVERY, options.repeats or sizes.repeats, warm_up=True)
    if sizes.whole_step:
        case = sizes.base | {"tokens": sizes.whole_step, "over": sizes.whole_step_over}
        yield from timed(case, EVERY, sizes.whole_step_repeats, warm_up=False)
        yield from harness.memory_rows(case, prepared, (FUSED,), case, *common)
    around = [sizes.base | {name: value} for name, values in sizes.swept.items() for value in values]
    distinct = {tuple(case.values()): case for case in around}
    for case in sorted(distinct.values(), key=lambda case: (-case["vocabulary"], *case.values())):  # draws each embedding once
        if case != sizes.base or 1.0 not in sizes.over:  # else timed above
            yield from timed(case, (LITERAL, FUSED, FULL_CONTEXT), sizes.sweep_repeats, warm_up=False)
        unchunked = (UNCHUNKED,) if case["tokens"] in sizes.literal_tokens else ()
        yield from harness.memory_rows(case, prepared, (LITERAL, FUSED, *unchunked), case, *common)
