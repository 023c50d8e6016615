"""The rows of `fire_head_loss` as Triton kernels: one program per token, which walks over the vocabulary in blocks.

`_FireHead` says in PyTorch what is computed, with a dozen tensors of the size of its logits; here every pass over a row keeps
nothing but a few sums. Products with the head are read as they are, in 16 or 32 bits, and turned into float32 logits on the fly. A
token of a correct response costs three passes over the student's row (top token; sums; gradient). One of a wrong response costs two
over the student's row alone and three that read the full teacher's as well (mean log-ratio; gradient energy; divergence and gradient),
and, over the radius, the same once more with the other views mixed in, after five passes per view. A floor on log-probabilities adds
two passes per teacher row. Threads add up their own tokens until a pass is over, and wait for each other only then.

The rules that keep small numbers right are those of `_Student`: the top token is the point of reference, `1 - p_top` is the sum of the
others, views of the teacher are compared with each other first. All sums are in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from firedistill.ops.fire_head import _FireHead
from firedistill.ops.fused_head import Head

# Tokens of the vocabulary at once, and warps of a program. Without a softcap, four tokens per thread cost at most 64 registers (ptxas
# for sm_90), so that two programs fit on a multiprocessor; eight cost over 100. Not tuned by the clock.
BLOCK = 2048
WARPS = 16

KNOWN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FORBIDDEN = tl.constexpr(-1e15)  # stands in for an infinite logit, see LARGEST_LOGIT
BEYOND = tl.constexpr(-1e30)  # logit of what fills the last block: less than that of any token
FAR = tl.constexpr(-60.0)  # log-ratio whose exponential is near overflow


class TritonFireHead(_FireHead):
    """`_FireHead` with its rows handled by the kernels. Products that they do not know are left to PyTorch."""

    def correct_rows(self, tokens: Tensor, products: Tensor, token_ids: Tensor) -> None:
        if not known(products):
            return super().correct_rows(tokens, products, token_ids)
        names = ("rho", "entropy", "beta", "gradient_norm", "token_loss")
        out = self.unknown(len(names), len(tokens))
        correct_rows_kernel[(len(tokens),)](
            products,
            products.stride(0),
            token_ids,
            self.token_weights[tokens],
            out,
            len(tokens),
            products.shape[-1],
            float(self.step_scale),
            DIFFERENTIATE=self.differentiate,
            STUDENT=head_settings(self.head),
            **launch_settings(products),
        )
        self.record(tokens, **dict(zip(names, out, strict=True)))

    def full_teacher(self, tokens: Tensor, products: Tensor, full: Tensor) -> Tensor:
        if not known(products, full):
            return super().full_teacher(tokens, products, full)
        every = torch.arange(len(tokens), device=products.device)
        found = self.wrong_rows(
            every, tokens, products, full, project=self.projection and not self.attribution, defer=self.attribution
        )
        self.record(tokens, **found)
        return every[found["chi"] > 0] if self.attribution else every[:0]

    def attributed_rows(self, tokens: Tensor, products: Tensor, full: Tensor, group: Tensor, views: Tensor) -> None:
        if not known(products, full, views):
            return super().attributed_rows(tokens, products, full, group, views)
        here, fields, (rows, vocabulary) = tokens[group], len(views), (len(group), products.shape[-1])
        views = views.flatten(0, 1)
        field_energy, top = self.unknown(fields, rows), torch.empty(rows, dtype=torch.int32, device=products.device)
        teacher = (full, full.stride(0), self.floors(full, group), views, views.stride(0), self.floors(views))
        settings = dict(TEACHER=head_settings(self.teacher_head), **launch_settings(products))
        if fields:
            field_energies_kernel[(rows, fields)](
                products,
                products.stride(0),
                group,
                *teacher,
                field_energy,
                top,
                rows,
                vocabulary,
                STUDENT=head_settings(self.head),
                **settings,
            )
        least = self.statistics["rho"][here].square().clamp(min=torch.finfo(self.dtype).tiny)
        evidence = torch.cat([least.unsqueeze(0), self.statistics["chi"][here] * field_energy])
        alpha = evidence / evidence.sum(0)
        shift = None
        if fields:
            shift = torch.empty(rows, vocabulary, dtype=torch.float32, device=products.device)
            blocks = triton.cdiv(vocabulary, settings["BLOCK"])
            weighted_residuals_kernel[(rows, blocks)](
                group, *teacher, alpha, top, shift, rows, vocabulary, FIELDS=fields, **settings
            )
        found = self.wrong_rows(group, here, products, full, project=self.projection, defer=False, shift=shift)
        found = {name: found[name] for name in ("eta", "gradient_norm", "token_loss")}
        self.record(here, alpha=alpha, field_energy=field_energy, **found)

    def wrong_rows(
        self,
        rows: Tensor,
        tokens: Tensor,
        products: Tensor,
        full: Tensor,
        *,
        project: bool,
        defer: bool,
        shift: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Statistics `[K]` of the rows `rows` `[K]` of `products`, which belong to `tokens` `[K]`, and gradients in their place.

        Args:
            project: contract the gradient onto the radius.
            defer: leave rows over the radius as they are.
            shift: `[K, V]`, log-ratio of the target to the full teacher, 0 at the student's top token; None is 0.
        """
        names = ("rho", "entropy", "energy", "chi", "kl", "eta", "gradient_norm", "token_loss")
        out = self.unknown(len(names), len(rows))
        wrong_rows_kernel[(len(rows),)](
            products,
            products.stride(0),
            rows,
            full,
            full.stride(0),
            self.floors(full, rows),
            shift,
            self.token_weights[tokens],
            out,
            len(rows),
            products.shape[-1],
            float(self.step_scale),
            PROJECT=project,
            DEFER=defer,
            DIFFERENTIATE=self.differentiate,
            STUDENT=head_settings(self.head),
            TEACHER=head_settings(self.teacher_head),
            **launch_settings(products),
        )
        return dict(zip(names, out, strict=True))

    def floors(self, products: Tensor, rows: Tensor | None = None) -> Tensor | None:
        """`[K]`, the logit at the floor on log-probabilities, of the rows `rows` of a teacher's products or of all; None: no floor."""
        if self.log_prob_floor is None:
            return None
        rows = torch.arange(len(products), device=products.device) if rows is None else rows
        floors = self.unknown(len(rows))
        if len(rows):
            floors_kernel[(len(rows),)](
                products,
                products.stride(0),
                rows,
                floors,
                products.shape[-1],
                float(self.log_prob_floor),
                TEACHER=head_settings(self.teacher_head),
                **launch_settings(products),
            )
        return floors


