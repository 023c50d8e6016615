"""Responses with prescribed hidden states: the steps and micro-batches that an objective reads, without a language model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from firedistill.memory import BatchLimit
from firedistill.metrics import Metrics
from firedistill.models.states import ResponseStates
from firedistill.objectives import MicroBatch, Objective, Step
from firedistill.ops import Head
from firedistill.rollout import Response, Rollout
from firedistill.tasks import Example, Verdict
from firedistill.tasks.types import FeedbackField
from firedistill.teacher import Teacher

H, V = 8, 31


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- Student, teacher and their responses ------------------------------------------------------------------------------------------


class StubStudent(torch.nn.Module):
    """A causal language model whose hidden states after the prompt `[i]` are those of response i of the world.

    Attributes:
        read: the responses that were scored.
    """

    def __init__(self, world: World):
        super().__init__()
        self.world, self.read = world, []
        self.placed = torch.nn.Parameter(torch.empty(0))  # parameters tell the device
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=world.weight.shape[1]))

    def base_model(self, input_ids, use_cache):
        rows = input_ids[:, 0].tolist()
        self.read += rows
        states = pad_sequence([self.world.student[row] for row in rows], batch_first=True)
        return SimpleNamespace(last_hidden_state=states.to(self.world.dtype))


class StubTeacher(Teacher):
    """A teacher that looks up the states of a response in `World.views`.

    Attributes:
        read: `(response, view, tokens)` for everything that was read.
        kept: whether keys and values of prompts were kept for other views.
        returned: the states; none of them may receive a gradient.
    """

    head = None

    def __init__(self, world: World):
        self.world, self.head, self.device = world, world.head, torch.device("cpu")
        self.read, self.returned, self.kept = [], [], False
        self.limit = BatchLimit(8192, "tokens", "")

    def states(self, rollouts, views, lengths=None, keep=True):
        self.kept |= keep
        rows = [rollout.prompt_ids[0] for rollout in rollouts]
        lengths = [len(rollout.response_ids) for rollout in rollouts] if lengths is None else list(lengths)
        self.read += [(row, view, length) for view in views for row, length in zip(rows, lengths, strict=True)]
        found = [
            self.world.states([self.world.views[row][view][:length] for row, length in zip(rows, lengths, strict=True)])
            for view in views
        ]
        self.returned += [states.hidden for states in found]
        return found


class World:
    """The responses of one step with the hidden states of student and teacher, and a trained head that both share.

    Args:
        student: `[T, H]` states per response.
        teacher: per response the `[T, H]` states of the full view, or states by view. A response has as many feedback fields as it
            has views without a field.
        token_ids, correct: per response.
        prompt_index: one prompt by default.
        prompts: prompts of the step; by default those with a response.
        prefixes: leading tokens of each response that the teacher wrote; none by default.
        weight: `[V, H]` weights of the head. By default the identity, with which states are logits.

    Attributes:
        sampled_from: the student's states at the time of sampling; see `move`.
        prepared: what `Objective.prepare` returned, by response.
        metrics: those of `prepare` and of all losses.
    """

    def __init__(
        self,
        student,
        teacher,
        token_ids,
        correct,
        prompt_index=None,
        prompts=None,
        prefixes=None,
        weight=None,
        dtype=torch.float64,
    ):
        count = len(token_ids)
        self.student = self.sampled_from = [torch.as_tensor(states, dtype=torch.float64) for states in student]
        self.views = [
            {view: torch.as_tensor(states, dtype=torch.float64) for view, states in by_view.items()}
            for by_view in (views if isinstance(views, dict) else {"full": views} for views in teacher)
        ]
        self.weight = torch.eye(self.student[0].shape[-1], dtype=torch.float64) if weight is None else weight
        self.dtype, self.head = dtype, Head(torch.nn.Linear(*self.weight.T.shape, bias=False))
        self.head.projection.weight.data = self.weight.to(dtype)
        prompt_index, prefixes = prompt_index or [0] * count, prefixes or [0] * count
        self.prompts = prompts if prompts is not None else len(set(prompt_index))
        self.rollouts = [
            Rollout(
                Example(f"x/{row}", "?", "1"),
                [row],
                Response(list(token_ids[row]), "", True),
                Verdict(correct[row], None, "1"),
                tuple(FeedbackField(f"field{j}", "") for j in self.views[row] if isinstance(j, int)),
                prompt_index=prompt_index[row],
                prefix_length=prefixes[row],
            )
            for row in range(count)
        ]
        self.prepared, self.metrics, self.generator = {}, Metrics(), torch.Generator().manual_seed(1001)
        self.model, self.teacher = StubStudent(self), StubTeacher(self)

    def states(self, hidden: list[torch.Tensor]) -> ResponseStates:
        """States in the dtype of the world, as leaves."""
        joined = torch.cat(hidden or [torch.empty(0, self.weight.shape[1])]).to(self.dtype, copy=True)
        return ResponseStates(joined.requires_grad_(), [len(states) for states in hidden])

    def tokens(self, row: int) -> torch.Tensor:
        return torch.tensor(self.rollouts[row].response_ids, dtype=torch.long)

    def logits(self, view="full") -> list[torch.Tensor]:
        """`[T, V]` logits per response, of the teacher under a view or of the "student"."""
        return [
            (self.student[row] if view == "student" else self.views[row][view]) @ self.weight.T
            for row in range(len(self.views))
        ]

    def move(self, size: float = 0.3) -> None:
        """Change the student, as an update does."""
        self.student = [states + size * torch.randn(states.shape, generator=self.generator) for states in self.student]

    # ---- What the trainer does with an objective -----------------------------------------------------------------------------------

    def step(self, rows: Sequence[int] | None = None, seed: int = 0) -> Step:
        rows = range(len(self.rollouts)) if rows is None else rows
        return Step([self.rollouts[row] for row in rows], self.prompts, 0.0, seed, self.model, self.head, self.teacher)

    def batch(self, rows: Sequence[int], group_size: int = 1, **settings) -> MicroBatch:
        return MicroBatch(
            [self.rollouts[row] for row in rows],
            [self.prepared.get(row) for row in rows],
            self.states([self.student[row] for row in rows]),
            self.head,
            self.teacher,
            responses=self.prompts * group_size,
            prompts=self.prompts,
            **settings,
        )

    def trained(self, objective: Objective, rows: Sequence[int] | None = None) -> list[int]:
        return [row for row in (range(len(self.rollouts)) if rows is None else rows) if objective.trains(self.rollouts[row])]

    def prepare(self, objective: Objective, rows: Sequence[int] | None = None, seed: int = 0) -> None:
        step = self.step(rows, seed)
        prepared, metrics = objective.prepare(step)
        self.prepared |= {rollout.prompt_ids[0]: of_one for rollout, of_one in zip(step.rollouts, prepared, strict=True)}
        self.metrics.merge([metrics])

    def backward(self, objective: Objective, micro_batches: Sequence[Sequence[int]] | None = None, **settings) -> Result:
        """The summed losses of micro-batches, with their gradients."""
        self.head.projection.weight.grad = torch.zeros_like(self.head.projection.weight)
        loss, metrics = torch.zeros((), dtype=self.dtype), Metrics()
        gradients = [torch.zeros_like(states, dtype=self.dtype) for states in self.student]
        for rows in [range(len(self.rollouts))] if micro_batches is None else micro_batches:
            batch = self.batch(rows, objective.group_size, **settings)
            part, part_metrics = objective.loss(batch)
            part.backward()
            loss = loss + part.detach()
            metrics.merge([part_metrics])
            for row, gradient in zip(rows, batch.student.hidden.grad.split(batch.student.lengths), strict=True):
                gradients[row] = gradient
        self.metrics.merge([metrics])
        assert all(states.grad is None for states in self.teacher.returned), "the teacher received a gradient"
        return Result(loss, gradients, self.head.projection.weight.grad, metrics.row())

    def run(self, objective: Objective, rows: Sequence[int] | None = None, **settings) -> Result:
        """A step of one micro-batch: leave out what does not train, prepare, and compute the loss."""
        rows = self.trained(objective, rows)
        self.teacher.read.clear()
        self.prepare(objective, rows)
        result = self.backward(objective, [rows], **settings)
        for row, _, _ in self.teacher.read:
            assert objective.needs_teacher(self.rollouts[row]), f"no feedback was built for response {row}"
        return result

    def literal(self, loss: Callable[[list[torch.Tensor]], torch.Tensor]) -> Result:
        """`loss(logits)`, given the student's `[T, V]` logits per response, with plain autograd."""
        inputs = [states.clone().requires_grad_() for states in [*self.student, self.weight]]
        logits = [states @ inputs[-1].T for states in inputs[:-1]]
        value = loss(logits) + 0.0 * sum(z.sum() for z in logits)
        gradients = torch.autograd.grad(value, inputs)
        return Result(value.detach(), list(gradients[:-1]), gradients[-1], {})


