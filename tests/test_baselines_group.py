"""Full Context, On-Policy SFT, SCOPE and SRPO: values by hand, literal equations, invariances, and reductions to each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import literal
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
from firedistill.models.states import score_responses
from firedistill.objectives import load_objective
from firedistill.objectives.srpo import Prepared, weights_from_entropies
from firedistill.teacher.ema import EMAWeights
from stubs import World, assert_printed, assert_result, assert_same, random_logits, random_world, tensor
from tiny import ToyTask, random_model, save_checkpoint

METHODS = ["full_context", "on_policy_sft", "scope", "srpo"]

# ---- The shared fixture: one prompt, four rollouts, a vocabulary of three --------------------------------------------------------

STUDENT = [[(1, 0, 0), (0, 1, 0)], [(0, 0, 0)], [(2, 0, 0), (0, 0, 1)], [(0, 0, 0)]]
TEACHER = [[(2, 0, 0), (0, 0, 2)], [(0, 2, 0)], [(0, 2, 0), (0, 0, 0)], [(3, 0, 0)]]
SAMPLED = [[0, 2], [1], [0, 1], [2]]
CORRECT = [True, True, False, False]


def fixture(rows=(0, 1, 2, 3), correct=CORRECT, **options) -> World:
    return World(*([values[row] for row in rows] for values in (STUDENT, TEACHER, SAMPLED, correct)), **options)


def test_log_probs_perplexities_divergences_and_entropies_of_the_fixture_by_hand():
    world = fixture()
    step = world.step()
    student, teacher = step.student_log_probs(world.rollouts), step.teacher_log_probs(world.rollouts)
    assert [len(lp) for lp in student] == [len(lq) for lq in teacher] == [2, 1, 2, 1]
    assert_printed(torch.cat(student), "-0.551445 -1.551445  -1.098612  -0.239545 -1.551445  -1.098612")
    assert_printed(torch.cat(teacher), "-0.239545 -0.239545  -0.239545  -2.239545 -1.098612  -3.094923")
    assert_printed([math.exp(-lp.mean()) for lp in student[:2]], "2.861783 3.000000")
    assert_printed([math.exp(-lq.mean()) for lq in teacher[2:]], "5.307275 22.085537")
    z, zq = torch.cat(world.logits("student")), torch.cat(world.logits())
    assert_printed(reverse_kl(z, zq), "0.111983 0.840334  0.474266  1.360958 0.123284  0.996311")
    assert_printed(entropy(zq), "0.665573 0.665573  0.665573  0.665573 1.098612  0.366594")


@pytest.mark.parametrize("method", METHODS)
def test_fixture_equals_the_literal_equations(method):
    assert_result(fixture().run(load_objective(method, {"group_size": 4})), literal.literal(fixture(), method, 4))


def test_ema_of_a_constant_student_by_hand():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    teacher = EMAWeights(layer, 0.03)
    torch.nn.init.ones_(layer.weight)
    seen = []
    for _ in range(3):
        teacher.update()
        seen.append(float(teacher.shadow["weight"]))
    assert_printed(seen, "0.030000 0.059100 0.087327")


def test_at_the_first_step_the_teacher_on_the_same_prompt_scores_as_the_student():
    model = add_lora(random_model())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which begins at 0
            torch.nn.init.normal_(parameter, std=0.1)
    prompts, responses = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]]
    student = score_responses(model, prompts, responses)
    with EMAWeights(model, 0.03).applied():
        teacher = score_responses(model, prompts, responses)
    assert torch.equal(student.hidden, teacher.hidden)


# ---- Full Context ----------------------------------------------------------------------------------------------------------------

LOG_P, LOG_Q = tensor([1 / 3] * 3).log(), tensor([0.5, 0.25, 0.25]).log()


def uniform_towards(*divergences) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[T, 2]` of a uniform student and of a teacher at these reverse divergences."""
    share = (1 - torch.sqrt(1 - torch.exp(-2 * tensor(divergences)))) / 2
    return torch.zeros(len(share), 2, dtype=torch.float64), torch.stack([share, 1 - share], -1).log()


