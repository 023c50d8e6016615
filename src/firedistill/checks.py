"""Checks of everything that can be known before the first step: one line per finding, with a suggested fix.

    print(firedistill.preflight(args=config))        # or trainer.preflight(); firedistill train RECIPE --preflight only

Errors stop a run of the command line, warnings do not, notes inform. Of large data, a fixed number of evenly spaced examples is
checked, and of a task whose methods are slow or hang, as many as `CHECK_SECONDS` allow; the finding says how many.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from firedistill.config import SelfDistillConfig, WarmStartConfig
from firedistill.footprint import memory_of_step
from firedistill.memory import LOADING, explained_memory, free_memory
from firedistill.models.attention import NAME, has_bfloat16
from firedistill.models.lora import trained_parameters
from firedistill.models.quantized import TOLERATED_DIFFERENCE, gradient_difference, quantized_layers
from firedistill.models.states import positions, unwrap
from firedistill.models.tokens import end_of_turn_id, render, stop_token_ids
from firedistill.objectives import load_objective
from firedistill.objectives.full_context import FullContext
from firedistill.ops.fire_head import default_chunk
from firedistill.prompts import student_messages, teacher_messages
from firedistill.rollouts.hf import causal_lm_for_decoding
from firedistill.rollouts.load import engine_context
from firedistill.rollouts.server import PATIENCE, unreachable
from firedistill.run.checkpoints import random_state, restore_random_state
from firedistill.setup import Setup, load_setup, reads_feedback
from firedistill.tasks.endpoint import JudgeError
from firedistill.tasks.guard import GuardedTask, TaskFault, explained
from firedistill.tasks.judged import JudgedTask
from firedistill.tasks.task import folded
from firedistill.tasks.types import Example, Verdict
from firedistill.teacher.prefix_cache import shares_prefixes
from firedistill.terminal import some, visible

CHECKED = 256  # examples of a split that are checked
CHECK_SECONDS = 30.0  # after which a check of a split's examples starts no further one
TOLERATED = 0.1  # share of golds that may fail with a warning only
SLOW_VERDICT = 1.0  # seconds
GB = 1e9
# Peak of a step over its memory in use: glibc keeps freed blocks, measured at up to 1.27 (docs/scale.md)
RETAINED = 1.3

Level = Literal["error", "warning", "note"]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        level: an error stops the run, a warning does not, a note informs.
        subject: what was checked, in one or two words.
        text: what was found.
        fix: what to do about it; empty in a note.
    """

    level: Level
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.subject}: {self.text}" + (f" -> {self.fix}" if self.fix else "")


@dataclass(frozen=True, repr=False)
class Preflight:
    """What is known before the first step: lines of text in a terminal, a table in a notebook.

    Attributes:
        findings: of all checks, in their order.
        memory: the estimate of bytes by purpose, see `memory_estimate`.
        chosen: what was chosen for the device where the settings leave it open, and why, as texts by name.
    """

    findings: list[Finding]
    memory: dict[str, float]
    chosen: dict[str, str]

    def of(self, *levels: Level) -> list[Finding]:
        """The findings of these levels."""
        return [finding for finding in self.findings if finding.level in levels]

    def __repr__(self) -> str:
        return "\n".join(visible(str(finding)) for finding in self.findings)

    def _repr_html_(self) -> str:
        rows = [
            "<tr>" + "".join(f"<td>{escape(visible(cell))}</td>" for cell in (f.level, f.subject, f.text, f.fix)) + "</tr>"
            for f in self.findings
        ]
        return "<table><tr><th></th><th>checked</th><th>found</th><th>fix</th></tr>" + "".join(rows) + "</table>"


def preflight(
    model: PreTrainedModel | PeftModel | str | None = None,
    args: SelfDistillConfig | None = None,
    task: Any = None,
    train_examples: Iterable[Any] | None = None,
    eval_examples: Iterable[Any] | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
) -> Preflight:
    """Load what a run needs, and check it. The arguments are those of `SelfDistillTrainer`; a model that is an object
    keeps its weights; on a GPU, its norms are fused as in training (`fuse_norms`).

    Returns:
        The findings, the memory estimate in bytes and the device-dependent defaults. Nothing is trained or written.

    Raises:
        ValueError: settings, model, tokenizer, task or examples are invalid or do not fit together; the message says what to change.
        TypeError: `processing_class` is not a tokenizer, or the examples cannot be iterated.
        ImportError: a package that the settings need is not installed.
    """
    setup = load_setup(
        SelfDistillConfig() if args is None else args,
        model=model,
        tokenizer=processing_class,
        task=task,
        train_examples=train_examples,
        eval_examples=eval_examples,
    )
    try:
        return check(setup)
    finally:
        if isinstance(model, PreTrainedModel):
            setup.model.unload()  # or the trainer of this object would refuse it


