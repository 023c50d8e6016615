"""The preflight reports every problem that can be known before the first step with its fix, and nothing else."""

from __future__ import annotations

import random
import re
import shutil
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import firedistill
from firedistill import Example, SelfDistillConfig, SelfDistillTrainer, Verdict, checks, load_task
from firedistill.checks import (
    CHECKED,
    check,
    check_adapter,
    check_memory,
    check_options_without_effect,
    check_settings,
    gold_responses,
)
from firedistill.cli import main as cli
from firedistill.coerce import built_in_names
from firedistill.footprint import memory_of_step
from firedistill.models import tokens
from firedistill.models.quantized import gradient_difference
from firedistill.objectives import registered_objectives
from firedistill.objectives.full_context import FullContext
from firedistill.prompts import PromptEncoder, student_messages
from firedistill.recipes import build_config
from firedistill.setup import load_setup
from firedistill.tasks import TableTask
from firedistill.tasks.choice import choice_example
from firedistill.tasks.code import CodeTask
from firedistill.warmstart import WarmStartConfig
from killable import killable_config
from tiny import ToyTask, byte_tokenizer, random_model, run_config

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
)
HELD_OUT = [Example(f"toy/eval/{i}", f"Another question {i}", "even", solution="ab") for i in range(3)]


def found(
    model, tmp_path, task=None, train=None, held_out=HELD_OUT, change=lambda setup: None, **changes
) -> dict[str, list[str]]:
    """Texts of the findings by level."""
    changes = {"max_context_tokens": 1800, **changes}
    config = killable_config(model, tmp_path / "run", changes.pop("method", "fire"), **changes)
    setup = load_setup(config, task=task or ToyTask(), train_examples=train, eval_examples=held_out)
    change(setup)
    texts: dict[str, list[str]] = {"error": [], "warning": [], "note": []}
    before = random.getstate()
    for finding in check(setup).findings:
        assert finding.level == "note" or finding.fix, "a finding comes with its fix"
        assert "\n" not in str(finding)
        texts[finding.level].append(str(finding))
    assert random.getstate() == before, "the checks do not change the run"
    assert not (tmp_path / "run").exists(), "nothing is written"
    return texts


def only(texts: dict[str, list[str]], level: str) -> str:
    assert len(texts[level]) == 1, texts
    return texts[level][0]


def test_a_sane_start_has_notes_only(model, tmp_path):
    texts = found(model, tmp_path)
    assert texts["error"] == texts["warning"] == []
    shown = "\n".join(texts["note"])
    assert "12 of 12 are judged right by the task's verifier" in shown and "3 of 3 are judged right" in shown
    assert "trainable parameters in 14 modules" in shown and "checkpoints of about" in shown and "memory: about" in shown


class Strict(ToyTask):
    """Judges every response to some examples wrong."""

    name = "strict"

    def __init__(self, wrong: int, error: bool = False):
        self.wrong, self.error = wrong, error

    def verify(self, example, response):
        random.random()
        if int(example.uid.rpartition("/")[2]) < self.wrong:
            if self.error:
                raise LookupError("no such key")
            return Verdict(False, response, "even")
        return super().verify(example, response)


def test_golds_that_the_verifier_refuses(model, tmp_path):
    task = Strict(1)
    texts = found(model, tmp_path, task, task.examples("train", 30))
    assert "1 of 30 golds are judged wrong by the task's own verifier: toy/train/0 ->" in texts["warning"][0]
    assert "1 of 3 golds are judged wrong" in only(texts, "error"), "a third of the held-out examples"
    texts = found(model, tmp_path, Strict(30, error=True), task.examples("train", 30))
    assert any("30 of 30 golds cannot be judged" in text for text in texts["error"])


@pytest.mark.parametrize(
    ("verify", "complaint"),
    [
        (lambda row: True, "raised TypeError: "),
        (lambda row, response: None, "the result of verify is a NoneType, expected True or False"),
        (lambda row, response: "yes", "the result of verify is a str, expected True or False"),
        (lambda row, response: 0.5, "the result of verify is a float, expected True or False"),
        (lambda row, response: Verdict(False, None, "", failed=True), "verify marks its verdict as failed"),
        (lambda row, response: response[0] == "x", None),
        (lambda row, response: False, None),
    ],
)
def test_without_golds_the_verifier_judges_other_responses(verify, complaint, model, tmp_path):
    own = firedistill.task([{"question": f"Write line {n}."} for n in range(20)], name="lines")(verify)
    texts = found(model, tmp_path, own, own.examples("train"), own.examples("eval"))
    if complaint is None:
        assert texts["error"] == []
        return
    text = only(texts, "error")
    assert "verdicts: no response to 16 of 16 examples can be judged: lines/all/" in text and complaint in text
    assert "fix verify: it must work for any response" in text