def generalized_jensen_shannon(log_p, log_q, alpha):
    if alpha in (0, 1):
        first, second = (log_p, log_q) if alpha == 1 else (log_q, log_p)
        return (first.exp() * (first - second)).sum(-1)
    mixture = ((1 - alpha) * log_p.exp() + alpha * log_q.exp()).log()
    return (1 - alpha) * (log_p.exp() * (log_p - mixture)).sum(-1) + alpha * (log_q.exp() * (log_q - mixture)).sum(-1)


def test_divergences_and_logit_gradient_by_hand():
    assert_printed(reverse_kl(LOG_P, LOG_Q), "0.0566330")
    assert_printed(forward_kl(LOG_P, LOG_Q), "0.0588915")
    assert_printed(jensen_shannon(LOG_P, LOG_Q), "0.0143626")
    assert_printed(induced_gradient(LOG_P, LOG_Q), "-0.154033 0.077016 0.077016")
    assert_printed(induced_gradient(LOG_P, LOG_Q).norm(), "0.188651")
    logits = LOG_P.clone().requires_grad_()
    reverse_kl(logits, LOG_Q).backward()
    assert_printed(logits.grad, "-0.154033 0.077016 0.077016")


seeds = st.integers(0, 2**31)
property_test = settings(max_examples=40, deadline=None)