def check(setup: Setup) -> Preflight:
    """Check data, prompts, tokenizer, adapter, settings, disk and memory. Nothing is trained, sampled or written.

    The state of every global random generator is restored, because a verifier may draw from one.
    """
    checks = [
        check_examples,
        check_golds,
        check_feedback,
        check_judge,
        check_prompts,
        check_context,
        check_chat_template,
        check_tokens,
        check_adapter,
        check_gradient,
        check_settings,
        check_options_without_effect,
        check_servers,
        check_products,
        check_draws,
        check_disk,
    ]
    state = random_state()
    try:
        findings = [finding for one in checks for finding in one(setup)]
        memory, chosen = memory_estimate(setup), chosen_for_the_device(setup)
        findings += [
            Finding("note", "defaults", "; ".join(f"{name} {text}" for name, text in chosen.items())),
            check_memory(memory, setup.args.device),
        ]
        return Preflight(findings, memory, chosen)
    finally:
        restore_random_state(state)


def splits(setup: Setup) -> list[tuple[str, list[Example]]]:
    """The splits that are not empty, by name."""
    return [(name, found) for name, found in (("training", setup.train_examples), ("held-out", setup.eval_examples)) if found]


def spread(examples: Sequence[Example], n: int = CHECKED) -> list[Example]:
    """At most n examples, evenly spaced."""
    return [examples[i * len(examples) // n] for i in range(n)] if len(examples) > n else list(examples)


def in_time(examples: Sequence[Example], check: Callable[[Example], Found]) -> list[tuple[Example, Found]]:
    """The examples with what `check` found about each; only the first ones if `CHECK_SECONDS` pass."""
    end, found = time.monotonic() + CHECK_SECONDS, []
    for example in examples:
        found.append((example, check(example)))
        if time.monotonic() >= end:
            break
    return found


def stopped(subject: str, method: str, checked: Sequence[object], examples: Sequence[object]) -> Iterator[Finding]:
    """A warning if a check ended before it had seen all examples."""
    if len(checked) < len(examples):
        yield Finding(
            "warning",
            subject,
            f"the check stopped after {len(checked)} of {len(examples)} examples, because {CHECK_SECONDS:g} s had passed",
            f"make {method} of the task faster",
        )


def named(examples: Sequence[Example]) -> str:
    """The uids of the first examples and the number of the others."""
    return some([example.uid for example in examples])


def share_of(part: Sequence[object], checked: Sequence[object], examples: Sequence[object]) -> str:
    """`3 of 256 (a sample of 7473)`."""
    return f"{len(part)} of {len(checked)}" + (f" (a sample of {len(examples)})" if len(checked) < len(examples) else "")


# ---- Data --------------------------------------------------------------------------------------------------------------------


def check_examples(setup: Setup) -> Iterator[Finding]:
    """Repeated uids, empty questions, problems that are both trained on and held out."""
    for name, examples in splits(setup):
        repeated = [uid for uid, count in Counter(e.uid for e in examples).items() if count > 1]
        if repeated:
            yield Finding(
                "warning",
                f"{name} data",
                f"{len(repeated)} uids occur more than once, for instance {repeated[0]}",
                "give every example its own uid: logs and feedback name examples by it",
            )
        if empty := [e for e in examples if not str(e.question).strip()]:
            yield Finding("error", f"{name} data", f"{len(empty)} questions are empty: {named(empty)}", "remove these rows")
    held_out = set(map(problem_of, setup.eval_examples))
    if both := [e for e in setup.train_examples if problem_of(e) in held_out]:
        yield Finding(
            "warning",
            "data",
            f"{len(both)} training questions are also held-out questions: {named(both)}",
            "remove them from one of the two: accuracy on them does not measure unseen problems",
        )


def problem_of(example: Example) -> str:
    """What two examples of the same problem share: question without options, and messages before it, without case and blanks."""
    stem = str(example.question).partition("\n\nChoices:\n")[0] if example.options else str(example.question)
    return "\n".join(map(folded, [stem, *map(str, example.history)]))


def gold_responses(setup: Setup, example: Example) -> list[str]:
    """Responses that must be right: the gold solution, and the gold answer on the final line of a task that has one."""
    marker, answer = setup.task.final_marker, str(example.answer)
    return [*filter(None, [example.solution]), *([f"{marker} {answer}"] if marker and answer.strip() else [])]


def judgement(task: GuardedTask, example: Example, response: str) -> Verdict | str:
    """The task's verdict, or why there is none."""
    try:
        verdict = task.verdict(example, response)
    except TaskFault as fault:
        return str(fault)
    return "verify marks its verdict as failed" if verdict.failed else verdict


def check_golds(setup: Setup) -> Iterator[Finding]:
    """The task's own verifier must accept the gold answers, unless a judge takes its place."""
    task = cast(GuardedTask, setup.task).own
    if (judge := cast(GuardedTask, setup.task).judge_file) is not None and judge.decides:
        return

    def judged(example: Example) -> tuple[list[bool], str, float]:
        """Whether each gold response is correct, why one cannot be judged, and the seconds of a verdict."""
        started = time.perf_counter()
        found = [judgement(task, example, response) for response in gold_responses(setup, example)]
        seconds = (time.perf_counter() - started) / max(len(found), 1)
        reason = next((verdict for verdict in found if isinstance(verdict, str)), "")
        return [verdict.correct for verdict in found if isinstance(verdict, Verdict)], reason, seconds

    for name, examples in splits(setup):
        subject, sample = f"{name} golds", spread(examples)
        checked = in_time(sample, judged)
        failed = [(example, reason) for example, (_, reason, _) in checked if reason]
        wrong = [example for example, (verdicts, reason, _) in checked if verdicts and not any(verdicts) and not reason]
        right = [example for example, (verdicts, reason, _) in checked if any(verdicts) and not reason]
        bad = [example for example, _ in failed]
        if failed:
            text = f"{share_of(bad, checked, examples)} golds cannot be judged: {named(bad)} ({failed[0][1]})"
            yield Finding(level_of(bad, checked), subject, text, "fix verify, or remove these rows")
        if wrong:
            text = f"{share_of(wrong, checked, examples)} golds are judged wrong by the task's own verifier: {named(wrong)}"
            yield Finding(level_of(wrong, checked), subject, text, "correct the answers or verify, or remove these rows")
        if apart := [
            e for e, (verdicts, reason, _) in checked if not reason and e.solution and any(verdicts) and not verdicts[0]
        ]:
            text = f"{share_of(apart, checked, examples)} solutions are judged wrong, though their answers are right: {named(apart)}"
            yield Finding("warning", subject, text, "correct their last lines: a warm start trains on them")
        if noisy := [
            example for example in examples if task.answer_type == "numeric" and is_rounding_error(str(example.answer))
        ]:
            text = f"{len(noisy)} of {len(examples)} look like rounding errors: {named(noisy)} ({noisy[0].answer})"
            yield Finding("warning", subject, text, "round the column: no other number is right")
        if right and not failed and not wrong and not apart:
            yield Finding("note", subject, f"{share_of(right, checked, examples)} are judged right by the task's verifier")
        if not (right or failed or wrong):
            yield Finding("note", subject, "not checked: the examples have no solution, and the answers no final line")
        slowest = max(seconds for _, (_, _, seconds) in checked)
        if slowest > SLOW_VERDICT:
            fix = "make verify faster: every response waits for its verdict"
            yield Finding("warning", subject, f"a verdict took {slowest:.1f} s", fix)
        yield from stopped(subject, "verify", checked, sample)


def is_rounding_error(answer: str) -> bool:
    """Whether a decimal number is that of a float which arithmetic has left beside a short one, such as 0.30000000000000004."""
    if not re.fullmatch(r"-?\d+\.\d{10,}", answer) or len(answer.strip("-0.")) < 15:
        return False
    return len(f"{float(answer):.12g}".strip("-")) <= 10


def level_of(bad: Sequence[object], checked: Sequence[object]) -> Level:
    """An error if more than the tolerated share is bad."""
    return "error" if len(bad) > TOLERATED * len(checked) else "warning"


def check_feedback(setup: Setup) -> Iterator[Finding]:
    """The task's own feedback about an empty and about a wrong response, for a few examples.

    Also whether its verifier judges them, where an example has no gold for `check_golds` and no judge takes the verifier's place.
    """
    task, sample = cast(GuardedTask, setup.task).own, spread(setup.train_examples, 16)
    names: set[str] = set()

    def reasons(example: Example) -> tuple[str, str]:
        """Why feedback fails, and why neither response can be judged; empty where that is not so."""
        found = {response: judgement(task, example, response) for response in ("", "I do not know.")}
        why = [verdict for verdict in found.values() if isinstance(verdict, str)]
        try:
            for response, verdict in found.items():
                if isinstance(verdict, Verdict):  # a response without one needs no feedback
                    names.update(field.name for field in task.feedback(example, response, verdict))
        except TaskFault as fault:
            return str(fault), ""
        return "", why[0] if len(why) == len(found) else ""

    checked = in_time(sample, reasons)
    judge, objective = cast(GuardedTask, setup.task).judge_file, load_objective(setup.args.method, setup.args.method_settings)
    unjudged = [(example, why) for example, (_, why) in checked if why and not gold_responses(setup, example)]
    if unjudged and not (judge is not None and judge.decides):
        examples = [example for example, _ in unjudged]
        text = f"no response to {len(examples)} of {len(checked)} examples can be judged: {named(examples)} ({unjudged[0][1]})"
        fix = "fix verify: it must work for any response, including an empty one"
        yield Finding(level_of(examples, checked), "verdicts", text, fix)
    unmatched = [
        pattern for pattern in setup.args.groups_of_fields if names and not any(fnmatchcase(name, pattern) for name in names)
    ]
    if unmatched:
        yield Finding(
            "warning",
            "attribution_groups",
            f"{', '.join(unmatched)} matches no field of feedback about {len(checked)} examples, which are {', '.join(sorted(names))}",
            "correct the pattern, or leave it out",
        )
    if failed := [why for _, (why, _) in checked if why]:
        yield Finding(
            "error" if len(failed) == len(checked) else "warning",
            "feedback",
            f"it fails for {len(failed)} of {len(checked)} examples: {failed[0]}",
            "fix feedback: it must work for any response, including an empty one",
        )
    elif checked and not names and not unjudged and judge is None and reads_feedback(setup.args, objective):
        text = f"none of {len(checked)} examples has a field: the teacher sees no feedback"
        yield Finding("warning", "feedback", text, "let feedback return fields, or use a method without a teacher")
    yield from stopped("feedback", "feedback", checked, sample)
    examples = setup.train_examples
    for name in getattr(task.task, "templates", ()):  # those of a `TableTask`
        filled = sum(any(given.name == name for given in example.feedback) for example in examples)
        text = f"field {name!r} is left out in {len(examples) - filled:,} of {len(examples):,} training rows, where a column is empty"
        if not filled:
            yield Finding("warning", "feedback", text, "name columns that have values, or leave the field out")
        elif filled < len(examples):
            yield Finding("note", "feedback", text)


def check_judge(setup: Setup) -> Iterator[Finding]:
    """The judge, if any, answers about the gold answer of one example."""
    task, examples = setup.task, [*setup.train_examples[:1], *setup.eval_examples[:1]]
    if not isinstance(task, JudgedTask) or not examples:
        return
    example, file = examples[0], task.judge_file
    stated = "" if task.answer_type == "program" else str(example.answer)  # that of a program is a number of tests
    gold = next(iter(gold_responses(setup, example)), stated)
    address = urlsplit(file.url)
    if file.key is not None and address.scheme == "http" and address.hostname not in ("localhost", "127.0.0.1", "::1"):
        yield Finding("warning", "judge", f"the key in {file.key} is sent to {file.url} unencrypted", "use https")
    try:
        opinion = task.ask(example, gold, trial=True).result()
    except (JudgeError, TaskFault) as error:
        yield Finding("error", "judge", str(error), f"correct {setup.args.judge}, or start the server")
        return
    if opinion.refused:
        fix = (
            f"correct {setup.args.judge}: the key, or parameters that this model does not take (temperature: none; max_tokens: none "
            "with extra: {max_completion_tokens: 512}), or shorten the prompt"
        )
        yield Finding("error", "judge", f"{file.url} refuses to judge {example.uid}: {opinion.problem}", fix)
        return
    if opinion.values is None:
        fix = "change the prompt, raise max_tokens, or choose another model"
        yield Finding("warning", "judge", f"its reply about {example.uid} cannot be used: {opinion.problem}", fix)
        return
    if gold and file.decides and not task.asks.correct(opinion.values):
        text = f"{file.model} judges the gold answer of {example.uid} wrong: {opinion.values}"
        yield Finding("warning", "judge", text, "change the prompt or the threshold")
    seconds, repeats = opinion.counts["judge_seconds"], opinion.counts.get("judge_invalid", 0)
    again = f", after {repeats:.0f} that cannot be used" if repeats else ""
    yield Finding("note", "judge", f"{file.model} replies in {seconds:.1f} s{again}: {opinion.values}")


# ---- Prompts and budgets -----------------------------------------------------------------------------------------------------


def check_prompts(setup: Setup) -> Iterator[Finding]:
    """Student prompts can be built and are within the budget."""
    args = setup.args
    context = args.max_context_tokens if args.rollouts == "hf" else engine_context(setup.model, args)
    limit = min(args.max_prompt_tokens, context - args.max_new_tokens)

    def tokens(example: Example) -> int | str:
        """The length of the prompt, or why there is none."""
        try:
            with explained(f"{example.uid}: encode", pass_on=()):
                return len(setup.encoder.encode(student_messages(setup.task, example)))
        except TaskFault as fault:
            return str(fault)

    for name, examples in splits(setup):
        subject, sample = f"{name} prompts", spread(examples)
        checked = in_time(sample, tokens)
        lengths = [found for _, found in checked if isinstance(found, int)]
        if broken := [found for _, found in checked if isinstance(found, str)]:
            yield Finding(
                "error" if len(broken) == len(checked) else "warning",
                subject,
                f"{share_of(broken, checked, examples)} cannot be built and are left out: {broken[0]}",
                "fix the task's prompt, or the chat template",
            )
        if over := [length for length in lengths if length > limit]:
            yield Finding(
                "error" if len(over) == len(checked) else "warning",
                subject,
                f"{share_of(over, checked, examples)} have more than {limit} tokens (the longest has {max(over)}) and are left out",
                "raise max_prompt_tokens and max_context_tokens, or lower max_new_tokens",
            )
        elif lengths:
            median = statistics.median(lengths)
            yield Finding("note", subject, f"median {median:.0f} tokens, longest {max(lengths)}; the limit is {limit}")
        yield from stopped(subject, "prompt", checked, sample)


def check_context(setup: Setup) -> Iterator[Finding]:
    """The context has room for the feedback in the teacher's prompt, and the model has room for the context."""
    args = setup.args
    try:
        view = teacher_messages(setup.task, setup.train_examples[0], ())
        room = args.max_context_tokens - args.max_new_tokens - len(setup.encoder.encode(view))
    except Exception:  # no training examples, or a prompt that `check_prompts` reports
        room = args.max_feedback_tokens
    if room < args.max_feedback_tokens:
        yield Finding(
            "warning",
            "teacher's prompt",
            f"{max(room, 0)} tokens are left for feedback of up to {args.max_feedback_tokens}; longer views leave their responses out",
            f"raise max_context_tokens by {args.max_feedback_tokens - room}",
        )
    most = positions(setup.model)
    if most is not None and args.max_context_tokens > most:
        yield Finding(
            "warning",
            "context",
            f"max_context_tokens is {args.max_context_tokens}, the model has {most} positions",
            f"set max_context_tokens to at most {most}",
        )


# ---- Model and tokenizer -----------------------------------------------------------------------------------------------------


def check_chat_template(setup: Setup) -> Iterator[Finding]:
    """The chat template renders the whole message once and opens the assistant's turn."""
    subject, mark = "chat template", "firedistill-mark"

    def rendered(open_answer: bool) -> str:
        messages = [{"role": "user", "content": mark}]
        return render(setup.tokenizer, messages, open_answer=open_answer)

    try:
        opened, closed = rendered(True), rendered(False)
    except TaskFault as fault:
        yield Finding("error", subject, f"it cannot render a message: {fault}", "set tokenizer.chat_template")
        return
    if opened.count(mark) != 1:
        text = f"it shows the user's message {opened.count(mark)} times"
        yield Finding("error", subject, text, "use the template of the instruct model")
    if opened == closed:
        text = "it has no generation prompt: nothing tells the model that its answer starts"
        yield Finding("error", subject, text, "use a template that supports add_generation_prompt")


def check_tokens(setup: Setup) -> Iterator[Finding]:
    """A token ends the answer, the pad token does not, and the head has a row for every token."""
    tokenizer, model = setup.tokenizer, unwrap(setup.model)
    stops = stop_token_ids(model, tokenizer)
    if not stops:
        yield Finding("error", "end of answer", "no token ends a response", "set eos_token in the tokenizer")
    turn = end_of_turn_id(tokenizer)
    if turn is not None and turn not in stops:
        yield Finding(
            "warning",
            "end of answer",
            f"the template ends a turn with {tokenizer.convert_ids_to_tokens(turn)!r}, which does not end a response",
            "add it to eos_token_id in the model's generation_config",
        )
    if tokenizer.pad_token_id is None:
        yield Finding("error", "padding", "the tokenizer has no pad token", "set one that is not an end-of-sequence token")
    elif tokenizer.pad_token_id in stops:
        text = "the pad token also ends a response, so that the two cannot be distinguished"
        yield Finding("warning", "padding", text, "set another pad_token")
    head = model.get_output_embeddings()
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if head is not None and largest >= head.weight.shape[0]:
        yield Finding(
            "error",
            "vocabulary",
            f"the tokenizer has tokens up to {largest} ({token!r}), the head has {head.weight.shape[0]} rows",
            "use the tokenizer that belongs to the model",
        )


def check_adapter(setup: Setup) -> Iterator[Finding]:
    """Which modules are trained."""
    trained = trained_parameters(setup.model)
    if not trained:
        yield Finding("error", "adapter", "nothing is trainable", "name lora_target_modules that the model has")
        return
    modules = {name.split(".lora_")[0] for name in trained if ".lora_" in name}
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    count = sum(p.numel() for p in trained.values())
    yield Finding("note", "adapter", f"{count:,} trainable parameters in {len(modules)} modules ({kinds})")
    if setup.args.initial_adapter is None:
        return
    (config,) = setup.model.peft_config.values()
    for name in ("r", "lora_alpha", "lora_dropout", "target_modules"):
        option = name if name.startswith("lora_") else f"lora_{name}"
        values = getattr(config, name), getattr(setup.args, option)
        own, asked = (sorted(set(value)) if isinstance(value, list) else value for value in values)
        if own != asked:
            text = f"the initial adapter has {name} {own}, {option} is {asked}; the adapter's own is used"
            yield Finding("warning", "adapter", text, f"set {option} to {own}")


def check_gradient(setup: Setup) -> Iterator[Finding]:
    """Gradients pass through quantized weights as through the weights that they stand for, after an evaluation too."""
    model = setup.model
    if not (quantized_layers(model) and any(p.requires_grad for p in model.parameters())):
        return
    tokens = torch.arange(32, device=next(model.parameters()).device)[None] % unwrap(model).config.get_text_config().vocab_size
    fix = "train without --quantization, or with another version of the package that quantizes"
    try:
        with explained_memory(LOADING):
            difference = gradient_difference(model, tokens)
    except RuntimeError as error:
        yield Finding(
            "error", "quantization", f"no gradient passes through the quantized weights: {' '.join(str(error).split())}", fix
        )
        return
    text = f"the adapter's gradient differs by {difference:.1%} from its gradient through dequantized weights"
    if difference > TOLERATED_DIFFERENCE:
        yield Finding("error", "quantization", f"{text}, so that training would be wrong on this machine", fix)
    else:
        yield Finding("note", "quantization", text)


# ---- Settings, disk, memory --------------------------------------------------------------------------------------------------


def check_settings(setup: Setup) -> Iterator[Finding]:
    """Sizes against the data, the optimizer's package, warm-up against the steps, solutions for supervised training."""
    args = setup.args
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, unwrap(setup.model))
    except (ImportError, ValueError) as error:
        yield Finding("error", "optim", " ".join(str(error).split()), "install the package, or choose another --optim")
    for name, requested, found in (
        ("train_size", args.train_size, len(setup.train_examples)),
        ("eval_size", args.eval_size, len(setup.eval_examples)),
    ):
        if requested and 0 < found < requested:
            text = f"{requested} problems are requested, the task has {found}, which are all used"
            yield Finding("warning", name, text, f"set {name} to {found}")
        elif requested and found > requested and requested != getattr(SelfDistillConfig, name):
            text = f"it is {requested}, but {found} problems are given, which are all used"
            yield Finding("warning", name, text, f"leave {name} out")
    if args.eval_size and not setup.eval_examples:
        yield Finding("warning", "held-out data", "there is none, so nothing is evaluated", "name some by eval_data")
    warmup = args.get_warmup_steps(args.max_steps)
    if warmup >= args.max_steps > 1:
        text = f"the learning rate warms up for {warmup} of {args.max_steps} steps and does not reach its peak"
        yield Finding("warning", "warmup_steps", text, "lower warmup_steps")
    if args.method == "supervised" and not isinstance(args, WarmStartConfig):
        text = "supervised would train on the student's own responses, right or wrong"
        yield Finding("error", "method", text, "use firedistill warmstart (WarmStartTrainer), which trains on gold solutions")
    if args.method == "supervised" and (missing := [e for e in setup.train_examples if not e.solution]):
        text = f"{len(missing)} examples have no gold solution: {named(missing)}"
        fix = "name a column with the working by --columns solution=COLUMN, or remove these rows"
        yield Finding("error", "training data", text, fix)


def check_options_without_effect(setup: Setup) -> Iterator[Finding]:
    """Options that neither the method, the teacher nor the evaluation of this run reads.

    Silent about what recipes set for all methods: nominal_learning_rate, and ema_rate where the method uses no teacher.
    """
    args = setup.args
    objective = load_objective(args.method, args.method_settings)
    attribution, projection = (getattr(objective, name, None) for name in ("attribution", "projection"))
    radius = projection is not None
    floor = radius and (attribution or projection or not isinstance(objective, FullContext))
    # Any option may be read by a method of others, and by the attribution that is saved for the report.
    any_option = not type(objective).__module__.startswith("firedistill.") or args.attribution_examples > 0
    reads = any_option or reads_feedback(args, objective)
    if isinstance(args, WarmStartConfig):
        without = "feedback_share is 0"
    else:
        without = f"method {args.method} reads no feedback" + (
            " with teacher_feedback false" if not args.teacher_feedback else ""
        )
    for name, is_read, reason in (
        ("attribution_groups", any_option or attribution, f"method {args.method} attributes nothing to fields"),
        ("attribution_views", any_option or attribution, f"method {args.method} attributes nothing to fields"),
        ("step_scale", any_option or radius, f"method {args.method} has no radius"),
        ("log_prob_floor", any_option or floor, f"method {args.method} has no floor under the teacher's probabilities"),
        ("feedback", reads, without),
        ("max_feedback_tokens", reads, without),
        ("eval_also", args.eval_size, "eval_size is 0"),
        ("eval_samples", args.eval_size, "eval_size is 0"),
        ("ema_rate", args.teacher_kind == "ema", f"teacher {args.teacher} is not a moving average"),
    ):
        value, default = getattr(args, name), getattr(SelfDistillConfig, name, [])  # collections are no attributes of the class
        if not is_read and value not in (default, {}):
            yield Finding("warning", name, f"it is {value}, but {reason}", f"leave {name} out")


def check_servers(setup: Setup) -> Iterator[Finding]:
    """Servers that sample answer."""
    for server in setup.args.rollout_servers:
        if problem := unreachable(server):
            text = f"{server} does not answer ({problem}); the run waits up to {PATIENCE / 60:.0f} minutes for it"
            yield Finding("warning", "rollouts", text, "start the server, or correct its address")


def check_products(setup: Setup) -> Iterator[Finding]:
    """A model in bfloat16 on a device without kernels for it."""
    device = setup.args.device
    if unwrap(setup.model).dtype == torch.bfloat16 and not has_bfloat16(device):
        slower = "products take several times as long as in float32" if device.type == "cpu" else "PyTorch emulates it"
        text = f"the model is in bfloat16, which the {device.type} device does not multiply: {slower}"
        of = "embeddings and head" if setup.args.quantization == "nf4" else "the weights"
        yield Finding("warning", "model_dtype", text, f"--model_dtype float32 takes twice the memory for {of}")


def check_draws(setup: Setup) -> Iterator[Finding]:
    """The draws of `generate` are deterministic where that is asked for."""
    args = setup.args
    truncated = args.rollouts == "hf" and args.temperature > 0 and args.top_p < 1
    if args.deterministic and args.device.type == "cuda" and truncated and causal_lm_for_decoding(setup.model) is None:
        text = "generate of transformers samples from this model, and its top_p has no deterministic implementation on a GPU"
        yield Finding("error", "deterministic", text, "set top_p to 1, or leave deterministic out")


def check_disk(setup: Setup) -> Iterator[Finding]:
    """Room for the checkpoints that exist at the same time."""
    args = setup.args
    trainable = sum(p.numel() for p in setup.model.parameters() if p.requires_grad)
    one = 4 * 4 * trainable + 20_000_000  # adapter, teacher and two moments in float32; files of the tokenizer
    every = args.save_steps if args.save_steps >= 1 else max(1, args.save_steps * args.max_steps)
    made = math.ceil(args.max_steps / every)
    kept = min(made, args.save_total_limit or made) + 1  # a new checkpoint is complete before an old one is removed
    folder = Path(args.run_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"up to {kept} checkpoints of about {one / GB:.2f} GB at a time; {free / GB:.1f} GB are free in {folder}"
    if free < kept * one:
        fix = "make room, lower save_total_limit, or name another --output_dir"
        yield Finding("error" if free < 2 * one else "warning", "disk", text, fix)
    else:
        yield Finding("note", "disk", text)


def chosen_for_the_device(setup: Setup) -> dict[str, str]:
    """What was chosen for the device where the settings leave it open, and why, by name."""
    args, device = setup.args, setup.args.device
    config = unwrap(setup.model).config
    attention = config._attn_implementation
    if not args.attn_implementation:
        attention += f", the default {f'for {device.type}' if attention == NAME else 'of transformers'}"
    if device.type == "cuda":
        attention += ", without cuDNN's kernels"
    views = "shared prefixes once" if shares_prefixes(args.share_prefixes, setup.model, device) else "in batches"
    if args.share_prefixes is None:
        views += f", the default for {device.type}"
    chunk = default_chunk(config.get_text_config().vocab_size, device.type == "cuda")
    return {**setup.decided, "attn_implementation": attention, "teacher views": views, "head": f"chunks of {chunk} tokens"}


def memory_estimate(setup: Setup) -> dict[str, float]:
    """Bytes by purpose: those of a step, and of a teacher with weights of its own."""
    own = setup.teacher_model
    need = memory_of_step(setup.args, setup.model, bool(setup.args.gradient_checkpointing), own)
    if own is not None:
        shared = {id(p) for p in setup.model.parameters()}  # an adapter's base model is the student's
        need["model of the teacher"] = sum(p.nbytes for p in own.parameters() if id(p) not in shared)
    return need


def check_memory(need: Mapping[str, float], device: torch.device) -> Finding:
    """The estimate against the memory of this process. It assumes the longest contexts throughout, so it errs high."""
    total, free = sum(need.values()), free_memory(device)
    parts = ", ".join(f"{name} {value / GB:.1f}" for name, value in need.items())
    text = f"about {total / GB:.1f} GB at most ({parts}); {device.type} has {free / GB:.1f} GB for it"
    if total > free:
        fix = "lower max_context_tokens, rollout_batch_size or per_device_train_batch_size (with more gradient_accumulation_steps)"
        return Finding("warning", "memory", text, fix)
    if device.type == "cpu" and RETAINED * total > free and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        text += (
            f". Freed blocks that the C library keeps may add {(RETAINED - 1) * total / GB:.1f} GB. "
            "MALLOC_MMAP_THRESHOLD_=1048576 in the environment returns them to the system, which makes steps slower"
        )
    return Finding("note", "memory", text)
