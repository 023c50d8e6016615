"""`fire_head_loss` against its plain twin: all logits at once, the target of `fire_target`, plain autograd."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firedistill.functional import entropy, fire_target, fisher_radius, induced_gradient, reverse_kl, sft_weight
from firedistill.objectives.distributions import log_softmax
from firedistill.ops import Head, fire_head, fire_head_loss, first_pass
from firedistill.ops.head import float32_sums

H = 8


@dataclass
class Case:
    """Inputs of the op. States and weights are multiples of 1/64, so that their products are the same in float32 and float64."""

    weight: torch.Tensor
    hidden: torch.Tensor
    token_weights: torch.Tensor
    token_ids: torch.Tensor
    correct: torch.Tensor
    teacher_hidden: torch.Tensor
    loo_hidden: torch.Tensor
    bias: torch.Tensor | None = None
    teacher_weight: torch.Tensor | None = None
    teacher_bias: torch.Tensor | None = None
    head_settings: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> Case:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: x.to(dtype) for name, x in tensors.items() if x.is_floating_point()})

    def heads(self, trained: bool = False) -> tuple[Head, Head]:
        """The student's and the teacher's."""
        projection = torch.nn.Linear(H, len(self.weight), bias=self.bias is not None, dtype=self.weight.dtype)
        projection.weight.data = self.weight.clone()
        if self.bias is not None:
            projection.bias.data = self.bias.clone()
        head = Head(projection.requires_grad_(trained), **self.head_settings)
        teacher = {"weight": self.teacher_weight, "bias": self.teacher_bias}
        override = dict(projection.named_parameters()) | {name: x for name, x in teacher.items() if x is not None}
        override = {name: x.detach() for name, x in override.items()}
        return head, Head(projection, override=override, **self.head_settings)

    @property
    def data(self) -> dict:
        """Tokens, verdicts and the states of the full view, as keyword arguments."""
        return dict(token_ids=self.token_ids, correct=self.correct, teacher_hidden=self.teacher_hidden)

    def fused(self, trained=False, factor=1.0, two_passes=False, **more):
        """Output and gradients of the op: in one call, or in two passes with the views only at the tokens over the radius."""
        hidden = self.hidden.clone().requires_grad_()
        head, teacher_head = self.heads(trained)
        inputs = (head, hidden, self.token_weights)
        settings = self.data | dict(teacher_head=teacher_head) | self.settings | more
        if two_passes:
            first = first_pass(*inputs, **settings)
            output = first.attribute(self.loo_hidden[:, first.over]) if len(first.over) else first.output()
        else:
            output = fire_head_loss(*inputs, loo_hidden=self.loo_hidden, **settings)
        (factor * output.loss).backward()
        return output, [hidden.grad, *(p.grad for p in head.projection.parameters() if trained)]

    def twin(self, trained=False, factor=1.0, closed_form=False):
        """Loss, gradients, targets of the wrong tokens and student logits, in float64.

        `closed_form` takes the gradients of the two token losses in closed form. Plain autograd loses everything below the rounding
        error of p_max and turns infinities into NaN.
        """
        case = self.to(torch.float64)
        hidden = case.hidden.clone().requires_grad_()
        head, teacher_head = case.heads(trained)
        logits, right, wrong = head(hidden), case.correct.nonzero().flatten(), (~case.correct).nonzero().flatten()
        z, y = logits[right], case.token_ids[right]
        step_scale = case.settings.get("step_scale", 1.0)
        losses = torch.zeros(len(hidden), dtype=torch.float64)
        losses[right] = sft_weight(z, y, step_scale) * (closed_form_nll if closed_form else literal_nll)(z, y)
        loo_logits = teacher_head(case.loo_hidden).detach()
        target = fire_target(logits[wrong].detach(), teacher_head(case.teacher_hidden).detach(), loo_logits, **case.settings)
        losses[wrong] = (reverse_kl if closed_form else literal_reverse_kl)(logits[wrong], target.log_probs)
        (factor * (case.token_weights * losses).sum()).backward()
        gradients = [hidden.grad, *(p.grad for p in head.projection.parameters() if trained)]
        return losses.detach(), gradients, target, logits.detach()


def literal_nll(logits, token_ids):
    return -logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def closed_form_nll(logits, token_ids):
    """The same, with gradient `p - e_y` in which `1 - p_y` is a sum."""
    gradient = logits.detach().softmax(-1).scatter(-1, token_ids[:, None], 0.0)
    gradient.scatter_(-1, token_ids[:, None], -gradient.sum(-1, keepdim=True))
    value = -log_softmax(logits.detach()).gather(-1, token_ids[:, None])[:, 0]
    return value + ((logits - logits.detach()) * gradient).sum(-1)


def literal_reverse_kl(logits, log_q):
    log_p = logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def make_case(tokens=7, vocabulary=31, fields=3, correct="mixed", spread=1.0, gap=1.0, seed=0, **settings) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=generator)).mul(64).round().div(64)

    hidden = noise(tokens, H, size=spread)
    is_correct = {
        "mixed": torch.rand(tokens, generator=generator) < 0.4,
        "all": torch.ones(tokens, dtype=torch.bool),
        "none": torch.zeros(tokens, dtype=torch.bool),
    }[correct]
    teacher = hidden[~is_correct] + noise(int((~is_correct).sum()), H, size=gap)
    return Case(
        weight=noise(vocabulary, H),
        hidden=hidden,
        token_weights=torch.rand(tokens, generator=generator) + 0.1,
        token_ids=torch.randint(vocabulary, (tokens,), generator=generator),
        correct=is_correct,
        teacher_hidden=teacher,
        loo_hidden=teacher + noise(fields, *teacher.shape, size=gap / 2),
        settings=settings,
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error relative to the largest element, over everything."""
    assert found.shape == expected.shape
    if found.numel() == 0:
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-300))


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a token's gradient, by its norm; gradients of 0 must be exactly 0."""
    assert found.shape == expected.shape
    if found.numel() == 0:
        return 0.0
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-200)).max())