class Silent(ToyTask):
    """Its feedback has no field."""

    def feedback(self, example, response, verdict):
        return ()


def test_a_teacher_without_feedback_is_named(model, tmp_path):
    text = "feedback: none of 16 examples has a field: the teacher sees no feedback"
    examples = Silent().examples("train", 30)
    assert text in only(found(model, tmp_path, Silent(), examples), "warning")
    assert found(model, tmp_path, Silent(), examples, method="on_policy_sft")["warning"] == []


def test_some_examples_without_golds_may_have_no_verdict(model, tmp_path):
    examples = [Example(f"x/{n}", f"Line {n}", "even" if n else "", solution="ab" if n else None) for n in range(16)]
    texts = found(model, tmp_path, Strict(1, error=True), examples, held_out=[])
    assert any("no response to 1 of 16 examples can be judged: x/0 (x/0: verify of Strict" in text for text in texts["warning"])
    assert texts["error"] == []


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic:hard"])
def test_the_golds_of_built_in_tasks_pass(name, model, tmp_path):
    task = load_task(name)
    texts = found(model, tmp_path, task, task.examples("train", 64), task.examples("eval", 8))
    assert not [text for level in ("error", "warning") for text in texts[level] if "gold" in text]


def test_programs_have_golds_only_where_the_rows_have_solutions():
    task = CodeTask()
    row = {"prompt": "Write `add`.", "entry_point": "add", "tests": ["assert add(1, 2) == 3"]}
    solved = {**row, "solution": "def add(a, b):\n    return a + b"}
    assert [len(gold_responses(SimpleNamespace(task=task), task.example(each, "u"))) for each in (row, solved)] == [0, 1]


@pytest.mark.parametrize("options", [{"answer": "regex:<a>(.*)</a>"}, {"verify": lambda row, response: "<a>" in response}])
def test_golds_without_a_final_line_are_checked_by_their_solutions_only(options, model, tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(10)]
    solved = [{**row, "solution": f"<a>{row['answer']}</a>"} for row in rows]
    for data, note in ((rows, "not checked: the examples have no solution"), (solved, "8 of 8 are judged right")):
        own = TableTask(data, **options)
        texts = found(model, tmp_path, own, own.examples("train"), own.examples("eval"))
        assert texts["error"] == [] and any(f"training golds: {note}" in text for text in texts["note"])


def test_large_data_is_sampled_evenly_and_fast(model, tmp_path):
    examples = ToyTask().examples("train", 40_000)
    started = time.perf_counter()
    texts = found(model, tmp_path, train=examples)
    assert time.perf_counter() - started < 20
    assert any(f"{CHECKED} of {CHECKED} (a sample of 40000) are judged right" in text for text in texts["note"])


def test_invalid_data(model, tmp_path):
    examples = [Example("a", "Same?", "even", solution="ab"), Example("a", " ", "even", solution="ab")]
    texts = found(model, tmp_path, train=examples, held_out=[Example("b", "Same?", "even", solution="ab")])
    assert "1 questions are empty: a" in only(texts, "error")
    shown = "\n".join(texts["warning"])
    assert (
        "1 uids occur more than once, for instance a" in shown and "1 training questions are also held-out questions" in shown
    )


def test_problems_are_held_out_whatever_the_order_of_options_and_not_if_the_messages_before_differ(model, tmp_path):
    def example(uid, question, options=(), before=""):
        history = ({"role": "user", "content": before},) if before else ()
        lettered = choice_example(uid, question, options, options[0]) if options else None
        return replace(lettered or Example(uid, question, "even"), solution="ab", history=history)

    train = [example("a", "Which is even?", ("2", "3")), example("b", "Another one?", before="Sums, please.")]
    held = [example("c", "which is  even?", ("3", "2")), example("d", "Another one?", before="Products, please.")]
    warnings = found(model, tmp_path, train=train, held_out=held)["warning"]
    (told,) = [text for text in warnings if "held-out questions" in text]
    assert "1 training questions are also held-out questions: a " in f"{told} "


