"""Ceilings of the device, and the head and loss without a model: whether they are right, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from firedistill.benchmarks import fire_head, harness
from firedistill.benchmarks.gpu.sizes import AS_IN_TRAINING, Setting, Work
from firedistill.benchmarks.gpu.timing import Variant, repeated, row_of, timed
from firedistill.config import SelfDistillConfig
from firedistill.ops import fire_head_loss
from firedistill.ops.fire_head import is_compiled
from firedistill.ops.head import float32_sums

# ---- Ceilings ----------------------------------------------------------------------------------------------------------------

COPY, PRODUCT = "copy", "matrix product"


def ceilings(setting: Setting) -> Iterator[harness.Row]:
    """What the floors of all other parts are made of, and what the host costs."""
    sizes, device = setting.sizes, setting.device
    copied = min(sizes.copied, torch.cuda.mem_get_info()[0] // 4) if setting.is_gpu else sizes.copied
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    several = 10 if setting.is_gpu else 1
    copy = Variant(partial(target.copy_, source), [(0, 2.0 * copied)], times=several)
    yield from timed({"bytes": copied}, {COPY: copy}, sizes.repeats)
    del source, target, copy
    n, shape = sizes.matrix, sizes.shapes["1.5b"]
    for label, (rows, inner, columns) in {
        PRODUCT: (n, n, n),
        "product with the head": (sizes.head_tokens, shape.hidden, shape.vocabulary),
        "gradient through the head": (sizes.head_tokens, shape.vocabulary, shape.hidden),
    }.items():
        a, b = (torch.randn(*size, device=device).bfloat16() for size in ((rows, inner), (inner, columns)))
        result = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        work: Work = [(2.0 * rows * inner * columns, 2.0 * (rows * inner + inner * columns + rows * columns))]
        multiply: Callable[[], Any] = partial(torch.mm, a, b, out=result)
        variant = Variant(multiply if label == PRODUCT else float32_sums()(multiply), work, times=several)  # as training does
        yield from timed({"rows": rows, "inner": inner, "columns": columns}, {label: variant}, sizes.repeats)
    small, total = torch.ones(8, device=device), torch.ones((), device=device)
    host = {
        "one operator": Variant(lambda: small.add_(1), times=sizes.operators),
        "one wait": Variant(total.item, times=sizes.operators),
    }
    if setting.is_gpu:
        graph = captured(lambda: repeated(lambda: small.add_(1), sizes.operators))
        host["one operator of a graph"] = Variant(graph.replay, parts=sizes.operators)
    yield from timed({"operators": sizes.operators}, host, sizes.repeats)


def captured(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


# ---- The head ----------------------------------------------------------------------------------------------------------------

FLOOR = cast(float, SelfDistillConfig.log_prob_floor)  # of training, by default

# Largest ||found - reference|| / ||reference|| of a correct implementation. In bfloat16 the logits are rounded.
TOLERATED_ERROR = {"float32": 1e-4, "bfloat16": 3e-2}


def head_check(setting: Setting) -> Iterator[harness.Row]:
    """`fire_head_loss` and the literal equations, both in the head's type, against the equations in float64.

    Every second token belongs to a correct response. Loss and gradient are continuous at the radius, so that no token is left out.
    """
    for (tokens, vocabulary, width), dtype, over in product(setting.sizes.checked, TOLERATED_ERROR, (0.0, 0.5, 1.0)):
        case = {"tokens": tokens, "vocabulary": vocabulary, "fields": 3, "over": over}
        problem = fire_head.Problem(case, width, dtype, setting.device)
        chosen = torch.arange(tokens, device=setting.device)
        correct, ids = chosen % 2 == 1, (chosen * 7919) % vocabulary
        weights = torch.linspace(0.5, 1.5, tokens, device=setting.device) / tokens
        expected = literal(problem, torch.float64, correct, ids, weights)
        variants: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "fire_head_loss": partial(fused, problem, correct, ids, weights, None),
            "fire_head_loss, odd chunks": partial(fused, problem, correct, ids, weights, 7),
            "literal equations": partial(literal, problem, getattr(torch, dtype), correct, ids, weights),
        }
        for name, function in variants.items():
            errors = [relative_error(a, b) for a, b in zip(function(), expected, strict=True)]
            facts: dict[str, Any] = {"loss_error": errors[0], "gradient_error": errors[1], "tolerated": TOLERATED_ERROR[dtype]}
            facts["within"] = all(error <= TOLERATED_ERROR[dtype] for error in errors)  # False for NaN
            facts |= head_compiled(setting) if name.startswith("fire_head_loss") else {}
            yield row_of({"type": dtype, **case}, name, details=facts)


def fused(
    problem: fire_head.Problem, correct: Tensor, ids: Tensor, weights: Tensor, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Token losses `[M]` and the gradient `[M, H]` of their weighted sum."""
    student, views = problem.student.detach().clone().requires_grad_(), problem.views[:, ~correct]
    output = fire_head_loss(
        problem.head,
        student,
        weights,
        token_ids=ids,
        correct=correct,
        teacher_hidden=views[0],
        loo_hidden=views[1:],
        step_scale=problem.step_scale,
        chunk_size=chunk,
        log_prob_floor=FLOOR,
    )
    output.loss.backward()
    assert student.grad is not None
    return output.token_loss, student.grad