def assert_equals_twin(case: Case, tolerance: float, trained=False, factor=1.0, closed_form=False, **more) -> None:
    losses, gradients, target, logits = case.twin(trained, factor, closed_form)
    output, found = case.fused(trained=trained, factor=factor, **more)
    assert relative_error(output.loss.detach(), (case.token_weights.double() * losses).sum()) <= tolerance
    assert relative_error(output.token_loss, losses) <= tolerance
    assert row_error(found[0], gradients[0]) <= tolerance
    for a, b in zip(found[1:], gradients[1:], strict=True):
        assert relative_error(a, b) <= tolerance
    wrong, step_scale = ~case.correct, case.settings.get("step_scale", 1.0)
    assert relative_error(output.rho, fisher_radius(logits, step_scale)) <= tolerance
    assert relative_error(output.entropy, entropy(logits)) <= tolerance
    assert relative_error(output.beta[case.correct], sft_weight(logits, case.token_ids, step_scale)[case.correct]) <= tolerance
    for name in ("energy", "chi", "eta"):
        assert relative_error(getattr(output, name)[wrong], getattr(target, name)) <= tolerance, name
    read = wrong.clone()
    read[wrong] = target.chi > 0
    if case.settings.get("attribution", True) and (len(output.field_energy) or read.any()):
        assert relative_error(output.alpha[:, wrong], target.alpha) <= tolerance
        assert relative_error(output.field_energy[:, read], target.field_energy[:, target.chi > 0]) <= tolerance
        assert output.field_energy[:, ~read].isnan().all()
    else:
        assert (output.alpha[:, wrong] == torch.tensor([1.0] + [0.0] * (len(output.alpha) - 1))[:, None]).all()


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@DTYPES
@pytest.mark.parametrize("correct", ["mixed", "all", "none"])
@pytest.mark.parametrize("fields", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 31), (2, 257), (7, 1001), (13, 31), (31, 257)])
def test_loss_and_gradient_equal_the_twin(tokens, vocabulary, fields, correct, dtype):
    case = make_case(tokens, vocabulary, fields, correct, seed=tokens + fields).to(dtype)
    assert_equals_twin(case, TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("step_scale", [1.0, 5.0, 200.0])
@pytest.mark.parametrize("floor", [None, -4.0, math.log(1e-10)], ids=str)
@pytest.mark.parametrize("attribution", [True, False])
@pytest.mark.parametrize("projection", [True, False])
def test_settings(step_scale, floor, attribution, projection, dtype):
    more = dict(step_scale=step_scale, log_prob_floor=floor, attribution=attribution, projection=projection)
    case = make_case(tokens=13, gap=1.0, **more).to(dtype)
    assert_equals_twin(case, TOLERANCE[dtype])


HEADS = {
    "softcap": dict(softcap=3.0),
    "scale": dict(scale=0.5),
    "temperature": dict(temperature=2.0),
    "all": dict(softcap=5.0, scale=0.5, temperature=0.7),
}


@DTYPES
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("chunk_size", [4, None])
def test_heads(name, bias, trained, chunk_size, dtype):
    case = make_case(tokens=11, seed=3, gap=2.0)
    generator = torch.Generator().manual_seed(5)
    case.teacher_weight = case.weight + torch.randn(case.weight.shape, generator=generator).div(8).mul(64).round().div(64)
    if bias:
        case.bias, case.teacher_bias = torch.randn(2, 31, generator=generator).mul(64).round().div(64)
    case.head_settings = HEADS[name]
    assert_equals_twin(case.to(dtype), TOLERANCE[dtype], trained=trained, chunk_size=chunk_size, factor=3.0)


@DTYPES
@pytest.mark.parametrize("gap", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("spread", [6.0, 9.0])
@pytest.mark.parametrize("step_scale", [1.0, 200.0])
@pytest.mark.parametrize("correct", ["all", "none"])
def test_nearly_deterministic_students(spread, gap, step_scale, correct, dtype):
    case = make_case(61, spread=spread, gap=gap, correct=correct, step_scale=step_scale).to(dtype)
    assert (case.twin(closed_form=True)[3].softmax(-1).amax(-1) > 1 - 1e-6).sum() >= 6, "several must be nearly deterministic"
    assert_equals_twin(case, TOLERANCE[dtype], closed_form=True)


@DTYPES
@pytest.mark.parametrize("fields", [0, 2])
@pytest.mark.parametrize("low", [-math.inf, -1000.0])
@pytest.mark.parametrize("projection", [True, False])
def test_a_token_that_the_teacher_forbids(low, fields, projection, dtype):
    case = make_case(13, fields=fields, correct="none", projection=projection)
    forbidden = (case.hidden @ case.weight.T).argmax(-1).unique()
    case.bias, case.teacher_bias = torch.zeros(31), torch.zeros(31)
    case.teacher_bias[forbidden] = low
    if low > -math.inf or dtype is torch.float64:
        assert_equals_twin(case.to(dtype), TOLERANCE[dtype], closed_form=True)
        return
    # What stands in for infinity depends on the dtype, and so do energies and an unprojected loss. The rest does not.
    (output, (gradient,)), (losses, (expected,), target, _) = case.fused(), case.twin(closed_form=True)
    assert relative_error(output.alpha, target.alpha) <= 1e-5
    assert torch.isfinite(output.token_loss).all() and torch.isfinite(gradient).all()
    if projection:
        assert relative_error(output.token_loss, losses) <= 1e-5 and row_error(gradient, expected) <= 1e-5


@DTYPES
def test_a_token_that_everybody_forbids_changes_nothing(dtype):
    case = make_case(13, gap=2.0).to(dtype)
    plain, plain_gradients = case.fused()
    padded = replace(
        case,
        weight=torch.cat([case.weight, case.weight[:1]]),
        bias=torch.cat([torch.zeros_like(case.weight[:, 0]), torch.tensor([-math.inf], dtype=dtype)]),
    )
    output, gradients = padded.fused()
    assert relative_error(output.token_loss, plain.token_loss) <= TOLERANCE[dtype]
    assert row_error(gradients[0], plain_gradients[0]) <= TOLERANCE[dtype]


def test_bfloat16_states_and_head():
    """Given the logits that the bfloat16 head rounds, the loss is right to 1e-5 and the gradient up to its own rounding."""
    case = make_case(29, 1001, gap=2.0).to(torch.bfloat16)
    output, (gradient,) = case.fused()
    assert output.loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    head, _ = case.heads()
    wrong = ~case.correct
    logits = head(case.hidden).double().requires_grad_()
    views = [head(states).double() for states in (case.teacher_hidden, case.loo_hidden)]
    target = fire_target(logits[wrong].detach(), *views)
    assert float((target.chi > 0).double().mean()) > 0.2
    losses = torch.zeros(29, dtype=torch.float64)
    losses[wrong] = literal_reverse_kl(logits[wrong], target.log_probs)
    y = case.token_ids[~wrong, None]
    losses[~wrong] = -sft_weight(logits[~wrong], y[:, 0]) * logits[~wrong].log_softmax(-1).gather(-1, y)[:, 0]
    (case.token_weights.double() * losses).sum().backward()
    assert relative_error(output.token_loss, losses.detach()) <= 1e-5
    assert row_error(gradient, logits.grad @ case.weight.double()) <= 2**-7


def test_a_bfloat16_run_stays_near_its_float32_twin():
    case = make_case(31, 257, gap=1.0)
    (high, (expected,)), (low, (found,)) = case.fused(), case.to(torch.bfloat16).fused()
    assert low.loss.item() == pytest.approx(high.loss.item(), rel=0.02)
    assert torch.nn.functional.cosine_similarity(found.float().flatten(), expected.flatten(), dim=0) > 0.999


class ExactProjection(torch.nn.Linear):
    """Products in float64: a float32 sum over 150,000 tokens has an error of 1e-4 of its own on the way back."""

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden.double(), self.weight.double()).to(hidden.dtype)


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_float32_at_the_size_of_a_real_vocabulary(spread, monkeypatch):
    monkeypatch.setattr(torch.nn, "Linear", ExactProjection)
    case = make_case(6, 151_936, gap=spread, spread=spread, correct="mixed", seed=1)
    assert_equals_twin(case, 1e-5)


@DTYPES
@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize("block", [1, 2, 1000])
@pytest.mark.parametrize("two_passes", [True, False])
def test_chunks_of_any_size(chunk_size, block, two_passes, dtype, monkeypatch):
    monkeypatch.setattr(fire_head, "BLOCK_ELEMENTS", 31 * block)
    case = make_case(13, fields=2, gap=2.0).to(dtype)
    assert_equals_twin(case, TOLERANCE[dtype], chunk_size=chunk_size, two_passes=two_passes, trained=True)


@pytest.mark.parametrize("chunk_size", [2, 5, 1000])
@pytest.mark.parametrize("settings", [{}, dict(step_scale=1.5), dict(log_prob_floor=-4.0), dict(projection=False)], ids=str)
def test_the_first_pass_finds_exactly_the_wrong_tokens_over_the_radius(chunk_size, settings):
    case = make_case(31, gap=1.0, **settings).to(torch.float64)
    _, _, target, _ = case.twin()
    first = first_pass(case.heads()[0], case.hidden, case.token_weights, chunk_size=chunk_size, **case.data, **settings)
    over = (target.chi > 0).nonzero().flatten()
    assert 0 < len(over) < len(case.teacher_hidden), "some tokens must be over the radius, and some not"
    assert torch.equal(first.over, over)
    assert torch.equal(first.wrong, (~case.correct).nonzero().flatten())
    one_call, gradients = case.fused(chunk_size=chunk_size)
    two_calls, two_gradients = case.fused(chunk_size=chunk_size, two_passes=True)
    assert torch.equal((one_call.chi > 0).nonzero().flatten(), first.wrong[over])
    assert relative_error(two_calls.token_loss, one_call.token_loss) <= 1e-13
    assert row_error(two_gradients[0], gradients[0]) <= 1e-12
    torch.testing.assert_close(two_calls.alpha, one_call.alpha, equal_nan=True)


def test_attribution_refuses_views_for_other_tokens_than_those_over_the_radius():
    case = make_case(31, gap=1.0)
    first = first_pass(case.weight, case.hidden, case.token_weights, **case.data)
    for tokens in (first.over[1:], torch.arange(len(case.teacher_hidden)), first.over[:0]):
        with pytest.raises(ValueError, match=f"does not fit {len(first.over)} tokens over the radius"):
            first.attribute(case.loo_hidden[:, tokens])


def test_tokens_over_the_radius_are_attributed_exactly_once():
    case = make_case(31, gap=1.0)
    first = first_pass(case.weight, case.hidden, case.token_weights, **case.data)
    with pytest.raises(RuntimeError, match=f"{len(first.over)} tokens are over the radius"):
        first.output()
    first.attribute(case.loo_hidden[:, first.over])
    assert first.output().loss.isfinite()
    with pytest.raises(RuntimeError, match="attributed already"):
        first.attribute(case.loo_hidden[:, first.over])


@pytest.mark.parametrize(
    "settings", [dict(gap=0.05), dict(correct="all"), dict(gap=3.0, attribution=False), dict(tokens=0)], ids=str
)
def test_no_token_waits_for_a_view_where_none_is_over_the_radius(settings):
    case = make_case(**settings).to(torch.float64)
    first = first_pass(case.weight, case.hidden, case.token_weights, **case.data, **case.settings)
    assert first.over.shape == (0,)
    output, _ = case.fused(two_passes=True)
    assert output.alpha.shape == (1, len(case.hidden)) and output.field_energy.shape == (0, len(case.hidden))
    assert_equals_twin(case, 1e-10, two_passes=True)


def test_no_tokens():
    case = make_case(tokens=0)
    output, (gradient,) = case.fused(trained=False)
    assert output.loss == 0 and gradient.shape == (0, H) and output.rho.shape == (0,)


def test_a_plain_weight_is_a_head():
    """Alone, for student and teacher; as a leaf and as part of a graph."""
    case = make_case(11, gap=2.0).to(torch.float64)
    expected, (hidden_gradient, weight_gradient) = case.fused(trained=True)
    hidden, factor = case.hidden.clone().requires_grad_(), torch.ones(H, dtype=torch.float64, requires_grad=True)
    data = case.data | dict(loo_hidden=case.loo_hidden)
    leaf = case.weight.clone().requires_grad_()
    loss = fire_head_loss(leaf, hidden, case.token_weights, **data).loss
    found = torch.autograd.grad(loss, [hidden, leaf])
    assert torch.equal(loss, expected.loss)
    assert row_error(found[0], hidden_gradient) <= 1e-12 and relative_error(found[1], weight_gradient) <= 1e-12
    loss = fire_head_loss(case.weight * factor, hidden, case.token_weights, teacher_head=case.weight, **data).loss
    found = torch.autograd.grad(loss, [hidden, factor])
    assert row_error(found[0], hidden_gradient) <= 1e-12
    assert relative_error(found[1], (weight_gradient * case.weight).sum(0)) <= 1e-12


def test_without_gradients_there_is_only_the_loss():
    case = make_case(11, gap=2.0)
    data = case.data | dict(loo_hidden=case.loo_hidden)
    with torch.no_grad():
        output = fire_head_loss(case.weight.clone().requires_grad_(), case.hidden, case.token_weights, **data)
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, case.fused()[0].loss.detach())