def test_prompts_against_the_budgets(model, tmp_path):
    encoder = PromptEncoder(byte_tokenizer())
    lengths = sorted(len(encoder.encode(student_messages(ToyTask(), e))) for e in ToyTask().examples("train"))
    texts = found(model, tmp_path, max_prompt_tokens=lengths[8])
    over = sum(length > lengths[8] for length in lengths)
    complaint = f"training prompts: {over} of 12 have more than {lengths[8]} tokens (the longest has {lengths[-1]})"
    assert 0 < over < 12 and any(complaint in text for text in texts["warning"])
    texts = found(model, tmp_path, max_prompt_tokens=8)
    assert len(texts["error"]) == 2 and "12 of 12 have more than 8 tokens" in texts["error"][0]
    texts = found(model, tmp_path, max_context_tokens=900)
    assert "raise max_context_tokens by" in only(texts, "warning")
    texts = found(model, tmp_path, max_context_tokens=4000)
    assert "max_context_tokens is 4000, the model has 2048 positions" in only(texts, "warning")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "no generation prompt"),
        ("fixed{% if add_generation_prompt %}>{% endif %}", "shows the user's message 0 times"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}{{ add_generation_prompt }}", "2 times"),
        ("{{ raise_exception('no users here') }}", "cannot render a message"),
        (ENDLESS, "cannot render a message: the chat template took longer than 0.2 s"),
    ],
)
def test_chat_templates(template, complaint, model, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "TEMPLATE_SECONDS", 0.2)
    monkeypatch.setattr(checks, "CHECK_SECONDS", 0.3)
    texts = found(model, tmp_path, change=lambda setup: setattr(setup.tokenizer, "chat_template", template))
    assert any(complaint in text for text in texts["error"])


def test_tokens_that_do_not_fit_the_model(model, tmp_path):
    def few_rows(setup):
        setup.model.get_base_model().set_output_embeddings(random_model(rows=200).get_output_embeddings())

    assert "tokens up to 258" in only(found(model, tmp_path, change=few_rows), "error")
    assert len(byte_tokenizer()) == 259

    def no_end(setup):
        setup.model.generation_config.eos_token_id = setup.tokenizer.pad_token_id
        setup.model.get_base_model().generation_config.eos_token_id = setup.tokenizer.pad_token_id
        setup.tokenizer.eos_token = "<|im_start|>"

    shown = "\n".join(found(model, tmp_path, change=no_end)["warning"])
    assert "ends a turn with '<|im_end|>', which does not end a response" in shown
    assert "the pad token also ends a response" in shown


class Lying(torch.nn.Linear):
    """A layer whose gradient is wrong after an evaluation, as that of repacked 4-bit weights is."""

    repacked = False

    def forward(self, states):
        self.repacked |= not torch.is_grad_enabled()
        return super().forward(states.detach() if self.repacked else states)


class Honest(torch.nn.Linear):
    pass


class Broken(torch.nn.Linear):
    def forward(self, states):
        raise RuntimeError("shape '[160, 2]' is invalid")


def with_layers(kind):
    """Put another class of layer in the place of some plain ones, with the same weights."""

    def change(setup):
        for name, module in setup.model.named_modules():
            if name.endswith("up_proj.base_layer"):
                module.__class__ = kind

    return change


def test_gradients_through_quantized_weights(model, tmp_path):
    texts = found(model, tmp_path, change=with_layers(Honest))
    assert any("gradient differs by 0.0%" in text for text in texts["note"]) and not texts["error"]
    text = only(found(model, tmp_path, change=with_layers(Lying)), "error")
    assert "quantization: the adapter's gradient differs by" in text and "train without --quantization" in text
    text = only(found(model, tmp_path, change=with_layers(Broken)), "error")
    assert "no gradient passes through the quantized weights: shape" in text


