"""The data that pass between tasks and training: a problem, the verdict on a response, and a field of feedback about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        uid: dataset name, split and row index as published, for instance `gsm8k/train/17`; independent of any shuffle.
        question: the dataset prompt without the format instruction (choices included where the task has them).
        answer: the gold answer, normalised; for choice tasks the label.
        labels: the labels of the options (`("A", "B")`); empty for numeric tasks.
        options: the texts of the options, in the order of `labels`.
        solution: gold working that ends with the final-answer line, if the dataset has one (used by the warm start).
        category: a subject within the task (MMLU-Pro), if any.
        metadata: whatever else the task's verifier needs; neither the student nor the teacher sees it.
    """

    uid: str
    question: str
    answer: str
    labels: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    solution: str | None = None
    category: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)


@dataclass(frozen=True)
class Verdict:
    """What the verifier says about one response.

    Attributes:
        correct: the only thing that routes a response. Never depends on whether the rollout finished.
        submitted: the normalised answer that was read from the response, or None.
        expected: the gold answer, normalised.
        well_formed: the answer stood on the final-answer line that the task asks for.
        lenient_correct: right when any recognisable final answer is accepted; a diagnostic, never the verdict.
        failed: the verifier raised or took too long, so that this is no verdict; such a response is not trained on.
    """

    correct: bool
    submitted: str | None
    expected: str
    well_formed: bool = False
    lenient_correct: bool = False
    failed: bool = False


@dataclass(frozen=True)
class FeedbackField:
    """One separable piece of feedback.

    `name` identifies the field in logs and pictures (`alpha_<name>`); the teacher sees only `text`.
    """

    name: str
    text: str