def test_a_response_with_fewer_fields_repeats_its_full_view():
    case = make_case(13, fields=2, gap=2.0, correct="none").to(torch.float64)
    more = replace(case, loo_hidden=torch.cat([case.loo_hidden, case.teacher_hidden[None]]))
    (few, few_gradients), (padded, gradients) = case.fused(), more.fused()
    assert (few.chi > 0).any()
    assert (padded.alpha[3] <= 1e-24).all()
    assert row_error(gradients[0], few_gradients[0]) <= 1e-12


def test_the_gradient_stays_inside_the_radius_and_its_norm_is_reported():
    """With the identity as head, the gradient of the states is that of the logits."""
    case = make_case(200, vocabulary=H, fields=3, gap=1.5, spread=1.5, step_scale=2.0)
    case = replace(case, weight=torch.eye(H)).to(torch.float64)
    output, (gradient,) = case.fused()
    norm = (gradient / case.token_weights[:, None]).norm(dim=-1)
    torch.testing.assert_close(output.gradient_norm, norm, rtol=1e-12, atol=0)
    assert (norm <= output.rho * (1 + 1e-12)).all()
    assert ((norm >= output.rho * (1 - 1e-12)) & case.correct).any() and (
        (norm >= output.rho * (1 - 1e-12)) & ~case.correct
    ).any()
    _, _, target, logits = case.twin()
    induced = induced_gradient(logits[~case.correct], target.log_probs)
    assert row_error(gradient[~case.correct] / case.token_weights[~case.correct, None], induced) <= 1e-12
    kl = reverse_kl(logits[~case.correct], case.teacher_hidden)
    assert relative_error(output.kl[~case.correct], kl) <= 1e-12
    for name in ("energy", "chi", "eta", "kl", "alpha"):
        assert getattr(output, name)[..., case.correct].isnan().all(), name
    assert output.beta[~case.correct].isnan().all()


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest storage that any operation returns."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return output