def test_the_check_of_gradients_changes_nothing(model, tmp_path):
    setup = load_setup(killable_config(model, tmp_path / "run", "fire"), task=ToyTask())
    with_layers(Honest)(setup)
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    setup.model.train()
    forwards = [vars(module).get("forward") for module in setup.model.modules()]
    assert gradient_difference(setup.model, torch.arange(8)[None]) < 1e-6
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())
    assert all(module.training for module in setup.model.modules())
    assert [vars(module).get("forward") for module in setup.model.modules()] == forwards
    assert all(parameter.grad is None for parameter in setup.model.parameters())


def test_feedback_that_fails(model, tmp_path):
    class Silent(ToyTask):
        def feedback(self, example, response, verdict):
            return response[0]

    assert "feedback: it fails for 12 of 12 examples" in only(found(model, tmp_path, Silent()), "error")


class Hanging(ToyTask):
    """A method of it never returns."""

    def __init__(self, method: str):
        self.method, self.calls = method, 0

    def wait(self, method):
        if method == self.method:
            self.calls += 1
            time.sleep(60)

    def prompt(self, example):
        self.wait("prompt")
        return super().prompt(example)

    def verify(self, example, response):
        self.wait("verify")
        return super().verify(example, response)

    def feedback(self, example, response, verdict):
        self.wait("feedback")
        return super().feedback(example, response, verdict)


@pytest.mark.parametrize("method", ["verify", "feedback", "prompt"])
def test_methods_that_hang_are_not_called_for_every_example(method, model, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHECK_SECONDS", 0.25)
    task = Hanging(method)
    texts = found(model, tmp_path, task, task.examples("train", 300), task_timeout=0.1)
    assert task.calls < 30
    shown = "\n".join(texts["error"] + texts["warning"])
    assert f"{method} of Hanging took longer than 0.1 s (task_timeout)" in shown and texts["error"]
    assert re.search(r"the check stopped after \d+ of (256|16) examples, because 0.25 s had passed -> make .* faster", shown)


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [
        (Verdict({}, None, "even"), "verify of Verdicts: Verdict.correct is a dict, expected True or False"),
        (Verdict(True, ["a"], "even"), "verify of Verdicts: Verdict.submitted is a list, expected text"),
        (Verdict(float("nan"), None, "even"), "Verdict.correct is a float"),
        (Verdict(True, None, "even", failed=True), "verify marks its verdict as failed"),
        ("right", "verify of Verdicts returned a str, expected a Verdict"),
    ],
)
def test_verdicts_of_other_types(verdict, complaint, model, tmp_path):
    class Verdicts(ToyTask):
        def verify(self, example, response):
            return verdict

    texts = found(model, tmp_path, Verdicts())
    assert len(texts["error"]) == 2
    assert "12 of 12 golds cannot be judged: toy/train/0, " in texts["error"][0] and complaint in texts["error"][0]


def test_prompts_and_feedback_of_other_types(model, tmp_path):
    class Odd(ToyTask):
        def prompt(self, example):
            return [example.question]

        def feedback(self, example, response, verdict):
            return {"hint": "even"}

    texts = "\n".join(found(model, tmp_path, Odd())["error"])
    assert "12 of 12 cannot be built and are left out: toy/train/0: prompt of Odd returned a list, expected text" in texts
    assert "feedback: it fails for 12 of 12 examples: toy/train/0: feedback of Odd returned a dict" in texts


@pytest.mark.parametrize(
    ("settings", "errors"), [({}, 1), ({"top_p": 1.0}, 0), ({"temperature": 0.0}, 0), ({"deterministic": False}, 0)], ids=str
)
def test_generate_of_transformers_has_no_deterministic_nucleus_on_a_gpu(settings, errors, model, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "causal_lm_for_decoding", lambda model: None)
    setup = load_setup(run_config(model, tmp_path, **{"top_p": 0.9, **settings}), task=ToyTask())
    setup.args.deterministic = settings.get("deterministic", True)
    monkeypatch.setattr(type(setup.args), "device", torch.device("cuda"))
    found = list(checks.check_draws(setup))
    assert len(found) == errors and all(each.level == "error" and "its top_p has no" in each.text for each in found)


@pytest.mark.parametrize("multiplies", [True, False])
def test_bfloat16_on_a_cpu_without_its_products(multiplies, model, tmp_path, monkeypatch):
    monkeypatch.setattr("firedistill.models.attention.multiplies_bfloat16", lambda: multiplies)
    assert found(model, tmp_path, model_dtype="float32")["warning"] == []
    texts = found(model, tmp_path, model_dtype="bfloat16")
    assert texts["warning"] == [] if multiplies else "--model_dtype float32" in only(texts, "warning")


