"""Head and loss: `fire_head_loss` against the literal equations with autograd, and against plain self-distillation.

States and head are random; the step scale is chosen such that the wanted share of tokens violates the radius. All tokens belong to
wrong responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from firedistill.benchmarks import harness
from firedistill.ops import Head, fire_head_loss
from firedistill.ops.fire_head import CHUNK_ELEMENTS, FireHeadOutput

TITLE = "Head and loss, forward and backward, from the last hidden states"


@dataclass
class Sizes:
    """
    Attributes:
        tokens, vocabulary, width, fields: the base point (M, V, H, B).
        over: shares of tokens beyond the radius at the base point.
        token_sweep, vocabulary_sweep, field_sweep: values around the base point, all tokens over the radius.
        whole_step: tokens of a whole step, measured `whole_step_repeats` times at `whole_step_over`; 0 leaves it out.
        literal_tokens: token counts of the sweep at which the equations also run on all tokens at once: memory allows few.
        repeats: timed runs per variant at the base point, and at the other points.
    """

    tokens: int = 220
    vocabulary: int = 151_936
    width: int = 1536
    fields: int = 4
    dtype: str = "bfloat16"
    over: tuple[float, ...] = (0.0, 0.1, 1.0)
    token_sweep: tuple[int, ...] = (55, 110, 220, 440, 880)
    vocabulary_sweep: tuple[int, ...] = (32_768, 65_536, 151_936)
    field_sweep: tuple[int, ...] = (1, 2, 4, 8)
    whole_step: int = 8 * 384
    whole_step_over: float = 0.1
    whole_step_repeats: int = 1
    literal_tokens: tuple[int, ...] = (55, 110)
    repeats: int = 5
    sweep_repeats: int = 1


SIZES = {
    "full": Sizes(),
    "quick": Sizes(
        tokens=64,
        vocabulary=32_768,
        width=512,
        token_sweep=(64,),
        vocabulary_sweep=(32_768,),
        field_sweep=(4,),
        whole_step=0,
        literal_tokens=(),
        repeats=3,
    ),
}


def sweeps(sizes: Sizes) -> dict[str, dict[str, float]]:
    """What the picture shows, see `harness.plot`; where all tokens are over the radius."""
    base = {"tokens": sizes.tokens, "vocabulary": sizes.vocabulary, "fields": sizes.fields, "over": 1.0}
    several = {"tokens": sizes.token_sweep, "vocabulary": sizes.vocabulary_sweep, "fields": sizes.field_sweep}
    return {name: {k: v for k, v in base.items() if k != name} for name, values in several.items() if len(values) > 1}


@dataclass
class Setting:
    """One problem: the head, the student's states `[M, H]`, the full teacher's, and those without field j `[B, M, H]`."""

    head: Head
    student: Tensor
    full: Tensor
    without: Tensor
    over: float
    step_scale: float = 1.0

    @property
    def token_weights(self) -> Tensor:
        return torch.full((len(self.student),), 1 / len(self.student), device=self.student.device)

    def teacher_logits(self, rows: slice) -> tuple[Tensor, Tensor]:
        """With all feedback `[C, V]`, and without field j `[B, C, V]` (as one matrix product: a batched one copies the head)."""
        without = self.without[:, rows]
        return self.head(self.full[rows]), self.head(without.flatten(0, 1)).unflatten(0, without.shape[:2])


def make_setting(tokens: int, vocabulary: int, width: int, fields: int, dtype: str, over: float, device: str) -> Setting:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=generator)).to(device, getattr(torch, dtype))

    weight = output_embedding(vocabulary, width, dtype, device)
    student = noise(tokens, width)
    full = student + noise(tokens, width, size=0.3)
    without = full + noise(fields, tokens, width, size=0.2)
    setting = Setting(Head.of_weight(weight), student.requires_grad_(), full.detach(), without.detach(), over)
    with torch.no_grad():
        output = fused(setting, attribution=False)
    setting.step_scale = step_scale_for(over, output.energy.sqrt() / output.rho)
    return setting


@lru_cache(maxsize=1)  # takes seconds to draw
def output_embedding(vocabulary: int, width: int, dtype: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    blocks = [min(8192, vocabulary - start) for start in range(0, vocabulary, 8192)]
    draws = (0.05 * torch.randn(rows, width, generator=generator) for rows in blocks)
    return torch.cat([draw.to(device, getattr(torch, dtype)) for draw in draws])


def step_scale_for(share: float, excess: Tensor) -> float:
    """The step scale at which this share is over the radius, where `excess` `[n]` is gradient norm over radius at a step scale of 1.

    At least 1, as in training: where more than the share is over the radius from the start, that is how it stays.
    """
    begins = (1 / excess.double().clamp(min=1e-9)).sort().values  # step scales at which one after the other begins to violate
    bounds = torch.cat([begins[:1] * 0.98, begins, begins[-1:] * 1.02])
    position = round(share * len(excess))
    return max(1.0, float(bounds[position] + bounds[position + 1]) / 2)


def fused(setting: Setting, lazy: bool = False, **more) -> FireHeadOutput:
    tokens, device = len(setting.student), setting.student.device
    return fire_head_loss(
        setting.head,
        setting.student,
        setting.token_weights,
        token_ids=torch.zeros(tokens, dtype=torch.long, device=device),
        correct=torch.zeros(tokens, dtype=torch.bool, device=device),
        teacher_hidden=setting.full,
        loo_hidden=(lambda rows: setting.without[:, rows]) if lazy else setting.without,
        step_scale=setting.step_scale,
        **more,
    )


def literal_fire(z: Tensor, q_c: Tensor, q_without: Tensor, step_scale: float) -> Tensor:
    """Eqs. fire_radius to fire_final_target and the KL of eq. fire_objective, each as it stands; `[C]`."""
    log_p_live = F.log_softmax(z, -1)
    with torch.no_grad():
        log_p = log_p_live.detach()
        p = log_p.exp()

        def induced(log_q: Tensor) -> Tensor:
            ratio = log_p - log_q
            return p * (ratio - (p * ratio).sum(-1, keepdim=True))

        log_q_c, log_q_without = F.log_softmax(q_c, -1), F.log_softmax(q_without, -1)
        rho = (1 - p.square().sum(-1)).sqrt() / step_scale
        g_c = induced(log_q_c)
        energy = g_c.square().sum(-1)
        field_energy = (g_c - induced(log_q_without)).square().sum(-1)
        chi = ((energy - rho.square()) / energy).clamp(min=0)
        evidence = torch.cat([rho.square().unsqueeze(0), chi * field_energy])
        alpha = evidence / evidence.sum(0)
        log_views = torch.cat([log_q_c.unsqueeze(0), log_q_without])
        log_q_A = F.log_softmax((alpha.unsqueeze(-1) * log_views).sum(0), -1)
        eta = (rho / induced(log_q_A).norm(dim=-1)).clamp(max=1).unsqueeze(-1)
        log_q_fire = F.log_softmax((1 - eta) * log_p + eta * log_q_A, -1)
    return (log_p_live.exp() * (log_p_live - log_q_fire)).sum(-1)


def run_literal(setting: Setting, chunk: int = 32) -> Tensor:
    """All views at all tokens, autograd through the student's head; chunked only because nothing would fit otherwise."""
    setting.student.grad = None
    total = torch.zeros((), device=setting.student.device)
    for start in range(0, len(setting.student), chunk):
        rows = slice(start, start + chunk)
        with torch.no_grad():
            q_c, q_without = setting.teacher_logits(rows)
        token_loss = literal_fire(setting.head(setting.student[rows]), q_c, q_without, setting.step_scale)
        loss = (setting.token_weights[rows] * token_loss).sum()
        loss.backward()
        total += loss.detach()
    return total