def test_memory_does_not_grow_with_tokens():
    vocabulary, chunk_size, largest = 4099, 8, {}
    for tokens in (24, 120):
        case = make_case(tokens, vocabulary, fields=4, gap=3.0)
        with LargestTensor() as seen:
            output, _ = case.fused(chunk_size=chunk_size)
        assert (output.chi > 0).any()
        largest[tokens] = seen.size
    assert largest[120] == largest[24] == chunk_size * vocabulary * 4


def test_errors():
    case = make_case(5, fields=2, correct="none")
    data = case.data | dict(loo_hidden=case.loo_hidden)
    for message, change in {
        "needs loo_hidden": dict(loo_hidden=None),
        "at least 1": dict(step_scale=0.5),
        "do not fit": dict(correct=case.correct.float()),
        r"5 tokens belong to wrong responses, but teacher_hidden \(4, 8\) has 4": dict(
            teacher_hidden=case.teacher_hidden[1:], loo_hidden=case.loo_hidden[:, 1:]
        ),
        r"loo_hidden \(2, 4, 8\) and teacher_hidden \(5, 8\) do not fit": dict(loo_hidden=case.loo_hidden[:, 1:]),
        r"loo_hidden \(2, 5, 8\) and teacher_hidden \(4, 8\) do not fit": dict(teacher_hidden=case.teacher_hidden[1:]),
    }.items():
        with pytest.raises(ValueError, match=message):
            fire_head_loss(case.weight, case.hidden, case.token_weights, **(data | change))
    with pytest.raises(ValueError, match="do not fit"):
        fire_head_loss(case.weight, case.hidden, case.token_weights[1:], **data)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    fields=st.integers(0, 5),
    correct=st.sampled_from(["mixed", "all", "none"]),
    spread=st.floats(0.1, 3.0),
    gap=st.floats(0.05, 5.0),
    step_scale=st.floats(1.0, 300.0),
    floor=st.sampled_from([None, -23.0, -3.0]),
    attribution=st.booleans(),
    projection=st.booleans(),
    chunk_size=st.integers(1, 10),
    two_passes=st.booleans(),
)
def test_any_case_equals_its_twin(
    seed, tokens, vocabulary, fields, correct, spread, gap, step_scale, floor, attribution, projection, chunk_size, two_passes
):
    more = dict(step_scale=step_scale, log_prob_floor=floor, attribution=attribution, projection=projection)
    case = make_case(tokens, vocabulary, fields, correct, spread, gap, seed, **more).to(torch.float64)
    assert_equals_twin(case, 1e-9, closed_form=True, chunk_size=chunk_size, two_passes=two_passes)


