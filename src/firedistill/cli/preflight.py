"""What is wrong with the input is said before the first step: one line per finding, each with its mend.

    firedistill train my-recipe --preflight only

Errors stop a run, warnings do not, notes are for information. On large data a fixed, evenly spaced part is looked at, and how
many that were is said.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from firedistill.models.states import unwrap
from firedistill.models.tokens import end_of_turn_id
from firedistill.prompts import student_messages, teacher_messages
from firedistill.rollouts.hf import stop_token_ids
from firedistill.run.checkpoints import random_state, restore_random_state
from firedistill.tasks.guard import TaskFault
from firedistill.tasks.types import Example

if TYPE_CHECKING:
    from firedistill.trainer import SelfDistillTrainer

CHECKED = 256  # examples of a split that are looked at
TOLERATED = 0.1  # share of golds that may fail before the data or the verifier must be mended
SLOW_VERDICT = 1.0  # seconds
GB = 1e9

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        level: an error stops the run, a warning does not, a note informs.
        about: what was looked at, in one or two words.
        text: what is the matter.
        mend: what to do; empty in a note.
    """

    level: Level
    about: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.about}: {self.text}" + (f" -> {self.mend}" if self.mend else "")


def preflight(trainer: SelfDistillTrainer) -> list[Finding]:
    """Everything that can be known before the first step; nothing is trained, sampled or written."""
    checks: list[Callable[[SelfDistillTrainer], Iterator[Finding]]] = [
        examples_are_sane,
        golds_are_correct,
        feedback_can_be_built,
        prompts_fit,
        template_opens_the_answer,
        tokens_are_sane,
        adapter_is_in_place,
        settings_fit_together,
        disk_has_room,
        memory_has_room,
    ]
    state = random_state()
    try:
        return [finding for check in checks for finding in check(trainer)]
    finally:
        restore_random_state(state)  # a verifier may draw: whether it was looked at must not change the run