def known(*products: Tensor) -> bool:
    """Whether the kernels can read these products."""
    return all(x.dtype in KNOWN_DTYPES and x.stride(-1) == 1 for x in products)


def head_settings(head: Head) -> tuple[float, float, float]:
    """What `Head.logits` does to the products; a softcap of 0 is none."""
    return float(head.scale), float(head.softcap or 0.0), float(head.temperature)


def launch_settings(products: Tensor) -> dict[str, int]:
    return {"BLOCK": min(BLOCK, triton.next_power_of_2(products.shape[-1])), "num_warps": WARPS}


@triton.jit
def exp_less_tangent(x):
    """`exp(x) - 1 - x`, never negative, by its series near 0, where the sum would cancel."""
    series = 1.0 + x * (1.0 / 11)
    for k in tl.static_range(10, 2, -1):
        series = 1.0 + x * series * (1.0 / k)
    return tl.where(tl.abs(x) < 1, 0.5 * x * x * series, tl.exp(x) - 1 - x)


@triton.jit
def log1p(x):
    """`log(1 + x)` for `x >= 0`, to the relative precision of float32; `2 artanh(x / (2 + x))` up to 1."""
    s = x / (2 + x)
    series = s * s * (1.0 / 17) + 1.0 / 15
    for k in tl.static_range(13, 0, -2):
        series = s * s * series + 1.0 / k
    return tl.where(x < 1, 2 * s * series, tl.log(1 + x))