def literal(
    problem: fire_head.Problem, dtype: torch.dtype, correct: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As `fused`, by the equations one by one; products in `dtype`, everything else in float32 or float64."""
    weight = problem.embedding.to(dtype)
    student = problem.student.detach().to(dtype).requires_grad_()
    at_least = torch.promote_types(dtype, torch.float32)
    z = (student @ weight.T).to(at_least)
    with torch.no_grad():
        states = problem.views[:, ~correct].to(dtype)
        views = (states.flatten(0, 1) @ weight.T).unflatten(0, states.shape[:2]).to(at_least)
        views = F.log_softmax(views, -1).clamp(min=FLOOR)
    log_p = F.log_softmax(z, -1)
    p = log_p.detach().exp()
    with torch.no_grad():
        rho = (1 - p.square().sum(-1)).sqrt() / problem.step_scale
        norm = (p - F.one_hot(ids, p.shape[-1])).norm(dim=-1)
        beta = (rho / norm).clamp(max=1)
    losses = torch.zeros(len(z), dtype=at_least, device=z.device)
    losses[correct] = (-beta * log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1))[correct]
    losses[~correct] = fire_head.literal_fire(z[~correct], views, problem.step_scale)
    (gradient,) = torch.autograd.grad((weights * losses).sum(), student)
    return losses.detach(), gradient


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))


def head_work(tokens: int, vocabulary: int, width: int, fields: int, over: float) -> Work:
    """Products of student, full teacher and, at the tokens over the radius, each view, and one product back; then every logit is read
    once, and the gradient written once."""
    views = over * fields * tokens
    return [
        (2.0 * width * vocabulary * (3 * tokens + views), 2.0 * width * vocabulary),
        (0.0, 2.0 * vocabulary * (3 * tokens + views)),
    ]


NOT_COMPILED, PRODUCTS_ALONE = "as in training, not compiled", "matrix products alone"


def head(setting: Setting) -> Iterator[harness.Row]:
    """`fire_head_loss` and its two passes as in training, the same without `torch.compile`, and at several chunk sizes."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    for over in sizes.over:
        case = {"tokens": sizes.head_tokens, "vocabulary": shape.vocabulary, "fields": len(sizes.fields), "over": over}
        problem = fire_head.Problem(case, shape.hidden, "bfloat16", setting.device)
        work = head_work(sizes.head_tokens, shape.vocabulary, shape.hidden, len(sizes.fields), problem.tokens_over_radius)
        facts = {"tokens_over_radius": problem.tokens_over_radius}
        training = partial(fire_head.run_two_passes, problem, log_prob_floor=FLOOR)
        of_training = {
            AS_IN_TRAINING: Variant(training, work, facts, memory=True),
            NOT_COMPILED: Variant(partial(without_compiling, training), work, facts, memory=True),
            "full context": Variant(
                partial(fire_head.run_full_context, problem, log_prob_floor=FLOOR),
                head_work(sizes.head_tokens, shape.vocabulary, shape.hidden, 0, 0),
                memory=True,
            ),
            PRODUCTS_ALONE: Variant(partial(fire_head.run_products, problem), work[:1]),
        }
        by_chunk = {
            f"fire_head_loss, 2^{size.bit_length() - 1} logits": Variant(
                partial(in_chunks, problem, size, log_prob_floor=FLOOR), work, memory=True
            )
            for size in sizes.chunks
        }
        for row in timed(case, {**of_training, **by_chunk}, sizes.repeats):
            if row["variant"] not in (NOT_COMPILED, PRODUCTS_ALONE):
                row["details"] |= head_compiled(setting)
            yield row


def in_chunks(problem: fire_head.Problem, elements: int, **settings: Any) -> Tensor:
    size = max(1, elements // problem.head.vocabulary_size)
    return fire_head.run_fused(problem, chunk_size=size, **settings)


def without_compiling(function: Callable[[], Any]) -> Any:
    with patch("firedistill.ops.fire_head.COMPILED_DEVICES", set()):
        return function()


def head_compiled(setting: Setting) -> dict[str, bool]:
    """Whether the head is still compiled: it is not after a failure of the compiler."""
    return {"head_compiled": is_compiled(torch.device(setting.device), torch.bfloat16)}


# ---- The rows of the head: distributions, loss and logit gradient --------------------------------------------------------------


CHECKED_ROWS = 64  # compared with float64


def inside_rows(z: Tensor, full: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Rows of tokens inside the radius, from `[C, V]` logits: gradient times `scale` in their type, loss, radius, energy, entropy."""
    at_least = torch.promote_types(z.dtype, torch.float32)
    log_p, log_q = F.log_softmax(z.to(at_least), -1), F.log_softmax(full.to(at_least), -1)
    p, ratio = log_p.exp(), log_p - log_q
    kl = (p * ratio).sum(-1)
    gradient = p * (ratio - kl.unsqueeze(-1))
    rho = (1 - p.square().sum(-1)).sqrt()
    return (gradient * scale).to(z.dtype), kl, rho, gradient.square().sum(-1), -(p * log_p).sum(-1)


def outside_rows(z: Tensor, full: Tensor, scale: Tensor, step_scale: Tensor, views: Tensor) -> tuple[Tensor, ...]:
    """Rows of tokens over the radius; `views` has `[B, C, V]` logits without a field. The fourth value is the weights `[B+1, C]`."""
    at_least = torch.promote_types(z.dtype, torch.float32)
    log_p, log_q = F.log_softmax(z.to(at_least), -1), F.log_softmax(full.to(at_least), -1)
    p = log_p.exp()

    def centred(ratio: Tensor) -> Tensor:
        return ratio - (p * ratio).sum(-1, keepdim=True)

    rho = (1 - p.square().sum(-1)).sqrt() / step_scale
    energy = (p * centred(log_p - log_q)).square().sum(-1)
    chi = ((energy - rho.square()) / energy).clamp(min=0)
    log_views = F.log_softmax(views.to(at_least), -1)
    residuals = [centred(view - log_q) for view in log_views.unbind(0)]
    evidence = torch.stack([rho.square(), *(chi * (p * residual).square().sum(-1) for residual in residuals)])
    alpha = evidence / evidence.sum(0)
    target = log_q
    for weight, residual in zip(alpha[1:].unbind(0), residuals, strict=True):
        target = target + weight.unsqueeze(-1) * residual
    ratio = centred(log_p - target)
    gradient = p * ratio
    eta = (rho / gradient.norm(dim=-1)).clamp(max=1).unsqueeze(-1)
    loss = (p * torch.exp(-eta * ratio)).sum(-1).log()
    return (eta * gradient * scale).to(z.dtype), loss, rho, alpha, -(p * log_p).sum(-1)


def rows_alone(setting: Setting) -> Iterator[harness.Row]:
    """The rows of `fire_head_loss`, those written in plain PyTorch, and the same compiled.

    The rows of the package are what a head of width 16, whose products cost little, takes beyond its products. Where `torch.compile`
    fails, its row has the error.
    """
    sizes, vocabulary, width = setting.sizes, setting.sizes.shapes["1.5b"].vocabulary, 16
    fields = len(sizes.fields)
    for over, elements in product((0.0, 1.0), sizes.chunks):
        size = max(1, elements // vocabulary)
        chunks = max(1, sizes.head_tokens // size)
        tokens = size * chunks
        case = {"tokens": tokens, "vocabulary": vocabulary, "fields": fields, "over": over}
        problem = fire_head.Problem(case, width, "bfloat16", setting.device)
        work = head_work(tokens, vocabulary, width, fields, over)[1:]
        z, full, *views = (
            problem.head.project(states) for states in (problem.student.detach()[:size], *problem.views[:, :size])
        )
        # Numbers are tensors, so that nothing is compiled again when they change.
        scale, step_scale = (torch.tensor(x, device=setting.device) for x in (1 / tokens, problem.step_scale))
        inputs = (z, full, scale) if over == 0 else (z, full, scale, step_scale, torch.stack(views))
        function = inside_rows if over == 0 else outside_rows
        plain, compiled = partial(function, *inputs), partial(torch.compile(function, backend=sizes.compiler), *inputs)
        exact = function(*(x[..., :CHECKED_ROWS, :].double() if x.dim() else x.double() for x in inputs))[0]

        def variant(
            rows: Callable[[], tuple[Tensor, ...]], chunks: int = chunks, exact: Tensor = exact, work: Work = work
        ) -> Variant:
            error = relative_error(rows()[0][:CHECKED_ROWS], exact)
            facts = {"gradient_error": error, "within": error <= TOLERATED_ERROR["bfloat16"]}
            return Variant(partial(repeated, rows, chunks), work, facts)

        variants = {
            "products": Variant(partial(fire_head.run_products, problem)),
            "fire_head_loss": Variant(partial(in_chunks, problem, elements)),
            "plain PyTorch": variant(plain),
        }
        by_compiler = f"torch.compile ({sizes.compiler})"
        try:
            variants[by_compiler] = variant(compiled)
        except Exception as error:  # of the compiler, or of the tools that it calls
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield row_of({**case, "chunk": elements}, by_compiler, details={"error": reason})
        measured = {row["variant"]: row for row in timed({**case, "chunk": elements}, variants, sizes.repeats)}
        products, whole = measured.pop("products"), measured["fire_head_loss"]
        if "seconds" in products and "seconds" in whole:  # both fit into memory
            whole["seconds"] = {
                name: max(0.0, seconds - products["seconds"]["median"]) for name, seconds in whole["seconds"].items()
            }
            whole |= {"variant": "rows of fire_head_loss, by difference", "work": work}
            whole["details"] |= head_compiled(setting)
            for name in ("processor_seconds", "relative", "relative_processor"):
                del whole[name]  # of the whole call
        yield from measured.values()
