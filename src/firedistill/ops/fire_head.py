"""FIRE from hidden states to the loss and its exact gradient, without building a target (eqs. fire_radius to fire_objective).

`firedistill.objectives.fire` states the method. This module arranges the same arithmetic for speed, in two passes:

    first = first_pass(head, student_hidden, token_weights, ..., teacher_hidden=full)
    views = ...                          # the teacher's states without field j at the tokens `first.over`, [B, K, H]
    output = first.attribute(views)      # the loss and the diagnostics

- The first pass finishes every token that needs no view without a field: all tokens of correct responses, and those of wrong
  responses where the full teacher stays inside the radius. Views without a field matter nowhere else.
- No target is built. The logit gradient of a target is affine in its log-probabilities (eq. app_gradient_average), so the log-ratio
  of `q_A` to the student is that of the full teacher minus a weighted sum of residuals between teacher views, and the gradient of
  the loss is `eta p (d_A - E_p[d_A])`. The views are added to that sum one after the other.
- Matrix products with the head take many tokens at once. On a CPU, distributions are formed for a few tokens at a time, which then
  stay in the cache; a GPU forms those of all of them by kernels that `torch.compile` makes. The gradient overwrites the logits it
  belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from firedistill.memory import is_out_of_memory
from firedistill.models.attention import has_bfloat16
from firedistill.ops.head import Head, float32_sums, with_gradients

logger = logging.getLogger(__name__)

# Tokens projected at once, in the head's dtype: as many as have this number of logits, but not fewer than CHUNK_TOKENS, because every
# projection reads the whole head. At most three such buffers exist (student, full teacher, other views), four where the views are
# copied (`attribute_tokens`).
CHUNK_ELEMENTS = 2**23
CHUNK_ELEMENTS_GPU = 2**27
CHUNK_TOKENS = 220
# Logits turned into distributions at once: on a CPU 4 MiB in float32, so that a handful of such tensors stay in the cache. Compiled
# functions take up to CHUNK_ELEMENTS_GPU, and with them all logits of a projection unless a larger chunk is asked for.
BLOCK_ELEMENTS = 2**20
BLOCK_ELEMENTS_GPU = 2**24

# Where functions on rows are compiled, by which backend of `torch.compile`, and how often one is at most, for other settings or sizes
COMPILED_DEVICES, COMPILER, COMPILATIONS = {"cuda"}, "inductor", 64

FAR = 60.0  # exponents up to which exponentials and their sums over a vocabulary are far from an overflow in float32

# Stands in for an infinite logit. Its square, summed over a vocabulary, is finite.
LARGEST_LOGIT = {torch.float32: 1e15, torch.float64: 1e100}


@dataclass
class FireHeadOutput:
    """The loss and the diagnostics of every token. All but `loss` are detached; NaN marks undefined values.

    Attributes:
        loss: scalar, `sum_t w_t token_loss_t`, differentiable.
        token_loss: `[M]`, `-beta log p(y)` at tokens of correct responses, `KL(p || q_FIRE)` at the others.
        rho: `[M]`, the radius (eq. fire_radius).
        gradient_norm: `[M]`, norm of the logit gradient of `token_loss`; at most rho up to rounding if `projection` and
            `bounded_sft` are on.
        entropy: `[M]`, of the student, in nats.
        beta: `[M]`, weight of the correct branch (eq. fire_correct), 1 without `bounded_sft`; NaN at tokens of wrong responses.
        energy, chi, eta, kl: `[M]`, E_c, the gate, the contraction and `KL(p || q_c)`; NaN at tokens of correct responses.
        alpha: `[B+1, M]`, weight of the full teacher, then of the teacher without field j; NaN at tokens of correct responses.
        field_energy: `[B, M]`, E_j; NaN where the views without a field were not read. B is 0 if they were not needed anywhere.
    """

    loss: Tensor
    token_loss: Tensor
    rho: Tensor
    gradient_norm: Tensor
    entropy: Tensor
    beta: Tensor
    energy: Tensor
    chi: Tensor
    eta: Tensor
    kl: Tensor
    alpha: Tensor
    field_energy: Tensor


def fire_head_loss(
    head: Head | Tensor,
    hidden: Tensor,
    token_weights: Tensor,
    *,
    loo_hidden: Tensor | None = None,
    attribution: bool = True,
    **settings: Any,
) -> FireHeadOutput:
    """Both branches of FIRE on M response tokens (eqs. fire_radius to fire_objective), with memory that does not grow with M.

    `first_pass` does the same when the views without a field are to be computed only where they are needed.

    Args:
        loo_hidden: `[B, W, H]`, the teacher's states without field j, in the order of `teacher_hidden`. A response with fewer than B
            fields repeats its states of the full view, whose energy is 0. None without attribution.
        head, hidden, token_weights: as in `first_pass`: `[V, H]`, `[M, H]`, `[M]`.
        settings: further arguments of `first_pass`; `token_ids`, `correct` (`[M]`) and `teacher_hidden` (`[W, H]`) are required.

    Returns:
        The loss, in float32 (float64 for float64 states), with its exact gradient for `hidden` and for what is trained of the
        head, and the diagnostics.

    Raises:
        ValueError: attribution without `loo_hidden`, a step scale below 1, or shapes that do not fit.
    """
    if attribution and loo_hidden is None:
        raise ValueError("fire_head_loss with attribution=True needs loo_hidden; pass attribution=False to go without")
    views = loo_hidden if attribution else None
    return first_pass(head, hidden, token_weights, attribution=attribution, loo_hidden=views, **settings).output()


def default_chunk(vocabulary_size: int, gpu: bool) -> int:
    """Tokens that are projected at once."""
    return max(CHUNK_TOKENS, (CHUNK_ELEMENTS_GPU if gpu else CHUNK_ELEMENTS) // vocabulary_size)


def first_pass(
    head: Head | Tensor,
    hidden: Tensor,
    token_weights: Tensor,
    *,
    token_ids: Tensor,
    correct: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Head | Tensor | None = None,
    step_scale: float = 1.0,
    log_prob_floor: float | None = None,
    attribution: bool = True,
    projection: bool = True,
    bounded_sft: bool = True,
    chunk_size: int | None = None,
    loo_hidden: Tensor | None = None,
) -> FirstPass:
    """The correct branch, and the incorrect branch as far as the full teacher alone decides it.

    Args:
        head: the student's, or an output embedding `[V, H]`.
        hidden: `[M, H]`, the student's last hidden states at the positions that predict the response tokens, in the head's dtype.
        token_weights: `[M]`, factors of the token losses, such as `1 / (N M_i)`.
        token_ids: `[M]`, the sampled tokens; used at tokens of correct responses.
        correct: `[M]`, bool, whether the token belongs to a correct response.
        teacher_hidden: `[W, H]`, the EMA teacher's states with all feedback at the W tokens of wrong responses, in their order.
        teacher_head: the teacher's, if it is not the student's.
        step_scale: `s = max(1, a_k / a_0)`.
        log_prob_floor: natural-log floor on normalized teacher log-probabilities; None disables it.
        attribution: False gives the ablation No Attribution (the full teacher, then the projection).
        projection: False gives the ablation No Projection (q_A itself; the gate still uses rho).
        bounded_sft: False gives the tokens of correct responses the weight 1 instead of beta.
        chunk_size: tokens projected at once; by default as many as have 2^23 logits, 2^27 on a GPU, and at least 220. Sets the peak
            memory.
        loo_hidden: `[B, W, H]` if the views without a field are known already: no token waits for `attribute` then, and none is
            projected twice.

    Raises:
        ValueError: a step scale below 1, or shapes that do not fit.
    """
    if step_scale < 1:
        raise ValueError(f"step_scale is {step_scale}; it is max(1, a_k / a_0), at least 1")
    if correct.dtype != torch.bool or not len(hidden) == len(token_weights) == len(token_ids) == len(correct):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, token_weights {tuple(token_weights.shape)}, token_ids {tuple(token_ids.shape)} and "
            f"correct {tuple(correct.shape)} ({correct.dtype}) do not fit: expected [M, H], [M], [M] and [M] (torch.bool)"
        )
    head = head if isinstance(head, Head) else Head.of_weight(head)
    if teacher_head is not None and not isinstance(teacher_head, Head):
        teacher_head = Head.of_weight(teacher_head)
    if loo_hidden is not None and loo_hidden.shape[1:] != teacher_hidden.shape:
        raise ValueError(
            f"loo_hidden {tuple(loo_hidden.shape)} and teacher_hidden {tuple(teacher_hidden.shape)} do not fit: "
            "expected [B, W, H] and [W, H]"
        )
    wrong = (~correct).nonzero().flatten()
    if len(wrong) != len(teacher_hidden):
        raise ValueError(
            f"{len(wrong)} tokens belong to wrong responses, but teacher_hidden {tuple(teacher_hidden.shape)} has {len(teacher_hidden)}"
        )
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or bool(head.trained))
    state = FirstPass(
        rule=Rule(head, teacher_head or head, log_prob_floor, attribution, projection, bounded_sft, differentiate, step_scale),
        hidden=hidden,
        token_weights=token_weights.detach().to(torch.promote_types(hidden.dtype, torch.float32)),
        wrong=wrong,
        teacher_hidden=teacher_hidden,
        chunk_size=chunk_size or default_chunk(head.vocabulary_size, hidden.is_cuda),
        block_size=max(1, (BLOCK_ELEMENTS_GPU if hidden.is_cuda else BLOCK_ELEMENTS) // head.vocabulary_size),
    )
    with torch.no_grad(), float32_sums(), torch.cuda.device_of(hidden):
        state.correct_branch(correct.nonzero().flatten(), token_ids)
        state.incorrect_branch(loo_hidden)
    return state


@dataclass
class FirstPass:
    """What the first pass has computed. `attribute` adds the tokens `over`, if there are any, and returns the output.

    Attributes:
        wrong: `[W]`, the tokens of wrong responses, as indices into the M tokens.
        over: `[K]`, ascending indices into these W tokens: where the full teacher violates the radius. Empty without attribution.
    """

    rule: Rule
    hidden: Tensor
    token_weights: Tensor
    wrong: Tensor
    teacher_hidden: Tensor
    chunk_size: int
    block_size: int

    def __post_init__(self) -> None:
        self.dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        names = ("token_loss", "rho", "gradient_norm", "entropy", "beta", "energy", "chi", "eta", "kl")
        self.statistics = {name: self.undefined(len(self.hidden)) for name in names}
        self.allocate_attribution(0)
        self.trained = self.rule.head.trained
        self.hidden_gradient = torch.zeros_like(self.hidden)
        self.head_gradients = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in self.trained]
        self.over = self.wrong[:0]
        self.waiting = False

    def output(self) -> FireHeadOutput:
        """The loss and the diagnostics.

        Raises:
            RuntimeError: the tokens `over` wait for `attribute`.
        """
        if self.waiting:
            raise RuntimeError(f"{len(self.over)} tokens are over the radius: call attribute(loo_hidden)")
        loss = (self.token_weights * self.statistics["token_loss"]).sum()
        if self.rule.differentiate:
            loss = with_gradients(loss, [self.hidden, *self.trained], [self.hidden_gradient, *self.head_gradients])
        return FireHeadOutput(loss, **self.statistics)

    def attribute(self, loo_hidden: Tensor) -> FireHeadOutput:
        """Leave-one-field-out attribution at the tokens `over`, which are projected a second time.

        Args:
            loo_hidden: `[B, K, H]`, the teacher's states without field j at the tokens `over`.

        Raises:
            ValueError: `loo_hidden` is for another number of tokens.
            RuntimeError: the tokens were attributed already.
        """
        if len(self.over) and not self.waiting:
            raise RuntimeError("the tokens over the radius are attributed already")
        if loo_hidden.shape[1] != len(self.over):
            raise ValueError(f"loo_hidden {tuple(loo_hidden.shape)} does not fit {len(self.over)} tokens over the radius")
        self.allocate_attribution(len(loo_hidden))
        tokens = self.wrong[self.over]
        with torch.no_grad(), float32_sums(), torch.cuda.device_of(self.hidden):
            for part, products in self.projected(tokens):
                full = self.rule.teacher_head.project(self.teacher_hidden[self.over[part]])
                every = torch.arange(len(products), device=products.device)
                self.attribute_tokens(tokens[part], products, full, every, loo_hidden[:, part])
        self.waiting = False
        return self.output()

    # ---- The branches ------------------------------------------------------------------------------------------------------------

    def correct_branch(self, tokens: Tensor, token_ids: Tensor) -> None:
        """Fisher-weighted on-policy SFT (eq. fire_correct)."""
        for part, products in self.projected(tokens):
            for rows in self.blocks(products):
                here = tokens[part][rows]
                self.finish(correct_rows, here, products, rows, token_ids[here].unsqueeze(-1), self.token_weights[here])

    def incorrect_branch(self, loo_hidden: Tensor | None) -> None:
        """What the full teacher alone decides (eqs. fire_gradient_energies, fire_evidence); finds the tokens `over`."""
        if loo_hidden is not None:
            self.allocate_attribution(len(loo_hidden))
        over = [self.over]
        for part, products in self.projected(self.wrong):
            full = self.rule.teacher_head.project(self.teacher_hidden[part])
            outside = self.full_teacher(self.wrong[part], products, full)
            if loo_hidden is not None:
                self.attribute_tokens(self.wrong[part], products, full, outside, loo_hidden[:, part][:, outside])
            else:
                products.index_fill_(0, outside, 0.0)  # no gradient yet
            over.append(outside + part.start)
        self.over = torch.cat(over)
        self.waiting = loo_hidden is None and len(self.over) > 0

    def full_teacher(self, tokens: Tensor, products: Tensor, full: Tensor) -> Tensor:
        """Finish the tokens that need no other view; returns the positions of those that do.

        `products` and `full` are the student's and the teacher's `[C, V]` products at the C tokens `tokens`.
        """
        not_done = []
        for rows in self.blocks(products):
            here = tokens[rows]
            not_done.append(self.finish(full_teacher_rows, here, products, rows, full[rows], self.token_weights[here]))
        return torch.cat(not_done).nonzero().flatten()  # once per chunk: the host waits for it

    def attribute_tokens(self, tokens: Tensor, products: Tensor, full: Tensor, over: Tensor, loo_hidden: Tensor) -> None:
        """Attribution, then projection, at the K positions `over` (eqs. fire_attribution_weights to fire_final_target).

        `products` and `full` are the student's and the teacher's `[C, V]` products at the C tokens `tokens`; `loo_hidden` is
        `[B, K, H]`. The views are projected for `chunk_size / B` tokens at a time. Functions are compiled for 1, 2, 4, ... views only:
        the views are padded to such a number with the full view, whose residual and energy are 0.
        """
        fields = len(loo_hidden)
        more = 2 ** max(0, fields - 1).bit_length() - fields if is_compiled(products.device, self.hidden.dtype) else 0
        group_size = max(1, self.chunk_size // max(1, fields + more))
        for start in range(0, len(over), group_size):
            group, states = over[start : start + group_size], loo_hidden[:, start : start + group_size]
            views = self.rule.teacher_head.project(states.flatten(0, 1)).view(fields, len(group), products.shape[-1])
            for block in self.blocks(group):
                rows, here = group[block], tokens[group[block]]
                of_full, every = full[rows], views[:, block]
                if more:
                    every = torch.cat([every, of_full.expand(more, *of_full.shape)])
                inputs = of_full, every, self.statistics["chi"][here], self.token_weights[here]
                self.finish(attributed_rows, here, products, rows, *inputs)

    def finish(
        self, function: Callable[..., Found], tokens: Tensor, products: Tensor, rows: Tensor | slice, *more: Tensor
    ) -> Tensor:
        """Record the statistics of these tokens, and overwrite their products with the gradient of the loss.

        Both are what `function` finds in the rows `rows` of `products` and in `more`. Returns which rows are not done.
        """
        found = self.on_rows(function, products[rows], *more)
        for name, value in found.statistics.items():
            self.statistics[name][..., tokens] = value[: len(self.statistics[name])]  # without the views that were added
        if found.gradient is not None:
            products[rows] = found.gradient
        return found.not_done

    # ---- Products, distributions, statistics ---------------------------------------------------------------------------------------

    def projected(self, tokens: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Project the student's states at these tokens in chunks: the slice of `tokens`, and their `[C, V]` products with the head.

        The caller overwrites the products with the gradient of the loss, which is then carried back through the head.
        """
        for start in range(0, len(tokens), self.chunk_size):
            part = slice(start, min(start + self.chunk_size, len(tokens)))
            with torch.set_grad_enabled(self.rule.differentiate):
                states = self.hidden[tokens[part]].detach().requires_grad_(self.rule.differentiate)
                products = self.rule.head.project(states)
            yield part, products.detach()
            if self.rule.differentiate:
                gradients = torch.autograd.grad(products, [states, *self.trained], products.detach())
                self.hidden_gradient[tokens[part]] = gradients[0]
                for accumulated, gradient in zip(self.head_gradients, gradients[1:], strict=True):
                    accumulated += gradient

    def blocks(self, rows: Tensor) -> list[Tensor | slice]:
        """Positions of a few rows at a time; of more where the functions on them are compiled."""
        if is_compiled(rows.device, self.hidden.dtype):
            size = self.compiled_size
            return [slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
        return [*torch.arange(len(rows), device=rows.device).split(self.block_size)]

    def on_rows(self, function: Callable[..., Found], *inputs: Tensor) -> Found:
        """The function of `rule` and of these tensors, compiled or in blocks. A single row would be compiled on its own."""
        if len(inputs[0]) > 1 and is_compiled(self.hidden.device, self.hidden.dtype):
            # A number would be compiled into the function. The device fills the tensor, so that the host does not wait for a copy.
            scale = torch.full((), cast(float, self.rule.step_scale), dtype=self.dtype, device=self.hidden.device)
            rule = self.rule._replace(step_scale=scale)
            try:
                with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
                    return compiled(function, COMPILER)(rule, *with_any_rows(inputs, self.compiled_size))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                logger.warning("the head runs without torch.compile: %s", cause)
                COMPILED_DEVICES.discard(self.hidden.device.type)
        parts = [tensor.split(self.block_size, dim_of_rows(tensor)) for tensor in inputs]
        return Found.concatenate([function(self.rule, *part) for part in zip(*parts, strict=True)])

    @property
    def compiled_size(self) -> int:
        """Rows that a compiled function takes at once, as many as a chunk has by default; a single one would be a case of its own."""
        return max(2, CHUNK_ELEMENTS_GPU // self.rule.head.vocabulary_size)

    def allocate_attribution(self, fields: int) -> None:
        """All weight on the full teacher until the views are read."""
        alpha, self.statistics["field_energy"] = (self.undefined(n, len(self.hidden)) for n in (fields + 1, fields))
        alpha[0].index_fill_(0, self.wrong, 1.0)  # an assignment would copy the number to the device, and wait
        alpha[1:].index_fill_(1, self.wrong, 0.0)
        self.statistics["alpha"] = alpha

    def undefined(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.hidden.device)


# ---- Functions on rows -----------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What all rows have in common; as in `first_pass`."""

    head: Head
    teacher_head: Head
    log_prob_floor: float | None
    attribution: bool
    projection: bool
    bounded_sft: bool
    differentiate: bool
    step_scale: float | Tensor

    def student(self, products: Tensor) -> StudentDistributions:
        return StudentDistributions(self.head.logits(products), self.step_scale)

    def teacher_logits(self, products: Tensor, dtype: torch.dtype) -> Tensor:
        """`[C, V]` finite logits, raised to the floor on log-probabilities."""
        logits = finite(self.teacher_head.logits(products).to(dtype))
        if self.log_prob_floor is None:
            return logits
        return torch.maximum(logits, logits.logsumexp(-1, keepdim=True) + self.log_prob_floor)

    def gradient(self, products: Tensor, gradient: Tensor, factors: Tensor) -> Tensor | None:
        """The gradient for the products, from that for the logits, which is overwritten, and the factors `[C]` of its rows."""
        if not self.differentiate:
            return None
        gradient *= factors.unsqueeze(-1)
        return self.head.logits_backward(products, gradient)


class Found(NamedTuple):
    """Of C rows.

    Attributes:
        statistics: as in `FireHeadOutput`.
        gradient: `[C, V]`, of the weighted token losses for the products; None if nothing is differentiated.
        not_done: `[C]`, whether a row waits for the views without a field; its `gradient` are the products.
    """

    statistics: dict[str, Tensor]
    gradient: Tensor | None
    not_done: Tensor

    @staticmethod
    def concatenate(found: Sequence[Found]) -> Found:
        if len(found) == 1:
            return found[0]
        statistics = {name: torch.cat([part.statistics[name] for part in found], -1) for name in found[0].statistics}
        gradients = [part.gradient for part in found if part.gradient is not None]
        return Found(statistics, torch.cat(gradients) if gradients else None, torch.cat([part.not_done for part in found]))


def correct_rows(rule: Rule, products: Tensor, token_ids: Tensor, weights: Tensor) -> Found:
    """Tokens `token_ids` `[C, 1]` of correct responses, from products `[C, V]` and token weights `[C]`."""
    student = rule.student(products)
    log_p_y = student.log_p(token_ids).squeeze(-1)
    gradient = put(student.p, token_ids, torch.zeros_like(log_p_y).unsqueeze(-1))
    gradient = put(gradient, token_ids, -gradient.sum(-1, keepdim=True))  # 1 - p_y is the sum of the others
    norm = gradient.square().sum(-1).sqrt()
    beta = contraction(norm, student.rho) if rule.bounded_sft else torch.ones_like(norm)
    statistics = {"rho": student.rho, "entropy": student.entropy, "beta": beta}
    statistics |= {"token_loss": -beta * log_p_y, "gradient_norm": beta * norm}
    return Found(statistics, rule.gradient(products, gradient, beta * weights), torch.zeros_like(norm, dtype=torch.bool))


def full_teacher_rows(rule: Rule, products: Tensor, full: Tensor, weights: Tensor) -> Found:
    """Tokens of wrong responses, from the products `[C, V]` of student and full teacher, and token weights `[C]`."""
    student = rule.student(products)
    log_q_c = rule.teacher_logits(full, student.logits.dtype)
    ratio = student.centred_ratio(student.logits, log_q_c)
    gradient = student.p * ratio
    energy = gradient.square().sum(-1)
    outside = energy > student.rho.square()
    chi = ((energy - student.rho.square()) / energy).where(outside, 0.0)
    eta, norm = torch.ones_like(energy), energy.sqrt()
    loss = kl = student.divergence(ratio, eta, log_q_c)
    if rule.projection and not rule.attribution:
        eta = contraction(norm, student.rho)
        loss = student.divergence(ratio, eta, log_q_c)
    statistics = {"rho": student.rho, "entropy": student.entropy, "energy": energy, "chi": chi, "kl": kl, "eta": eta}
    statistics |= {"token_loss": loss, "gradient_norm": eta * norm}
    done = ~outside if rule.attribution else torch.ones_like(outside)
    found = rule.gradient(products, gradient, eta * weights)
    return Found(statistics, None if found is None else torch.where(done.unsqueeze(-1), found, products), ~done)


def attributed_rows(rule: Rule, products: Tensor, full: Tensor, views: Tensor, chi: Tensor, weights: Tensor) -> Found:
    """Tokens over the radius, from the products `[C, V]` of student and full teacher, those without a field `[B, C, V]`, the gate and
    token weights `[C]`."""
    student = rule.student(products)
    log_q_c = rule.teacher_logits(full, student.logits.dtype)
    # log q_A = log q_c + sum_j alpha_j r_j up to a constant, r_j = log q_-j - log q_c (eq. app_field_contrast). The weights share the
    # denominator Z, so that views are read one at a time. Where Z = 0, alpha_0 = 1.
    shift = torch.zeros_like(log_q_c)
    evidence = [student.rho.square().clamp(min=torch.finfo(log_q_c.dtype).tiny)]
    energies = []
    for view in views:
        residual = student.centred_ratio(rule.teacher_logits(view, log_q_c.dtype), log_q_c)
        energies.append((student.p * residual).square_().sum(-1))
        evidence.append(chi * energies[-1])
        shift.addcmul_(evidence[-1].unsqueeze(-1), residual)
    total = cast(Tensor, sum(evidence))
    shift /= total.unsqueeze(-1)
    ratio = student.centred_ratio(student.logits, log_q_c).sub_(shift)
    gradient = student.p * ratio
    norm = gradient.square().sum(-1).sqrt()
    eta = contraction(norm, student.rho) if rule.projection else torch.ones_like(norm)
    loss = student.divergence(ratio, eta, log_q_c.add_(shift))
    statistics = {"eta": eta, "alpha": torch.stack(evidence) / total, "token_loss": loss, "gradient_norm": eta * norm}
    statistics |= {"field_energy": torch.stack(energies)} if energies else {}
    return Found(statistics, rule.gradient(products, gradient, eta * weights), torch.zeros_like(norm, dtype=torch.bool))


def is_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether functions on rows are compiled for hidden states of this type.

    Compiled reductions may depend on the number of rows that comes first, which is not the same in a resumed run, so that
    deterministic runs do without. Nothing is compiled under a dispatch mode such as `FlopCounterMode`, with `TORCH_COMPILE_DISABLE`,
    in float64, and in bfloat16 on GPUs that emulate it: PyTorch would run the function as it is there, on as many rows as a compiled
    one takes.
    """
    if torch.are_deterministic_algorithms_enabled() or torch._C._len_torch_dispatch_stack() or torch._dynamo.config.disable:
        return False
    emulated = dtype == torch.bfloat16 and not has_bfloat16(device)
    return device.type in COMPILED_DEVICES and dtype != torch.float64 and not emulated


@cache
def compiled(function: Callable[..., Found], backend: str) -> Callable[..., Found]:
    return torch.compile(function, backend=backend, fullgraph=True)


def with_any_rows(tensors: tuple[Tensor, ...], usual: int) -> tuple[Tensor, ...]:
    """Let a compiled function take these tensors with any number of rows, by kernels for the `usual` one: without that, they depend on
    the number that came first, also in an earlier process, whose kernels are kept on the disk. It is compiled again for another
    vocabulary or number of views: sums over a size that is known are faster."""
    tensors = tuple(tensor.data for tensor in tensors)  # otherwise also for a slice of another tensor
    for tensor in tensors:
        rows = dim_of_rows(tensor)
        if hints_are_known():
            torch._dynamo.mark_dynamic(tensor, rows, hint_override=usual)
        else:
            torch._dynamo.maybe_mark_dynamic(tensor, rows)
        torch._dynamo.mark_static(tensor, [dim for dim in range(tensor.dim()) if dim != rows])
    return tensors


@cache
def hints_are_known() -> bool:
    """Whether this PyTorch lets a dynamic size have a hint."""
    return "hint_override" in signature(torch._dynamo.mark_dynamic).parameters


def dim_of_rows(tensor: Tensor) -> int:
    """That of C in `[C]`, `[C, V]` or `[B, C, V]`."""
    return max(0, tensor.dim() - 2)


def put(values: Tensor, index: Tensor, replacement: Tensor) -> Tensor:
    """`values` `[C, V]` with `replacement` `[C, 1]` at `index` `[C, 1]`; overwrites them, except where this is compiled."""
    if not torch.compiler.is_compiling():
        return values.scatter_(-1, index, replacement)
    return torch.where(torch.arange(values.shape[-1], device=values.device) == index, replacement, values)


class StudentDistributions:
    """The student's distributions at a few tokens, and the quantities measured with them.

    As in `firedistill.objectives.distributions`, `1 - p_top` is the sum of the other probabilities, never a subtraction, and
    log-ratios are shifted to be exactly 0 at the most likely token.
    """

    def __init__(self, logits: Tensor, step_scale: float | Tensor):
        self.logits = finite(logits)
        top_logit, self.top = self.logits.max(-1, keepdim=True)
        self.shifted = self.logits - top_logit
        weights = put(self.shifted.exp(), self.top, torch.zeros_like(top_logit))
        rest = weights.sum(-1, keepdim=True)
        self.log_normalizer = rest.log1p()
        p = weights.div_(1 + rest)
        p_top, others = 1 / (1 + rest), rest / (1 + rest)
        fisher_trace = (p_top * others + others).squeeze(-1) - p.square().sum(-1)
        self.rho = fisher_trace.sqrt() / step_scale
        self.p = put(p, self.top, p_top)
        self.entropy = self.log_normalizer.squeeze(-1) - (self.p * self.shifted).sum(-1)

    def log_p(self, token_ids: Tensor) -> Tensor:
        """`[C, 1]` log-probabilities of tokens."""
        return self.shifted.gather(-1, token_ids) - self.log_normalizer

    def centred_ratio(self, a: Tensor, b: Tensor) -> Tensor:
        """`d - E_p[d]`, `[C, V]`, for the log-ratio `d` of two distributions given by logits; times p it is eq. app_gradient.

        The difference of close logits is exact, so it is computed first.
        """
        ratio = (a - b).sub_(a.gather(-1, self.top) - b.gather(-1, self.top))
        return ratio.sub_((self.p * ratio).sum(-1, keepdim=True))

    def divergence(self, ratio: Tensor, eta: Tensor, target: Tensor) -> Tensor:
        """`KL(p || q)` `[C]` for `q` proportional to `p^(1-eta) exp(eta target)`; `ratio` is the centred log-ratio to the target.

        With `x = eta ratio`, whose mean under p is 0, it is `log E_p[exp(-x)] = log(1 + E_p[exp(-x) - 1 + x])`: no term of the
        sum is negative, so that nothing cancels. Where exp(-x) may overflow, `p exp(-x)` is the exponential of its logarithm, and
        where the sum may, it is that of ratios to its largest term.
        """
        x = eta.unsqueeze(-1) * ratio
        terms = torch.expm1(-x).add_(x).mul_(self.p)
        # The shorter way to the same bits. Compiled code has no branch for it, and a single row, which is never compiled, does not
        # make the host wait.
        if not torch.compiler.is_compiling() and len(x) > 1 and x.amin() >= -FAR:
            return terms.sum(-1).log1p()
        weight, log_p = eta.unsqueeze(-1), self.shifted - self.log_normalizer
        constant = log_p.gather(-1, self.top) - target.gather(-1, self.top) - ratio.gather(-1, self.top)
        log_products = (1 - weight) * log_p + weight * (target + constant)  # log p - x would cancel where p is tiny
        largest = log_products.amax(-1, keepdim=True)
        shift = largest.where(largest > FAR, 0.0)
        products = (log_products - shift).exp()
        total = torch.where(x < -FAR, products + self.p * (x - 1), terms).sum(-1)
        return torch.where(largest.squeeze(-1) > FAR, shift.squeeze(-1) + products.sum(-1).log(), total.log1p())


def contraction(gradient_norm: Tensor, rho: Tensor) -> Tensor:
    """`min(1, rho / ||g||)`, 1 for a gradient of 0 (eqs. fire_contraction_coefficient, fire_correct)."""
    return (rho / gradient_norm).where(gradient_norm > rho, 1.0)


def finite(logits: Tensor) -> Tensor:
    """Minus infinity replaced by a logit so low that its probability is 0 all the same, in place except where this is compiled."""
    least = -LARGEST_LOGIT[logits.dtype]
    return logits.clamp(min=least) if torch.compiler.is_compiling() else logits.clamp_(min=least)