@triton.jit
def tanh(x):
    decay = -2 * tl.abs(x)
    decayed = tl.where(decay > -1, decay + exp_less_tangent(decay), tl.exp(decay) - 1)
    return tl.where(x < 0, decayed, -decayed) / (2 + decayed)


@triton.jit
def logits_of(products, HEAD: tl.constexpr):
    """What `Head.logits` makes of products, with a finite number for infinity. Comparisons let NaN through."""
    logits = products.to(tl.float32)
    if HEAD[0] != 1.0:
        logits = logits * HEAD[0]
    if HEAD[1] != 0.0:
        logits = HEAD[1] * tanh(logits / HEAD[1])
    if HEAD[2] != 1.0:
        logits = logits / HEAD[2]
    return tl.where(logits < FORBIDDEN, FORBIDDEN, logits)


@triton.jit
def slope_of(products, HEAD: tl.constexpr):
    """Derivative of the logits by the products."""
    slope = tl.full(products.shape, HEAD[0] / HEAD[2], tl.float32)
    if HEAD[1] != 0.0:
        decayed = tl.exp(-2 * tl.abs(products.to(tl.float32) * HEAD[0] / HEAD[1]))
        slope = slope * 4 * decayed / ((1 + decayed) * (1 + decayed))  # 1 - tanh^2
    return slope


@triton.jit
def load_logits(row, token, vocabulary, HEAD: tl.constexpr):
    """Logits of one block of a row."""
    inside = token < vocabulary
    return tl.where(inside, logits_of(tl.load(row + token, mask=inside, other=0.0), HEAD), BEYOND)


@triton.jit
def raised(logits, floor):
    return tl.where(logits < floor, floor, logits)


@triton.jit
def floor_at(floors, index):
    if floors is None:
        return BEYOND
    else:
        return tl.load(floors + index)