def run_fused(setting: Setting, **more) -> Tensor:
    setting.student.grad = None
    loss = fused(setting, **more).loss
    loss.backward()
    return loss.detach()


def run_products(setting: Setting) -> None:
    """The floor: only the matrix products with the head that every arrangement needs, in chunks of the size of `fire_head_loss`.

    Forward for the student, the full teacher and, where the radius is violated, each view; backward once.
    """
    size = max(1, CHUNK_ELEMENTS // setting.head.vocabulary_size)
    for start in range(0, len(setting.student), size):
        states = setting.student[start : start + size]
        products = setting.head.project(states)
        with torch.no_grad():
            setting.head.project(setting.full[start : start + size])
            over = round(setting.over * len(states))
            if over:
                setting.head.project(setting.without[:, start : start + over].flatten(0, 1))
        torch.autograd.grad(products, [states], products.detach())


# By name, what does one forward and backward pass and answers the loss. "asked for when needed" is how training calls it: the states
# without a field are read once the violations are known, and the tokens that have one are projected again.
VARIANTS: dict[str, Callable[[Setting], Tensor | None]] = {
    "literal equations": run_literal,
    "literal equations, unchunked": lambda setting: run_literal(setting, chunk=len(setting.student)),
    "fire_head_loss": run_fused,
    "fire_head_loss, views asked for when needed": lambda setting: run_fused(setting, lazy=True),
    "full context": lambda setting: run_fused(setting, attribution=False, projection=False),
    "matrix products alone": run_products,
}
LITERAL, UNCHUNKED, FUSED, LAZY, FULL_CONTEXT, PRODUCTS = VARIANTS
EVERY = (LITERAL, FUSED, LAZY, FULL_CONTEXT, PRODUCTS)


def prepared(variants: tuple[str, ...], *size) -> dict[str, Callable[[], Tensor | None]]:
    """The functions whose memory is measured."""
    setting = make_setting(*size)
    return {variant: partial(VARIANTS[variant], setting) for variant in variants}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    def size(tokens=sizes.tokens, vocabulary=sizes.vocabulary, fields=sizes.fields, over=1.0) -> tuple:
        return tokens, vocabulary, sizes.width, fields, sizes.dtype, over, options.device

    def case_of(size: tuple) -> dict[str, float]:
        return {"tokens": size[0], "vocabulary": size[1], "fields": size[3], "over": size[5]}

    def timed(size: tuple, variants: tuple[str, ...], repeats: int, warm_up: bool) -> list[harness.Row]:
        setting = make_setting(*size)
        over = float((fused(setting, attribution=False).chi > 0).float().mean())
        found = {"tokens_over_radius": over, "step_scale": setting.step_scale}
        functions = {variant: lambda variant=variant: VARIANTS[variant](setting) for variant in variants}
        return harness.rows(case_of(size), functions, repeats, warm_up=warm_up, details=lambda variant: found)

    repeats = options.repeats or sizes.repeats
    for over in sizes.over:
        yield from timed(size(over=over), EVERY, repeats, warm_up=True)
    if sizes.whole_step:
        whole = size(tokens=sizes.whole_step, over=sizes.whole_step_over)
        yield from timed(whole, EVERY, sizes.whole_step_repeats, warm_up=False)
        yield from harness.memory_rows(case_of(whole), prepared, (FUSED,), *whole)
    around = {
        *(size(tokens=tokens) for tokens in sizes.token_sweep),
        *(size(vocabulary=vocabulary) for vocabulary in sizes.vocabulary_sweep),
        *(size(fields=fields) for fields in sizes.field_sweep),
    }
    for point in sorted(around, key=lambda point: (-point[1], point)):
        if point != size() or 1.0 not in sizes.over:  # else it was timed above
            yield from timed(point, (LITERAL, FUSED, FULL_CONTEXT), sizes.sweep_repeats, warm_up=False)
        unchunked = (UNCHUNKED,) if point[0] in sizes.literal_tokens else ()
        yield from harness.memory_rows(case_of(point), prepared, (LITERAL, FUSED, *unchunked), *point)
