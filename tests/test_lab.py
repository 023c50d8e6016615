"""The lab model loads offline, solves about half of the problems, and reads feedback; its training script is deterministic."""

from __future__ import annotations

import hashlib
import importlib
import random
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from firedistill import load_task
from firedistill.evaluation import answer_examples, summarize
from firedistill.models.loading import LAB_FOLDER, load_model_and_tokenizer
from firedistill.models.tokens import stop_token_ids
from firedistill.prompts import PromptEncoder, TokenBudget, teacher_messages
from firedistill.rollout import Sampling
from firedistill.rollouts.hf import HFRolloutEngine

SCRIPTS = Path(__file__).parent.parent / "tools" / "lab"
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=64)
SAMPLED = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=64)  # as in the recipe
TASK = load_task("arithmetic")


@pytest.fixture(scope="module")
def lab():
    return load_model_and_tokenizer("lab", dtype="float32")


@pytest.fixture
def script(monkeypatch):
    """Imports a script of tools/lab as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in ("mistakes", "pretrain", "measure"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def sampled(lab):
    """Answers to 48 held-out problems, with feedback."""
    rollouts = answers(lab, TASK.examples("eval", 48), SAMPLED)
    return [replace(r, feedback=TASK.feedback(r.example, r.response.text, r.verdict)) for r in rollouts]


@pytest.fixture(scope="module")
def wrong(sampled):
    return [rollout for rollout in sampled if not rollout.verdict.correct]


def answers(lab, examples, sampling):
    model, tokenizer = lab
    engine = HFRolloutEngine(model, tokenizer, batch_size=48)
    return answer_examples(engine, TASK, PromptEncoder(tokenizer), examples, sampling, TokenBudget(), seed=3)[0]


def test_it_loads_offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network is used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model, tokenizer = load_model_and_tokenizer("lab")
    assert model.config.model_type == "qwen2" and model.config.tie_word_embeddings
    assert tokenizer.pad_token_id not in stop_token_ids(model, tokenizer)
    assert tokenizer.eos_token_id in stop_token_ids(model, tokenizer)


def test_plain_transformers_reads_the_folder_in_the_same_way(lab):
    ids = AutoTokenizer.from_pretrained(LAB_FOLDER)("Ada has 12 apples.\n#### 12").input_ids
    assert ids == lab[1]("Ada has 12 apples.\n#### 12").input_ids
    ids = torch.tensor([ids])
    model = AutoModelForCausalLM.from_pretrained(LAB_FOLDER, dtype=torch.float32)
    torch.testing.assert_close(model(ids).logits, lab[0](ids).logits)


def test_it_is_small():
    assert sum(file.stat().st_size for file in LAB_FOLDER.iterdir()) <= 8_000_000


@pytest.mark.parametrize("text", ["28 - 17 = 11\n#### 11", "naïve 日本 \n\n x\t5", TASK.format_instruction, "<|im_end|> 7"])
def test_text_survives_the_tokenizer(lab, text):
    encoder = PromptEncoder(lab[1])
    assert encoder.decode(encoder.encode_text(text)) == text


def test_digits_are_single_and_the_template_opens_the_answer(lab):
    encoder = PromptEncoder(lab[1])
    assert len(encoder.encode_text("2047")) == 4
    rendered = encoder.render([{"role": "user", "content": "Hello"}])
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_it_solves_about_half(lab, sampled):
    greedy = summarize(answers(lab, TASK.examples("eval", 48), GREEDY))
    assert 0.5 <= greedy["accuracy"] <= 0.8 and greedy["well_formed_rate"] >= 0.95
    assert 0.35 <= summarize(sampled)["accuracy"] <= 0.65 and summarize(sampled)["well_formed_rate"] >= 0.75


@pytest.mark.parametrize("view, least, most", [("full", 0.9, 1.0), (0, 0.0, 0.75)])
def test_the_teacher_reads_the_verifier_field(lab, wrong, view, least, most):
    model, tokenizer = lab
    encoder = PromptEncoder(tokenizer)
    prompts = [encoder.encode(teacher_messages(TASK, r.example, r.feedback, view)) for r in wrong]
    responses = HFRolloutEngine(model, tokenizer, batch_size=48).generate(prompts, GREEDY, seed=0)
    solved = sum(TASK.verify(r.example, response.text).correct for r, response in zip(wrong, responses, strict=True))
    assert least <= solved / len(wrong) <= most


def test_the_teacher_disagrees_where_the_answer_goes_wrong(lab, wrong, script):
    """Scored as in training: the same tokens in the student's and in the teacher's context."""
    divergence, encoder = script("measure").divergence, PromptEncoder(lab[1])
    gold_student, _ = divergence(lab[0], encoder, TASK, wrong, "none")
    gold_teacher, sampled_teacher = divergence(lab[0], encoder, TASK, wrong, "full")
    assert gold_teacher > gold_student + 0.15 and gold_teacher > sampled_teacher


def test_without_mistakes_an_attempt_is_the_gold_solution(script):
    mistakes, pretrain = script("mistakes"), script("pretrain")
    rng = random.Random(0)
    for _ in range(200):
        _, problem, example = pretrain.draw_example(rng)
        assert mistakes.attempt(problem, rng, kinds=()) == example.solution
        assert mistakes.attempt(problem, rng).strip()


def test_traps_name_templates_that_exist(script):
    from firedistill.tasks.arithmetic import TEMPLATES

    known = {template.name: steps for steps, templates in TEMPLATES.items() for template in templates}
    mistakes = script("mistakes")
    for name, trap in mistakes.TRAPS.items():
        assert known[name] > (trap == mistakes.FORGETS_LAST_STEP)  # something remains without the last step


def test_rows_do_not_depend_on_the_process(script):
    """The order of a set of strings differs between processes, so a row must not depend on it."""
    pretrain, rng = script("pretrain"), random.Random(5)
    answers = [make(rng).answer for make in (pretrain.student_row, pretrain.teacher_row) for _ in range(40)]
    assert hashlib.sha256("\n\n".join(answers).encode()).hexdigest()[:16] == "26c3e4b71d75b577"


@pytest.mark.slow
def test_pretraining_is_deterministic_and_resumes(script, tmp_path, monkeypatch):
    pretrain = script("pretrain")
    monkeypatch.setattr(pretrain, "ROWS", ((0, 4, 2, 0), (2, 2, 2, 2)))

    def trained(name: str, *steps: int) -> dict[str, bytes]:
        for count in steps:
            options = {
                "--output": tmp_path / name,
                "--checkpoint": tmp_path / f"{name}.pt",
                "--steps": count,
                "--warmup": 1,
                "--decay": 1,
                "--vocabulary": 400,
                "--phrases": 40,
                "--tokenizer_rows": 20,
                "--width": 32,
                "--inner_width": 48,
                "--head_width": 8,
                "--layers": 2,
            }
            arguments = [str(part) for option in options.items() for part in option]
            pretrain.train(pretrain.read_settings(arguments))
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    at_once = trained("at_once", 4)
    assert at_once == trained("again", 4)
    assert at_once == trained("interrupted", 2, 4)
