"""Whatever texts, views, token ids and recipes come: functions return, and their promises hold.

    FIREDISTILL_FUZZ=5000 python -m pytest tests/test_fuzz.py         # longer, outside of continuous integration

What was once found is in `corpus.json` and is tried in every run.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firedistill import Example, FeedbackField, SelfDistillConfig, Verdict, load_task
from firedistill.models.states import score_responses
from firedistill.prompts import PromptEncoder, fair_share, fit_feedback, student_messages, teacher_messages
from firedistill.recipes import OptionError, build_config
from firedistill.rollout import Response, Rollout
from firedistill.run.checkpoints import CheckpointError, check, load_state, save_state
from firedistill.run.log import json_line
from firedistill.tasks.feedback import structured_feedback
from firedistill.tasks.guard import GuardedTask
from firedistill.teacher import Teacher
from tiny import SPECIAL, byte_tokenizer, random_model

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text(encoding="utf-8"))
TRIES = int(os.environ.get("FIREDISTILL_FUZZ", 30))
fuzz = settings(
    max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck), derandomize="FIREDISTILL_FUZZ" not in os.environ
)

MARKS = [*SPECIAL, *CORPUS, "####", "Answer:", "\\boxed{", "\n", "; ", "`", "=", "1,000", "[cut]"]
PIECES = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=8)), max_size=12)
TEXTS = st.one_of(st.text(max_size=60), PIECES.map("".join), st.sampled_from(CORPUS))
# What comes back from a tokenizer as it was: UTF-8 has no halves of surrogate pairs, they become U+FFFD.
ENCODABLE = TEXTS.map(lambda text: text.encode("utf-8", "ignore").decode("utf-8"))
TASKS = [load_task(name) for name in ("gsm8k", "asdiv", "aqua_rat", "wic", "arithmetic")]


@functools.cache
def encoder() -> PromptEncoder:
    return PromptEncoder(byte_tokenizer())


@functools.cache
def model():
    return random_model()


def control(ids: list[int]) -> list[int]:
    """The special tokens among these."""
    return [token for token in ids if token < len(SPECIAL)]


# ---- Verdicts and feedback -------------------------------------------------------------------------------------------------


@fuzz
@given(task=st.sampled_from(TASKS), question=TEXTS, answer=st.sampled_from(["42", "A", "B", "2; 6", "True"]), response=TEXTS)
def test_every_response_has_a_verdict_and_feedback(task, question, answer, response):
    example = Example("x/train/0", question, answer, labels=("A", "B"), options=("one", "two"))
    guarded = GuardedTask(task, 5.0)
    verdict = guarded.verify(example, response)
    assert not verdict.failed and verdict == guarded.verify(example, response), "the same text, the same verdict"
    feedback = guarded.feedback(example, response, verdict)
    assert [field.name for field in feedback] == ["verifier", "parser", "provenance", "format"]
    assert not any(mark in field.text for field in feedback for mark in "\n\r"), "every field is one line"
    assert all(field.text.count("`") % 2 == 0 for field in structured_feedback(task, example, response, verdict)), (
        "quotations close"
    )
    assert all(len(field.text) < 4000 + 3 * len(question) for field in feedback)


# ---- Prompts and views -----------------------------------------------------------------------------------------------------


@fuzz
@given(question=ENCODABLE, texts=st.lists(ENCODABLE, max_size=5))
def test_no_text_can_end_or_open_a_turn_in_any_view(question, texts):
    task, example = TASKS[0], Example("x", question, "1")
    feedback = [FeedbackField(f"f{i}", text) for i, text in enumerate(texts)]
    expected = control(encoder().encode(student_messages(task, Example("x", "plain", "1"))))
    views = ["full", "none", *range(len(texts))]
    prompts = [encoder().encode(teacher_messages(task, example, feedback, view)) for view in views]
    for view, ids in zip(views, prompts, strict=True):
        assert control(ids) == expected
        shown = byte_tokenizer().decode(ids, skip_special_tokens=False)
        for number, text in enumerate(texts):
            if view == "full" or (view != "none" and view != number):
                assert f"[Context block {number + 1}]\n{text}" in shown
        if question.strip() == question:
            assert question in shown


@fuzz
@given(texts=st.lists(TEXTS, max_size=5), budget=st.integers(1, 200))
def test_feedback_fits_its_budget_or_says_that_it_was_cut(texts, budget):
    feedback = tuple(FeedbackField(f"f{i}", text) for i, text in enumerate(texts))
    fitted, cut = fit_feedback(feedback, encoder(), budget)
    sizes = [len(encoder().encode_text(field.text)) for field in fitted]
    mark = len(encoder().encode_text(" [cut]"))
    assert sum(sizes) <= max(budget, mark * len(cut) + sum(s for f, s in zip(fitted, sizes, strict=True) if f.name not in cut))
    for before, after in zip(feedback, fitted, strict=True):
        assert after.name == before.name and (after.text.endswith(" [cut]") if before.name in cut else after == before)


@fuzz
@given(sizes=st.lists(st.integers(0, 1000), max_size=8), budget=st.integers(0, 3000))
def test_the_fair_share_is_fair(sizes, budget):
    share = fair_share(sizes, budget)
    if sum(sizes) > budget:
        assert sum(min(size, share) for size in sizes) <= budget < sum(min(size, share + 1) for size in sizes)


# ---- Shared prefixes -------------------------------------------------------------------------------------------------------


class PrescribedPrompts(Teacher):
    """A teacher whose prompts are given."""

    def __init__(self, model, prescribed):
        super().__init__(model, task=None, encoder=None, share_prefixes=True)
        self.prescribed = prescribed

    def prompt_ids(self, rollout, view):
        return self.prescribed[rollout, view]


IDS = st.lists(st.integers(3, 258), min_size=1, max_size=10)


@settings(fuzz, max_examples=max(10, TRIES // 3))
@given(
    shared=IDS,
    rests=st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=3),
    responses=st.lists(IDS, min_size=3, max_size=3),
    twice=st.booleans(),
)
def test_views_with_shared_prefixes_equal_views_scored_alone(shared, rests, responses, twice):
    """Whatever prefixes the views share, in whatever order they are scored."""
    count = min(len(views) for views in rests)
    prompts = [[shared + views[v] for views in rests] for v in range(count)]
    responses = responses[: len(rests)]
    rollouts = [Rollout(Example("x", "", ""), [], Response(ids, "", True), Verdict(False, None, "")) for ids in responses]
    teacher = PrescribedPrompts(model(), {(r, v): prompts[v][i] for i, r in enumerate(rollouts) for v in range(count)})
    if twice and count > 1:
        found = teacher.states(rollouts, [0]) + teacher.states(rollouts, range(1, count))
    else:
        found = teacher.states(rollouts, range(count))
    for view, states in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = score_responses(model(), view, responses)
        torch.testing.assert_close(states.hidden, expected.hidden, rtol=1e-3, atol=1e-4)


# ---- Recipes ---------------------------------------------------------------------------------------------------------------

# Options of transformers that do more than hold a value: they look for hardware, packages, files or other processes.
OUTWARD = (
    "use_cpu deepspeed fsdp fsdp_config accelerator_config local_rank ddp_backend parallelism_config torch_compile debug output_dir "
    "distributed_config log_level log_level_replica liger_kernel_config"
)
FIELDS = [name for name in SelfDistillConfig.__dataclass_fields__ if not name.startswith("_") and name not in OUTWARD]
NAMES = st.sampled_from([*FIELDS, "methods", "max_step", "ünknown"])
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.floats(), TEXTS)


def nested(inner, keys):
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3))


VALUES = st.recursive(PLAIN, lambda inner: nested(inner, st.text(max_size=5)), max_leaves=6)


@fuzz
@given(recipe=st.dictionaries(NAMES, VALUES, max_size=4))
def test_a_recipe_is_settings_or_one_clear_complaint(recipe):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
        try:
            config = build_config(SelfDistillConfig, str(path), {"use_cpu": True})
        except OptionError as error:
            assert str(error)
        else:
            assert build_config(SelfDistillConfig, None, {"use_cpu": True, **config.resolved()}).resolved() == config.resolved()


@fuzz
@given(text=st.one_of(TEXTS, st.binary(max_size=60).map(lambda data: data.decode("latin-1"))))
def test_any_file_is_settings_or_one_clear_complaint(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            build_config(SelfDistillConfig, str(path), {"use_cpu": True})
        except OptionError as error:
            assert str(error)


# ---- Logs and checkpoints --------------------------------------------------------------------------------------------------


@fuzz
@given(row=st.dictionaries(TEXTS, st.one_of(st.floats(), st.integers(), TEXTS, st.booleans(), st.none()), max_size=5))
def test_every_row_is_one_line_of_json(row):
    line = json_line(row)
    assert line.count("\n") == 1 and json.loads(line, parse_constant=lambda name: pytest.fail(name)).keys() == row.keys()


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), ENCODABLE)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.integers(), ENCODABLE), inner, max_size=3),
    ),
    max_leaves=12,
)


@fuzz
@given(state=STATES)
def test_states_come_back_as_they_were(state):
    with tempfile.TemporaryDirectory() as folder:
        save_state(state, folder, "state")
        again = load_state(folder, "state")
        assert again == state and repr(again) == repr(state)


@fuzz
@given(text=st.one_of(TEXTS, VALUES.map(lambda value: json.dumps(value, default=str))))
def test_states_and_lists_of_nonsense_are_refused_in_words(text):
    with tempfile.TemporaryDirectory() as folder:
        data = text.encode("utf-8", "surrogatepass")
        save_state(None, folder, "state")
        (Path(folder) / "state.json").write_bytes(data)
        (Path(folder) / "checkpoint.json").write_bytes(data)
        with pytest.raises(CheckpointError):
            check(Path(folder))
        try:
            load_state(folder, "state")
        except CheckpointError as error:
            assert "state.json" in str(error)
