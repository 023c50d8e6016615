"""All methods on micro-batches against their literal equations; what they read; the head; settings."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier

import pytest
import torch

from firedistill.functional import entropy, fire_target, fisher_radius, induced_gradient, reverse_kl, sft_weight
from firedistill.metrics import Metrics
from firedistill.objectives import batches, load_objective
from firedistill.ops import Head, chunked_token_loss, fire_head
from firedistill.ops import head as head_module
from firedistill.rollout import Sampling
from literal import literal
from stubs import CASES, H, Result, V, World, assert_result, random_world


@dataclass
class Method:
    """A method under test.

    Attributes:
        settings: its own.
        literal: the settings of its literal equation that express the same.
        batch: settings of its micro-batches.
    """

    name: str
    settings: dict = field(default_factory=dict)
    literal: dict = field(default_factory=dict)
    batch: dict = field(default_factory=dict)

    def prepared(self, case, rows=None, **options):
        """The objective and a world whose step it has prepared. TOP-D makes several updates: the student has moved since."""
        options = {"views": ("none", 0, 1, 2), "gap": 2.0} | options
        world, objective = random_world(case, **options), load_objective(self.name, {"group_size": 3} | self.settings)
        world.prepare(objective, world.trained(objective, rows))
        if self.name == "top_d":
            world.move()
        return objective, world

    def backward(self, objective, world, split=lambda rows: [rows], rows=None) -> Result:
        return world.backward(objective, split(world.trained(objective, rows)), **self.batch)

    def expected(self, world) -> Result:
        return literal(world, self.name, 3, **self.literal)


FIRE = ("fire", "no_attribution", "no_projection", "hard_gradient_excision")
PLAIN, FLOOR = {"step_scale": 1.5}, {"step_scale": 1.5, "log_prob_floor": -4.0}
METHODS = {
    **{name: Method(name, {}, PLAIN, PLAIN) for name in FIRE},
    **{f"{name}, floor": Method(name, {}, FLOOR, FLOOR) for name in FIRE},
    "full_context": Method("full_context", batch=PLAIN),
    "full_context, floor": Method("full_context", batch=FLOOR),
    "on_policy_sft": Method("on_policy_sft"),
    "scope": Method("scope"),
    "scope, cold": Method("scope", {"weight_temperature": 0.3}, {"tau": 0.3}),
    "scope, hot": Method("scope", {"weight_temperature": "1e2"}, {"tau": 100.0}),
    "srpo": Method("srpo"),
    "srpo, equal weights": Method("srpo", {"beta": 0}, {"beta": 0.0}),
    "srpo, sample deviation": Method("srpo", {"beta": 2.5, "deviation": "sample"}, {"beta": 2.5, "deviation": "sample"}),
    "srpo, no deviation": Method("srpo", {"deviation": "none"}, {"deviation": "none"}),
    "veto": Method("veto", {}, {"beta": 0.8 * 0.75}, {"progress": 0.25}),
    "veto, other schedule": Method("veto", {"beta_start": 0.2, "beta_end": 1.0}, {"beta": 0.4}, {"progress": 0.25}),
    "demopsd": Method("demopsd"),
    "demopsd, other settings": Method("demopsd", *[{"alpha_max": 0.7, "beta": 2.0}] * 2),
    "demopsd, student": Method("demopsd", *[{"reference": "student"}] * 2),
    "top_d": Method("top_d"),
    "top_d, other settings": Method("top_d", *[{"alpha": 0.7, "clip": 0.05}] * 2),
    "tropd": Method("tropd"),
    "tropd, other settings": Method("tropd", *[{"top_k": 3, "beta": 0.5}] * 2),
}
# The trainer leaves out empty responses. Methods with statistics over a group or the step have no value for them.
EMPTY, WITH_STATISTICS = list(CASES)[-2:], ("on_policy_sft", "scope", "srpo")
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(method, case, id=f"{name}-{case}")
        for name, method in METHODS.items()
        for case in CASES
        if not (case in EMPTY and method.name in WITH_STATISTICS)
    ],
)
def test_loss_and_gradient_equal_the_dense_form(method, case, chunk, monkeypatch):
    """The gradients of the states and of a trained head, which the teacher shares without sending a gradient to it."""
    for module in (head_module, fire_head):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * V)
    monkeypatch.setattr(fire_head, "CHUNK_TOKENS", 1)
    objective, world = method.prepared(case)
    found, expected = method.backward(objective, world), method.expected(world)
    assert case != "mixed" or float(expected.gradient.norm()) > 1e-4
    assert_result(found, expected)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-9, atol=1e-12)


SPLITS = {
    "one by one": lambda rows: [[row] for row in rows],
    "every other": lambda rows: [rows[::2], rows[1::2]],
    "one in the middle": lambda rows: [rows[3:], rows[:1], rows[1:3]],
    "backwards": lambda rows: [rows[::-1]],
    "backwards, in threes, one micro-batch empty": lambda rows: [*(rows[::-1][i : i + 3] for i in range(0, len(rows), 3)), []],
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("case", ["mixed", "groups of five"])
@every_method
def test_order_and_micro_batches_change_nothing(method, case, split):
    """Every split separates the members of groups."""
    objective, world = method.prepared(case)
    whole = method.backward(objective, world)
    assert_result(method.backward(objective, world, split), whole)
    shuffled = torch.randperm(len(world.rollouts), generator=torch.Generator().manual_seed(1)).tolist()
    assert_result(method.backward(objective, world, split, shuffled), whole)
    if method.name != "tropd":  # its draws follow the order of the step
        assert_result(method.backward(*method.prepared(case, shuffled), split, shuffled), whole)


@pytest.mark.parametrize("case", [case for case in CASES if case not in EMPTY])
@every_method
def test_float32_agrees_with_float64(method, case):
    wide, narrow = (method.backward(*method.prepared(case, dtype=dtype)) for dtype in (torch.float64, torch.float32))
    assert narrow.loss.dtype == narrow.gradient.dtype == torch.float32
    assert_result(narrow, wide, 1e-5)


def test_bfloat16_states_against_a_float32_twin():
    low, high = (
        METHODS["fire"].backward(*METHODS["fire"].prepared("mixed", gap=1.0, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert low.loss.dtype == torch.float32
    torch.testing.assert_close(low.loss, high.loss, rtol=0.01, atol=0)
    assert torch.nn.functional.cosine_similarity(low.gradient.float().flatten(), high.gradient.flatten(), dim=0) > 0.99


class Exchange:
    """Lets threads stand in for processes: `gather` waits until every one of them has called it."""

    def __init__(self, size):
        self.values, self.barrier = [0.0] * size, Barrier(size, timeout=20)

    def gather(self, values):
        self.values[self.barrier.wait()] = values[0]
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


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
@pytest.mark.parametrize("name", ["full_context", "on_policy_sft", "scope", "srpo", "srpo, equal weights"])
def test_two_processes_add_up_to_one(name, case, first, monkeypatch):
    """Each holds complete groups, maybe none, maybe none that is trained: they agree on what spans the step."""
    method = METHODS[name]
    objective, world = method.prepared(case)
    whole = method.backward(objective, world)
    trained, exchange = world.trained(objective), Exchange(2)
    halves = [[row for row in trained if (world.rollouts[row].prompt_index in first) == own] for own in (True, False)]
    world.prepared.clear()
    monkeypatch.setattr(batches, "gather", lambda model, values: exchange.gather(values))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rows: world.prepare(objective, rows), halves))
    parts = [world.backward(objective, [rows], **method.batch) for rows in halves]
    gradients = [a + b for a, b in zip(*(part.gradients for part in parts), strict=True)]
    assert_result(Result(parts[0].loss + parts[1].loss, gradients, parts[0].head + parts[1].head, {}), whole)


@every_method
def test_a_step_without_rollouts_is_prepared_and_has_no_loss(method):
    objective, world = method.prepared("mixed", rows=[])
    assert world.prepared == {}
    result = method.backward(objective, world, rows=[])
    assert result.loss == 0 and not result.gradient.any()


# ---- What is sampled, trained and read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted({method.name for method in METHODS.values()}))
def test_only_on_policy_sft_has_a_temperature_of_its_own(method):
    configured = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=123, top_k=7, repetition_penalty=1.3)
    found = load_objective(method).sampling(configured)
    assert found == Sampling(1.0, 0.95, 123, 7, 1.3) if method == "on_policy_sft" else found is configured


def test_the_temperature_of_on_policy_sft_is_a_setting():
    assert load_objective("on_policy_sft", {"temperature": "0.6"}).sampling(Sampling()).temperature == 0.6


ALL, CORRECT, WRONG = [0, 1, 2, 3, 4, 5, 6], [0, 3, 4, 5], [1, 2, 6]


@pytest.mark.parametrize(
    ("name", "trained", "scored", "before", "in_loss", "student"),
    [
        ("full_context", ALL, ALL, [], ["full"], []),
        ("on_policy_sft", CORRECT, [], [], [], []),
        ("scope", ALL, WRONG, ["full"], [], CORRECT),
        ("srpo", ALL, WRONG, ["full"], [], []),
        ("veto", ALL, ALL, [], ["full"], []),
        ("demopsd", ALL, ALL, [], ["full", "none"], []),
        ("demopsd, student", ALL, ALL, [], ["full"], []),
        ("top_d", ALL, ALL, ["full"], [], ALL),
        ("tropd", ALL, ALL, [], ["full"], []),
    ],
)
def test_each_view_is_read_once_and_only_where_it_matters(name, trained, scored, before, in_loss, student):
    """The responses that train, those that the teacher sees, the views read before any gradient and in the loss, and the responses
    that the student scores beforehand."""
    objective, world = METHODS[name].prepared("mixed")
    assert world.trained(objective) == trained
    assert [row for row in trained if objective.needs_teacher(world.rollouts[row])] == scored
    assert all(objective.views(world.rollouts[row]) == (before + in_loss if row in scored else []) for row in trained)
    assert sorted(world.model.read) == student
    assert sorted(world.teacher.read) == [(row, view, len(world.tokens(row))) for row in scored for view in before]
    world.teacher.read.clear()
    METHODS[name].backward(objective, world)
    assert sorted(world.teacher.read) == [(row, view, len(world.tokens(row))) for row in scored for view in in_loss]


@pytest.mark.parametrize(("case", "scored"), [("all correct", [0, 1]), ("all wrong", []), ("groups of five", [0, 2, 4])])
def test_scope_scores_a_correct_response_only_if_it_has_a_correct_sibling(case, scored):
    assert sorted(METHODS["scope"].prepared(case)[1].model.read) == scored


def one_prompt(lengths, correct, **options) -> World:
    return random_world([list(zip(lengths, correct, strict=True))], views=range(3), **options)


def test_fire_reads_no_view_that_cannot_matter():
    """Correct responses never reach the teacher; a response inside the radius throughout is read under the full view only."""
    world, objective = one_prompt([4, 5, 6, 3], [True, False, False, False], gap=[4.0, 1e-3, 4.0, 1e-3]), load_objective("fire")
    world.run(objective, step_scale=1.0)
    read = {(row, view) for row, view, _ in world.teacher.read}
    assert len(read) == len(world.teacher.read)
    assert {row for row, _ in read} == {1, 2, 3}
    assert sorted(view for row, view in read if row in (1, 3)) == ["full", "full"]
    assert {view for row, view in read if row == 2} == {"full", 0, 1, 2}
    naive = {(row, view) for row, rollout in enumerate(world.rollouts) for view in objective.views(rollout)}
    assert read < naive and sorted(naive - read) == [(row, view) for row in (1, 3) for view in range(3)]


def test_the_views_without_a_field_are_read_up_to_the_last_token_over_the_radius():
    world = one_prompt([4, 9, 6], [True, False, False], gap=4.0)
    world.views[1]["full"][5:] = world.student[1][5:]  # the rest of this response agrees with the teacher
    found, expected = world.run(load_objective("fire"), step_scale=1.5), literal(world, "fire", step_scale=1.5)
    read = {row: {length for r, view, length in world.teacher.read if r == row and view != "full"} for row in (1, 2)}
    assert read[1] <= set(range(1, 6)) and read[2] <= set(range(1, 7)) and read[1]
    assert {length for row, view, length in world.teacher.read if view == "full" and row == 1} == {9}
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.gradient, expected.gradient)


@pytest.mark.parametrize("method", ["fire", "hard_gradient_excision"])
def test_responses_with_different_fields_are_grouped(method):
    world = one_prompt([3, 4, 5], [False, False, False], gap=4.0)
    world.rollouts[1] = replace(world.rollouts[1], feedback=world.rollouts[1].feedback[:2])
    del world.views[1][2]
    found, expected = world.run(load_objective(method), step_scale=1.5), literal(world, method, step_scale=1.5)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.gradient, expected.gradient)


def test_chunks_of_hard_gradient_excision_are_as_small_as_its_views_need(monkeypatch):
    asked, world = [], one_prompt([3, 4], [False, False], gap=4.0)

    def watched(hidden, head, distributions=1):
        asked.append(distributions)
        return head_module.chunks(hidden, head, distributions)

    monkeypatch.setattr(batches, "chunks", watched)
    world.run(load_objective("hard_gradient_excision"))
    assert max(asked) == 8, "logits of the student, the full teacher and three views, which are copied into one tensor"


def test_the_columns_of_fire_are_means_over_the_tokens_of_their_branch():
    world = one_prompt([40, 30], [True, False], gap=4.0)
    world.views[1]["full"][20:] = world.student[1][20:]  # inside the radius
    right, wrong = world.logits("student")
    world.rollouts[0].response.token_ids[::2] = right.argmax(-1).tolist()[::2]  # whose beta is 1 at step scale 1: p_y >= |p|^2
    row = world.run(load_objective("fire"), step_scale=1.0).metrics
    full, without = world.logits()[1], torch.stack([world.logits(j)[1] for j in range(3)])
    target, beta = fire_target(wrong, full, without, step_scale=1.0), sft_weight(right, world.tokens(0), 1.0)
    both, over = torch.cat([right, wrong]), target.chi > 0
    expected = {"rho": fisher_radius(both, 1.0), "entropy": entropy(both), "beta": beta, "clipped_correct": beta < 1}
    expected |= {"chi": target.chi, "chi_active": over, "alpha_full": target.alpha[0], "eta": target.eta}
    expected |= {"projected": target.eta < 1, "kl": reverse_kl(wrong, full)}
    expected |= {f"alpha_field{j}": target.alpha[j + 1] for j in range(3)}
    expected |= {f"field_energy_field{j}": target.field_energy[j][over] for j in range(3)}
    assert row.pop("max_bound_ratio") == pytest.approx(1, rel=1e-5)
    assert row == pytest.approx({name: float(values.double().mean()) for name, values in expected.items()}, rel=1e-5)
    assert 0 < row["clipped_correct"] < 1 and 0 < row["projected"] < 1


def test_every_token_gradient_respects_the_radius():
    world = one_prompt([40, 30], [True, False], gap=5.0)
    found = world.run(load_objective("fire"), step_scale=3.0)
    logits = [states @ world.weight.T for states in world.student]
    rho = fisher_radius(torch.cat(logits), 3.0)
    # The gradient of the states is W^T g / (N M): recover g from the pure functions and compare, then check its norm.
    beta = sft_weight(logits[0], world.tokens(0), 3.0)
    g_plus = beta[:, None] * (logits[0].softmax(-1) - torch.nn.functional.one_hot(world.tokens(0), V))
    loo = torch.stack([world.logits(j)[1] for j in range(3)])
    target = fire_target(logits[1], world.logits()[1], loo, step_scale=3.0)
    g_minus = induced_gradient(logits[1], target.log_probs)
    torch.testing.assert_close(found.gradient, torch.cat([g_plus / 40, g_minus / 30]) @ world.weight / world.prompts)
    norms = torch.cat([g_plus, g_minus]).norm(dim=-1)
    assert (norms <= rho * (1 + 1e-9)).all()
    assert (norms >= rho * (1 - 1e-9)).any(), "some tokens must lie on the boundary for this test to mean anything"


# ---- The head ----------------------------------------------------------------------------------------------------------------------


def test_head_with_bias_softcap_scale_temperature_and_override():
    generator = torch.Generator().manual_seed(0)
    projection = torch.nn.Linear(H, V).double()
    hidden = torch.randn(5, H, generator=generator, dtype=torch.float64)
    raw = projection(hidden)
    head = Head(projection, softcap=3.0, scale=0.5, temperature=2.0)
    torch.testing.assert_close(head(hidden), 3.0 * torch.tanh(raw * 0.5 / 3.0) / 2.0)
    other = {"weight": torch.randn(V, H, generator=generator, dtype=torch.float64)}
    torch.testing.assert_close(Head(projection, override=other)(hidden), hidden @ other["weight"].T + projection.bias)
    assert Head(projection.bfloat16())(hidden.bfloat16()).dtype == torch.float32


def test_a_trained_head_gets_its_gradient():
    projection = torch.nn.Linear(H, V).double()
    hidden = torch.randn(11, H, dtype=torch.float64, requires_grad=True)
    tokens, weights = torch.randint(V, (11,)), torch.rand(11, dtype=torch.float64)

    def nll(logits, chunk):
        return -logits.log_softmax(-1).gather(-1, tokens[chunk, None])[:, 0]

    chunked = chunked_token_loss(Head(projection), hidden, weights, nll)
    found = torch.autograd.grad(3 * chunked, [hidden, *projection.parameters()])
    dense = (weights * nll(projection(hidden), slice(None))).sum()
    expected = torch.autograd.grad(3 * dense, [hidden, *projection.parameters()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduced", [lambda logits: logits.mean(), lambda logits: logits])
def test_a_token_loss_of_another_shape_is_refused(reduced):
    """It would broadcast over the weights of the tokens."""
    hidden = torch.randn(11, H, requires_grad=True)
    with pytest.raises(ValueError, match=r"token_loss returned the shape \[.*\] for 11 tokens: expected one loss per token"):
        chunked_token_loss(Head(torch.nn.Linear(H, V)), hidden, torch.rand(11), lambda logits, chunk: reduced(logits))


def test_metrics_merge():
    first, second = Metrics(), Metrics()
    first.mean(x=torch.tensor([1.0, 2.0]))
    second.mean(x=6.0, y=torch.tensor([]))
    first.maximum(m=torch.tensor([3.0, 5.0]))
    second.maximum(m=torch.tensor([4.0]))
    assert Metrics().merge([first, second]).row() == {"x": 3.0, "m": 5.0}


# ---- Settings ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "table"),
    [
        ("veto", {"group_size": 1, "beta_start": 0.8, "beta_end": 0.0}),
        ("demopsd", {"group_size": 1, "alpha_max": 0.15, "beta": 50.0, "reference": "ema"}),
        ("top_d", {"group_size": 4, "alpha": 0.2, "clip": 0.2, "epochs": 1, "minibatch_prompts": 1}),
        ("tropd", {"group_size": 4, "beta": 1e-3, "max_prefix": 384, "top_k": 64}),
    ],
)
def test_settings_default_to_the_papers_table(method, table):
    assert vars(load_objective(method)) == table


@pytest.mark.parametrize(
    ("method", "method_settings", "message"),
    [
        ("full_context", {"group_size": 0}, "group_size"),
        ("on_policy_sft", {"group_size": 1.5}, "group_size"),
        ("on_policy_sft", {"temperature": -0.5}, "temperature"),
        ("on_policy_sft", {"temperature": "hot"}, "temperature"),
        ("scope", {"group_size": -1}, "group_size"),
        ("scope", {"weight_temperature": 0}, "weight_temperature"),
        ("scope", {"weight_temperature": -1.0}, "weight_temperature"),
        ("scope", {"weight_temperature": math.nan}, "weight_temperature"),
        ("scope", {"weight_temprature": 1.0}, "weight_temprature"),
        ("srpo", {"group_size": 0}, "group_size"),
        ("srpo", {"beta": -1.0}, "beta"),
        ("srpo", {"beta": math.inf}, "beta"),
        ("rlcsd", {"clip": -0.2}, "clip is -0.2"),
        ("sdpg", {"clip": -0.2}, "clip is -0.2"),
        ("srpo", {"clip": -0.2}, "clip"),
        ("srpo", {"ratio_cap": 0.5}, "ratio_cap"),
        ("srpo", {"deviation": "biased"}, "deviation"),
        ("veto", {"beta_strat": 1}, "'veto' has no setting 'beta_strat'; did you mean 'beta_start'"),
        ("veto", {"xyz": 1}, "no setting 'xyz'; it has group_size, beta_start, beta_end"),
        ("veto", {"beta_start": "high"}, "beta_start is 'high'; expected a number"),
        ("veto", {"beta_start": -0.1}, "beta_start is -0.1"),
        ("veto", {"beta_end": -1}, "beta_end is -1.0: expected a finite number at least 0"),
        ("veto", {"beta_start": math.inf}, "beta_start is inf"),
        ("veto", {"beta_end": "nan"}, "beta_end is 'nan'; expected a number"),
        ("veto", {"group_size": 0}, "group_size is 0"),
        ("demopsd", {"alpha": 0.1}, "did you mean 'alpha_max'"),
        ("demopsd", {"alpha_max": 1.5}, "alpha_max is 1.5"),
        ("demopsd", {"alpha_max": -0.1}, "alpha_max is -0.1"),
        ("demopsd", {"beta": -1}, "beta is -1.0"),
        ("demopsd", {"beta": math.inf}, "beta is inf"),
        ("demopsd", {"reference": "teacher"}, "reference is 'teacher'; expected 'ema' or 'student'"),
        ("demopsd", {"alpha_max": True}, "alpha_max is True; expected a number"),
        ("top_d", {"alpha": 1.01}, "alpha is 1.01"),
        ("top_d", {"clip": -0.2}, "clip is -0.2"),
        ("top_d", {"epochs": 0}, "epochs is 0"),
        ("top_d", {"epochs": 1.5}, "epochs is 1.5; expected a whole number"),
        ("top_d", {"minibatch_prompts": 0}, "minibatch_prompts is 0"),
        ("top_d", {"group_size": True}, "group_size is True; expected a whole number"),
        ("tropd", {"max_prefix": -1}, "max_prefix is -1"),
        ("tropd", {"top_k": 0}, "top_k is 0"),
        ("tropd", {"top_k": [64]}, "top_k is .*; expected a whole number"),
        ("tropd", {"beta": -1e-3}, "beta is -0.001"),
        ("tropd", {"beta": math.inf}, "beta is inf"),
        ("tropd", {"group_size": None}, "group_size is None; expected a whole number"),
    ],
)
def test_invalid_settings_are_refused_by_name(method, method_settings, message):
    with pytest.raises(ValueError, match=f"method_settings.*{message}"):
        load_objective(method, method_settings)


def test_settings_may_be_text():
    objective = load_objective("tropd", {"beta": "1e-3", "top_k": "8", "max_prefix": 16.0})
    assert (objective.beta, objective.top_k, objective.max_prefix) == (1e-3, 8, 16)
    assert isinstance(objective.max_prefix, int)


def test_unknown_methods():
    with pytest.raises(ValueError, match="unknown method 'fyre'.*fire"):
        load_objective("fyre")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_objective("no_such_module:Thing")


def test_rollouts_whose_states_are_held_at_once():
    rollouts = random_world([[(3, False), (5, False)], [(0, False), (4, True)]]).rollouts
    sizes = [len(r.prompt_ids) + len(r.response_ids) for r in rollouts]
    for tokens in (1, sizes[0], sizes[0] + sizes[1], sum(sizes) - 1, sum(sizes)):
        parts = list(batches.in_parts(rollouts, tokens))
        assert [r for part in parts for r in part] == rollouts and all(parts)
        held = [sum(len(r.prompt_ids) + len(r.response_ids) for r in part) for part in parts]
        assert all(size <= tokens or len(part) == 1 for size, part in zip(held, parts, strict=True))
        assert all(a + len(b[0].prompt_ids) + len(b[0].response_ids) > tokens for a, b in zip(held, parts[1:], strict=False))
    assert list(batches.in_parts([])) == []
