"""Full Context, On-Policy SFT, SCOPE and SRPO: values by hand, the printed equations read literally, and what must not matter."""

from __future__ import annotations

import math
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firedistill import SelfDistillConfig, SelfDistillTrainer, Verdict
from firedistill.functional import (
    clipped_surrogate,
    entropy,
    entropy_weights,
    forward_kl,
    group_advantages,
    induced_gradient,
    jensen_shannon,
    perplexity_weights,
    reverse_kl,
    sft_weight,
)
from firedistill.models.lora import add_lora
from firedistill.models.states import ResponseStates, score_responses
from firedistill.objectives import Averages, StepBatch, TrainingBatch, load_objective
from firedistill.objectives.srpo import weights_from_entropies
from firedistill.ops import Head
from firedistill.ops import head as head_module
from firedistill.rollouts.engine import Prompt, Response, Rollout, Sampling
from firedistill.tasks import Example
from firedistill.teacher.ema import EMATeacher
from tiny import ToyTask, random_model, save_checkpoint

METHODS = ["full_context", "on_policy_sft", "scope", "srpo"]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_prints(found, printed: str) -> None:
    """Equal to the printed numbers within half a unit of the last printed digit."""
    texts = re.findall(r"[-+.\d]+", printed)
    found = torch.as_tensor(found, dtype=torch.float64).flatten().tolist()
    assert len(found) == len(texts)
    for value, text in zip(found, texts, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        assert abs(value - float(text)) <= 0.5 * unit * (1 + 1e-9), f"{value} is not {text}"


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Relative to the largest element."""
    assert found.shape == expected.shape
    difference = (found.double() - expected.double()).abs().max() if expected.numel() else torch.zeros(())
    scale = expected.double().abs().max() if expected.numel() else torch.zeros(())
    assert difference <= tolerance * scale + 1e-15, f"off by {float(difference):.3g}, the largest element is {float(scale):.3g}"


# --- a step with given hidden states


@dataclass
class Result:
    """Summed loss of all micro-batches, the gradient of every rollout's states (0 if it is not trained), and of the head."""

    loss: torch.Tensor
    gradients: list[torch.Tensor]
    head: torch.Tensor


class World:
    """Rollouts with the hidden states of student and teacher, and a head; it watches who is asked for what.

    Without `projection` the head is the identity, so that the states are the logits and their gradients logit gradients.
    """

    def __init__(
        self, student, teacher, token_ids, correct, prompt_index=None, prompts=None, projection=None, dtype=torch.float64
    ):
        self.student, self.teacher = (
            [torch.as_tensor(s, dtype=torch.float64) for s in states] for states in (student, teacher)
        )
        self.weight = torch.eye(self.student[0].shape[-1], dtype=torch.float64) if projection is None else projection
        self.dtype = dtype
        self.head = Head(torch.nn.Linear(*self.weight.T.shape, bias=False))
        self.head.projection.weight.data = self.weight.to(dtype)
        prompt_index = prompt_index if prompt_index is not None else [0] * len(token_ids)
        self.prompts = prompts if prompts is not None else len(set(prompt_index))
        self.rollouts = [
            Rollout(
                Example(f"x/{row}", "?", "1"), [1], Response(list(ids), "", True), Verdict(ok, None, "1"), prompt_index=prompt
            )
            for row, (ids, ok, prompt) in enumerate(zip(token_ids, correct, prompt_index, strict=True))
        ]
        self.averages = Averages()
        self.teacher_asked, self.student_asked, self.teacher_leaves = Counter(), [], []

    def states(self, source, rows) -> ResponseStates:
        hidden = [source[row] for row in rows] or [torch.empty(0, self.weight.shape[1])]
        return ResponseStates(torch.cat(hidden).to(self.dtype), [len(self.rollouts[row].response_ids) for row in rows])

    def teacher_states(self, objective, rows, views) -> list[ResponseStates]:
        assert list(views) == ["full"]
        assert all(objective.needs_teacher(self.rollouts[row]) for row in rows), "no feedback was built for this rollout"
        self.teacher_asked.update(rows)
        states = self.states(self.teacher, rows)
        self.teacher_leaves.append(states.hidden.requires_grad_())
        return [states]

    def row(self, rollout) -> int:
        return int(rollout.example.uid.removeprefix("x/"))

    def step(self, objective, rows, **exchange) -> StepBatch:
        def student(rollouts):
            self.student_asked += [self.row(rollout) for rollout in rollouts]
            return self.states(self.student, [self.row(rollout) for rollout in rollouts])

        return StepBatch(
            rollouts=[self.rollouts[row] for row in rows],
            prompts=self.prompts,
            progress=0.0,
            seed=0,
            student=student,
            teacher=lambda rollouts, views: self.teacher_states(objective, [self.row(r) for r in rollouts], views),
            head=self.head,
            teacher_head=self.head,
            averages=self.averages,
            **exchange,
        )

    def batch(self, objective, rows) -> TrainingBatch:
        student = self.states(self.student, rows)
        student.hidden.requires_grad_()
        return TrainingBatch(
            rollouts=[self.rollouts[row] for row in rows],
            student=student,
            head=self.head,
            teacher_head=self.head,
            teacher=lambda members, views: self.teacher_states(objective, [rows[i] for i in members], views),
            responses=self.prompts * objective.group_size,
            prompts=self.prompts,
            averages=self.averages,
        )

    def trained(self, objective, rows=None) -> list[int]:
        return [row for row in (range(len(self.rollouts)) if rows is None else rows) if objective.trains(self.rollouts[row])]

    def prepare(self, objective, rows, **exchange) -> None:
        for row in rows:
            self.rollouts[row].coefficients.clear()
        objective.prepare(self.step(objective, rows, **exchange))

    def backward(self, objective, micro_batches) -> Result:
        self.head.projection.weight.grad = None
        loss = torch.zeros((), dtype=self.dtype)
        gradients = [torch.zeros_like(s, dtype=self.dtype) for s in self.student]
        for rows in micro_batches:
            batch = self.batch(objective, rows)
            part = objective.loss(batch)
            part.backward()
            loss = loss + part.detach()
            for row, gradient in zip(rows, batch.student.hidden.grad.split(batch.student.lengths), strict=True):
                gradients[row] = gradient
        return Result(loss, gradients, self.head.projection.weight.grad)

    def run(self, objective, split=lambda rows: [rows], order=None) -> Result:
        """What the trainer does in a step: drop what does not train, prepare, and sum the losses of the micro-batches."""
        rows = self.trained(objective, order)
        self.prepare(objective, rows)
        return self.backward(objective, split(rows))

    def literal(self, method, group_size, **options) -> Result:
        """The same by the printed equations, with all logits at once and plain autograd."""
        hidden = [s.clone().requires_grad_() for s in self.student]
        weight = self.weight.clone().requires_grad_()
        z, zq = [s @ weight.T for s in hidden], [s @ self.weight.T for s in self.teacher]
        loss = LITERAL[method](self, z, zq, group_size, **options)
        if not loss.requires_grad:
            return Result(loss, [torch.zeros_like(s) for s in hidden], torch.zeros_like(weight))
        gradients = torch.autograd.grad(loss, [*hidden, weight], allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, [*hidden, weight], strict=True)]
        return Result(loss.detach(), gradients[:-1], gradients[-1])


def assert_result(found: Result, expected: Result, tolerance: float = 1e-9) -> None:
    assert_same(found.loss, expected.loss, tolerance)
    assert_same(torch.cat(found.gradients), torch.cat(expected.gradients), tolerance)
    assert_same(found.head if found.head is not None else torch.zeros_like(expected.head), expected.head, tolerance)


# --- the printed equations, read literally, in plain Python and float64


