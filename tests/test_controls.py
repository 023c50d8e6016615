"""The newer controls, held against literal readings of their equations: negative advantage, RLCSD and SDPG; and FIRE's parts alone."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev

import pytest
import torch

from firedistill import FeedbackField, Verdict
from firedistill.functional import fire_target, induced_gradient
from firedistill.models.states import unwrap
from firedistill.objectives import Step, batches, load_objective, sdpg
from firedistill.objectives.batches import sampled_log_probs
from firedistill.objectives.rlcsd import RLCSD
from firedistill.objectives.sdpg import SDPG
from firedistill.ops import Head
from firedistill.rollout import Response, Rollout
from firedistill.tasks.guard import TaskFault
from literal import entropy, kl, literal, log_p, mean_of_responses, of_tokens
from stubs import CASES, assert_result, assert_same, random_world, tensor
from test_teacher import example, moved_teacher

GROUPS = ["mixed", "groups of five", "a wrong empty response", "one token"]


# ---- The negative advantage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # in the third, A is 0 at H_min; the last one chooses several tokens of a response
    ("advantage", "delta", "share"), [(-0.75, 0.0, 0.2), (-0.75, 1.0, 0.2), (-0.25, 1.0, 0.2), (-0.75, 1.0, 0.7)]
)
@pytest.mark.parametrize("case", GROUPS)
def test_the_negative_advantage_is_the_papers(case, advantage, delta, share):
    world = random_world(case)

    def loss(logits):
        parts = []
        for row, z in enumerate(logits):
            sampled, h = of_tokens(log_p(z), world.tokens(row)), entropy(z).detach()
            count = math.ceil(share * len(sampled))
            chosen = sorted(range(len(sampled)), key=lambda t: float(sampled.detach()[t]))[:count]
            low, high = (f([float(h[t]) for t in chosen], default=0.0) for f in (min, max))
            total = torch.zeros((), dtype=torch.float64)
            for t in chosen:
                r = 2 * (float(h[t]) - low) / (high - low) - 1 if high > low else 0.0
                total = total - (advantage - delta / 4 * r) * sampled[t]
            parts.append(total / max(count, 1))
        return sum(parts) / world.prompts

    objective = load_objective("negative_advantage", {"advantage": advantage, "delta": delta, "share": share})
    assert_result(world.run(objective), world.literal(loss))
    assert not world.teacher.read


def test_a_negative_advantage_makes_the_unlikely_token_less_likely():
    world = random_world([[(5, False)]])
    gradient = world.run(load_objective("negative_advantage", {"share": 0.2})).gradients[0]
    (logits,) = world.logits("student")
    ids = world.tokens(0)
    lowest = int(of_tokens(log_p(logits), ids).argmin())
    assert gradient.abs().sum(-1).nonzero().flatten().tolist() == [lowest]
    after = (world.student[0][lowest] - 0.01 * gradient[lowest]) @ world.weight.T
    assert log_p(after)[ids[lowest]] < log_p(logits[lowest])[ids[lowest]]


# ---- Right hint minus wrong hint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strength", "temperature", "threshold", "eta"), [(0.5, 0.02, 0.02, 1.0), (0.3, 0.05, 0.1, 0.4)])
def test_the_modulated_advantage_is_the_papers_and_keeps_its_sign(strength, temperature, threshold, eta, monkeypatch):
    world = random_world("groups of five")
    objective = RLCSD(group_size=5, strength=strength, temperature=temperature, threshold=threshold, eta=eta)
    generator = torch.Generator().manual_seed(5)
    gaps = {r: 0.05 * torch.randn(len(r.response_ids), generator=generator, dtype=torch.float64) for r in world.rollouts[1:]}
    gaps[world.rollouts[2]][0] = 1e-6  # below the threshold
    monkeypatch.setattr(objective, "gaps", lambda step, rollouts: {r: gaps[r] for r in rollouts if r in gaps})

    def loss(logits):
        total = 0.0
        for row, z in enumerate(logits):
            rollout = world.rollouts[row]
            rewards = [float(r.verdict.correct) for r in world.rollouts if r.prompt_index == rollout.prompt_index]
            advantage = (float(rollout.verdict.correct) - fmean(rewards)) / (pstdev(rewards) + 1e-6)
            paths = {False: [], True: []}
            for t, log_prob in enumerate(of_tokens(log_p(z), world.tokens(row))):
                shift = strength * math.tanh(float(gaps[rollout][t]) / temperature) if rollout in gaps else 0.0
                a = advantage
                if abs(shift) > threshold:
                    a = max(0.0, a + shift) if a > 0 else min(0.0, a + shift)
                paths[abs(shift) > threshold].append(log_prob / log_prob.detach() * log_prob.detach() * a)
            total = total - sum(
                (eta if modulated else 1.0) * sum(path) / len(path) for modulated, path in paths.items() if path
            )
        return total / (world.prompts * 5)

    found, expected = world.run(objective), world.literal(loss)
    assert_same(found.gradient, expected.gradient)
    assert_same(found.head, expected.head)
    for rollout, prepared in zip(world.rollouts, world.prepared.values(), strict=True):
        assert (prepared.advantages >= 0).all() if rollout.verdict.correct else (prepared.advantages <= 0).all()


def test_hints_leave_out_the_response_itself_and_average_probabilities():
    world = random_world("groups of five")
    objective = RLCSD()
    group = world.rollouts[:5]  # right, wrong, right, wrong, right
    for row, rollout in enumerate(group):
        object.__setattr__(rollout.response, "text", f"text {row}")
    assert objective.hints(group[0], group) == ["text 2", "text 1", "text 3"]
    assert RLCSD(wrong_hints=1).hints(group[0], group) == ["text 2", "text 1"]
    assert objective.hints(group[1], group) == ["text 0", "text 3"]
    assert objective.hints(group[1], group[:2]) is None and objective.hints(group[0], group[::2]) is None
    object.__setattr__(group[1].example, "solution", "working\n#### gold")
    assert objective.hints(group[1], group)[0] == "working\n#### gold"
    object.__setattr__(group[1].example, "solution", "#### gold")
    assert objective.hints(group[1], group)[0] == "text 0" and objective.hints(group[1], group[1:4:2]) == [
        "#### gold",
        "text 3",
    ]
    from firedistill.objectives.rlcsd import contrast

    right, wrong = tensor([0.5]).log(), [tensor([0.2]).log(), tensor([0.6]).log()]
    assert float(contrast(right, wrong)) == pytest.approx(math.log(0.5 / 0.4))


def step_of_one_prompt() -> Step:
    """Three responses, the first of which is right; student and teacher differ."""
    teacher = moved_teacher()
    rollouts = [
        Rollout(example(), [5, 6, 7], Response([20 + i, 30, 31], text, True), Verdict(i == 0, None, "even"))
        for i, text in enumerate(("right", "wrong", "other"))
    ]
    return Step(rollouts, 1, 0.0, 0, teacher.model, Head.of(unwrap(teacher.model)), teacher)


def test_the_gap_is_that_between_the_right_hint_and_the_wrong_ones(monkeypatch):
    step = step_of_one_prompt()
    teacher, (_, wrong, other) = step.teacher, step.rollouts
    found = RLCSD().gaps(step, step.rollouts)

    def under(rollout, text):
        hinted = replace(rollout, feedback=(FeedbackField("hint", f"Reference solution: {text}"),))
        return sampled_log_probs(teacher.head, teacher.full([hinted]), [hinted])[0]

    assert list(found) == [wrong, other], "there is no other right response for the right one"
    for rollout, text in ((wrong, "other"), (other, "wrong")):
        torch.testing.assert_close(found[rollout], under(rollout, "right") - under(rollout, text), rtol=1e-5, atol=1e-6)
        assert found[rollout].abs().max() > 1e-3
    monkeypatch.setattr("firedistill.objectives.rlcsd.positions", lambda model: 10)
    assert RLCSD().gaps(step, [wrong, other]) == {}, "hints that are longer than the positions of the model"


def test_log_probabilities_are_read_in_parts(monkeypatch):
    step = step_of_one_prompt()
    rollouts = [replace(rollout, feedback=(FeedbackField("hint", "a hint"),)) for rollout in step.rollouts]
    whole = step.student_log_probs(rollouts), step.teacher_log_probs(rollouts), SDPG().reference_log_probs(step)
    for module in (batches, sdpg):
        monkeypatch.setattr(module, "in_parts", partial(batches.in_parts, tokens=1))
    for found, expected in zip(
        (step.student_log_probs(rollouts), step.teacher_log_probs(rollouts), SDPG().reference_log_probs(step)),
        whole,
        strict=True,
    ):
        assert len(found) == 3
        for part, values in zip(found, expected, strict=True):
            torch.testing.assert_close(part, values, rtol=1e-5, atol=1e-6)


def test_a_response_whose_hints_cannot_be_shown_is_trained_without_them(monkeypatch, caplog):
    step = step_of_one_prompt()
    view_tokens = step.teacher.view_tokens

    def failing(rollout, view):
        if "other" in rollout.feedback[0].text:
            raise TaskFault("the chat template fails")
        return view_tokens(rollout, view)

    monkeypatch.setattr(step.teacher, "view_tokens", failing)
    assert list(RLCSD().gaps(step, step.rollouts)) == [step.rollouts[2]] and "the chat template fails" in caplog.text


@pytest.mark.parametrize("method", ["scope", "srpo", "sdpg", "rlcsd"])
def test_prompts_that_no_other_view_follows_are_not_kept(method, monkeypatch):
    world, objective = random_world("groups of five"), load_objective(method)
    monkeypatch.setattr("firedistill.objectives.rlcsd.positions", lambda model: None)
    monkeypatch.setattr(world.teacher, "view_tokens", lambda rollout, view: 1)
    monkeypatch.setattr(world.teacher, "model", None, raising=False)
    monkeypatch.setattr(
        SDPG, "reference_log_probs", lambda self, step: [tensor([0.0] * len(r.response_ids)) for r in step.rollouts]
    )
    world.prepare(objective)
    world.backward(objective, progress=0.5)
    assert world.teacher.read and not world.teacher.kept


# ---- Group advantage, self-distillation, reference KL ------------------------------------------------------------------------------


def test_the_reference_of_sdpg_is_the_student_of_the_first_step_also_in_a_resumed_run():
    step, objective, again = step_of_one_prompt(), SDPG(), SDPG()
    expected = step.student_log_probs(step.rollouts)
    found = objective.reference_log_probs(step)
    again.load_state(objective.state())
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(1.05)
    for later in (found, objective.reference_log_probs(step), again.reference_log_probs(step)):
        for of_one, first in zip(later, expected, strict=True):
            torch.testing.assert_close(of_one, first, rtol=1e-5, atol=1e-5)
    assert (torch.cat(step.student_log_probs(step.rollouts)) - torch.cat(expected)).abs().max() > 1e-2


@pytest.mark.parametrize("progress", [0.0, 0.5])
@pytest.mark.parametrize("case", GROUPS)
def test_sdpg_is_the_sum_of_its_three_losses(case, progress, monkeypatch):
    world = random_world(case)
    objective = SDPG(beta=0.3, alpha=0.2, warmup=0.0 if progress else 0.125)
    shifted = [of_tokens(log_p(z), world.tokens(row)) - 0.1 * (row + 1) for row, z in enumerate(world.logits("student"))]
    monkeypatch.setattr(objective, "reference_log_probs", lambda step: [shifted[r.prompt_ids[0]] for r in step.rollouts])
    step_tokens = sum(len(r.response_ids) for r in world.rollouts)
    beta = 0.3 if progress else 0.0

    def loss(logits):
        total = 0.0
        for row, z in enumerate(logits):
            rollout = world.rollouts[row]
            rewards = [float(r.verdict.correct) for r in world.rollouts if r.prompt_index == rollout.prompt_index]
            advantage = (float(rollout.verdict.correct) - fmean(rewards)) / (pstdev(rewards) + 1e-6)
            log_prob = of_tokens(log_p(z), world.tokens(row))
            ratio = (log_prob - log_prob.detach()).exp()
            total = total + (-ratio * advantage + 0.2 * 0.5 * (log_prob - shifted[row]) ** 2).sum()
            if advantage > 0:
                total = total + beta * kl(z, world.logits("full")[row]).sum()
        return total / step_tokens

    assert_result(world.run(objective, progress=progress), world.literal(loss))


def test_the_weight_of_the_distillation_fades_in_and_out():
    objective = SDPG(beta=1.0)
    weights = [objective.distillation_weight(x) for x in (0.0, 0.0625, 0.125, 0.5, 0.75, 0.875, 1.0)]
    assert weights == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0])
    assert SDPG(beta=1.0, warmup=0, decay=0).distillation_weight(1.0) == 1.0


# ---- FIRE's parts, with and without routing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["mixed", "all correct", "all wrong"])
@pytest.mark.parametrize(
    "settings", [{"attribution": True}, {"projection": True}, {"attribution": True, "projection": True}], ids=str
)
def test_full_context_with_parts_of_fire(case, settings):
    world = random_world(case, gap=2.0, views=(0, 1))

    def loss(logits):
        losses = []
        for row, z in enumerate(logits):
            views = world.views[row]
            full, *without = (views[view] @ world.weight.T for view in ("full", 0, 1))
            choice = {"attribution": False, "projection": False} | settings
            target = fire_target(
                z.detach(), full, torch.stack(without), step_scale=1.5, log_prob_floor=math.log(1e-10), **choice
            )
            losses.append(kl(z, target.log_probs))
        return mean_of_responses(world, 1, losses)

    found = world.run(load_objective("full_context", settings), step_scale=1.5, log_prob_floor=math.log(1e-10))
    assert_result(found, world.literal(loss))
    if "projection" in settings:
        assert found.metrics["max_bound_ratio"] <= 1 + 1e-9


@pytest.mark.parametrize("case", list(CASES))
def test_routing_alone_is_fire_without_its_two_parts(case):
    world = random_world(case, views=(0, 1))
    found = world.run(load_objective("routing"), step_scale=1.5)
    assert_result(found, literal(world, "fire", step_scale=1.5, attribution=False, projection=False))
    assert {view for _, view, _ in world.teacher.read} <= {"full"}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("method", ["fire", "no_attribution", "no_projection", "routing", "hard_gradient_excision"])
def test_supervised_learning_without_the_weight_beta(method, case):
    """Every token of a correct response counts 1; wrong responses are trained as with it."""
    world = random_world(case, gap=2.0, views=(0, 1))
    found = world.run(load_objective(method, {"bounded_sft": False}), step_scale=3.0)
    parts = {
        "attribution": method not in ("no_attribution", "routing"),
        "projection": method not in ("no_projection", "routing"),
    }
    parts |= {"excise": method == "hard_gradient_excision"}
    assert_result(found, literal(world, "fire", step_scale=3.0, bounded_sft=False, **parts))
    right = [row for row, rollout in enumerate(world.rollouts) if rollout.verdict.correct and rollout.response_ids]
    if right:
        bounded = world.run(load_objective(method), step_scale=3.0)
        assert float(found.metrics["beta"]) == 1 > float(bounded.metrics["beta"])


def test_the_two_readings_of_the_largest_influence():
    """Half the L1 norm against E_j, which one large difference dominates; the mean over the tokens decides."""
    world = random_world([[(4, False)]], gap=1.5, views=(0, 1, 2), seed=13)
    student, teacher = world.logits("student")[0], world.logits("full")[0]
    changes = [induced_gradient(student, teacher) - induced_gradient(student, world.logits(j)[0]) for j in range(3)]
    half_l1 = [float(change.abs().sum(-1).mean()) / 2 for change in changes]
    energies = [float(change.square().sum(-1).mean()) for change in changes]
    removed = [max(range(3), key=scores.__getitem__) for scores in (half_l1, energies)]
    assert removed[0] != removed[1], "the seed must tell the readings apart"
    for influence, field in zip(("half_l1", "energy"), removed, strict=True):
        found = world.run(load_objective("hard_gradient_excision", {"influence": influence}))
        assert [found.metrics[f"excised_field{j}"] for j in range(3)] == [float(j == field) for j in range(3)]
        expected = world.literal(lambda logits, j=field: kl(logits[0], world.logits(j)[0]).mean() / world.prompts)
        assert_result(found, expected)


@pytest.mark.parametrize(
    ("method", "settings", "complaint"),
    [
        ("negative_advantage", {"share": 0}, "share is 0"),
        ("negative_advantage", {"advantage": 0.2}, "advantage is 0.2"),
        ("rlcsd", {"temperature": 0}, "temperature is 0"),
        ("sdpg", {"warmup": 2}, "warmup is 2"),
        ("hard_gradient_excision", {"influence": "l3"}, "influence is 'l3'"),
    ],
)
def test_settings_are_checked(method, settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_objective(method, settings)


@pytest.mark.parametrize(
    ("method", "kind", "feedback", "complaint"),
    [
        ("negative_advantage", "student", True, "method negative_advantage uses no teacher"),
        ("negative_advantage", "ema", False, "method negative_advantage uses no teacher"),
        ("rlcsd", "model", False, "method rlcsd shows the teacher hints"),
        ("rlcsd", "model", True, None),
        ("sdpg", "student", False, None),
        ("full_context", "ema", False, "method full_context attributes to .* none: leave method_settings.attribution out"),
        ("full_context", "ema", True, None),
    ],
)
def test_a_teacher_that_would_change_nothing_is_refused(method, kind, feedback, complaint):
    with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
        load_objective(method, {"attribution": True} if method == "full_context" else {}).check_teacher(kind, feedback)