def test_disk_and_memory(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=30_000_000))
    monkeypatch.setattr("firedistill.checks.free_memory", lambda device: 1000.0)
    texts = found(model, tmp_path)
    assert "are free" in only(texts, "error") and "make room" in texts["error"][0]
    assert "memory: about" in only(texts, "warning")


def test_memory_that_the_c_library_keeps(monkeypatch):
    def text(free: float, device: str = "cpu") -> str:
        monkeypatch.setattr("firedistill.checks.free_memory", lambda device: free)
        finding = check_memory({"model": 6e9, "training": 4e9}, torch.device(device))
        assert finding.level == "note"
        return finding.text

    advice = "may add 3.0 GB. MALLOC_MMAP_THRESHOLD_=1048576 in the environment"
    assert advice in text(12.9e9) and advice not in text(13.1e9) and advice not in text(12.9e9, "cuda")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert advice not in text(12.9e9)


def test_the_memory_estimate_counts_what_is_certain(model, tmp_path):
    setup = load_setup(killable_config(model, tmp_path / "run", "fire"), task=ToyTask())
    need = memory_of_step(setup.args, setup.model, checkpointing=False)
    base = sum(p.numel() for p in setup.model.parameters() if not p.requires_grad)
    adapter = sum(p.numel() for p in setup.model.parameters() if p.requires_grad)
    assert need["model"] == 4 * base and need["adapter, teacher, optimizer"] == 5 * 4 * adapter
    assert need.get("sampling", need.get("training")) > 0


def test_settings_that_do_not_fit(model, tmp_path):
    few = ToyTask().examples("train", 5)
    texts = found(model, tmp_path, train=few, train_size=7, warmup_steps=9)
    shown = "\n".join(texts["warning"])
    assert "7 problems are requested, the task has 5" in shown and "warms up for 9 of 6 steps" in shown


def test_an_optimizer_whose_package_is_missing(model, tmp_path):
    assert "optim: You need to install" in only(found(model, tmp_path, optim="stable_adamw"), "error")


def test_supervised_training_is_a_warm_start(model, tmp_path):
    config = killable_config(model, tmp_path / "run", "supervised")
    (finding,) = check_settings(load_setup(config, task=ToyTask()))
    assert finding.level == "error" and "use firedistill warmstart" in finding.fix
    setup = load_setup(WarmStartConfig(**config.resolved()), task=ToyTask())
    assert list(check_settings(setup)) == []
    unsolved = [replace(example, solution=None) for example in setup.train_examples]
    (finding,) = check_settings(replace(setup, train_examples=unsolved))
    assert finding.level == "error" and f"{len(unsolved)} examples have no gold solution" in finding.text
    assert "name a column with the working by --columns solution=COLUMN" in finding.fix


def test_an_initial_adapter_keeps_its_own_settings(model, tmp_path):
    asked = {"lora_r": 4, "lora_alpha": 32, "lora_dropout": 0.1, "lora_target_modules": ["v_proj", "q_proj"]}
    adapter = str(tmp_path / "adapter")

    def warnings(**changes) -> list[str]:
        setup = load_setup(killable_config(model, tmp_path / "run", "fire", **{**asked, **changes}), task=ToyTask())
        if not changes:
            setup.model.save_pretrained(adapter)
        return [str(finding) for finding in check_adapter(setup) if finding.level == "warning"]

    assert warnings() == warnings(initial_adapter=adapter) == []
    for option, value, shown in (
        ("lora_r", 8, "r 4, lora_r is 8"),
        ("lora_alpha", 16, "lora_alpha 32, lora_alpha is 16"),
        ("lora_dropout", 0.0, "lora_dropout 0.1, lora_dropout is 0.0"),
        ("lora_target_modules", ["q_proj"], "target_modules ['q_proj', 'v_proj'], lora_target_modules is ['q_proj']"),
    ):
        (text,) = warnings(initial_adapter=adapter, **{option: value})
        assert f"the initial adapter has {shown}; the adapter's own is used -> set {option} to" in text


