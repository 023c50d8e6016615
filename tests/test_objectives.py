"""Objectives on micro-batches: against dense autograd, in any order, padding and chunking, with as few views as exact."""

from __future__ import annotations

import pytest
import torch

from firedistill.functional import excised_target, fire_target, fisher_radius, induced_gradient, reverse_kl, sft_weight
from firedistill.models.states import ResponseStates
from firedistill.objectives import Averages, TrainingBatch, load_objective
from firedistill.ops import Head, chunked_token_loss, fire_head
from firedistill.ops import head as head_module
from firedistill.rollouts.engine import Response, Rollout
from firedistill.tasks import Example, Verdict
from firedistill.tasks.types import FeedbackField

H, V = 8, 31
METHODS = ["fire", "no_attribution", "no_projection", "hard_gradient_excision", "full_context"]


class World:
    """A head, responses with their student states, and a teacher that looks states up and counts what it is asked."""

    def __init__(self, lengths, correct, seed=0, dtype=torch.float64, gap=1.0, fields=3, tied_gap_rows=()):
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.projection = torch.nn.Linear(H, V, bias=False)
        self.projection.weight.data = noise(V, H)
        self.projection.to(dtype).requires_grad_(False)
        self.head = Head(self.projection)
        self.lengths = list(lengths)
        self.student = [noise(n, H) for n in lengths]
        self.views = []
        for row, states in enumerate(self.student):
            size = 1e-3 if row in tied_gap_rows else gap
            full = states + size * noise(*states.shape)
            self.views.append({"full": full, **{j: full + size * noise(*states.shape) for j in range(fields)}})
        self.rollouts = [
            Rollout(
                Example(f"x/{row}", "?", "1"),
                [1],
                Response(torch.randint(V, (n,), generator=generator).tolist(), "", True),
                Verdict(ok, None, "1"),
                tuple(FeedbackField(f"field{j}", "") for j in range(fields)),
            )
            for row, (n, ok) in enumerate(zip(lengths, correct, strict=True))
        ]
        self.dtype, self.asked, self.read, self.saved = dtype, [], [], []

    def batch(self, order=None, step_scale=1.5, floor=None):
        order = list(order if order is not None else range(len(self.lengths)))
        hidden = torch.cat([self.student[row] for row in order]).to(self.dtype).requires_grad_()

        def teacher(rows, views, lengths=None):
            self.asked += [(order[row], view) for view in views for row in rows]
            lengths = lengths if lengths is not None else [self.lengths[order[row]] for row in rows]
            self.read += [(order[row], view, length) for view in views for row, length in zip(rows, lengths, strict=True)]
            states = [[self.views[order[row]][view][:n] for row, n in zip(rows, lengths, strict=True)] for view in views]
            return [ResponseStates(torch.cat(s or [torch.empty(0, H)]).to(self.dtype), list(lengths)) for s in states]

        return TrainingBatch(
            rollouts=[self.rollouts[row] for row in order],
            student=ResponseStates(hidden, [self.lengths[row] for row in order]),
            head=self.head,
            teacher_head=self.head,
            teacher=teacher,
            saved=lambda rows, views: self.saved.extend((order[row], view) for view in views for row in rows),
            step_scale=step_scale,
            log_prob_floor=floor,
            averages=Averages(),
        )

    def dense(self, method, step_scale=1.5, floor=None):
        """The same loss with all logits at once and plain autograd, straight from the pure functions."""
        hidden = torch.cat(self.student).requires_grad_()
        weight = self.projection.weight.double()
        total = 0.0
        for states, views, rollout in zip(hidden.split(self.lengths), self.views, self.rollouts, strict=True):
            if len(states) == 0:
                continue
            z = states @ weight.T
            full = views["full"] @ weight.T
            loo = torch.stack([views[j] @ weight.T for j in range(len(views) - 1)])
            y = torch.tensor(rollout.response_ids)
            if method == "full_context":
                loss = reverse_kl(z, full)
            elif rollout.verdict.correct:
                loss = -sft_weight(z, y, step_scale) * z.log_softmax(-1).gather(-1, y[:, None])[:, 0]
            elif method == "hard_gradient_excision":
                log_probs, _ = excised_target(z.detach(), full, loo, torch.ones(len(z), dtype=torch.bool), log_prob_floor=floor)
                loss = reverse_kl(z, log_probs)
            else:
                target = fire_target(
                    z.detach(),
                    full,
                    loo,
                    step_scale=step_scale,
                    log_prob_floor=floor,
                    attribution=method != "no_attribution",
                    projection=method != "no_projection",
                )
                log_p = z.log_softmax(-1)
                loss = (log_p.exp() * (log_p - target.log_probs)).sum(-1)
            total = total + loss.mean()
        total.backward()
        return total.detach(), hidden.grad