@property_test
@given(seed=seeds, spread=st.floats(0.01, 8))
def test_divergences_equal_the_literal_family_and_jensen_shannon_is_at_most_log_2(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    z, zq = (random_logits(generator, 4, 9, spread=spread) for _ in range(2))
    p, q = literal.log_p(z), literal.log_p(zq)
    torch.testing.assert_close(reverse_kl(z, zq), generalized_jensen_shannon(p, q, 1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(forward_kl(z, zq), generalized_jensen_shannon(p, q, 0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(jensen_shannon(p, q), generalized_jensen_shannon(p, q, 0.5), rtol=1e-9, atol=1e-12)
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
    log_p, log_q = literal.log_p(z), literal.log_p(zq)
    expected = (log_p.exp() * (log_p - log_q - literal.kl(z, zq).unsqueeze(-1))).detach()
    assert_same(gradient, expected)
    assert_same(induced_gradient(z, zq), expected)
    assert (gradient.sum(-1).abs() <= 1e-12).all()
    assert_same(reverse_kl(z + shift, zq + target_shift), value.detach())
    assert_same(induced_gradient(z + shift, zq + target_shift), expected)
    with pytest.raises(RuntimeError):  # nothing leads from the divergence to the teacher
        torch.autograd.grad(value.sum(), zq)


def test_full_context_of_a_teacher_equal_to_the_student_is_exactly_zero():
    world = random_world("mixed")
    world.views = [{"full": states} for states in world.student]
    result = world.run(load_objective("full_context"))
    assert result.loss == 0 and not result.gradient.any() and not result.head.any()


def test_full_context_is_the_mean_over_responses_of_their_token_means():
    student, teacher = uniform_towards(0.6, 0.2, 0.2, 0.2)
    world = World([student[:1], student[1:]], [teacher[:1], teacher[1:]], [[0], [0] * 3], [True, False], prompt_index=[0, 1])
    assert float(world.run(load_objective("full_context")).loss) == pytest.approx(0.4, abs=1e-12)
    assert_printed(fixture(prompt_index=range(4)).run(load_objective("full_context")).loss, "0.672214")


def test_full_context_gradient_of_a_token_is_the_induced_one_over_length_and_responses():
    world = fixture(prompt_index=range(4))
    gradients = world.run(load_objective("full_context")).gradients
    for gradient, z, zq in zip(gradients, world.student, world.logits(), strict=True):
        assert_same(gradient, induced_gradient(z, zq) / (len(z) * 4))


@pytest.mark.parametrize("length", [1, 2])
def test_sampled_token_gradient_averages_to_the_reverse_kl_gradient(length):
    """Over all responses of this length: SCOPE's wrong branch (weight 1) against Full Context summed over tokens."""
    generator = torch.Generator().manual_seed(length)
    student, teacher = random_logits(generator, length, 3), random_logits(generator, length, 3)
    mean = torch.zeros_like(student)
    for ids in torch.cartesian_prod(*[torch.arange(3)] * length).reshape(-1, length).tolist():
        world = World([student], [teacher], [ids], [False])
        probability = literal.of_tokens(literal.log_p(student), world.tokens(0)).sum().exp()
        mean += probability * world.run(load_objective("scope")).gradients[0]
    assert_same(
        mean, length * World([student], [teacher], [[0] * length], [False]).run(load_objective("full_context")).gradients[0]
    )
    assert_same(mean, induced_gradient(student, teacher))


# ---- On-Policy SFT ---------------------------------------------------------------------------------------------------------------


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
    assert_printed(two_prompts_of_two().run(objective).loss, "0.387500")
    assert_printed(fixture().run(load_objective("on_policy_sft")).loss, "0.400188")


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
    assert_same(2 * torch.cat(twice.gradients[:4]), once.gradient)
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
    log_probs = [literal.of_tokens(literal.log_p(z), world.tokens(row)) for row, z in enumerate(states)]
    assert_same(world.run(load_objective("on_policy_sft", {"group_size": 1})).loss, -torch.cat(log_probs).mean())


def test_on_policy_sft_with_nothing_accepted_has_no_loss_and_no_gradient():
    objective = load_objective("on_policy_sft")
    world = fixture(correct=[False] * 4)
    assert world.trained(objective) == []
    result = world.run(objective)
    assert result.loss == 0 and not result.gradient.any() and not result.head.any()


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
        assert name not in trainer.teacher.weights.shadow or torch.equal(trainer.teacher.weights.shadow[name], before[name])


# ---- SCOPE -----------------------------------------------------------------------------------------------------------------------


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
    assert_printed(found, printed)


def test_scope_of_the_fixture_by_hand():
    world = fixture()
    result = world.run(load_objective("scope"))
    assert_printed([world.prepared[row].weight for row in range(4)], "0.488210 0.511790 0.806253 0.193747")
    assert_printed(result.loss, "0.145977")
    r0, r1, r2, r3 = result.gradients
    assert_printed(r0, "(-.206944,.103472,.103472) (.103472,.281266,-.384738)")
    assert_printed(r1, "(.170597,-.341193,.170597)")
    assert_printed(r2, "(.343486,-.171743,-.171743) (.077379,-.287718,.210339)")
    assert_printed(r3, "(-.128926,-.128926,.257853)")
    means = world.metrics.row()
    assert means["scope_student_perplexity"] == pytest.approx((2.861783 + 3.0) / 2, rel=1e-6)
    assert means["scope_teacher_perplexity"] == pytest.approx((5.307275 + 22.085537) / 2, rel=1e-6)


@pytest.mark.parametrize(("row", "printed"), [(0, "-2.000000"), (1, "-1.000000"), (2, "1.547168"), (3, "1.996311")])
def test_scope_of_one_rollout_is_its_token_sum_with_weight_one(row, printed):
    assert_printed(fixture(rows=[row]).run(load_objective("scope", {"group_size": 1})).loss, printed)


def test_scope_with_everything_correct_is_weighted_maximum_likelihood_without_a_teacher():
    world = random_world("all correct")
    result = world.run(load_objective("scope"))
    assert not world.teacher.read
    nll, total = 0.0, 0.0
    hidden = [s.clone().requires_grad_() for s in world.student]
    for row, states in enumerate(hidden):
        weight, tokens = world.prepared[row].weight, world.tokens(row)
        nll = nll - weight * literal.of_tokens(literal.log_p(states @ world.weight.T), tokens).sum() / world.prompts
        total -= weight * len(tokens) / world.prompts
    assert_same(result.loss, tensor(total))
    assert_same(result.gradient, torch.cat(torch.autograd.grad(nll, hidden)))


def test_scope_with_one_right_and_one_wrong_response_gives_both_weight_one():
    world = fixture(rows=[0, 3])
    world.run(load_objective("scope", {"group_size": 2}))
    assert [world.prepared[row].weight for row in range(2)] == [1.0, 1.0]


def test_scope_gradient_of_a_wrong_response_doubles_with_the_gap():
    student = tensor([[2.0, -1.0, 0.5]])
    log_probs = literal.log_p(student)
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
    z = world.logits("student")
    step = 1e-5
    for row, position in ((0, 2), (1, 0), (3, 1)):
        logit_gradient = []
        for v in range(5):
            values = []
            for sign in (1, -1):
                moved = [s.clone() for s in z]
                moved[row][position, v] += sign * step
                values.append(float(literal.scope(world, moved, 5, old=z)))
            logit_gradient.append((values[0] - values[1]) / (2 * step))
        assert_same(gradients[row][position], tensor(logit_gradient) @ world.weight, 1e-6)


def test_scope_weights_of_a_prompt_do_not_depend_on_the_others():
    objective, world = load_objective("scope"), random_world("mixed")
    whole = world.run(objective)
    weights = [world.prepared[row].weight for row in range(len(world.rollouts))]
    for prompt in {rollout.prompt_index for rollout in world.rollouts}:
        rows = [row for row, rollout in enumerate(world.rollouts) if rollout.prompt_index == prompt]
        alone = world.run(objective, rows=rows)
        assert [world.prepared[row].weight for row in rows] == pytest.approx([weights[row] for row in rows])
        for row in rows:
            assert_same(alone.gradients[row], whole.gradients[row])


# ---- SRPO ------------------------------------------------------------------------------------------------------------------------


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
    assert_printed(group_advantages(tensor(rewards), torch.zeros(len(rewards), dtype=torch.long), deviation), printed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("deviation", ["population", "sample", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_advantages_of_equal_rewards_are_exactly_zero(size, reward, deviation, dtype):
    rewards = torch.full((size,), reward, dtype=dtype)
    assert not group_advantages(rewards, torch.zeros(size, dtype=torch.long), deviation).any()


def logits_of_support(*sizes) -> torch.Tensor:
    """`[1, T, 4]` logits uniform over `size` tokens, of entropy `log size`."""
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
    assert_printed(entropy_weights(logits_of_support(*sizes), torch.ones(1, len(sizes)), beta), printed)


def test_srpo_mini_loss_by_hand():
    """A correct response of two tokens with A = 1, a wrong one with divergences 0.3 and 0.6 and entropies 0 and log 2."""
    student, teacher = uniform_towards(0.3, 0.6)
    world = World([student, student], [teacher, teacher], [[0, 1], [1, 0]], [True, False])
    weights = entropy_weights(logits_of_support(1, 2), torch.ones(1, 2), 1.0)[0]
    world.prepared = {0: Prepared(4, 1.0, None, None), 1: Prepared(4, -1.0, weights, teacher)}
    assert float(world.backward(load_objective("srpo")).loss) == pytest.approx(-0.3, abs=1e-12)


def test_srpo_of_the_fixture_by_hand():
    world = fixture()
    result = world.run(load_objective("srpo"))
    prepared, student, teacher = (
        [of_all[row] for row in range(4)] for of_all in (world.prepared, world.student, world.logits())
    )
    assert_printed([p.advantage for p in prepared], "0.999998 0.999998 -0.999998 -0.999998")
    assert_printed(torch.exp(-entropy(torch.cat(teacher[2:]))), "0.513979 0.333333 0.693091")
    weights = torch.cat([p.entropy_weights for p in prepared[2:]])
    assert_printed(weights, "1.000996 0.649181 1.349824")
    assert all(p.step_tokens == 6 for p in prepared)
    assert_printed(-3 * prepared[0].advantage, "-2.999994")
    assert_printed((weights * reverse_kl(torch.cat(student[2:]), torch.cat(teacher[2:]))).sum(), "2.787191")
    assert_printed(result.loss, "-0.0354672")
    assert_printed(fixture().run(load_objective("srpo", {"beta": 0})).loss, "-0.0865735")
    r0, r1, r2, r3 = result.gradients
    assert_printed(r0, "(-.070647,.035324,.035324) (.035324,.096019,-.131343)")
    assert_printed(r1, "(.055555,-.111111,.055555)")
    assert_printed(r2, "(.083903,-.059720,-.024183) (-.013211,-.013211,.026422)")
    assert_printed(r3, "(-.149980,.074990,.074990)")
    assert world.metrics.row()["srpo_entropy_weight"] == pytest.approx(1, rel=1e-6)


def test_srpo_weights_do_not_underflow_together():
    """`exp(-1e4 H)` is 0 at every token, yet the token with the lowest entropy gets all the weight."""
    world = random_world("all wrong")
    result = world.run(load_objective("srpo", {"beta": 1e4}))
    weights = torch.cat([world.prepared[row].entropy_weights for row in range(len(world.rollouts))])
    surest = entropy(torch.cat(world.logits())).argmin()
    assert_same(weights, 10.0 * torch.nn.functional.one_hot(surest, 10), 1e-6)
    assert torch.isfinite(result.loss) and torch.isfinite(result.gradient).all()


def test_srpo_with_everything_correct_has_no_gradient_and_needs_no_teacher():
    world = random_world("all correct")
    result = world.run(load_objective("srpo"))
    assert result.loss == 0 and not result.gradient.any()
    assert not world.teacher.read


def test_srpo_with_everything_wrong_and_equal_weights_is_the_token_mean_of_the_divergence():
    assert_printed(fixture(correct=[False] * 4).run(load_objective("srpo", {"beta": 0})).loss, "0.651189")
    world = random_world("all wrong")
    divergences = reverse_kl(torch.cat(world.logits("student")), torch.cat(world.logits()))
    assert_same(world.run(load_objective("srpo", {"beta": 0})).loss, divergences.mean())


def test_clipped_surrogate_on_all_tokens_is_plain_token_mean_grpo():
    """What SRPO is without its distillation branch, negative advantages and ratios other than 1 included."""
    generator = torch.Generator().manual_seed(5)
    rewards, lengths = [1.0, 0.0, 0.0, 1.0, 1.0], [2, 3, 1, 4, 2]
    advantages = group_advantages(tensor(rewards), torch.tensor([0, 0, 0, 7, 7]))
    per_token = advantages.repeat_interleave(torch.tensor(lengths))
    log_ratio = random_logits(generator, sum(lengths), spread=0.6)
    found = clipped_surrogate(log_ratio - 1, torch.full_like(log_ratio, -1), per_token, 0.2, 2.0).mean()
    expected = [
        literal.surrogate(math.exp(r), a, 0.2, 2.0) for r, a in zip(log_ratio.tolist(), per_token.tolist(), strict=True)
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


@pytest.mark.parametrize("changes", [{"clip": 0.0}, {"clip": 0.01}, {"clip": 5.0}, {"ratio_cap": 1.0}, {"ratio_cap": 1e6}])
def test_srpo_clip_and_cap_change_nothing_while_the_ratio_is_one(changes):
    plain, changed = (random_world("mixed").run(load_objective("srpo", options)) for options in ({}, changes))
    assert torch.equal(plain.loss, changed.loss) and torch.equal(plain.gradient, changed.gradient)


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


# ---- Pure functions against literal readings, and their properties ---------------------------------------------------------------


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
def test_perplexity_weights_equal_the_literal_equation_sum_to_one_and_ignore_shifts(rows, seed, tau, shift):
    prompts, correct = rows
    mean_logp = -random_logits(torch.Generator().manual_seed(seed), len(prompts)).abs()
    index, right = torch.tensor(prompts), torch.tensor(correct)
    found = perplexity_weights(mean_logp.requires_grad_(), index, right, tau)
    assert not found.requires_grad
    torch.testing.assert_close(
        found, tensor(literal.perplexity_weights(mean_logp.tolist(), prompts, correct, tau)), rtol=1e-9, atol=0
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
def test_advantages_equal_the_literal_equation_and_belong_to_their_own_prompt(rows, deviation, shift, seed):
    prompts, correct = rows
    index = torch.tensor(prompts)
    fractions = torch.rand(len(prompts), generator=torch.Generator().manual_seed(seed)).double()
    for rewards in (tensor(correct), fractions):
        found = group_advantages(rewards, index, deviation)
        assert not found.requires_grad
        expected = tensor(literal.advantages(rewards.tolist(), prompts, deviation))
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
def test_entropy_weights_equal_the_literal_equation_have_mean_one_and_ignore_padding(seed, beta, lengths, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, len(lengths), 5, 7, spread=spread)
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)
    found = entropy_weights(logits.requires_grad_(), mask, beta)
    assert not found.requires_grad and not found[~mask].any()
    if not mask.any():
        return
    expected = literal.entropy_weights(literal.entropy(logits.detach())[mask].tolist(), beta)
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
    """The weights are relative, so that they do not underflow where the teacher is uncertain everywhere."""
    mask = torch.ones(len(entropies), dtype=torch.bool)
    found = weights_from_entropies(tensor(entropies), mask, beta)
    assert_same(found, tensor(literal.entropy_weights(entropies, beta)))
    assert_same(weights_from_entropies(tensor(entropies) + shift, mask, beta), found)


@property_test
@given(log_ratio=st.floats(-4, 4), advantage=st.floats(-3, 3), epsilon=st.floats(0.01, 0.9), cap=st.floats(1, 5))
def test_clipped_surrogate_equals_the_literal_equation(log_ratio, advantage, epsilon, cap):
    logp, old = tensor([log_ratio - 2.0]).requires_grad_(), tensor([-2.0]).requires_grad_()
    advantages = tensor([advantage]).requires_grad_()
    found = clipped_surrogate(logp, old, advantages, epsilon, cap)
    assert found.item() == pytest.approx(literal.surrogate(math.exp(log_ratio), advantage, epsilon, cap), rel=1e-9, abs=1e-15)
    gradients = torch.autograd.grad(found.sum(), [logp, old, advantages], allow_unused=True)
    assert gradients[1] is None and gradients[2] is None
    # Off its kinks the loss follows the ratio, or is flat.
    ratio = math.exp(log_ratio)
    kinks = (1 - epsilon, 1 + epsilon, cap)
    if all(abs(ratio - kink) > 1e-4 for kink in kinks):
        step = 1e-6
        values = [literal.surrogate(math.exp(log_ratio + s), advantage, epsilon, cap) for s in (step, -step)]
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


# ---- One method reduces to another -----------------------------------------------------------------------------------------------


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
    scope = world.run(load_objective("scope", {"group_size": 3})).gradient
    sft = world.run(load_objective("on_policy_sft", {"group_size": 3})).gradient
    assert_same(scope, 4 * sft)


def test_fire_with_a_weight_of_one_is_on_policy_sft_of_one_response_per_prompt():
    """A response of the most likely tokens is inside the radius throughout: `p_y >= ||p||^2`."""
    world = random_world("all correct")
    logits = world.logits("student")
    for z, rollout in zip(logits, world.rollouts, strict=True):
        rollout.response.token_ids[:] = z.argmax(-1).tolist()
        assert (sft_weight(z, z.argmax(-1)) == 1).all()
    sft = load_objective("on_policy_sft", {"group_size": 1})
    fire = world.run(load_objective("fire"))
    parts = [world.run(sft, rows=[row]) for row in range(len(logits))]  # alone, so that each is divided by its own length
    assert_same(fire.loss, sum(part.loss for part in parts))
    for row, part in enumerate(parts):
        assert_same(fire.gradients[row], part.gradients[row])


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_equal_to_the_student_distils_nothing(method):
    """Correct responses still raise their own likelihood in On-Policy SFT and SCOPE; nothing else has a gradient."""
    for case, moving in (("all correct", {"on_policy_sft", "scope"}), ("all wrong", set())):
        world = random_world(case)
        world.views = [{"full": states} for states in world.student]
        gradients = world.run(load_objective(method)).gradient
        assert gradients.any() == (method in moving)