def test_options_that_nothing_reads(model, tmp_path):
    groups = {"attribution_groups": ["hi*=hints", "test_*=tests"]}
    assert only(found(model, tmp_path, **groups), "warning") == (
        "warning: attribution_groups: test_* matches no field of feedback about 12 examples, which are hint, outcome -> "
        "correct the pattern, or leave it out"
    )
    matching = {"attribution_groups": ["hi*=hints"]}
    assert found(model, tmp_path, **matching)["warning"] == []
    assert "method full_context attributes nothing" in only(
        found(model, tmp_path, method="full_context", **matching), "warning"
    )
    attributing = {"method": "full_context", "method_settings": {"attribution": True}, **matching}
    assert found(model, tmp_path, **attributing)["warning"] == []
    shown = only(found(model, tmp_path, teacher="student", ema_rate=0.2), "warning")
    assert "ema_rate: it is 0.2, but teacher student is not a moving average" in shown
    fixed = {"step_scale": 4.0, "nominal_learning_rate": None}
    shown = only(found(model, tmp_path, method="srpo", **fixed), "warning")
    assert "step_scale: it is 4.0, but method srpo has no radius" in shown
    for method in ("fire", "routing", "full_context"):
        assert found(model, tmp_path, method=method, **fixed)["warning"] == []


class OfOthers(FullContext):
    """A method that is not of the package may read every option."""


@pytest.mark.parametrize(
    ("method", "changes", "complaint"),
    [
        (
            "no_attribution",
            {"attribution_views": 4},
            "attribution_views: it is 4, but method no_attribution attributes nothing",
        ),
        ("hard_gradient_excision", {"attribution_views": 4}, None),
        ("srpo", {"log_prob_floor": None}, "log_prob_floor: it is None, but method srpo has no floor under the teacher's"),
        ("full_context", {"log_prob_floor": None}, "log_prob_floor: it is None, but method full_context has no floor"),
        ("full_context", {"log_prob_floor": None, "method_settings": {"projection": True}}, None),
        ("routing", {"log_prob_floor": None}, None),
        ("srpo", {"log_prob_floor": None, "step_scale": 4, "nominal_learning_rate": None, "attribution_examples": 1}, None),
        ("test_preflight:OfOthers", {"log_prob_floor": None, "attribution_views": 4}, None),
        ("on_policy_sft", {"ema_rate": 0.01}, None),
        (
            "on_policy_sft",
            {"feedback": {"h": "{h}"}},
            "feedback: it is {'h': '{h}'}, but method on_policy_sft reads no feedback ->",
        ),
        ("on_policy_sft", {"score_temperature": 2.0}, None),
        (
            "negative_advantage",
            {"max_feedback_tokens": 9},
            "max_feedback_tokens: it is 9, but method negative_advantage reads no",
        ),
        ("rlcsd", {"max_feedback_tokens": 9}, "max_feedback_tokens: it is 9, but method rlcsd reads no feedback ->"),
        ("fire", {"max_feedback_tokens": 9}, None),
        (
            "fire",
            {"max_feedback_tokens": 9, "teacher_feedback": False},
            "max_feedback_tokens: it is 9, but method fire reads no feedback with teacher_feedback false -> leave",
        ),
        (
            "fire",
            {"eval_size": 0, "eval_also": ["gsm8k"]},
            "eval_also: it is ['gsm8k'], but eval_size is 0 -> leave eval_also out",
        ),
        ("fire", {"eval_size": 0, "eval_samples": 4}, "eval_samples: it is 4, but eval_size is 0 -> leave eval_samples out"),
        ("fire", {"eval_samples": 4, "eval_also": ["gsm8k"]}, None),
        ("fire", {"ema_rate": 0.2, "teacher": "initial"}, "ema_rate: it is 0.2, but teacher initial is not a moving average"),
    ],
    ids=str,
)
def test_options_of_other_methods(method, changes, complaint, tmp_path):
    setup = SimpleNamespace(args=killable_config("unused", tmp_path / "run", method, **changes))
    findings = [str(finding) for finding in check_options_without_effect(setup)]
    assert len(findings) == (complaint is not None) and all(f"warning: {complaint}" in text for text in findings)