CASES = {
    "mixed": ([5, 1, 7, 3, 2], [True, False, False, True, False]),
    "all correct": ([4, 2], [True, True]),
    "all wrong": ([4, 2, 1], [False, False, False]),
    "one token": ([1], [False]),
    "an empty response": ([3, 0, 2], [False, False, True]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("floor", [None, -4.0], ids=["no floor", "floor"])
def test_loss_and_gradient_equal_the_dense_form(method, case, chunk, floor, monkeypatch):
    for module in (head_module, fire_head):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * V)
    lengths, correct = CASES[case]
    world = World(lengths, correct, gap=2.0)
    batch = world.batch(floor=floor)
    loss = load_objective(method).loss(batch)
    loss.backward()
    expected_loss, expected_gradient = world.dense(method, floor=floor)
    torch.testing.assert_close(loss.detach(), expected_loss.reshape(()), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(batch.student.hidden.grad, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_order_and_split_change_nothing(method):
    lengths, correct = CASES["mixed"]
    world = World(lengths, correct)
    whole = world.batch()
    objective = load_objective(method)
    loss = objective.loss(whole)
    loss.backward()
    parts, gradients = [], {}
    for order in ([4, 2], [0], [3, 1]):
        batch = world.batch(order)
        part = objective.loss(batch)
        part.backward()
        parts.append(part.detach())
        gradients |= dict(zip(order, batch.student.hidden.grad.split(batch.student.lengths), strict=True))
    torch.testing.assert_close(sum(parts), loss.detach())
    torch.testing.assert_close(torch.cat([gradients[row] for row in range(5)]), whole.student.hidden.grad)


def test_bfloat16_states_against_a_float32_twin():
    lengths, correct = CASES["mixed"]
    low, high = World(lengths, correct, dtype=torch.bfloat16), World(lengths, correct, dtype=torch.float32)
    results = []
    for world in (low, high):
        batch = world.batch()
        loss = load_objective("fire").loss(batch)
        loss.backward()
        results.append((loss.detach(), batch.student.hidden.grad.float()))
    assert results[0][0].dtype == torch.float32
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.05, atol=0.05)
    cosine = torch.nn.functional.cosine_similarity(results[0][1].flatten(), results[1][1].flatten(), dim=0)
    assert cosine > 0.99


def test_fire_asks_for_no_view_that_cannot_matter():
    """Correct responses never reach the teacher; a response inside the radius throughout is scored under the full view only."""
    world = World([4, 5, 6, 3], [True, False, False, False], gap=4.0, tied_gap_rows=(1, 3))
    load_objective("fire").loss(world.batch(step_scale=1.0))
    assert {row for row, _ in world.asked} == {1, 2, 3}
    assert sorted(view for row, view in world.asked if row in (1, 3)) == ["full", "full"]
    assert {view for row, view in world.asked if row == 2} == {"full", 0, 1, 2}
    assert sorted(world.saved) == [(row, view) for row in (1, 3) for view in range(3)]


def test_the_views_without_a_field_are_read_up_to_the_last_token_over_the_radius():
    world = World([4, 9, 6], [True, False, False], gap=4.0)
    world.views[1]["full"][5:] = world.student[1][5:]  # the rest of this response agrees with the teacher
    batch = world.batch()
    loss = load_objective("fire").loss(batch)
    loss.backward()
    read = {row: {length for r, view, length in world.read if r == row and view != "full"} for row in (1, 2)}
    assert read[1] <= set(range(1, 6)) and read[2] <= set(range(1, 7)) and read[1]
    assert {length for row, view, length in world.read if view == "full" and row == 1} == {9}
    expected_loss, expected_gradient = world.dense("fire")
    torch.testing.assert_close(loss.detach(), expected_loss)
    torch.testing.assert_close(batch.student.hidden.grad, expected_gradient)


def test_responses_with_different_fields_are_grouped():
    world = World([3, 4, 5], [False, False, False], gap=4.0)
    world.rollouts[1].feedback = world.rollouts[1].feedback[:2]
    del world.views[1][2]
    batch = world.batch()
    loss = load_objective("fire").loss(batch)
    loss.backward()
    expected_loss, expected_gradient = world.dense("fire")
    torch.testing.assert_close(loss.detach(), expected_loss)
    torch.testing.assert_close(batch.student.hidden.grad, expected_gradient)


def test_every_token_gradient_respects_the_radius():
    world = World([40, 30], [True, False], gap=5.0)
    seen = {}
    world.projection.requires_grad_(False)
    batch = world.batch(step_scale=3.0)
    loss = load_objective("fire").loss(batch)
    loss.backward()
    logits = batch.student.hidden.detach() @ world.projection.weight.T
    rho = fisher_radius(logits, 3.0)
    # The gradient of the states is W^T g / M: recover g from the pure functions and compare, then check its norm.
    y = torch.tensor(world.rollouts[0].response_ids)
    beta = sft_weight(logits[:40], y, 3.0)
    g_plus = beta[:, None] * (logits[:40].softmax(-1) - torch.nn.functional.one_hot(y, V))
    views = world.views[1]
    loo = torch.stack([views[j] @ world.projection.weight.T for j in range(3)])
    target = fire_target(logits[40:], views["full"] @ world.projection.weight.T, loo, step_scale=3.0)
    g_minus = induced_gradient(logits[40:], target.log_probs)
    seen = torch.cat([g_plus / 40, g_minus / 30]) @ world.projection.weight
    torch.testing.assert_close(batch.student.hidden.grad, seen)
    norms = torch.cat([g_plus, g_minus]).norm(dim=-1)
    assert (norms <= rho * (1 + 1e-9)).all()
    assert (norms >= rho * (1 - 1e-9)).any(), "some tokens must lie on the boundary for this test to mean anything"


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

    def nll(logits, rows):
        return -logits.log_softmax(-1).gather(-1, tokens[rows, None])[:, 0]

    chunked = chunked_token_loss(Head(projection), hidden, weights, nll)
    found = torch.autograd.grad(3 * chunked, [hidden, *projection.parameters()])
    dense = (weights * nll(projection(hidden), slice(None))).sum()
    expected = torch.autograd.grad(3 * dense, [hidden, *projection.parameters()])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_averages_merge_over_ranks():
    first, second = Averages(), Averages()
    first.add(x=torch.tensor([1.0, 2.0]))
    second.add(x=6.0, y=torch.tensor([]))
    first.maximum(m=torch.tensor([3.0, 5.0]))
    second.maximum(m=torch.tensor([4.0]))
    merged = Averages().merge([first, second])
    assert merged.means() == {"x": 3.0, "m": 5.0}


def test_unknown_methods():
    with pytest.raises(ValueError, match="unknown method 'fyre'.*fire"):
        load_objective("fyre")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_objective("no_such_module:Thing")