def spread(examples: Sequence[Example], n: int = CHECKED) -> list[Example]:
    """At most n examples, evenly spaced."""
    return [examples[i * len(examples) // n] for i in range(n)] if len(examples) > n else list(examples)


def splits(trainer: SelfDistillTrainer) -> list[tuple[str, list[Example]]]:
    found = [("training", trainer.train_dataset.examples), ("held-out", trainer.eval_examples)]
    return [(name, list(examples)) for name, examples in found if examples]


def named(examples: Sequence[Example], most: int = 3) -> str:
    names = ", ".join(example.uid for example in examples[:most])
    return names + (f" and {len(examples) - most} more" if len(examples) > most else "")


def share_of(part: Sequence[object], whole: Sequence[object], everything: Sequence[object]) -> str:
    """`3 of 256 (checked of 7473)`."""
    return f"{len(part)} of {len(whole)}" + (f" (checked of {len(everything)})" if len(whole) < len(everything) else "")


# ---- Data --------------------------------------------------------------------------------------------------------------------


def examples_are_sane(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """Uids that repeat, empty questions, problems that are both trained on and held out."""
    for name, examples in splits(trainer):
        repeated = [uid for uid, count in Counter(e.uid for e in examples).items() if count > 1]
        if repeated:
            yield Finding(
                "warning",
                f"{name} data",
                f"{len(repeated)} uids occur more than once, {repeated[0]} among them",
                "give every example a uid of its own: logs and feedback name examples by it",
            )
        if empty := [e for e in examples if not str(e.question).strip()]:
            yield Finding("error", f"{name} data", f"{len(empty)} questions are empty: {named(empty)}", "remove these rows")
    held_out = {e.question for e in trainer.eval_examples}
    if both := [e for e in trainer.train_dataset.examples if e.question in held_out]:
        yield Finding(
            "warning",
            "data",
            f"{len(both)} training questions are held-out questions as well: {named(both)}",
            "accuracy on them is no accuracy on unseen problems; remove them from one of the two",
        )


def gold_responses(trainer: SelfDistillTrainer, example: Example) -> list[str]:
    """Responses that have to be right: the gold answer on the line that the task asks for, and the gold solution."""
    answer = str(example.answer)
    short = [f"{trainer.task.final_marker} {answer}".strip()] if answer.strip() else []
    return [*([example.solution] if example.solution else []), *short]


def golds_are_correct(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """The task's own verifier has to accept the gold answer."""
    for name, examples in splits(trainer):
        checked = spread(examples)
        wrong, failed, silent, slowest = [], [], [], 0.0
        for example in checked:
            begun = time.perf_counter()
            verdicts = [trainer.task.verify(example, response) for response in gold_responses(trainer, example)]
            slowest = max(slowest, (time.perf_counter() - begun) / max(len(verdicts), 1))
            if not verdicts:
                silent.append(example)
            elif any(verdict.failed for verdict in verdicts):
                failed.append(example)
            elif not any(verdict.correct for verdict in verdicts):
                wrong.append(example)
        for bad, what, mend in (
            (failed, "golds cannot be judged (the verifier raised or took too long)", "mend verify, or remove these rows"),
            (wrong, "golds are judged wrong by the task's own verifier", "correct the answers, verify, or remove these rows"),
        ):
            if bad:
                level: Level = "error" if len(bad) > TOLERATED * len(checked) else "warning"
                yield Finding(level, f"{name} golds", f"{share_of(bad, checked, examples)} {what}: {named(bad)}", mend)
        if not failed and not wrong and len(silent) < len(checked):
            right = [e for e in checked if e not in silent] if silent else checked
            yield Finding(
                "note", f"{name} golds", f"{share_of(right, right, examples)} are judged right by the task's verifier"
            )
        if slowest > SLOW_VERDICT:
            yield Finding(
                "warning",
                f"{name} golds",
                f"a verdict took {slowest:.1f} s",
                "make verify faster: every response waits for one",
            )


def feedback_can_be_built(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """Feedback on an empty and on a wrong response, for a few examples."""
    failed: list[tuple[Example, str]] = []
    checked = spread(trainer.train_dataset.examples, 16)
    for example in checked:
        for response in ("", "I do not know."):
            verdict = trainer.task.verify(example, response)
            try:
                trainer.task.feedback(example, response, verdict)
            except TaskFault as fault:
                failed.append((example, str(fault)))
                break
    if failed:
        level: Level = "error" if len(failed) == len(checked) else "warning"
        yield Finding(
            level,
            "feedback",
            f"there is none for {len(failed)} of {len(checked)} examples: {failed[0][1]}",
            "mend feedback: it is asked about any response, also an empty one",
        )


def prompts_fit(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """Lengths of student and teacher prompts against the budgets and the model's own context."""
    args = trainer.args
    limit = min(args.max_prompt_tokens, args.max_context_tokens - args.max_new_tokens)
    for name, examples in splits(trainer):
        checked, lengths, broken = spread(examples), [], []
        for example in checked:
            try:
                lengths.append(len(trainer.encoder.encode(student_messages(trainer.task, example))))
            except Exception as error:  # the task's prompt and the chat template are programs of others
                broken.append((example, error))
        if broken:
            example, problem = broken[0]
            yield Finding(
                "error" if len(broken) == len(checked) else "warning",
                f"{name} prompts",
                f"{share_of(broken, checked, examples)} cannot be built: {example.uid}: {type(problem).__name__}: {problem}",
                "mend the task's prompt, or the chat template; these examples are left out",
            )
        if over := [length for length in lengths if length > limit]:
            yield Finding(
                "error" if len(over) == len(checked) else "warning",
                f"{name} prompts",
                f"{share_of(over, checked, examples)} have more than {limit} tokens (the longest has {max(over)}) and are left out",
                "raise max_prompt_tokens and max_context_tokens, or lower max_new_tokens",
            )
        elif lengths:
            middle = statistics.median(lengths)
            yield Finding(
                "note", f"{name} prompts", f"{middle:.0f} tokens in the middle, {max(lengths)} at most; limit {limit}"
            )
    try:
        view = teacher_messages(trainer.task, trainer.train_dataset.examples[0], ())
        room = args.max_context_tokens - args.max_new_tokens - len(trainer.encoder.encode(view))
    except Exception:  # said above
        room = args.max_feedback_tokens
    if room < args.max_feedback_tokens:
        yield Finding(
            "warning",
            "teacher's prompt",
            f"{max(room, 0)} tokens are left for feedback, which may take {args.max_feedback_tokens}",
            f"raise max_context_tokens by {args.max_feedback_tokens - room}; responses whose view is too long are left out",
        )
    positions = getattr(unwrap(trainer.model).config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and args.max_context_tokens > positions:
        yield Finding(
            "warning",
            "context",
            f"max_context_tokens is {args.max_context_tokens}, the model knows {positions} positions",
            f"set max_context_tokens to {positions} at most",
        )


# ---- Model and tokenizer -----------------------------------------------------------------------------------------------------


def template_opens_the_answer(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """The chat template renders the whole message once, and opens the assistant's turn."""
    tokenizer, mark = trainer.processing_class, "firedistill-mark"
    messages = [{"role": "user", "content": mark}]
    try:
        opened = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        closed = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a template is a program of the checkpoint's author
        yield Finding(
            "error",
            "chat template",
            f"it cannot render a message: {type(error).__name__}: {error}",
            "set tokenizer.chat_template",
        )
        return
    if opened.count(mark) != 1:
        yield Finding(
            "error",
            "chat template",
            f"it shows the user's message {opened.count(mark)} times",
            "take the instruct model's template",
        )
    if opened == closed:
        yield Finding(
            "error",
            "chat template",
            "it has no generation prompt: nothing tells the model that the answer begins",
            "take a template that knows add_generation_prompt",
        )


def tokens_are_sane(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """Something ends an answer, padding does not, and every token has a row in the head."""
    tokenizer, model = trainer.processing_class, unwrap(trainer.model)
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
        yield Finding(
            "warning", "padding", "the pad token also ends a response", "set another pad_token: the two cannot be told apart"
        )
    rows = model.get_output_embeddings().weight.shape[0] if model.get_output_embeddings() is not None else None
    vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if rows and largest >= rows:
        yield Finding(
            "error",
            "vocabulary",
            f"the tokenizer has tokens up to {largest} ({token!r}), the head has {rows} rows",
            "take the tokenizer that belongs to the model",
        )


def adapter_is_in_place(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """Which modules are trained."""
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    modules = {name.split(".lora_")[0] for name in trained if ".lora_" in name}
    kinds = sorted({name.rpartition(".")[2] for name in modules})
    count = sum(p.numel() for p in trained.values())
    if not trained:
        yield Finding("error", "adapter", "nothing is trainable", "name lora_target_modules that the model has")
        return
    yield Finding("note", "adapter", f"{count:,} trainable parameters in {len(modules)} modules ({', '.join(kinds)})")
    configs = getattr(trainer.model, "peft_config", {})
    rank = next((getattr(config, "r", None) for config in configs.values()), None)
    if trainer.args.initial_adapter and rank is not None and rank != trainer.args.lora_r:
        yield Finding(
            "warning",
            "adapter",
            f"the initial adapter has rank {rank}, lora_r is {trainer.args.lora_r}",
            f"the adapter's own rank is used; set lora_r to {rank}",
        )


# ---- Settings, disk, memory --------------------------------------------------------------------------------------------------


def settings_fit_together(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    args, train = trainer.args, trainer.train_dataset.examples
    for name, asked, there in (
        ("train_size", args.train_size, len(train)),
        ("eval_size", args.eval_size, len(trainer.eval_examples)),
    ):
        if asked and there and there < asked:
            yield Finding("warning", name, f"{asked} problems are asked for, there are {there}", f"all {there} are used")
    warmup = args.get_warmup_steps(args.max_steps)
    if warmup >= args.max_steps > 1:
        yield Finding(
            "warning",
            "warmup_steps",
            f"{warmup} of {args.max_steps} steps warm up",
            "lower it, or the peak rate is hardly reached",
        )
    if args.method == "supervised" and (missing := [e for e in train if not e.solution]):
        yield Finding(
            "error",
            "training data",
            f"{len(missing)} examples have no gold solution: {named(missing)}",
            "remove these rows",
        )


def checkpoint_bytes(trainer: SelfDistillTrainer) -> int:
    """About what a checkpoint takes: adapter, teacher and two moments in float32, and the tokenizer's files."""
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return 4 * 4 * trainable + 20_000_000


def disk_has_room(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    args, one = trainer.args, checkpoint_bytes(trainer)
    every = args.save_steps if args.save_steps >= 1 else max(1, args.save_steps * args.max_steps)
    made = math.ceil(args.max_steps / every)
    kept = min(made, args.save_total_limit or made) + 1  # a new one is complete before an old one goes
    folder = Path(args.run_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{kept} checkpoints of about {one / GB:.2f} GB at a time, {free / GB:.1f} GB are free in {folder}"
    mend = "make room, lower save_total_limit, or name another --output_dir"
    if free < 2 * one:
        yield Finding("error", "disk", text, mend)
    elif free < kept * one:
        yield Finding("warning", "disk", text, mend)
    else:
        yield Finding("note", "disk", text)


def memory_estimate(trainer: SelfDistillTrainer) -> dict[str, float]:
    """Bytes by purpose, roughly: what is certain (weights, states) and the largest of what comes and goes."""
    args, model = trainer.args, unwrap(trainer.model)
    config = model.config.get_text_config()
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if not p.requires_grad)
    width = {"float32": 4}.get(args.model_dtype, 2)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    tokens = args.per_device_train_batch_size * trainer.objective.group_size * args.max_context_tokens
    per_layer = hidden if args.activation_checkpointing else 10 * hidden + 3 * inner
    update = tokens * width * (layers * per_layer + 10 * hidden + 3 * inner)
    cache = 2 * args.rollout_batch_size * args.max_context_tokens * layers * heads * head_size * width
    score = args.score_tokens_per_forward * width * (10 * hidden + 3 * inner)
    return {"base model": frozen, "adapter, teacher, optimizer": trainable * 4 * 5, "work": max(update, cache, score)}


def memory_has_room(trainer: SelfDistillTrainer) -> Iterator[Finding]:
    """The estimate against what there is; the longest contexts are assumed throughout, so it errs high."""
    need = memory_estimate(trainer)
    total = sum(need.values())
    device = trainer.args.device
    free = free_memory(device)
    parts = ", ".join(f"{name} {value / GB:.1f}" for name, value in need.items())
    text = f"about {total / GB:.1f} GB at most ({parts})" + (f"; {device.type} has {free / GB:.1f} GB for it" if free else "")
    if free is not None and total > free:
        yield Finding(
            "warning",
            "memory",
            text,
            "lower max_context_tokens, rollout_batch_size or per_device_train_batch_size (with more gradient_accumulation_steps)",
        )
    else:
        yield Finding("note", "memory", text)


def free_memory(device: torch.device) -> float | None:
    """Bytes that this process may use in all: what is free, and what it has already. None if that cannot be known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        own = Path("/proc/self/statm").read_text().split()[1]
        return float(lines["MemAvailable"].split()[0]) * 1024 + int(own) * 4096
    except (OSError, KeyError, ValueError, IndexError):
        return None