@pytest.mark.parametrize(("share", "count"), [(0.0, 2), (0.5, 0)])
def test_a_warm_start_without_feedback_reads_no_option_about_it(share, count, tmp_path):
    options = {"feedback": {"h": "{h}"}, "max_feedback_tokens": 9, "feedback_share": share}
    args = WarmStartConfig(output_dir=str(tmp_path / "run"), use_cpu=True, **options)
    findings = list(check_options_without_effect(SimpleNamespace(args=args)))
    assert len(findings) == count and all("but feedback_share is 0 -> leave" in str(finding) for finding in findings)


def test_sizes_that_do_not_choose_among_given_problems(model, tmp_path):
    given = ToyTask().examples("train", 5)
    shown = only(found(model, tmp_path, train=given, train_size=2), "warning")
    assert "train_size: it is 2, but 5 problems are given, which are all used -> leave train_size out" in shown
    assert "eval_size: it is 2, but 3 problems are given" in only(found(model, tmp_path, eval_size=2), "warning")
    assert found(model, tmp_path, train=given)["warning"] == []


@pytest.mark.parametrize("recipe", [name for name in built_in_names("recipes") if not name.endswith("-warmstart")])
def test_built_in_recipes_set_nothing_without_effect(recipe):
    """Suites run every method with one recipe."""
    for method in registered_objectives():
        if method != "supervised":
            args = build_config(SelfDistillConfig, recipe, {"method": method, "use_cpu": True})
            assert list(check_options_without_effect(SimpleNamespace(args=args))) == []


def test_without_held_out_problems_nothing_is_evaluated(model, tmp_path):
    assert "there is none, so nothing is evaluated" in only(found(model, tmp_path, held_out=[]), "warning")
    assert found(model, tmp_path, held_out=[], eval_size=0)["warning"] == []


def test_servers_that_do_not_answer(model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    shown = only(found(model, tmp_path, rollouts=address), "warning")
    assert f"rollouts: {address} does not answer" in shown and "the run waits up to 10 minutes" in shown


def test_the_command_line_stops_at_errors_and_shows_notes_on_request(model, tmp_path, capsys):
    changes = {"task": "tiny:ToyTask", "max_context_tokens": 1800, "eval_size": 0, "lora_dropout": 0.0}
    config = killable_config(model, tmp_path / "run", "fire", 1, **changes)
    config.save_yaml(tmp_path / "mine.yaml")
    assert cli.main(["train", str(tmp_path / "mine.yaml"), "--preflight", "only"]) == 0
    shown = capsys.readouterr().out
    assert "note: training golds: 12 of 12 are judged right" in shown and not list((tmp_path / "run").glob("*"))
    assert cli.main(["train", str(tmp_path / "mine.yaml"), "--max_prompt_tokens", "3"]) == 2
    printed = capsys.readouterr()
    assert "error" not in printed.out
    assert "1 problem to fix before training: training prompts: 12 of 12 have more than 3 tokens" in printed.err
    assert not (tmp_path / "run").exists(), "a refused run leaves no folder"
    assert cli.main(["train", str(tmp_path / "mine.yaml"), "--preflight", "maybe"]) == 2


def test_from_python_the_findings_are_data_that_print_as_text_and_as_a_table(model, tmp_path):
    config = killable_config(model, tmp_path / "run", "fire", max_context_tokens=4096)
    found = firedistill.preflight(args=config, task=ToyTask(), eval_examples=[Example("x", "<b>\x1b", "even", solution="ab")])
    assert [finding.subject for finding in found.of("warning")] == ["context", "eval_size"]
    assert str(found) == repr(found) and len(str(found).splitlines()) == len(found.findings)
    assert set(found.memory) >= {"model", "training"} and all(value >= 0 for value in found.memory.values())
    assert found.chosen["merge_adapter"].startswith("true: ")
    table = found._repr_html_()
    assert table.count("<tr>") == len(found.findings) + 1 and "<td>warning</td><td>context</td>" in table
    assert not (tmp_path / "run").exists(), "nothing is written"
    trainer = SelfDistillTrainer(args=config, task=ToyTask())
    assert [finding.subject for finding in trainer.preflight().of("warning")] == ["data", "context"]


def test_a_model_that_is_checked_can_be_trained(model, tmp_path):
    config, base = killable_config(model, tmp_path / "run", "fire"), random_model()
    firedistill.preflight(base, config, ToyTask(), processing_class=byte_tokenizer())
    trainer = SelfDistillTrainer(base, config, ToyTask(), processing_class=byte_tokenizer())
    assert trainer.model.get_base_model() is base