def log_p(z):
    return z - z.exp().sum(-1, keepdim=True).log()


def of_sampled(z, rollout):
    return torch.stack([log_p(z)[t, y] for t, y in enumerate(rollout.response_ids)])


def literal_kl(z, zq):
    return (log_p(z).exp() * (log_p(z) - log_p(zq))).sum(-1)


def literal_entropy(zq):
    return -(log_p(zq).exp() * log_p(zq)).sum(-1)


def literal_perplexity_weights(mean_logp, prompts, correct, tau=1.0):
    """`PPL^(1/tau)` over its sum for the correct ones, `PPL^(-1/tau)` over its sum for the wrong ones."""
    raw = [math.exp(-s if ok else s) ** (1 / tau) for s, ok in zip(mean_logp, correct, strict=True)]
    keys = list(zip(prompts, correct, strict=True))
    return [w / math.fsum(v for v, key in zip(raw, keys, strict=True) if key == own) for w, own in zip(raw, keys, strict=True)]


def literal_advantages(rewards, prompts, deviation="population"):
    out = []
    for reward, prompt in zip(rewards, prompts, strict=True):
        group = [r for r, other in zip(rewards, prompts, strict=True) if other == prompt]
        mean = math.fsum(group) / len(group)
        squares = math.fsum((r - mean) ** 2 for r in group)
        if len(set(group)) == 1:
            out.append(0.0)
        elif deviation == "none":
            out.append(reward - mean)
        else:
            out.append((reward - mean) / (math.sqrt(squares / (len(group) - (deviation == "sample"))) + 1e-6))
    return out


def literal_entropy_weights(entropies, beta):
    """Of the tokens in a flat list."""
    raw = [math.exp(-beta * h) for h in entropies]
    return [w / (math.fsum(raw) / len(raw)) for w in raw]


def literal_surrogate(ratio, advantage, epsilon, cap):
    ratio = min(ratio, cap)
    return -min(ratio * advantage, min(max(ratio, 1 - epsilon), 1 + epsilon) * advantage)


def literal_full_context(world, z, zq, group_size):
    return sum(literal_kl(a, b).sum() / len(a) for a, b in zip(z, zq, strict=True)) / (world.prompts * group_size)


def literal_on_policy_sft(world, z, zq, group_size):
    kept = [row for row, rollout in enumerate(world.rollouts) if rollout.verdict.correct]
    longest = max((len(z[row]) for row in kept), default=1)
    total = sum((of_sampled(z[row], world.rollouts[row]).sum() / longest for row in kept), torch.zeros(()))
    return -total / (world.prompts * group_size)


def literal_scope(world, z, zq, group_size, tau=1.0, old=None):
    """`old` holds the logits of the policy that sampled; by default the current one."""
    rollouts = world.rollouts
    live = [of_sampled(a, r) for a, r in zip(z, rollouts, strict=True)]
    frozen = [of_sampled(a, r).detach() for a, r in zip(old or z, rollouts, strict=True)]
    teacher = [of_sampled(b, r).detach() for b, r in zip(zq, rollouts, strict=True)]
    correct = [r.verdict.correct for r in rollouts]
    mean_logp = [float((s if ok else u).mean()) for s, u, ok in zip(frozen, teacher, correct, strict=True)]
    weights = literal_perplexity_weights(mean_logp, [r.prompt_index for r in rollouts], correct, tau)
    total = 0.0
    for lp, lp_old, lq, ok, weight in zip(live, frozen, teacher, correct, weights, strict=True):
        ratio = (lp - lp_old).exp()
        total = total + weight * (-ratio.sum() if ok else (ratio * (lp_old - lq)).sum())
    return total / world.prompts


def literal_srpo(world, z, zq, group_size, beta=1.0, deviation="population"):
    rollouts = world.rollouts
    advantages = literal_advantages([float(r.verdict.correct) for r in rollouts], [r.prompt_index for r in rollouts], deviation)
    wrong = [row for row, r in enumerate(rollouts) if not r.verdict.correct]
    entropies = [float(h) for row in wrong for h in literal_entropy(zq[row])]
    weights = iter(literal_entropy_weights(entropies, beta)) if wrong else iter(())
    total = 0.0
    for row, rollout in enumerate(rollouts):
        if rollout.verdict.correct:
            lp = of_sampled(z[row], rollout)
            total = total - ((lp - lp.detach()).exp() * advantages[row]).sum()
        else:
            total = total + sum(next(weights) * kl for kl in literal_kl(z[row], zq[row].detach()))
    return total / sum(len(a) for a in z)


LITERAL = {
    "full_context": literal_full_context,
    "on_policy_sft": literal_on_policy_sft,
    "scope": literal_scope,
    "srpo": literal_srpo,
}


# --- the shared fixture: one prompt, four rollouts, a vocabulary of three

STUDENT = [[(1, 0, 0), (0, 1, 0)], [(0, 0, 0)], [(2, 0, 0), (0, 0, 1)], [(0, 0, 0)]]
TEACHER = [[(2, 0, 0), (0, 0, 2)], [(0, 2, 0)], [(0, 2, 0), (0, 0, 0)], [(3, 0, 0)]]
SAMPLED = [[0, 2], [1], [0, 1], [2]]
CORRECT = [True, True, False, False]


def fixture(rows=(0, 1, 2, 3), correct=CORRECT, **options) -> World:
    return World(*([values[row] for row in rows] for values in (STUDENT, TEACHER, SAMPLED, correct)), **options)


def test_fixture_log_probs_divergences_and_entropies_are_the_printed_ones():
    world = fixture()
    step = world.step(load_objective("full_context"), range(4))
    student, teacher = step.student_log_probs(world.rollouts), step.teacher_log_probs(world.rollouts)
    assert [len(lp) for lp in student] == [len(lq) for lq in teacher] == [2, 1, 2, 1]
    assert_prints(torch.cat(student), "-0.551445 -1.551445  -1.098612  -0.239545 -1.551445  -1.098612")
    assert_prints(torch.cat(teacher), "-0.239545 -0.239545  -0.239545  -2.239545 -1.098612  -3.094923")
    z, zq = torch.cat(world.student), torch.cat(world.teacher)
    assert_prints(reverse_kl(z, zq), "0.111983 0.840334  0.474266  1.360958 0.123284  0.996311")
    assert_prints(entropy(zq), "0.665573 0.665573  0.665573  0.665573 1.098612  0.366594")


@pytest.mark.parametrize("method", METHODS)
def test_fixture_equals_the_literal_equations(method):
    assert_result(fixture().run(load_objective(method, {"group_size": 4})), fixture().literal(method, 4))


def test_ema_of_a_constant_student_by_hand():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    teacher = EMATeacher(layer, 0.03)
    torch.nn.init.ones_(layer.weight)
    seen = []
    for _ in range(3):
        teacher.update()
        seen.append(float(teacher.shadow["weight"]))
    assert_prints(seen, "0.030000 0.059100 0.087327")


def test_at_the_first_step_the_teacher_on_the_same_prompt_scores_as_the_student():
    model = add_lora(random_model())
    prompts, responses = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]]
    student = score_responses(model, prompts, responses)
    with EMATeacher(model, 0.03).applied():
        teacher = score_responses(model, prompts, responses)
    assert torch.equal(student.hidden, teacher.hidden)


# --- Full Context

LOG_P, LOG_Q = tensor([1 / 3] * 3).log(), tensor([0.5, 0.25, 0.25]).log()