@dataclass
class Result:
    """A loss; its gradient for the states of every response, 0 where it is not trained, and for the head; the metrics of the loss."""

    loss: torch.Tensor
    gradients: list[torch.Tensor]
    head: torch.Tensor
    metrics: dict[str, float]

    @property
    def gradient(self) -> torch.Tensor:
        return torch.cat(self.gradients)


def random_logits(generator, *shape, spread=2.0, dtype=torch.float64):
    """Representable in float32, whatever the dtype."""
    return (spread * torch.randn(*shape, generator=generator)).to(dtype)


T, F = True, False
# Per prompt its responses: their length, whether they are correct, and optionally the length of their prefix.
CASES = {
    "mixed": [[(5, T), (1, F), (7, F, 4), (3, T)], [(2, T), (4, T)], [(6, F)]],
    "all correct": [[(4, T), (2, T)], [(3, T)]],
    "all wrong": [[(4, F), (2, F), (1, F)], [(3, F, 1)]],
    "one token": [[(1, F)]],
    "groups of five": [[(2, T), (3, F), (1, T), (4, F), (2, T)], [(1, F), (2, F), (1, T), (3, F), (2, F)]],
    "a wrong empty response": [[(3, F), (0, F)], [(2, T, 1)]],
    "a correct empty response": [[(0, T), (4, F)]],
}