# ---- Functions on rows under torch.compile -------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Compile the functions on rows on CPUs, by the backend that is set."""
    monkeypatch.setattr(fire_head, "COMPILED_DEVICES", {"cpu"})
    torch._dynamo.reset()
    fire_head.compiled.cache_clear()

    def choose(backend):
        monkeypatch.setattr(fire_head, "COMPILER", backend)

    yield choose
    torch._dynamo.reset()
    fire_head.compiled.cache_clear()


def rows_problem(tokens, vocabulary, width, fields, dtype, *, far=False, softcap=None):
    """Everything that `first_pass` takes; every third token belongs to a correct response."""
    draw = torch.Generator().manual_seed(tokens)

    def noise(*shape, size=1.0):
        return (size * torch.randn(*shape, generator=draw)).to(dtype)

    weight = noise(vocabulary, width, size=0.4).requires_grad_()
    hidden = noise(tokens, width).requires_grad_()
    correct = torch.arange(tokens) % 3 == 1
    full = hidden.detach()[~correct] + noise(int((~correct).sum()), width, size=60.0 if far else 0.4)
    loo = full + noise(fields, len(full), width, size=0.3)
    head = fire_head.Head.of_weight(weight, softcap=softcap, scale=0.9 if softcap else 1.0)
    settings = {
        "token_ids": torch.randint(vocabulary, (tokens,), generator=draw),
        "correct": correct,
        "teacher_hidden": full,
        "loo_hidden": loo,
    }
    return head, weight, hidden, torch.rand(tokens, generator=draw) + 0.5, settings


def rows_outcome(problem, **more):
    head, weight, hidden, token_weights, settings = problem
    weight.grad = hidden.grad = None
    output = fire_head_loss(head, hidden, token_weights, **settings | more)
    output.loss.backward()
    names = [name for name in output.__dataclass_fields__ if name != "loss"]
    return output.loss.detach(), hidden.grad.clone(), weight.grad.clone(), {name: getattr(output, name) for name in names}


CASES_OF_ROWS = {
    "usual": ({}, {"step_scale": 10.0}),
    "inside": ({}, {"step_scale": 1.0}),
    "far": ({"far": True}, {"step_scale": 2.0}),
    "softcap": ({"softcap": 9.0}, {"step_scale": 15.0}),
    "floor": ({}, {"step_scale": 10.0, "log_prob_floor": -6.0}),
    "no attribution": ({}, {"step_scale": 10.0, "attribution": False}),
    "no projection": ({}, {"step_scale": 10.0, "projection": False}),
    "chunks": ({}, {"step_scale": 10.0, "chunk_size": 5}),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES_OF_ROWS)