def uniform_towards(*divergences) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[T, 2]` of a uniform student and of a teacher at these reverse divergences."""
    share = (1 - torch.sqrt(1 - torch.exp(-2 * tensor(divergences)))) / 2
    return torch.zeros(len(share), 2, dtype=torch.float64), torch.stack([share, 1 - share], -1).log()


def generalised_jensen_shannon(log_p, log_q, alpha):
    if alpha in (0, 1):
        first, second = (log_p, log_q) if alpha == 1 else (log_q, log_p)
        return (first.exp() * (first - second)).sum(-1)
    mixture = ((1 - alpha) * log_p.exp() + alpha * log_q.exp()).log()
    return (1 - alpha) * (log_p.exp() * (log_p - mixture)).sum(-1) + alpha * (log_q.exp() * (log_q - mixture)).sum(-1)


def test_divergences_and_logit_gradient_by_hand():
    assert_prints(reverse_kl(LOG_P, LOG_Q), "0.0566330")
    assert_prints(forward_kl(LOG_P, LOG_Q), "0.0588915")
    assert_prints(jensen_shannon(LOG_P, LOG_Q), "0.0143626")
    assert_prints(induced_gradient(LOG_P, LOG_Q), "-0.154033 0.077016 0.077016")
    assert_prints(induced_gradient(LOG_P, LOG_Q).norm(), "0.188651")
    logits = LOG_P.clone().requires_grad_()
    reverse_kl(logits, LOG_Q).backward()
    assert_prints(logits.grad, "-0.154033 0.077016 0.077016")


def random_logits(generator, *shape, spread=2.0, dtype=torch.float64):
    """Representable in float32, whatever the dtype."""
    return (spread * torch.randn(*shape, generator=generator)).to(dtype)


seeds = st.integers(0, 2**31)
property_test = settings(max_examples=40, deadline=None)


@property_test
@given(seed=seeds, spread=st.floats(0.01, 8))
def test_divergences_equal_the_literal_family_and_jensen_shannon_is_at_most_log_2(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    z, zq = (random_logits(generator, 4, 9, spread=spread) for _ in range(2))
    p, q = log_p(z), log_p(zq)
    torch.testing.assert_close(reverse_kl(z, zq), generalised_jensen_shannon(p, q, 1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(forward_kl(z, zq), generalised_jensen_shannon(p, q, 0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(jensen_shannon(p, q), generalised_jensen_shannon(p, q, 0.5), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(jensen_shannon(p, q), jensen_shannon(q, p))
    assert (reverse_kl(z, zq) >= 0).all() and (forward_kl(z, zq) >= 0).all()
    assert (jensen_shannon(p, q) >= 0).all() and (jensen_shannon(p, q) <= math.log(2)).all()


def test_jensen_shannon_of_disjoint_distributions_is_log_2():
    log_p = tensor([1.0, 0.0]).log()
    assert float(jensen_shannon(log_p, log_p.flip(0))) == pytest.approx(math.log(2), abs=1e-15)


@property_test
@given(seed=seeds, shift=st.floats(-50, 50), target_shift=st.floats(-50, 50))
def test_reverse_kl_gradient_is_the_literal_one_sums_to_zero_and_ignores_constants(seed, shift, target_shift):
    generator = torch.Generator().manual_seed(seed)
    z, zq = (random_logits(generator, 3, 9).requires_grad_() for _ in range(2))
    value = reverse_kl(z, zq)
    (gradient,) = torch.autograd.grad(value.sum(), z, retain_graph=True)
    literal = (log_p(z).exp() * (log_p(z) - log_p(zq) - literal_kl(z, zq).unsqueeze(-1))).detach()
    assert_same(gradient, literal)
    assert_same(induced_gradient(z, zq), literal)
    assert (gradient.sum(-1).abs() <= 1e-12).all()
    assert_same(reverse_kl(z + shift, zq + target_shift), value.detach())
    assert_same(induced_gradient(z + shift, zq + target_shift), literal)
    with pytest.raises(RuntimeError):  # nothing leads from the divergence to the teacher
        torch.autograd.grad(value.sum(), zq)


def test_full_context_of_a_teacher_equal_to_the_student_is_exactly_zero():
    world = random_world("mixed")
    world.teacher = world.student
    result = world.run(load_objective("full_context"))
    assert result.loss == 0 and not torch.cat(result.gradients).any() and not result.head.any()


def test_full_context_is_the_mean_over_responses_of_their_token_means():
    student, teacher = uniform_towards(0.6, 0.2, 0.2, 0.2)
    world = World([student[:1], student[1:]], [teacher[:1], teacher[1:]], [[0], [0] * 3], [True, False], prompt_index=[0, 1])
    assert float(world.run(load_objective("full_context")).loss) == pytest.approx(0.4, abs=1e-12)
    assert_prints(fixture(prompt_index=range(4)).run(load_objective("full_context")).loss, "0.672214")


def test_full_context_gradient_of_a_token_is_the_induced_one_over_length_and_responses():
    world = fixture(prompt_index=range(4))
    gradients = world.run(load_objective("full_context")).gradients
    for gradient, z, zq in zip(gradients, world.student, world.teacher, strict=True):
        assert_same(gradient, induced_gradient(z, zq) / (len(z) * 4))


@pytest.mark.parametrize("length", [1, 2])
def test_sampled_token_gradient_averages_to_the_reverse_kl_gradient(length):
    """Over all responses of this length: SCOPE's wrong branch (weight 1) against Full Context summed over tokens."""
    generator = torch.Generator().manual_seed(length)
    student, teacher = random_logits(generator, length, 3), random_logits(generator, length, 3)
    mean = torch.zeros_like(student)
    for ids in torch.cartesian_prod(*[torch.arange(3)] * length).reshape(-1, length).tolist():
        world = World([student], [teacher], [ids], [False])
        probability = of_sampled(student, world.rollouts[0]).sum().exp()
        mean += probability * world.run(load_objective("scope")).gradients[0]
    assert_same(
        mean, length * World([student], [teacher], [[0] * length], [False]).run(load_objective("full_context")).gradients[0]
    )
    assert_same(mean, induced_gradient(student, teacher))


# --- On-Policy SFT


def logits_of_nll(*nll) -> torch.Tensor:
    """`[T, 3]` logits that give token 0 these negative log-likelihoods; the rest is shared by the other two."""
    first = -tensor(nll)
    rest = torch.log(-torch.expm1(first) / 2)
    return torch.stack([first, rest, rest], -1)


def two_prompts_of_two(rejected=((0.3,) * 5)) -> World:
    student = [logits_of_nll(1, 3), logits_of_nll(*[0.5] * 4), logits_of_nll(0.2), logits_of_nll(*rejected)]
    return World(student, student, [[0] * len(s) for s in student], [True, True, True, False], prompt_index=[0, 0, 1, 1])


def test_on_policy_sft_by_hand():
    objective = load_objective("on_policy_sft", {"group_size": 2})
    assert_prints(two_prompts_of_two().run(objective).loss, "0.387500")
    assert_prints(fixture().run(load_objective("on_policy_sft")).loss, "0.400188")


def test_on_policy_sft_ignores_length_and_content_of_rejected_responses():
    objective = load_objective("on_policy_sft", {"group_size": 2})
    before = two_prompts_of_two().run(objective)
    for rejected in ((2.0,), (0.1, 0.2, 0.3, 0.4, 5.0, 6.0, 7.0)):
        after = two_prompts_of_two(rejected).run(objective)
        assert torch.equal(after.loss, before.loss)
        assert torch.equal(torch.cat(after.gradients[:3]), torch.cat(before.gradients[:3]))
        assert not after.gradients[3].any()


def test_on_policy_sft_with_every_sample_twice_and_twice_the_group_is_unchanged():
    once = fixture().run(load_objective("on_policy_sft", {"group_size": 4}))
    twice = fixture(rows=[0, 1, 2, 3] * 2).run(load_objective("on_policy_sft", {"group_size": 8}))
    assert_same(twice.loss, once.loss)
    assert_same(2 * torch.cat(twice.gradients[:4]), torch.cat(once.gradients))
    assert_same(twice.head, once.head)


def test_on_policy_sft_gradient_is_the_same_multiple_of_p_minus_one_hot_at_every_kept_token():
    gradients = fixture().run(load_objective("on_policy_sft")).gradients
    for row, gradient in enumerate(gradients):
        one_hot = torch.nn.functional.one_hot(torch.tensor(SAMPLED[row]), 3)
        expected = (tensor(STUDENT[row]).softmax(-1) - one_hot) / (2 * 1 * 4) if CORRECT[row] else torch.zeros_like(gradient)
        assert_same(gradient, expected)


def test_on_policy_sft_of_equally_long_accepted_samples_is_plain_supervised_fine_tuning():
    generator = torch.Generator().manual_seed(0)
    states = [random_logits(generator, 4, 5) for _ in range(3)]
    ids = torch.randint(5, (3, 4), generator=generator).tolist()
    world = World(states, states, ids, [True] * 3, prompt_index=range(3))
    log_probs = [of_sampled(z, rollout) for z, rollout in zip(states, world.rollouts, strict=True)]
    assert_same(world.run(load_objective("on_policy_sft", {"group_size": 1})).loss, -torch.cat(log_probs).mean())


def test_on_policy_sft_with_nothing_accepted_has_no_loss_and_no_gradient():
    objective = load_objective("on_policy_sft")
    world = fixture(correct=[False] * 4)
    assert world.trained(objective) == []
    result = world.run(objective)
    assert result.loss == 0 and not torch.cat(result.gradients).any() and not result.head.any()


class NeverRight(ToyTask):
    def verify(self, example, response):
        return Verdict(False, None, "even")


def test_on_policy_sft_step_with_nothing_accepted_leaves_every_parameter_bit_identical(tmp_path):
    """Neither weight decay nor momentum nor the EMA moves anything."""
    arguments = SelfDistillConfig(
        model=save_checkpoint(tmp_path / "base"),
        task="toy",
        method="on_policy_sft",
        method_settings={"group_size": 2},
        model_dtype="float32",
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        learning_rate=1e-2,
        weight_decay=0.5,
        max_new_tokens=3,
        eval_size=0,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    trainer = SelfDistillTrainer(args=arguments, task=NeverRight())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 1
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, before[name]), name
        assert name not in trainer.teacher.shadow or torch.equal(trainer.teacher.shadow[name], before[name])


# --- SCOPE


@pytest.mark.parametrize(
    ("mean_logp", "correct", "tau", "printed"),
    [
        ([-math.log(x) for x in (1.2, 2.6, 3.8)], True, 1.0, "0.157895 0.342105 0.500000"),
        ([-math.log(x) for x in (4.5, 2.9, 1.7)], False, 1.0, "0.192353 0.298478 0.509169"),
        ([-0.2, -0.7], True, 1.0, "0.377541 0.622459"),
        ([-0.2, -0.7], True, 0.5, "0.268941 0.731059"),
        ([-0.2, -0.7], True, 2.0, "0.437823 0.562177"),
        ([-0.2, -0.7], True, 1e9, "0.500000 0.500000"),
        ([-0.2, -0.7], True, math.inf, "0.500000 0.500000"),
        ([-0.2, -0.7], True, 1e-9, "0.000000 1.000000"),
        ([-1.0, -2.0], False, 1.0, "0.731059 0.268941"),
        ([-1.0, -2.0], False, 1e-9, "1.000000 0.000000"),
        ([-3.0], True, 1.0, "1.000000"),
    ],
)
def test_perplexity_weights_by_hand(mean_logp, correct, tau, printed):
    n = len(mean_logp)
    found = perplexity_weights(tensor(mean_logp), torch.zeros(n, dtype=torch.long), torch.full((n,), correct), tau)
    assert_prints(found, printed)


def test_scope_of_the_fixture_by_hand():
    world = fixture()
    result = world.run(load_objective("scope"))
    assert_prints([world.rollouts[row].coefficients["weight"] for row in range(4)], "0.488210 0.511790 0.806253 0.193747")
    assert_prints(result.loss, "0.145977")
    r0, r1, r2, r3 = result.gradients
    assert_prints(r0, "(-.206944,.103472,.103472) (.103472,.281266,-.384738)")
    assert_prints(r1, "(.170597,-.341193,.170597)")
    assert_prints(r2, "(.343486,-.171743,-.171743) (.077379,-.287718,.210339)")
    assert_prints(r3, "(-.128926,-.128926,.257853)")
    means = world.averages.means()
    assert means["scope_student_perplexity"] == pytest.approx((2.861783 + 3.0) / 2, rel=1e-6)
    assert means["scope_teacher_perplexity"] == pytest.approx((5.307275 + 22.085537) / 2, rel=1e-6)


@pytest.mark.parametrize(("row", "printed"), [(0, "-2.000000"), (1, "-1.000000"), (2, "1.547168"), (3, "1.996311")])
def test_scope_of_one_rollout_is_its_token_sum_with_weight_one(row, printed):
    assert_prints(fixture(rows=[row]).run(load_objective("scope", {"group_size": 1})).loss, printed)


def test_perplexities_of_the_fixture_by_hand():
    world = fixture()
    step = world.step(load_objective("full_context"), range(4))
    student, teacher = step.student_log_probs(world.rollouts[:2]), step.teacher_log_probs(world.rollouts[2:])
    assert_prints([math.exp(-lp.mean()) for lp in student], "2.861783 3.000000")
    assert_prints([math.exp(-lq.mean()) for lq in teacher], "5.307275 22.085537")


def test_scope_with_everything_correct_is_weighted_maximum_likelihood_without_a_teacher():
    world = random_world("all correct")
    result = world.run(load_objective("scope"))
    assert not world.teacher_asked
    nll, total = 0.0, 0.0
    hidden = [s.clone().requires_grad_() for s in world.student]
    for states, rollout in zip(hidden, world.rollouts, strict=True):
        weight = rollout.coefficients["weight"]
        nll = nll - weight * of_sampled(states @ world.weight.T, rollout).sum() / world.prompts
        total -= weight * len(rollout.response_ids) / world.prompts
    assert_same(result.loss, tensor(total))
    assert_same(torch.cat(result.gradients), torch.cat(torch.autograd.grad(nll, hidden)))


def test_scope_with_one_right_and_one_wrong_response_gives_both_weight_one():
    world = fixture(rows=[0, 3])
    world.run(load_objective("scope", {"group_size": 2}))
    assert [rollout.coefficients["weight"] for rollout in world.rollouts] == [1.0, 1.0]


def test_scope_gradient_of_a_wrong_response_doubles_with_the_gap():
    student = tensor([[2.0, -1.0, 0.5]])
    log_probs = log_p(student)
    once, twice = log_probs.clone(), log_probs.clone()
    # The teacher's log-probability of token 0 is lower by a gap, then by twice that gap; the others make up for it.
    for target, gap in ((once, 0.7), (twice, 1.4)):
        target[0, 0] -= gap
        target[0, 1:] += torch.log((1 - target[0, 0].exp()) / (1 - log_probs[0, 0].exp()))
    results = [World([student], [target], [[0]], [False]).run(load_objective("scope")) for target in (once, twice)]
    assert float(results[0].loss) == pytest.approx(0.7)
    assert_same(results[1].gradients[0], 2 * results[0].gradients[0])


def test_scope_gradient_is_the_slope_of_the_printed_objective_with_weights_and_old_policy_frozen():
    world = random_world("mixed", vocabulary=5)
    gradients = world.run(load_objective("scope", {"group_size": 5})).gradients
    z, zq = ([s @ world.weight.T for s in states] for states in (world.student, world.teacher))
    step = 1e-5
    for row, position in ((0, 2), (1, 0), (3, 1)):
        logit_gradient = []
        for v in range(5):
            values = []
            for sign in (1, -1):
                moved = [s.clone() for s in z]
                moved[row][position, v] += sign * step
                values.append(float(literal_scope(world, moved, zq, 5, old=z)))
            logit_gradient.append((values[0] - values[1]) / (2 * step))
        assert_same(gradients[row][position], tensor(logit_gradient) @ world.weight, 1e-6)


def test_scope_weights_of_a_prompt_do_not_depend_on_the_others():
    objective, world = load_objective("scope"), random_world("mixed")
    whole = world.run(objective)
    weights = [rollout.coefficients["weight"] for rollout in world.rollouts]
    for prompt in {rollout.prompt_index for rollout in world.rollouts}:
        rows = [row for row, rollout in enumerate(world.rollouts) if rollout.prompt_index == prompt]
        alone = world.run(objective, order=rows)
        assert [world.rollouts[row].coefficients["weight"] for row in rows] == pytest.approx([weights[row] for row in rows])
        for row in rows:
            assert_same(alone.gradients[row], whole.gradients[row])


# --- SRPO


@pytest.mark.parametrize(
    ("rewards", "deviation", "printed"),
    [
        ([1, 1, 0, 0], "population", "0.999998 0.999998 -0.999998 -0.999998"),
        ([1, 0, 0, 0], "population", "1.732047 -0.577349 -0.577349 -0.577349"),
        ([1, 1, 1, 0], "population", "0.577349 0.577349 0.577349 -1.732047"),
        ([1, 0], "population", "0.999998 -0.999998"),
        ([1, 1, 0, 0], "sample", "0.866024 0.866024 -0.866024 -0.866024"),
        ([1, 0, 0, 0], "sample", "1.499997 -0.499999 -0.499999 -0.499999"),
        ([1, 1, 1, 0], "sample", "0.499999 0.499999 0.499999 -1.499997"),
        ([1, 0], "sample", "0.707106 -0.707106"),
        ([1, 1, 0, 0], "none", "0.500000 0.500000 -0.500000 -0.500000"),
        ([1, 0, 0, 0], "none", "0.750000 -0.250000 -0.250000 -0.250000"),
        ([1, 1, 1, 0], "none", "0.250000 0.250000 0.250000 -0.750000"),
        ([1, 0], "none", "0.500000 -0.500000"),
    ],
)
def test_advantages_by_hand(rewards, deviation, printed):
    assert_prints(group_advantages(tensor(rewards), torch.zeros(len(rewards), dtype=torch.long), deviation), printed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("deviation", ["population", "sample", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_advantages_of_equal_rewards_are_exactly_zero(size, reward, deviation, dtype):
    rewards = torch.full((size,), reward, dtype=dtype)
    assert not group_advantages(rewards, torch.zeros(size, dtype=torch.long), deviation).any()


def logits_of_support(*sizes) -> torch.Tensor:
    """`[1, T, 4]` logits uniform over so many tokens, of entropy `log size`."""
    return torch.where(torch.arange(4) < torch.tensor(sizes).unsqueeze(-1), 0.0, -torch.inf).double().unsqueeze(0)


@pytest.mark.parametrize(
    ("sizes", "beta", "printed"),
    [
        ((1, 2), 1.0, "1.333333 0.666667"),
        ((1, 2, 4), 1.0, "1.714286 0.857143 0.428571"),
        ((1, 2, 4), 2.0, "2.285714 0.571429 0.142857"),
        ((1, 2, 4), 0.0, "1.000000 1.000000 1.000000"),
        ((2, 2), 3.0, "1.000000 1.000000"),
    ],
)
def test_entropy_weights_by_hand(sizes, beta, printed):
    assert_prints(entropy_weights(logits_of_support(*sizes), torch.ones(1, len(sizes)), beta), printed)


def test_srpo_mini_loss_by_hand():
    """A correct response of two tokens with A = 1, a wrong one with divergences 0.3 and 0.6 and entropies 0 and log 2."""
    student, teacher = uniform_towards(0.3, 0.6)
    world = World([student, student], [teacher, teacher], [[0, 1], [1, 0]], [True, False])
    weights = entropy_weights(logits_of_support(1, 2), torch.ones(1, 2), 1.0)[0]
    world.rollouts[0].coefficients |= {"advantage": 1.0, "step_tokens": 4}
    world.rollouts[1].coefficients |= {"step_tokens": 4, "entropy_weight": weights}
    assert float(world.backward(load_objective("srpo"), [[0, 1]]).loss) == pytest.approx(-0.3, abs=1e-12)


def test_srpo_of_the_fixture_by_hand():
    world = fixture()
    result = world.run(load_objective("srpo"))
    coefficients = [rollout.coefficients for rollout in world.rollouts]
    assert_prints([c["advantage"] for c in coefficients], "0.999998 0.999998 -0.999998 -0.999998")
    assert_prints(torch.exp(-entropy(torch.cat(world.teacher[2:]))), "0.513979 0.333333 0.693091")
    weights = torch.cat([c["entropy_weight"] for c in coefficients[2:]])
    assert_prints(weights, "1.000996 0.649181 1.349824")
    assert all(c["step_tokens"] == 6 for c in coefficients)
    assert_prints(-3 * coefficients[0]["advantage"], "-2.999994")
    assert_prints((weights * reverse_kl(torch.cat(world.student[2:]), torch.cat(world.teacher[2:]))).sum(), "2.787191")
    assert_prints(result.loss, "-0.0354672")
    assert_prints(fixture().run(load_objective("srpo", {"beta": 0})).loss, "-0.0865735")
    r0, r1, r2, r3 = result.gradients
    assert_prints(r0, "(-.070647,.035324,.035324) (.035324,.096019,-.131343)")
    assert_prints(r1, "(.055555,-.111111,.055555)")
    assert_prints(r2, "(.083903,-.059720,-.024183) (-.013211,-.013211,.026422)")
    assert_prints(r3, "(-.149980,.074990,.074990)")
    assert world.averages.means()["srpo_entropy_weight"] == pytest.approx(1, rel=1e-6)


def test_srpo_weights_do_not_underflow_together():
    """`exp(-1e4 H)` is 0 at every token; the share of the surest one is 1 all the same."""
    world = random_world("all wrong")
    result = world.run(load_objective("srpo", {"beta": 1e4}))
    weights = torch.cat([rollout.coefficients["entropy_weight"] for rollout in world.rollouts])
    surest = entropy(torch.cat(world.teacher) @ world.weight.T).argmin()
    assert_same(weights, 10.0 * torch.nn.functional.one_hot(surest, 10), 1e-6)
    assert torch.isfinite(result.loss) and torch.isfinite(torch.cat(result.gradients)).all()


def test_srpo_with_everything_correct_has_no_gradient_and_asks_no_teacher():
    world = random_world("all correct")
    result = world.run(load_objective("srpo"))
    assert result.loss == 0 and not torch.cat(result.gradients).any()
    assert not world.teacher_asked


def test_srpo_with_everything_wrong_and_equal_weights_is_the_token_mean_of_the_divergence():
    assert_prints(fixture(correct=[False] * 4).run(load_objective("srpo", {"beta": 0})).loss, "0.651189")
    world = random_world("all wrong")
    divergences = [
        reverse_kl(s @ world.weight.T, t @ world.weight.T) for s, t in zip(world.student, world.teacher, strict=True)
    ]
    assert_same(world.run(load_objective("srpo", {"beta": 0})).loss, torch.cat(divergences).mean())


def test_clipped_surrogate_on_all_tokens_is_plain_token_mean_grpo():
    """What SRPO is without its distillation branch, negative advantages and ratios other than 1 included."""
    generator = torch.Generator().manual_seed(5)
    rewards, lengths = [1.0, 0.0, 0.0, 1.0, 1.0], [2, 3, 1, 4, 2]
    advantages = group_advantages(tensor(rewards), torch.tensor([0, 0, 0, 7, 7]))
    per_token = advantages.repeat_interleave(torch.tensor(lengths))
    log_ratio = random_logits(generator, sum(lengths), spread=0.6)
    found = clipped_surrogate(log_ratio - 1, torch.full_like(log_ratio, -1), per_token, 0.2, 2.0).mean()
    expected = [
        literal_surrogate(math.exp(r), a, 0.2, 2.0) for r, a in zip(log_ratio.tolist(), per_token.tolist(), strict=True)
    ]
    assert float(found) == pytest.approx(math.fsum(expected) / len(expected), rel=1e-12)


def test_srpo_reward_of_a_wrong_response_still_matters_to_its_siblings():
    gradients = {}
    for siblings in (False, True):
        world = fixture(correct=[True, siblings, False, False])
        gradients[siblings] = world.run(load_objective("srpo", {"beta": 0})).gradients[0]
    # (1, 0, 0, 0) gives the first response sqrt(3), (1, 1, 0, 0) gives it 1, each up to the 1e-6 in the divisor.
    ratio = (0.75 / (math.sqrt(0.1875) + 1e-6)) / (0.5 / (0.5 + 1e-6))
    assert_same(gradients[False], ratio * gradients[True])


@pytest.mark.parametrize("changes", [{"clip": 0.01}, {"clip": 5.0}, {"ratio_cap": 1.0}, {"ratio_cap": 1e6}])
def test_srpo_clip_and_cap_change_nothing_while_the_ratio_is_one(changes):
    plain, changed = (random_world("mixed").run(load_objective("srpo", options)) for options in ({}, changes))
    assert torch.equal(plain.loss, changed.loss) and torch.equal(torch.cat(plain.gradients), torch.cat(changed.gradients))


def test_srpo_hands_clip_and_cap_to_the_surrogate(monkeypatch):
    """With ratios of 1 its result cannot show them."""
    seen = set()

    def spy(logp, old_logp, advantages, epsilon, ratio_cap):
        seen.add((epsilon, ratio_cap, torch.equal(logp, old_logp), old_logp.requires_grad))
        return clipped_surrogate(logp, old_logp, advantages, epsilon, ratio_cap)

    monkeypatch.setattr("firedistill.objectives.srpo.clipped_surrogate", spy)
    fixture().run(load_objective("srpo", {"clip": 0.3, "ratio_cap": 4}))
    fixture().run(load_objective("srpo"))
    assert seen == {(0.3, 4.0, True, False), (0.2, 2.0, True, False)}


# --- pure functions against literal readings, and their properties


@st.composite
def groups(draw):
    """Prompts and verdicts of up to four groups of one to five responses, interleaved."""
    rows = [
        (prompt, draw(st.booleans()))
        for prompt in draw(st.permutations([3, 8, 11, 40]))
        for _ in range(draw(st.integers(0, 5)))
    ]
    rows = draw(st.permutations(rows or [(3, True)]))
    return [prompt for prompt, _ in rows], [ok for _, ok in rows]


@property_test
@given(rows=groups(), seed=seeds, tau=st.floats(0.3, 5), shift=st.floats(-5, 5))
def test_perplexity_weights_equal_the_literal_reading_sum_to_one_and_ignore_shifts(rows, seed, tau, shift):
    prompts, correct = rows
    mean_logp = -random_logits(torch.Generator().manual_seed(seed), len(prompts)).abs()
    index, right = torch.tensor(prompts), torch.tensor(correct)
    found = perplexity_weights(mean_logp.requires_grad_(), index, right, tau)
    assert not found.requires_grad
    torch.testing.assert_close(
        found, tensor(literal_perplexity_weights(mean_logp.tolist(), prompts, correct, tau)), rtol=1e-9, atol=0
    )
    for key in set(zip(prompts, correct, strict=True)):
        subset = torch.tensor([own == key for own in zip(prompts, correct, strict=True)])
        assert float(found[subset].sum()) == pytest.approx(1, abs=1e-12)
        moved = mean_logp.detach() + shift * subset
        torch.testing.assert_close(perplexity_weights(moved, index, right, tau), found, rtol=1e-9, atol=0)
        alone = perplexity_weights(mean_logp[subset], index[subset], right[subset], tau)
        torch.testing.assert_close(alone, found[subset], rtol=1e-12, atol=0)
    single = perplexity_weights(mean_logp.detach().float(), index, right, tau)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), found, rtol=1e-5, atol=0)


@property_test
@given(rows=groups(), deviation=st.sampled_from(["population", "sample", "none"]), shift=st.integers(-4, 4), seed=seeds)
def test_advantages_equal_the_literal_reading_and_belong_to_their_own_prompt(rows, deviation, shift, seed):
    prompts, correct = rows
    index = torch.tensor(prompts)
    fractions = torch.rand(len(prompts), generator=torch.Generator().manual_seed(seed)).double()
    for rewards in (tensor(correct), fractions):
        found = group_advantages(rewards, index, deviation)
        assert not found.requires_grad
        expected = tensor(literal_advantages(rewards.tolist(), prompts, deviation))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(group_advantages(rewards + shift, index, deviation), found, rtol=1e-9, atol=1e-9)
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(
            group_advantages(rewards[order], index[order], deviation), found[order], rtol=1e-9, atol=1e-12
        )
        for prompt in set(prompts):
            group = index == prompt
            torch.testing.assert_close(found[group].sum(), tensor(0.0), rtol=0, atol=1e-9)
            assert torch.equal(group_advantages(rewards[group], index[group], deviation), found[group])
    single = group_advantages(tensor(correct).float(), index, deviation)
    torch.testing.assert_close(single.double(), group_advantages(tensor(correct), index, deviation), rtol=1e-5, atol=0)


@property_test
@given(seed=seeds, beta=st.floats(0, 30), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), spread=st.floats(0.1, 6))
def test_entropy_weights_equal_the_literal_reading_have_mean_one_and_ignore_padding(seed, beta, lengths, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, len(lengths), 5, 7, spread=spread)
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    found = entropy_weights(logits.requires_grad_(), mask, beta)
    assert not found.requires_grad and not found[~mask].any()
    if not mask.any():
        return
    expected = literal_entropy_weights(literal_entropy(logits.detach())[mask].tolist(), beta)
    torch.testing.assert_close(found[mask], tensor(expected), rtol=1e-9, atol=1e-12)
    assert float(found[mask].mean()) == pytest.approx(1, abs=1e-12)
    padded = torch.where(mask.unsqueeze(-1), logits, torch.nan)
    assert torch.equal(entropy_weights(padded, mask, beta), found)
    order = torch.randperm(len(lengths), generator=generator)
    torch.testing.assert_close(entropy_weights(logits[order], mask[order], beta), found[order], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(entropy_weights(logits + 9.0, mask, beta), found, rtol=1e-9, atol=1e-12)
    single = entropy_weights(logits.detach().float(), mask, beta)
    assert_same(single, found, 1e-5)


@property_test
@given(entropies=st.lists(st.floats(0, 4), min_size=1, max_size=6), beta=st.floats(0, 5), shift=st.floats(0, 200))
def test_a_constant_added_to_every_entropy_leaves_the_weights_as_they_are(entropies, beta, shift):
    """As prepared by SRPO for a step: it is the same whether all teachers are sure or all are vague, and never underflows."""
    mask = torch.ones(len(entropies), dtype=torch.bool)
    found = weights_from_entropies(tensor(entropies), mask, beta)
    assert_same(found, tensor(literal_entropy_weights(entropies, beta)))
    assert_same(weights_from_entropies(tensor(entropies) + shift, mask, beta), found)


@property_test
@given(log_ratio=st.floats(-4, 4), advantage=st.floats(-3, 3), epsilon=st.floats(0.01, 0.9), cap=st.floats(1, 5))
def test_clipped_surrogate_equals_the_literal_reading(log_ratio, advantage, epsilon, cap):
    logp, old = tensor([log_ratio - 2.0]).requires_grad_(), tensor([-2.0]).requires_grad_()
    advantages = tensor([advantage]).requires_grad_()
    found = clipped_surrogate(logp, old, advantages, epsilon, cap)
    assert found.item() == pytest.approx(literal_surrogate(math.exp(log_ratio), advantage, epsilon, cap), rel=1e-9, abs=1e-15)
    gradients = torch.autograd.grad(found.sum(), [logp, old, advantages], allow_unused=True)
    assert gradients[1] is None and gradients[2] is None
    # Off its kinks the loss follows the ratio, or is flat.
    ratio = math.exp(log_ratio)
    kinks = (1 - epsilon, 1 + epsilon, cap)
    if all(abs(ratio - kink) > 1e-4 for kink in kinks):
        step = 1e-6
        values = [literal_surrogate(math.exp(log_ratio + s), advantage, epsilon, cap) for s in (step, -step)]
        assert float(gradients[0]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-7)


@property_test
@given(log_ratio=st.floats(-8, 8), size=st.floats(0.01, 3))
def test_the_cap_at_two_never_touches_advantages_above_zero_and_always_those_below_once_the_ratio_is_over_two(log_ratio, size):
    logp, old = tensor([log_ratio]), tensor([0.0])
    gain, loss = tensor([size]), tensor([-size])
    assert torch.equal(clipped_surrogate(logp, old, gain, 0.2, 2.0), clipped_surrogate(logp, old, gain, 0.2))
    capped, free = clipped_surrogate(logp, old, loss, 0.2, 2.0), clipped_surrogate(logp, old, loss, 0.2)
    if log_ratio > math.log(2):
        assert float(capped) == pytest.approx(2 * size) and capped < free
    else:
        assert torch.equal(capped, free)


# --- the classes on random batches against the dense form

T, F = True, False
CASES = {
    "mixed": [[(5, T), (1, F), (7, F), (3, T)], [(2, T), (4, T)], [(6, F)]],
    "all correct": [[(4, T), (2, T)], [(3, T)]],
    "all wrong": [[(4, F), (2, F), (1, F)], [(3, F)]],
    "one token": [[(1, F)]],
    "groups of five": [[(2, T), (3, F), (1, T), (4, F), (2, T)], [(1, F), (2, F), (1, T), (3, F), (2, F)]],
}
H, V = 8, 31


def random_world(case, seed=0, dtype=torch.float64, vocabulary=V, gap=1.0) -> World:
    """One more prompt was left out of the step, so that divisors must not be counted from what is there."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(10 * group + 3, length, ok) for group, members in enumerate(CASES[case]) for length, ok in members]
    student = [random_logits(generator, length, H, spread=1.0) for _, length, _ in rows]
    teacher = [s + random_logits(generator, *s.shape, spread=gap) for s in student]
    return World(
        student,
        teacher,
        [torch.randint(vocabulary, (length,), generator=generator).tolist() for _, length, _ in rows],
        [ok for _, _, ok in rows],
        [prompt for prompt, _, _ in rows],
        prompts=len(CASES[case]) + 1,
        projection=random_logits(generator, vocabulary, H, spread=1.0),
        dtype=dtype,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_loss_and_gradients_equal_the_dense_form(method, case, chunk, monkeypatch):
    """Of the states and of a trained head; the teacher shares that head and sends no gradient to it."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", chunk * V)
    world = random_world(case)
    assert_result(world.run(load_objective(method, {"group_size": 5})), world.literal(method, 5))
    assert all(states.grad is None for states in world.teacher_leaves)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("method", "given", "options"),
    [
        ("scope", {"weight_temperature": 0.3}, {"tau": 0.3}),
        ("scope", {"weight_temperature": "1e2"}, {"tau": 100.0}),
        ("srpo", {"beta": 0}, {"beta": 0.0}),
        ("srpo", {"beta": 2.5, "deviation": "sample"}, {"beta": 2.5, "deviation": "sample"}),
        ("srpo", {"deviation": "none"}, {"deviation": "none"}),
    ],
)
def test_settings_reach_the_loss(method, given, options, case):
    world = random_world(case, seed=1)
    assert_result(world.run(load_objective(method, given)), world.literal(method, 4, **options))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_float32_agrees_with_float64(method, case):
    wide, narrow = (random_world(case, dtype=dtype).run(load_objective(method)) for dtype in (torch.float64, torch.float32))
    assert narrow.loss.dtype == torch.float32
    assert_result(narrow, wide, 1e-5)


SPLITS = {
    "one by one": lambda rows: [[row] for row in rows],
    "every other": lambda rows: [rows[::2], rows[1::2]],
    "backwards, in threes, one micro-batch empty": lambda rows: [*(rows[::-1][i : i + 3] for i in range(0, len(rows), 3)), []],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", ["mixed", "groups of five"])
@pytest.mark.parametrize("method", METHODS)
def test_order_and_micro_batches_change_nothing(method, case, split):
    """Groups are torn apart by every one of these splits."""
    objective, world = load_objective(method), random_world(case)
    whole = world.run(objective)
    assert_result(world.run(objective, SPLITS[split]), whole)
    shuffled = torch.randperm(len(world.rollouts), generator=torch.Generator().manual_seed(1)).tolist()
    assert_result(world.run(objective, SPLITS[split], order=shuffled), whole)


class Exchange:
    """Lets threads stand in for processes: `gather` waits until every one of them has asked."""

    def __init__(self, size):
        self.values, self.barrier = [0.0] * size, Barrier(size, timeout=20)

    def gather(self, process, value):
        self.values[process] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("mixed", {3}),
        ("mixed", {13}),
        ("mixed", {3, 13, 23}),
        ("all correct", {3}),
        ("all wrong", {3}),
        ("groups of five", {13}),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_add_up_to_one(method, case, first):
    """Each holds whole groups, maybe none, maybe none that is trained: what spans the step is agreed upon by both."""
    objective, world = load_objective(method), random_world(case)
    whole = world.run(objective)
    trained, exchange = world.trained(objective), Exchange(2)
    halves = [[row for row in trained if (world.rollouts[row].prompt_index in first) == own] for own in (True, False)]

    def prepare(process):
        world.prepare(
            objective,
            halves[process],
            total=lambda value: sum(exchange.gather(process, value)),
            largest=lambda value: max(exchange.gather(process, value)),
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(prepare, range(2)))
    parts = [world.backward(objective, [rows]) for rows in halves]
    gradients = [a + b for a, b in zip(*(part.gradients for part in parts), strict=True)]
    assert_result(Result(parts[0].loss + parts[1].loss, gradients, parts[0].head + parts[1].head), whole)


# --- one method reduces to another


def test_srpo_of_equally_long_wrong_responses_with_equal_weights_is_full_context():
    generator = torch.Generator().manual_seed(2)
    student, teacher = ([random_logits(generator, 3, 6) for _ in range(4)] for _ in range(2))
    world = World(student, teacher, [[0, 1, 2]] * 4, [False] * 4)
    srpo = world.run(load_objective("srpo", {"beta": 0}))
    assert_result(srpo, world.run(load_objective("full_context", {"group_size": 4})))


def test_srpo_gives_a_correct_response_beside_a_wrong_one_the_supervised_gradient():
    """`A (p - onehot) / N` with A = 1, up to the 1e-6 in its divisor: On-Policy SFT up to a common scale."""
    srpo = fixture(rows=[0, 2]).run(load_objective("srpo", {"group_size": 2})).gradients[0]
    one_hot = torch.nn.functional.one_hot(torch.tensor(SAMPLED[0]), 3)
    assert_same(srpo, 0.5 / (0.5 + 1e-6) * (tensor(STUDENT[0]).softmax(-1) - one_hot) / 4)
    sft = fixture(rows=[0, 2]).run(load_objective("on_policy_sft", {"group_size": 2})).gradients[0]
    assert_same(srpo, 0.5 / (0.5 + 1e-6) * sft * (2 * 2) / 4)


def test_scope_of_equally_long_equally_likely_correct_responses_is_on_policy_sft_times_the_length():
    generator = torch.Generator().manual_seed(3)
    states, ids = random_logits(generator, 4, 6), torch.randint(6, (4,), generator=generator)
    orders = [torch.randperm(4, generator=generator) for _ in range(3)]
    world = World([states[o] for o in orders], [states] * 3, [ids[o].tolist() for o in orders], [True] * 3)
    scope = torch.cat(world.run(load_objective("scope", {"group_size": 3})).gradients)
    sft = torch.cat(world.run(load_objective("on_policy_sft", {"group_size": 3})).gradients)
    assert_same(scope, 4 * sft)


def test_fire_with_a_weight_of_one_is_on_policy_sft_of_one_response_per_prompt():
    """A response of the most likely tokens is inside the radius throughout: `p_y >= ||p||^2`."""
    world = random_world("all correct")
    logits = [s @ world.weight.T for s in world.student]
    for z, rollout in zip(logits, world.rollouts, strict=True):
        rollout.response.token_ids[:] = z.argmax(-1).tolist()
        assert (sft_weight(z, z.argmax(-1)) == 1).all()
    sft = load_objective("on_policy_sft", {"group_size": 1})
    fire = world.run(load_objective("fire"))
    parts = [world.run(sft, order=[row]) for row in range(len(logits))]  # alone, so that each is divided by its own length
    assert_same(fire.loss, sum(part.loss for part in parts))
    for row, part in enumerate(parts):
        assert_same(fire.gradients[row], part.gradients[row])


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_equal_to_the_student_teaches_nothing_new(method):
    """Correct responses still raise their own likelihood in On-Policy SFT and SCOPE; nothing else has a gradient."""
    for case, moving in (("all correct", {"on_policy_sft", "scope"}), ("all wrong", set())):
        world = random_world(case)
        world.teacher = world.student
        gradients = torch.cat(world.run(load_objective(method)).gradients)
        assert gradients.any() == (method in moving)


# --- what is sampled, trained and scored


class FakeSampler:
    """Answers every prompt with three tokens, every third answer right."""

    def student(self, prompts):
        return [
            Rollout(p.example, p.token_ids, Response([0, 1, 2], "", True), Verdict(i % 3 == 0, None, "1"), prompt_index=p.index)
            for i, p in enumerate(prompts)
        ]


@pytest.mark.parametrize(
    ("method", "given", "size"),
    [("full_context", {}, 1), ("on_policy_sft", {}, 4), ("scope", {}, 4), ("srpo", {}, 4), ("srpo", {"group_size": 2}, 2)],
)
def test_a_step_samples_the_members_of_a_group_side_by_side(method, given, size):
    prompts = [Prompt(Example(f"x/{i}", "?", "1"), [i], index=10 + i) for i in range(8)]
    rollouts = load_objective(method, given).sample(FakeSampler(), prompts, 0.0)
    assert [rollout.prompt_index for rollout in rollouts] == [10 + i for i in range(8) for _ in range(size)]
    assert [rollout.example for rollout in rollouts] == [prompt.example for prompt in prompts for _ in range(size)]
    assert sum(rollout.generated_tokens for rollout in rollouts) == 8 * size * 3


@pytest.mark.parametrize("method", METHODS)
def test_on_policy_sft_samples_at_temperature_one_and_no_method_changes_anything_else(method):
    law = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=123, top_k=7, repetition_penalty=1.3)
    expected = Sampling(1.0, 0.95, 123, 7, 1.3) if method == "on_policy_sft" else law
    assert load_objective(method).sampling(law) == expected


def test_the_temperature_of_on_policy_sft_is_a_setting():
    assert load_objective("on_policy_sft", {"temperature": "0.6"}).sampling(Sampling()).temperature == 0.6


@pytest.mark.parametrize(
    ("method", "trained", "scored"),
    [
        ("full_context", [0, 1, 2, 3, 4, 5, 6], {0, 1, 2, 3, 4, 5, 6}),
        ("on_policy_sft", [0, 3, 4, 5], set()),
        ("scope", [0, 1, 2, 3, 4, 5, 6], {1, 2, 6}),
        ("srpo", [0, 1, 2, 3, 4, 5, 6], {1, 2, 6}),
    ],
)
def test_who_is_trained_and_who_is_shown_to_the_teacher(method, trained, scored):
    objective, world = load_objective(method), random_world("mixed")
    assert world.trained(objective) == trained
    assert {row for row in trained if objective.needs_teacher(world.rollouts[row])} == scored
    world.run(objective)
    assert set(world.teacher_asked) == scored


@pytest.mark.parametrize(
    ("case", "scored"),
    [("mixed", [0, 3, 4, 5]), ("all correct", [0, 1]), ("all wrong", []), ("groups of five", [0, 2, 4])],
)
def test_scope_asks_for_the_students_scores_only_where_a_correct_response_has_a_correct_sibling(case, scored):
    world = random_world(case)
    world.run(load_objective("scope"))
    assert sorted(world.student_asked) == scored


@pytest.mark.parametrize("method", ["full_context", "on_policy_sft", "srpo"])
def test_other_methods_ask_for_no_scores_of_the_student_beforehand(method):
    world = random_world("mixed")
    world.run(load_objective(method))
    assert world.student_asked == []


@pytest.mark.parametrize("method", METHODS)
def test_a_step_without_rollouts_is_prepared_and_has_no_loss(method):
    objective, world = load_objective(method), random_world("mixed")
    result = world.run(objective, order=[])
    assert result.loss == 0 and not torch.cat(result.gradients).any()


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("full_context", {"group_size": 0}),
        ("on_policy_sft", {"group_size": 1.5}),
        ("on_policy_sft", {"temperature": -0.5}),
        ("on_policy_sft", {"temperature": "hot"}),
        ("scope", {"group_size": -1}),
        ("scope", {"weight_temperature": 0}),
        ("scope", {"weight_temperature": -1.0}),
        ("scope", {"weight_temperature": float("nan")}),
        ("srpo", {"group_size": 0}),
        ("srpo", {"beta": -1.0}),
        ("srpo", {"beta": float("inf")}),
        ("srpo", {"clip": -0.2}),
        ("srpo", {"ratio_cap": 0.5}),
        ("srpo", {"deviation": "biased"}),
        ("scope", {"weight_temprature": 1.0}),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_meant_is_refused_by_its_name(method, given):
    (name,) = given
    with pytest.raises(ValueError, match=name) as error:
        load_objective(method, given)
    assert "method_settings" in str(error.value)
