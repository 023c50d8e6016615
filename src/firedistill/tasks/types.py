"""The data that tasks and training exchange: a problem, the verdict on a response, and a field of feedback about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FeedbackField:
    """One separable piece of feedback.

    Attributes:
        name: identifies the field in logs and figures (`alpha_<name>`).
        text: the feedback, which is all that the teacher sees.
        group: fields of one group are removed together and have one weight, `alpha_<group>`; None for a field on its own.
    """

    name: str
    text: str
    group: str | None = None


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        uid: dataset name, published split and row index, for instance `gsm8k/train/17`; independent of any shuffle.
        question: the dataset prompt, with the choices if there are any, without the format instruction.
        answer: the normalized gold answer; the label for choice tasks.
        labels: the labels of the options (`("A", "B")`); empty for numeric tasks.
        options: the texts of the options, in the order of `labels`.
        solution: gold working that ends with the final-answer line, if the dataset has one; used by the warm start.
        category: a subject within the task (MMLU-Pro), if any.
        metadata: anything else that the task's verifier needs; neither the student nor the teacher sees it.
        history: messages before the question, `{"role": ..., "content": ...}`: a system message, earlier turns.
        feedback: fields of feedback that come with the problem, such as a hint; `Task.feedback` decides what the teacher sees.
    """

    uid: str
    question: str
    answer: str
    labels: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    solution: str | None = None
    category: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    history: tuple[Mapping[str, str], ...] = field(default=(), hash=False)
    feedback: tuple[FeedbackField, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verifier's judgement of one response.

    Attributes:
        correct: decides alone which loss the response gets. Does not depend on whether the rollout finished.
        submitted: the normalized answer of the response; None if none was found.
        expected: the normalized gold answer.
        well_formed: whether the answer is on the final-answer line that the task requires.
        lenient_correct: whether any recognizable final answer is correct; a diagnostic that never replaces `correct`. By default it is
            `correct`.
        failed: whether the verifier raised or timed out, so that there is no judgement; the response is excluded from training.
    """

    correct: bool
    submitted: str | None
    expected: str
    well_formed: bool = False
    lenient_correct: bool = None  # type: ignore[assignment]  # never None after `__post_init__`
    failed: bool = False

    def __post_init__(self) -> None:
        if self.lenient_correct is None:
            object.__setattr__(self, "lenient_correct", self.correct)
