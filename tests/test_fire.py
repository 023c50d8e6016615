"""FIRE's target and weights against the paper's equations in 60-digit arithmetic, and as properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from firedistill.functional import (
    excised_target,
    fire_target,
    fisher_radius,
    fisher_trace,
    induced_gradient,
    reverse_kl,
    sft_weight,
)
from firedistill.objectives.distributions import log_softmax

V, B = 29, 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def nearly_deterministic(rest: float, generator: torch.Generator) -> torch.Tensor:
    """Logits with p_max = 1 - rest."""
    logits = torch.randn(V, generator=generator, dtype=torch.float64)
    logits[3] = logits[[v for v in range(V) if v != 3]].logsumexp(0) + math.log1p(-rest) - math.log(rest)
    return logits


def regime(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student `[V]`, teacher `[V]` and leave-one-out `[B, V]` logits in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = 3 * noise(V) + 15
    if name == "mild":
        teacher = student + 0.1 * noise(V) - 7
        return student, teacher, teacher + 0.05 * noise(B, V)
    if name == "large":
        return student, 6 * noise(V), 6 * noise(B, V) + 40
    if name == "nearly deterministic, mild":
        student = nearly_deterministic(1e-9, generator)
        return student, student + noise(V), student + noise(B, V)
    if name == "nearly deterministic, large":
        student = nearly_deterministic(1e-5, generator)
        return student, 60 * noise(V), 60 * noise(B, V)
    if name == "one-hot":
        student = torch.full((V,), -math.inf, dtype=torch.float64)
        student[5] = 12.0
        return student, 3 * noise(V), 3 * noise(B, V)
    if name == "killed token":
        teacher = student + noise(V)
        teacher[student.argmax()] -= 10_000.0
        return student, teacher, teacher + noise(B, V)
    if name == "uniform":
        return torch.zeros(V, dtype=torch.float64), 5 * noise(V), 5 * noise(B, V)
    raise AssertionError(name)


REGIMES = ["mild", "large", "nearly deterministic, mild", "nearly deterministic, large", "one-hot", "killed token", "uniform"]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, scale: float | None = None) -> None:
    """Equal relative to the largest element (or `scale`), the measure that a norm bound depends on."""
    expected = expected.double()
    scale = scale if scale is not None else max(float(expected.abs().max()), 1e-300)
    error = float((found.double() - expected).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("step_scale", [1.0, 5.0, 200.0])
@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("floor", [None, math.log(1e-10)], ids=["no floor", "floor"])
def test_target_equals_the_literal_equations(name, step_scale, dtype, floor):
    for seed in range(3):
        student, teacher, without = (x.to(dtype) for x in regime(name, seed))
        expected = reference.fire(student, teacher, without, step_scale, floor)
        found = fire_target(student, teacher, without, step_scale=step_scale, log_prob_floor=floor)
        tolerance = TOLERANCE[dtype]
        assert_close(found.rho, reference.floats([expected.rho]), tolerance)
        assert_close(found.energy, reference.floats([expected.energy]), tolerance)
        assert_close(found.field_energy, reference.floats(expected.field_energy), tolerance)
        assert_close(found.chi, reference.floats([expected.chi]), tolerance, scale=1.0)
        assert_close(found.alpha, reference.floats(expected.alpha), tolerance, scale=1.0)
        assert_close(found.eta, reference.floats([expected.eta]), tolerance)
        assert_close(found.log_probs, reference.floats(expected.log_probs), tolerance)
        # Cancels to second order; what float32 can promise is relative to the log-ratios it is made of.
        loss_scale = max(float(expected.loss), 1e-3 if dtype is torch.float32 else 1e-300)
        assert_close(found.loss, reference.floats([expected.loss]), 10 * tolerance, scale=loss_scale)
        gradient = reference.floats([expected.eta * g for g in expected.g_A])
        norm = float(gradient.norm())
        if dtype is torch.float64 and norm > 1e-12:
            # The float64 target itself is rounded at 1e-16 of its largest log-probability.
            floor_error = 1e-16 * float(found.log_probs.abs().max()) * float(found.rho) / norm
            assert_close(induced_gradient(student, found.log_probs), gradient, tolerance + 10 * floor_error, scale=norm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", REGIMES)
def test_induced_gradient_equals_the_literal_equation(name, dtype):
    for seed in range(5):
        student, teacher, _ = (x.to(dtype) for x in regime(name, seed))
        expected = reference.floats(reference.fire(student, teacher, [], attribution=False).g_c)
        found = induced_gradient(student, teacher)
        assert_close(found, expected, TOLERANCE[dtype])
        assert float(found.sum().abs()) <= TOLERANCE[dtype] * max(float(expected.norm()), 1e-300)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rest", [0.5, 1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("step_scale", [1.0, 7.0, 200.0])
def test_sft_weight_equals_the_literal_equation(rest, step_scale, dtype):
    student = nearly_deterministic(rest, torch.Generator().manual_seed(1)).to(dtype)
    found = sft_weight(student.expand(V, V), torch.arange(V), step_scale)
    expected = reference.floats([reference.sft_weight(student, token, step_scale) for token in range(V)])
    assert_close(found / expected, torch.ones(V), TOLERANCE[dtype])


def test_hand_computed_values():
    """p = (1/2, 1/4, 1/4) towards q = (1/4, 1/2, 1/4): by hand, d = (ln 2, -ln 2, 0) and E_p[d] = ln 2 / 4."""
    student = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    target = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).log()
    ln2 = math.log(2)
    gradient = torch.tensor([0.5 * 0.75 * ln2, -0.25 * 1.25 * ln2, -0.25 * 0.25 * ln2], dtype=torch.float64)
    torch.testing.assert_close(induced_gradient(student, target), gradient)
    torch.testing.assert_close(reverse_kl(student, target), torch.tensor(ln2 / 4, dtype=torch.float64))
    assert float(fisher_trace(student)) == pytest.approx(1 - (1 / 4 + 1 / 16 + 1 / 16))
    assert float(fisher_radius(student, 4.0)) == pytest.approx(math.sqrt(0.625) / 4)
    # Token 1: ||p - e_1||^2 = 1/4 + 9/16 + 1/16 = 0.875 > 0.625; token 0: 1/4 + 1/16 + 1/16 = 0.375 < 0.625.
    assert sft_weight(student.expand(2, 3), torch.tensor([0, 1])).tolist() == pytest.approx([1.0, math.sqrt(0.625 / 0.875)])


def test_one_hot_student_is_not_moved_nor_divided_by_zero():
    student = torch.tensor([0.0, -math.inf, -math.inf])
    target = fire_target(student, torch.tensor([0.0, 5.0, 1.0]), torch.randn(2, 3))
    assert (target.rho, target.energy, target.chi, target.eta) == (0.0, 0.0, 0.0, 1.0)
    assert target.alpha.tolist() == [1.0, 0.0, 0.0]
    assert torch.isfinite(target.log_probs).all() and torch.isfinite(target.loss)
    assert sft_weight(student.expand(2, 3), torch.tensor([0, 1])).tolist() == [1.0, 0.0]


def test_a_token_forbidden_by_minus_infinity_leaves_everything_finite():
    student, teacher, without = (x.float() for x in regime("mild", 0))
    teacher[student.argmax()] = without[1, student.argmax()] = -math.inf
    target = fire_target(student, teacher, without)
    for value in (target.log_probs, target.energy, target.field_energy, target.alpha, target.eta, target.loss):
        assert torch.isfinite(value).all()
    norm = induced_gradient(student, target.log_probs).norm()
    assert norm <= target.rho * (1 + 1e-5)


def test_bfloat16_logits_of_a_language_model():
    """Logits of a bfloat16 head, upcast to float32, at the size of a real vocabulary."""
    generator = torch.Generator().manual_seed(0)
    student = (6 * torch.randn(3, 50_000, generator=generator)).bfloat16().float()
    teacher = (student + 3 * torch.randn(3, 50_000, generator=generator)).bfloat16().float()
    without = (teacher + torch.randn(2, 3, 50_000, generator=generator)).bfloat16().float()
    found = fire_target(student, teacher, without, step_scale=3.0)
    wide = fire_target(student.double(), teacher.double(), without.double(), step_scale=3.0)
    for name in ("rho", "energy", "field_energy", "eta", "loss"):
        assert_close(getattr(found, name) / getattr(wide, name), torch.ones(()), 1e-4)
    assert_close(found.alpha, wide.alpha, 1e-4, scale=1.0)
    with pytest.raises(TypeError, match="float32 or float64"):
        fire_target(student.bfloat16(), teacher.bfloat16(), without.bfloat16())


def test_ablations_and_errors():
    student, teacher, without = regime("large", 0)
    plain = fire_target(student, teacher, None, attribution=False)
    assert plain.alpha.shape == (1,) and plain.field_energy.shape == (0,)
    expected = reference.fire(student, teacher, [], attribution=False)
    assert_close(plain.log_probs, reference.floats(expected.log_probs), 1e-9)
    unprojected = fire_target(student, teacher, without, projection=False)
    expected = reference.fire(student, teacher, without, projection=False)
    assert_close(unprojected.log_probs, reference.floats(expected.log_probs), 1e-9)
    assert unprojected.eta == 1.0
    with pytest.raises(ValueError, match="loo_logits"):
        fire_target(student, teacher)
    with pytest.raises(ValueError, match="do not fit"):
        fire_target(student, teacher, without[:, :-1])


logit_rows = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(
    generator=logit_rows,
    spread=st.floats(0.01, 30),
    gap=st.floats(0.001, 30),
    fields=st.integers(1, 6),
    step_scale=st.floats(1, 200),
    floor=st.sampled_from([None, -23.0]),
)
def test_identities(generator, spread, gap, fields, step_scale, floor):
    """g(q_FIRE) = eta g(q_A), ||g|| <= rho, affinity in alpha, alpha on the simplex, chi = 0 untouched."""
    student = spread * torch.randn(5, 17, generator=generator, dtype=torch.float64)
    teacher = student + gap * torch.randn(5, 17, generator=generator, dtype=torch.float64)
    without = student + gap * torch.randn(fields, 5, 17, generator=generator, dtype=torch.float64)
    target = fire_target(student, teacher, without, step_scale=step_scale, log_prob_floor=floor)
    attributed = fire_target(student, teacher, without, step_scale=step_scale, log_prob_floor=floor, projection=False)
    g = induced_gradient(student, target.log_probs)
    g_A = induced_gradient(student, attributed.log_probs)
    size = g_A.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    assert ((g - target.eta.unsqueeze(-1) * g_A).abs() <= 1e-10 * size).all()
    assert (g.norm(dim=-1) <= target.rho * (1 + 1e-9) + 1e-14).all()
    assert (target.alpha >= 0).all() and torch.allclose(target.alpha.sum(0), torch.ones(5, dtype=torch.float64))
    assert ((target.chi >= 0) & (target.chi < 1)).all()

    def floored_gradient(logits):
        log_q = logits.log_softmax(-1)
        return induced_gradient(student, log_q if floor is None else log_q.clamp(min=floor))

    mixture = target.alpha[0].unsqueeze(-1) * floored_gradient(teacher)
    for alpha_j, view in zip(target.alpha[1:], without, strict=True):
        mixture = mixture + alpha_j.unsqueeze(-1) * floored_gradient(view)
    assert ((mixture - g_A).abs() <= 1e-9 * size).all()
    if floor is None:
        untouched = target.chi == 0
        assert torch.equal(target.log_probs[untouched], log_softmax(teacher)[untouched])


@settings(max_examples=150, deadline=None)
@given(generator=logit_rows, rest=st.floats(1e-9, 0.5), gap=st.floats(0.1, 80), step_scale=st.floats(1, 200))
def test_no_overshoot_in_float32_on_nearly_deterministic_tokens(generator, rest, gap, step_scale):
    student = nearly_deterministic(rest, generator).float()
    teacher = gap * torch.randn(V, generator=generator)
    without = gap * torch.randn(3, V, generator=generator)
    target = fire_target(student, teacher, without, step_scale=step_scale)
    norm = induced_gradient(student.double(), target.log_probs.double()).norm()
    exact_rho = fisher_radius(student.double(), step_scale)
    # What is left is the rounding of the returned float32 log-probabilities themselves.
    rounding = 6e-8 * float(target.log_probs.abs().max()) * float(student.softmax(-1).norm()) if target.eta < 1 else 0.0
    assert norm <= exact_rho * (1 + 2e-6) + rounding * math.sqrt(rest)


@settings(max_examples=100, deadline=None)
@given(generator=logit_rows, spread=st.floats(0.1, 20), step_scale=st.floats(1, 200))
def test_correct_branch_gradient_is_beta_times_p_minus_one_hot(generator, spread, step_scale):
    logits = (spread * torch.randn(6, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(11, (6,), generator=generator)
    beta = sft_weight(logits, tokens, step_scale)
    (-beta * logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).sum().backward()
    p = logits.detach().softmax(-1)
    one_hot = torch.nn.functional.one_hot(tokens, 11)
    torch.testing.assert_close(logits.grad, beta.unsqueeze(-1) * (p - one_hot))
    rho = fisher_radius(logits, step_scale)
    assert (logits.grad.norm(dim=-1) <= rho * (1 + 1e-9)).all()
    below = beta == 1
    assert ((p - one_hot).norm(dim=-1)[below] <= rho[below] * (1 + 1e-12)).all()


def test_streaming_form_equals_batch_form():
    """One residual accumulator over the views (appendix "Computation and Memory") against all views at once."""
    student, teacher, without = (x.unsqueeze(0) for x in regime("large", 3))
    without = without.squeeze(0).unsqueeze(1)
    batch = fire_target(student, teacher, without, step_scale=2.0)
    log_q_c = teacher.log_softmax(-1)
    g_c = induced_gradient(student, log_q_c)
    rho = fisher_radius(student, 2.0)
    chi = 1 - (rho.square() / g_c.square().sum(-1)).clamp(max=1)
    residual, weights = torch.zeros_like(log_q_c), torch.zeros_like(rho)
    for view in without:
        log_q = view.log_softmax(-1)
        w = chi * (g_c - induced_gradient(student, log_q)).square().sum(-1)
        residual, weights = residual + w.unsqueeze(-1) * (log_q - log_q_c), weights + w
    log_q_A = (log_q_c + residual / (rho.square() + weights).unsqueeze(-1)).log_softmax(-1)
    eta = (rho / induced_gradient(student, log_q_A).norm(dim=-1)).clamp(max=1)
    streamed = ((1 - eta).unsqueeze(-1) * student.log_softmax(-1) + eta.unsqueeze(-1) * log_q_A).log_softmax(-1)
    torch.testing.assert_close(batch.log_probs, streamed, rtol=1e-10, atol=1e-10)


def test_reverse_kl_gradient_is_the_induced_gradient():
    student, teacher, _ = regime("large", 1)
    logits = student.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: reverse_kl(z, teacher), (logits,))
    reverse_kl(logits, teacher).backward()
    torch.testing.assert_close(logits.grad, induced_gradient(student, teacher))
    naive = torch.nn.functional.kl_div(teacher.log_softmax(-1), student.log_softmax(-1), log_target=True, reduction="sum")
    torch.testing.assert_close(reverse_kl(student, teacher), naive)


def test_excised_target_names_shapes_that_do_not_fit():
    teacher = torch.zeros(2, 3, 5)
    for student, mask in ((torch.zeros(2, 4, 5), torch.ones(2, 3)), (teacher, torch.ones(2, 4))):
        with pytest.raises(ValueError, match=r"student_logits \(2, .* do not fit: expected"):
            excised_target(student, teacher, teacher.unsqueeze(0), mask)


def test_excised_target_removes_the_most_influential_field_of_each_response():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, V, generator=generator, dtype=torch.float64) for _ in range(2))
    without = teacher + 0.01 * torch.randn(B, 2, 3, V, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    without[2, 0] += torch.randn(3, V, generator=generator, dtype=torch.float64)
    without[1, 1, :2] += torch.randn(2, V, generator=generator, dtype=torch.float64)
    without[3, 1, 2] += 100 * torch.randn(V, generator=generator, dtype=torch.float64)  # outside the mask: must not count
    log_probs, removed = excised_target(student, teacher, without, mask)
    assert removed.tolist() == [2, 1]
    torch.testing.assert_close(log_probs[0], without[2, 0].log_softmax(-1))
    torch.testing.assert_close(log_probs[1], without[1, 1].log_softmax(-1))
    # The score is the token mean of half the L1 change of the induced gradient, by its literal definition.
    scores = [
        (induced_gradient(student, teacher) - induced_gradient(student, view)).abs().sum(-1)[0].mean() / 2 for view in without
    ]
    assert max(range(B), key=lambda j: scores[j]) == 2


def test_float32_at_the_size_of_a_real_vocabulary():
    """A peaked student over 150,000 tokens: the built-in float32 softmax loses the tail beside the top token."""
    generator = torch.Generator().manual_seed(1)
    student = 2 * torch.randn(3, 151_936, generator=generator)
    student[:, 9] = student.amax(-1) + 8
    teacher = student + torch.randn(3, 151_936, generator=generator)
    without = teacher + torch.randn(2, 3, 151_936, generator=generator)
    student, teacher, without = (x.bfloat16().float() for x in (student, teacher, without))
    for floor in (None, math.log(1e-10)):
        found = fire_target(student, teacher, without, step_scale=20.0, log_prob_floor=floor)
        wide = fire_target(student.double(), teacher.double(), without.double(), step_scale=20.0, log_prob_floor=floor)
        for name in ("rho", "energy", "field_energy", "alpha", "eta", "loss"):
            torch.testing.assert_close(getattr(found, name).double(), getattr(wide, name), rtol=2e-5, atol=0)
        torch.testing.assert_close(found.log_probs.double(), wide.log_probs, rtol=2e-5, atol=1e-7)
    beta = sft_weight(student, torch.tensor([9, 9, 3]), 20.0)
    torch.testing.assert_close(beta.double(), sft_weight(student.double(), torch.tensor([9, 9, 3]), 20.0), rtol=1e-5, atol=0)


def test_shapes_that_do_not_fit_are_refused():
    student, teacher, without = regime("mild", 0)
    with pytest.raises(ValueError, match="at least 1"):
        fire_target(student, teacher, without, step_scale=0.5)
    with pytest.raises(ValueError, match="B >= 1"):
        excised_target(student[None], teacher[None], without[:0, None], torch.ones(1))
    with pytest.raises(ValueError, match="mask"):
        excised_target(student[None], teacher[None], without[:, None], torch.ones(2))