@triton.jit
def student_statistics(row, vocabulary, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """The top token, its logit, and the sums over all other tokens of `w = exp(logit - top logit)`, `w^2` and `w log w`."""
    highest, position = tl.full((BLOCK,), BEYOND, tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = load_logits(row, token, vocabulary, HEAD)
        position = tl.where(logits > highest, token, position)
        highest = tl.where(logits > highest, logits, highest)
    top_logit = tl.max(highest)
    top = tl.min(tl.where(highest == top_logit, position, vocabulary))
    rest = tl.zeros((BLOCK,), tl.float32)
    squares, moment = rest, rest
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        shifted = load_logits(row, token, vocabulary, HEAD) - top_logit
        weights = tl.where(token == top, 0.0, tl.exp(shifted))
        rest += weights
        squares += weights * weights
        moment += weights * shifted
    return top, top_logit, tl.sum(rest), tl.sum(squares), tl.sum(moment)


@triton.jit
def radius_and_entropy(rest, squares, moment, step_scale):
    total = 1 + rest
    others = rest / total
    fisher_trace = others / total + others - squares / (total * total)
    return tl.sqrt(fisher_trace) / step_scale, log1p(rest) - moment / total


@triton.jit
def contraction(norm, rho):
    return tl.where(norm > rho, rho / norm, 1.0)


@triton.jit
def probabilities_and_ratio(student, full, shift, token, anchor, vocabulary, STUDENT: tl.constexpr, TEACHER: tl.constexpr):
    """Of one block: the student's `p`, and its log-ratio to the target, 0 at the top token. Beyond the vocabulary both are 0.

    `anchor` holds the student's top logit, `p_top`, the log-ratio of the logits at the top token, and the floor of the teacher.
    """
    top_logit, p_top, top_ratio, floor = anchor
    logits = load_logits(student, token, vocabulary, STUDENT)
    ratio = logits - raised(load_logits(full, token, vocabulary, TEACHER), floor) - top_ratio
    if shift is not None:
        ratio -= tl.load(shift + token, mask=token < vocabulary, other=0.0)
    return p_top * tl.exp(logits - top_logit), tl.where(token < vocabulary, ratio, 0.0)


@triton.jit
def far_divergence(
    student, full, shift, anchor, mean, eta, vocabulary, STUDENT: tl.constexpr, TEACHER: tl.constexpr, BLOCK: tl.constexpr
):
    """`KL(p || q)` as `sum p log(p/q) - p + q`, for `log q = log p - x - log E_p[exp(-x)]` and `x = eta (ratio - mean)`, however large.

    No term is negative, and an error of the normaliser changes the sum in second order only.
    """
    top_logit, p_top, top_ratio, floor = anchor
    log_p_top = tl.log(p_top)
    highest = tl.full((BLOCK,), BEYOND, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p, ratio = probabilities_and_ratio(student, full, shift, token, anchor, vocabulary, STUDENT, TEACHER)
        log_p = load_logits(student, token, vocabulary, STUDENT) - top_logit + log_p_top
        highest = tl.maximum(highest, log_p - eta * (ratio - mean))
    highest_log_q = tl.max(highest)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p, ratio = probabilities_and_ratio(student, full, shift, token, anchor, vocabulary, STUDENT, TEACHER)
        log_p = load_logits(student, token, vocabulary, STUDENT) - top_logit + log_p_top
        weights += tl.exp(log_p - eta * (ratio - mean) - highest_log_q)
    normaliser = highest_log_q + tl.log(tl.sum(weights))
    divergence = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p, ratio = probabilities_and_ratio(student, full, shift, token, anchor, vocabulary, STUDENT, TEACHER)
        log_p = load_logits(student, token, vocabulary, STUDENT) - top_logit + log_p_top
        x = eta * (ratio - mean) + normaliser
        divergence += tl.where(x > -10, p * exp_less_tangent(-x), p * x - p + tl.exp(log_p - x))
    return tl.sum(divergence)


@triton.jit
def divergence_and_gradient(
    student,
    full,
    shift,
    anchor,
    mean,
    lowest,
    eta,
    factor,
    vocabulary,
    written,
    WRITE: tl.constexpr,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`KL(p || q)` for `q` proportional to `p exp(-eta (ratio - mean))`.

    `lowest` is the least ratio. With `WRITE`, `factor p (ratio - mean)`, carried back to the products, replaces the first `written`
    products of the student: all or none.
    """
    far = eta * (lowest - mean) < FAR
    distant = 0.0
    if far:
        distant = far_divergence(student, full, shift, anchor, mean, eta, vocabulary, STUDENT, TEACHER, BLOCK)
    near = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p, ratio = probabilities_and_ratio(student, full, shift, token, anchor, vocabulary, STUDENT, TEACHER)
        x = ratio - mean
        near += p * exp_less_tangent(-eta * x)
        if WRITE:
            inside = token < vocabulary
            gradient = factor * p * x * slope_of(tl.load(student + token, mask=inside, other=0.0), STUDENT)
            tl.store(student + token, gradient.to(student.dtype.element_ty), mask=token < written)
    return tl.where(far, distant, log1p(tl.sum(near)))


@triton.jit
def floors_kernel(products, stride, rows, floors, vocabulary, log_prob_floor, TEACHER: tl.constexpr, BLOCK: tl.constexpr):
    """Writes to `floors` `[K]` the logit below which a token of the row `rows[k]` has less than the least log-probability."""
    k = tl.program_id(0)
    row = products + tl.load(rows + k) * stride
    _, top_logit, rest, _, _ = student_statistics(row, vocabulary, TEACHER, BLOCK)
    tl.store(floors + k, top_logit + log1p(rest) + log_prob_floor)


@triton.jit
def correct_rows_kernel(
    products,
    stride,
    token_ids,
    token_weights,
    out,
    tokens,
    vocabulary,
    step_scale,
    DIFFERENTIATE: tl.constexpr,
    STUDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Correct branch (eq. fire_correct): statistics to `out` `[5, C]`, and the gradient in place of `products` `[C, V]`."""
    k = tl.program_id(0)
    row = products + k.to(tl.int64) * stride
    y = tl.load(token_ids + k)
    y_logit = logits_of(tl.load(row + y), STUDENT)  # read before anything is written
    top, top_logit, rest, squares, moment = student_statistics(row, vocabulary, STUDENT, BLOCK)
    rho, entropy = radius_and_entropy(rest, squares, moment, step_scale)
    # The mass and the squares of the other tokens than y. If y is not the top token, p_y is at most 1/2 and nothing cancels.
    total, y_weight = 1 + rest, tl.exp(y_logit - top_logit)
    others = tl.where(y == top, rest, total - y_weight) / total
    other_squares = tl.where(y == top, squares, 1 + squares - y_weight * y_weight) / (total * total)
    norm = tl.sqrt(others * others + other_squares)
    beta = contraction(norm, rho)
    tl.store(out + k, rho)
    tl.store(out + tokens + k, entropy)
    tl.store(out + 2 * tokens + k, beta)
    tl.store(out + 3 * tokens + k, beta * norm)
    tl.store(out + 4 * tokens + k, beta * (top_logit - y_logit + log1p(rest)))
    if DIFFERENTIATE:
        factor = beta * tl.load(token_weights + k)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            p = tl.exp(load_logits(row, token, vocabulary, STUDENT) - top_logit) / total
            slope = slope_of(tl.load(row + token, mask=token < vocabulary, other=0.0), STUDENT)
            gradient = factor * tl.where(token == y, -others, p) * slope
            tl.store(row + token, gradient.to(row.dtype.element_ty), mask=token < vocabulary)


@triton.jit
def wrong_rows_kernel(
    products,
    stride,
    rows,
    full,
    full_stride,
    floors,
    shift,
    token_weights,
    out,
    tokens,
    vocabulary,
    step_scale,
    PROJECT: tl.constexpr,
    DEFER: tl.constexpr,
    DIFFERENTIATE: tl.constexpr,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wrong branch, see `TritonFireHead.wrong_rows`: statistics to `out` `[8, K]`, and the gradient in place of `products`."""
    k = tl.program_id(0)
    index = tl.load(rows + k)
    student, teacher = products + index * stride, full + index * full_stride
    shift_row = shift
    if shift is not None:
        shift_row = shift + k.to(tl.int64) * vocabulary
    top, top_logit, rest, rest_squares, moment = student_statistics(student, vocabulary, STUDENT, BLOCK)
    rho, entropy = radius_and_entropy(rest, rest_squares, moment, step_scale)
    floor = floor_at(floors, k)
    top_ratio = top_logit - raised(logits_of(tl.load(teacher + top), TEACHER), floor)
    anchor = (top_logit, 1 / (1 + rest), top_ratio, floor)

    products_sum, least = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p, ratio = probabilities_and_ratio(student, teacher, shift_row, token, anchor, vocabulary, STUDENT, TEACHER)
        products_sum += p * ratio
        least = tl.minimum(least, ratio)
    mean, lowest = tl.sum(products_sum), tl.min(least)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p, ratio = probabilities_and_ratio(student, teacher, shift_row, token, anchor, vocabulary, STUDENT, TEACHER)
        gradient = p * (ratio - mean)
        squares += gradient * gradient
    energy = tl.sum(squares)

    norm = tl.sqrt(energy)
    chi = tl.where(energy > rho * rho, (energy - rho * rho) / energy, 0.0)
    eta = 1.0
    if PROJECT:
        eta = contraction(norm, rho)
    written = vocabulary
    if DEFER:
        written = tl.where(chi > 0, 0, vocabulary)
    factor = eta * tl.load(token_weights + k)
    kl = 0.0
    if PROJECT and shift is None:
        kl = divergence_and_gradient(
            student, teacher, shift_row, anchor, mean, lowest, 1.0, 0.0, vocabulary, 0, False, STUDENT, TEACHER, BLOCK
        )
    loss = divergence_and_gradient(
        student,
        teacher,
        shift_row,
        anchor,
        mean,
        lowest,
        eta,
        factor,
        vocabulary,
        written,
        DIFFERENTIATE,
        STUDENT,
        TEACHER,
        BLOCK,
    )
    if not PROJECT:
        kl = loss
    tl.store(out + k, rho)
    tl.store(out + tokens + k, entropy)
    tl.store(out + 2 * tokens + k, energy)
    tl.store(out + 3 * tokens + k, chi)
    tl.store(out + 4 * tokens + k, kl)
    tl.store(out + 5 * tokens + k, eta)
    tl.store(out + 6 * tokens + k, eta * norm)
    tl.store(out + 7 * tokens + k, loss)


@triton.jit
def residuals(full, view, token, full_floor, view_floor, top, vocabulary, TEACHER: tl.constexpr):
    """Of one block: log-ratio of a view without a field to the full view, 0 at the student's top token and beyond the vocabulary."""
    at_top = raised(logits_of(tl.load(view + top), TEACHER), view_floor)
    at_top -= raised(logits_of(tl.load(full + top), TEACHER), full_floor)
    view_logits = raised(load_logits(view, token, vocabulary, TEACHER), view_floor)
    full_logits = raised(load_logits(full, token, vocabulary, TEACHER), full_floor)
    return tl.where(token < vocabulary, view_logits - full_logits - at_top, 0.0)


@triton.jit
def field_energies_kernel(
    products,
    stride,
    rows,
    full,
    full_stride,
    full_floors,
    views,
    view_stride,
    view_floors,
    field_energy,
    tops,
    group,
    vocabulary,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes E_j to `field_energy` `[B, K]` and the student's top tokens to `tops` `[K]`, for the rows `rows` `[K]`, one per program.

    `views` `[B K, V]` are the teacher's products without field j.
    """
    k, j = tl.program_id(0), tl.program_id(1)
    index, position = tl.load(rows + k), j * group + k
    student, teacher, view = products + index * stride, full + index * full_stride, views + position.to(tl.int64) * view_stride
    top, top_logit, rest, _, _ = student_statistics(student, vocabulary, STUDENT, BLOCK)
    full_floor, view_floor = floor_at(full_floors, k), floor_at(view_floors, position)
    p_top = 1 / (1 + rest)
    products_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p = p_top * tl.exp(load_logits(student, token, vocabulary, STUDENT) - top_logit)
        products_sum += p * residuals(teacher, view, token, full_floor, view_floor, top, vocabulary, TEACHER)
    mean = tl.sum(products_sum)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        p = p_top * tl.exp(load_logits(student, token, vocabulary, STUDENT) - top_logit)
        change = p * (residuals(teacher, view, token, full_floor, view_floor, top, vocabulary, TEACHER) - mean)
        squares += change * change
    tl.store(field_energy + position, tl.sum(squares))
    tl.store(tops + k, top)


@triton.jit
def weighted_residuals_kernel(
    rows,
    full,
    full_stride,
    full_floors,
    views,
    view_stride,
    view_floors,
    alpha,
    tops,
    shift,
    group,
    vocabulary,
    FIELDS: tl.constexpr,
    TEACHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes `sum_j alpha_j r_j` to `shift` `[K, V]` for `r_j = log q_-j - log q_c`, 0 at the top token; `alpha` is `[B+1, K]`."""
    k = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top, teacher, full_floor = tl.load(tops + k), full + tl.load(rows + k) * full_stride, floor_at(full_floors, k)
    mixture = tl.zeros((BLOCK,), tl.float32)
    for j in range(FIELDS):
        position = j * group + k
        view, view_floor = views + position.to(tl.int64) * view_stride, floor_at(view_floors, position)
        residual = residuals(teacher, view, token, full_floor, view_floor, top, vocabulary, TEACHER)
        mixture += tl.load(alpha + position + group) * residual
    tl.store(shift + k.to(tl.int64) * vocabulary + token, mixture, mask=token < vocabulary)