def test_compiled_rows_compute_the_same(case, dtype, backend, on_cpu, monkeypatch):
    if backend == "inductor" and (shutil.which("g++") is None or case in ("inside", "no projection")):
        pytest.skip(
            "without a C++ compiler" if shutil.which("g++") is None else "by aot_eager only: inductor takes seconds per case"
        )
    special, settings = CASES_OF_ROWS[case]
    for tokens in (23, 2, 41):
        problem = rows_problem(tokens, 301, 16, 3, dtype, **special)
        with monkeypatch.context() as plain:
            plain.setattr(fire_head, "COMPILED_DEVICES", set())
            expected = rows_outcome(problem, **settings)
        over = int((expected[3]["chi"] > 0).sum())
        assert (over == 0) if case == "inside" else (over > 1 or tokens == 2), "attribution must take part"
        on_cpu(backend)
        found = rows_outcome(problem, **settings)
        assert {"cpu"} == fire_head.COMPILED_DEVICES  # nothing failed
        # Sums in another order; bfloat16 rounds the gradients of the logits.
        close = {"rtol": 2e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
        for name, value in expected[3].items():
            assert torch.allclose(found[3][name], value, rtol=2e-4, atol=2e-5, equal_nan=True), name
        assert torch.allclose(found[0], expected[0], rtol=1e-4)
        for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
            scale = float(theirs.float().abs().max())
            assert torch.allclose(ours.float() / scale, theirs.float() / scale, **close)


@pytest.mark.parametrize("fields", [0, 1, 3])
@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize(("spread", "gap", "step_scale"), [(1.0, 0.02, 1.0), (1.0, 1.0, 200.0), (9.0, 30.0, 2.0)])
def test_compiled_rows_equal_the_twin(spread, gap, step_scale, chunk_size, fields, on_cpu):
    """As exact as those that are not compiled, also where the loss is small or near overflow."""
    case = make_case(13, 31, fields, spread=spread, gap=gap, seed=1, step_scale=step_scale)
    on_cpu("aot_eager")
    assert_equals_twin(case, TOLERANCE[torch.float32], chunk_size=chunk_size, closed_form=True)
    assert_equals_twin(case, TOLERANCE[torch.float32], chunk_size=chunk_size, closed_form=True, two_passes=True)
    assert {"cpu"} == fire_head.COMPILED_DEVICES


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("more", [{}, dict(attribution=False), dict(projection=False)], ids=str)
def test_rows_near_overflow(more, compiling, on_cpu):
    """Divergences on both sides of `FAR`, as exact as others."""
    case = make_case(61, spread=9.0, gap=60.0, correct="none", step_scale=2.0, **more)
    exact, _ = case.to(torch.float64).fused()
    assert (exact.kl > 2 * fire_head.FAR).any() and (exact.kl < fire_head.FAR / 2).any()
    if compiling:
        on_cpu("aot_eager")
    output, _ = case.fused()
    assert output.token_loss.isfinite().all() and relative_error(output.kl, exact.kl) <= TOLERANCE[torch.float32]
    assert_equals_twin(case, TOLERANCE[torch.float32], closed_form=True)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("eta", [1.0, 0.4])
def test_divergence_of_unlikely_tokens(eta, compiling, monkeypatch):
    """Rows whose divergence is small although a token is unlikelier under p than under q by over exp(60); tokens of probability 0."""
    inf = torch.inf
    z = torch.tensor([[0.0, -1.0, -90.0, -2.0], [0.0, -1.0, -400.0, -3.0], [0.0, -1.0, -inf, -2.0], [0.0, -1.0, -2.0, -500.0]])
    teacher = torch.tensor(
        [[0.0, -1.0, -16.0, -2.0], [0.1, -1.0, 300.0, -3.0], [0.0, -1.2, -3.0, -2.0], [0.1, -1.0, -inf, 2.0]]
    )
    p, q = (fire_head.finite(logits.clone()).double().log_softmax(-1) for logits in (z, teacher))
    log_q = ((1 - eta) * p + eta * q).log_softmax(-1)
    difference = p - log_q
    expected = (p.exp() * (difference + torch.expm1(-difference))).where(
        difference > -10, p.exp() * (difference - 1) + log_q.exp()
    )
    student, target = fire_head.StudentDistributions(z.clone(), 1.0), fire_head.finite(teacher.clone())
    ratio = student.centred_ratio(student.logits, target)
    assert (ratio < -fire_head.FAR).any(-1).tolist() == [True, True, True, True]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    found = student.divergence(ratio, torch.full((4,), eta), target)
    torch.testing.assert_close(found, expected.sum(-1).float(), rtol=2e-5, atol=0)


def test_only_the_number_of_rows_is_symbolic(on_cpu):
    """Also after other vocabularies and other numbers of fields."""
    symbolic = []

    def backend(graph, inputs):
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        symbolic.append([[isinstance(size, torch.SymInt) for size in shape] for shape in shapes])
        return graph.forward

    on_cpu(backend)
    for vocabulary, fields in ((301, 3), (257, 2), (129, 4)):
        output = rows_outcome(rows_problem(41, vocabulary, 16, fields, torch.float32), step_scale=30.0)[3]
        assert (output["chi"] > 0).sum() > 1
    assert len(symbolic) == 9 and {"cpu"} == fire_head.COMPILED_DEVICES
    for shapes in symbolic:
        for dims in shapes:
            expected = [i == max(0, len(dims) - 2) for i in range(len(dims))]
            assert dims == expected, shapes


def test_other_numbers_compile_nothing_again(on_cpu):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    on_cpu(backend)
    for tokens, scale in ((23, 10.0), (24, 9.0), (50, 11.0), (31, 12.0)):
        output = rows_outcome(rows_problem(tokens, 301, 16, 3, torch.float32), step_scale=scale)[3]
        assert (output["chi"] > 0).sum() > 1
    assert len(compiled) == 3  # correct responses, full teacher, attribution


def counting(seen):
    """A backend that keeps the graphs and runs them as they are."""

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    return backend


def test_numbers_of_fields_share_what_is_compiled(on_cpu):
    """And every number of fields gives what it gives without compiling."""
    graphs, sizes = [], []
    on_cpu(counting(graphs))
    for fields in (5, 6, 7, 8, 3, 4, 2, 1):
        case = make_case(30, fields=fields, gap=2.0, seed=fields)
        before = len(graphs)
        output, _ = case.fused()
        assert output.alpha.shape == (fields + 1, 30) and output.field_energy.shape == (fields, 30)
        sizes += [fields] * (len(graphs) - before)
        assert_equals_twin(case, TOLERANCE[torch.float32])
    assert sizes == [5, 5, 5, 3, 2, 1]  # correct responses, full teacher, attribution with 8 views; 4, 2 and 1 views
    assert {"cpu"} == fire_head.COMPILED_DEVICES


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("floor", [None, -6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_equal_to_the_full_one_changes_no_bit(dtype, floor, backend, on_cpu):
    """None: without compiling."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("without a C++ compiler")
    draw = torch.Generator().manual_seed(0)
    head = fire_head.Head.of_weight(torch.zeros(301, 4, dtype=dtype))
    products = torch.randn(9, 301, generator=draw).mul(2).to(dtype)
    full = products + torch.randn(9, 301, generator=draw).to(dtype)
    views = full + torch.randn(3, 9, 301, generator=draw).mul(0.5).to(dtype)
    chi, weights = torch.rand(9, generator=draw), torch.rand(9, generator=draw)
    rule = fire_head.Rule(head, head, floor, True, True, True, True, torch.tensor(20.0))

    def found(*, more):
        inputs = tuple(x.clone() for x in (products, full, torch.cat([views, full.expand(more, 9, 301)]), chi, weights))
        with torch.no_grad():
            if backend is None:
                return fire_head.attributed_rows(rule, *inputs)
            return fire_head.compiled(fire_head.attributed_rows, backend)(rule, *fire_head.with_any_rows(inputs, 100))

    few, many = found(more=0), found(more=5)
    assert (many.statistics["field_energy"][3:] == 0).all() and (many.statistics["alpha"][4:] == 0).all()
    if backend == "inductor":  # another number of views, other kernels
        assert torch.allclose(few.gradient.float(), many.gradient.float(), rtol=1e-2, atol=1e-6)
        return
    assert torch.equal(few.gradient, many.gradient)
    for name, value in few.statistics.items():
        assert torch.equal(value, many.statistics[name][: len(value)]), name


def test_a_single_row_is_not_compiled(on_cpu):
    graphs = []
    on_cpu(counting(graphs))
    case = make_case(1, gap=3.0, correct="none", step_scale=30.0)
    for two_passes in (False, True):
        output, _ = case.fused(two_passes=two_passes)
        assert output.chi > 0
    make_case(1, correct="all").fused()
    assert not graphs
    assert_equals_twin(case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("usual", [None, 2, 31, 883])
def test_kernels_are_made_for_the_usual_number_of_rows(usual, on_cpu, monkeypatch):
    """Whatever number comes first; 12 and 500 rows share a graph. None: a version of PyTorch that cannot be told the usual number."""
    if usual is None:
        monkeypatch.setattr(fire_head, "hints_are_known", lambda: False)
    elif not fire_head.hints_are_known():
        pytest.skip("this version of PyTorch takes no hint")
    monkeypatch.setattr(fire_head, "CHUNK_ELEMENTS_GPU", (usual or 883) * 31)
    monkeypatch.setattr(fire_head.FirstPass, "blocks", lambda self, rows: [slice(0, len(rows))])
    hints = []

    def backend(graph, inputs):
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        (mode,) = {value.fake_mode for value in values if isinstance(value, torch.Tensor)}
        hints.append(set(mode.shape_env.var_to_hint_override.values()))
        return graph.forward

    on_cpu(backend)
    few, many = (make_case(tokens, gap=2.0, correct="none", step_scale=3.0, seed=tokens) for tokens in (12, 500))
    for case in (few, many, few):
        assert_equals_twin(case, TOLERANCE[torch.float32])
    assert {"cpu"} == fire_head.COMPILED_DEVICES
    assert hints == [set() if usual is None else {usual}] * 2  # full teacher, attribution


def test_under_a_dispatch_mode_nothing_is_compiled(on_cpu):
    graphs = []
    on_cpu(counting(graphs))
    case = make_case(30, gap=2.0, step_scale=3.0)
    with LargestTensor():
        counted, (gradient,) = case.fused()
    assert not graphs and {"cpu"} == fire_head.COMPILED_DEVICES
    output, (expected,) = case.fused()
    assert len(graphs) == 3
    assert torch.allclose(counted.token_loss, output.token_loss, rtol=1e-5) and torch.allclose(gradient, expected, rtol=1e-4)


def test_a_compiler_that_fails_in_the_middle_leaves_blocks_small(monkeypatch):
    """Of the rows whose turn comes after the failure as well."""
    largest, calls = [], []
    rows = fire_head.full_teacher_rows

    def seen(rule, products, *more):
        largest.append(len(products))
        return rows(rule, products, *more)

    def failing(function, backend):
        calls.append(function)
        if len(calls) == 2:
            raise RuntimeError("no compiler here")
        return function

    monkeypatch.setattr(fire_head, "COMPILED_DEVICES", {"cpu"})
    monkeypatch.setattr(fire_head, "compiled", failing)
    monkeypatch.setattr(fire_head, "full_teacher_rows", seen)
    monkeypatch.setattr(fire_head, "BLOCK_ELEMENTS", 3 * 31)
    monkeypatch.setattr(fire_head, "CHUNK_ELEMENTS_GPU", 10 * 31)
    assert_equals_twin(make_case(40, gap=0.02, correct="none"), TOLERANCE[torch.float32], chunk_size=1000)
    assert largest == [10, *[3, 3, 3, 1] * 3] and not fire_head.COMPILED_DEVICES


def test_a_compiler_that_fails_leaves_the_numbers_as_they_are(on_cpu, monkeypatch, caplog):
    def backend(graph, inputs):
        raise RuntimeError("no compiler here")

    problem = rows_problem(40, 301, 16, 3, torch.float32)
    monkeypatch.setattr(fire_head, "BLOCK_ELEMENTS", 7 * 301)
    monkeypatch.setattr(fire_head, "COMPILED_DEVICES", set())
    expected = rows_outcome(problem, step_scale=10.0)
    monkeypatch.setattr(fire_head, "COMPILED_DEVICES", {"cpu"})
    on_cpu(backend)
    for _ in range(2):
        found = rows_outcome(problem, step_scale=10.0)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    warnings = [record.message for record in caplog.records if "torch.compile" in record.message]
    assert len(warnings) == 1 and "no compiler here" in warnings[0]


def test_memory_that_runs_out_is_no_failure_of_the_compiler(on_cpu):
    def backend(graph, inputs):
        def run(*arguments):
            raise torch.OutOfMemoryError("out of memory")

        return run

    on_cpu(backend)
    with pytest.raises(torch.OutOfMemoryError):
        rows_outcome(rows_problem(9, 301, 16, 3, torch.float32), step_scale=3.0)
    assert {"cpu"} == fire_head.COMPILED_DEVICES


def test_deterministic_runs_do_without_compiled_rows(on_cpu):
    torch.use_deterministic_algorithms(True)
    try:
        assert not fire_head.is_compiled(torch.device("cpu"), torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert fire_head.is_compiled(torch.device("cpu"), torch.float32)


def test_emulated_bfloat16_is_not_compiled(on_cpu, monkeypatch):
    """PyTorch's compiler leaves it out, after which the function would run as it is on many rows at a time."""
    graphs = []
    on_cpu(counting(graphs))
    monkeypatch.setattr(fire_head, "has_bfloat16", lambda device: False)
    rows_outcome(rows_problem(40, 301, 16, 3, torch.bfloat16), step_scale=10.0)
    assert not graphs and not fire_head.is_compiled(torch.device("cpu"), torch.bfloat16)
    rows_outcome(rows_problem(40, 301, 16, 3, torch.float32), step_scale=10.0)
    assert graphs
    with torch._dynamo.config.patch(disable=True):  # TORCH_COMPILE_DISABLE=1
        assert not fire_head.is_compiled(torch.device("cpu"), torch.float32)


def test_settings_of_products_are_restored():
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction_split_k
    try:
        flags.allow_bf16_reduced_precision_reduction = (False, False)
        with float32_sums():
            assert not flags.allow_bf16_reduced_precision_reduction
        assert not flags.allow_bf16_reduced_precision_reduction_split_k
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_through_the_logits_is_that_of_autograd(dtype, scale, softcap, temperature):
    head = fire_head.Head.of_weight(torch.zeros(7, 3, dtype=dtype), softcap=softcap, scale=scale, temperature=temperature)
    products = (10 * torch.randn(4, 7, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    logits = head.logits(products)
    gradient = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    (expected,) = torch.autograd.grad(logits, products, gradient)
    found = head.logits_backward(products.detach(), gradient.clone())
    assert found.dtype == dtype
    assert torch.allclose(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_function_is_compiled_for_many_vocabularies(on_cpu):
    on_cpu("eager")
    for vocabulary in range(50, 62):
        rows_outcome(rows_problem(9, vocabulary, 16, 2, torch.float32), step_scale=3.0)
    assert {"cpu"} == fire_head.COMPILED_DEVICES


def test_a_teacher_may_have_fewer_digits():
    head, _, hidden, token_weights, settings = rows_problem(23, 301, 16, 3, torch.float64)
    exact = fire_head_loss(head, hidden, token_weights, **settings, step_scale=3.0)
    rounded = {name: settings[name].float() for name in ("teacher_hidden", "loo_hidden")}
    teacher = fire_head.Head.of_weight(head.override["weight"].detach().float())
    found = fire_head_loss(head, hidden, token_weights, **settings | rounded, teacher_head=teacher, step_scale=3.0)
    assert found.loss.dtype == torch.float64
    assert torch.allclose(found.loss, exact.loss, rtol=1e-4)