def random_world(case, seed=0, gap=1.0, views=(), vocabulary=V, dtype=torch.float64) -> World:
    """Random states and tokens. One prompt of the step has no response, so that divisors cannot be counted from the responses.

    Args:
        case: a name in `CASES`, or an entry like them.
        gap: size of the noise between student and full view, and between full view and other views; one for all responses, or each.
        views: the teacher's views besides the full one.
    """
    generator, case = torch.Generator().manual_seed(seed), CASES[case] if isinstance(case, str) else case
    rows = [(10 * group + 3, *member) for group, members in enumerate(case) for member in members]
    gaps = gap if isinstance(gap, Sequence) else [gap] * len(rows)
    student = [random_logits(generator, length, H, spread=1.0) for _, length, *_ in rows]
    teacher = []
    for states, size in zip(student, gaps, strict=True):
        full = states + random_logits(generator, *states.shape, spread=size)
        teacher.append({"full": full, **{view: full + random_logits(generator, *states.shape, spread=size) for view in views}})
    return World(
        student,
        teacher,
        [torch.randint(vocabulary, (length,), generator=generator).tolist() for _, length, *_ in rows],
        [ok for _, _, ok, *_ in rows],
        [prompt for prompt, *_ in rows],
        prompts=len(case) + 1,
        prefixes=[sum(prefix) for _, _, _, *prefix in rows],
        weight=random_logits(generator, vocabulary, H, spread=1.0),
        dtype=dtype,
    )


# ---- Comparisons -------------------------------------------------------------------------------------------------------------------


def assert_printed(found, printed, digits: int = 6) -> None:
    """Equal to printed numbers within half a unit of the last digit.

    Args:
        printed: numbers, printed with `digits` digits after the point, or a text that shows its digits.
    """
    found = torch.as_tensor(found, dtype=torch.float64)
    if isinstance(printed, str):
        texts = re.findall(r"[-+.\d]+", printed)
        digits = tensor([len(text.partition(".")[2]) for text in texts])
        found, printed = found.flatten(), [float(text) for text in texts]
    expected = torch.as_tensor(printed, dtype=torch.float64)
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= 0.5 * (1 + 1e-9) * 10.0**-digits).all(), f"{found} is not {expected}"


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Equal relative to the largest element."""
    assert found.shape == expected.shape
    difference = (found.double() - expected.double()).abs().max() if expected.numel() else torch.zeros(())
    scale = expected.double().abs().max() if expected.numel() else torch.zeros(())
    assert difference <= tolerance * scale + 1e-15, f"off by {float(difference):.3g}, the largest element is {float(scale):.3g}"


def assert_result(found: Result, expected: Result, tolerance: float = 1e-9) -> None:
    assert_same(found.loss, expected.loss, tolerance)
    assert_same(found.gradient, expected.gradient, tolerance)
    assert_same(found.head, expected.head, tolerance)
