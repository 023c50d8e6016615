"""Train the lab model from scratch, a tokenizer and a tiny Qwen2 model, on text that this script generates.

    python tools/lab/pretrain.py --output src/firedistill/lab

The text consists of the package's own student and teacher messages for the built-in `arithmetic` task, so the model sees exactly
the prompts of a run. A student row ends with an attempt of a pupil who makes mistakes (mistakes.py). A teacher row holds the
feedback about such an attempt, and an answer that is as right as the visible fields allow: with all fields it is the gold
solution; without one field, the mistakes that this field corrects occur as often as in the student's answers. The teacher is
therefore better than the student only if it reads the feedback.

Only problems of the `train` split are used. The same seed gives bit-identical files on the same machine and library versions. An
interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mistakes import CORRECTED_BY, attempt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_REGEX

from firedistill import Example
from firedistill.prompts import Message, PromptEncoder, student_messages, teacher_messages
from firedistill.tasks.arithmetic import Arithmetic, Problem, draw_problem
from firedistill.tasks.generated import split_of

# ---------------------------------------------------------------------------------------------------------------------
# Rows of text

LEVELS = {"mixed": 0.7, "easy": 0.1, "medium": 0.1, "hard": 0.1}
TASKS = {level: Arithmetic(level) for level in LEVELS}
WRONG_SHARE = 0.85  # of the attempts in teacher rows; the others are right and have feedback too
EMPTY_SHARE = 0.04  # of the attempts in teacher rows; some methods use the teacher before there is a response
MISSING_FIELD_SHARE = 0.4  # of the teacher rows: one field is missing
RESCORED_SHARE = 0.3  # of the teacher rows with all fields: the attempt's working is given, only the final line is learnt


@dataclass(frozen=True)
class Row:
    """Chat messages, the given beginning of the answer (often empty), and the rest of the answer, which is learnt."""

    messages: list[Message]
    answer: str
    given: str = ""


def student_row(rng: random.Random) -> Row:
    task, problem, example = draw_example(rng)
    return Row(student_messages(task, example), attempt(problem, rng))


def teacher_row(rng: random.Random) -> Row:
    task, problem, example = draw_example(rng)
    tried = example.solution
    if rng.random() < EMPTY_SHARE:
        tried = ""
    elif rng.random() < WRONG_SHARE:
        while task.verify(example, tried := attempt(problem, rng)).correct:
            pass
    feedback = task.feedback(example, tried, task.verify(example, tried))
    if rng.random() < MISSING_FIELD_SHARE:
        missing = rng.randrange(len(feedback))
        remaining = {kind for kind, field in CORRECTED_BY.items() if field == feedback[missing].name}
        return Row(teacher_messages(task, example, feedback, missing), attempt(problem, rng, remaining))
    messages = teacher_messages(task, example, feedback)
    working, marker, _ = tried.rpartition("\n#### ")
    if marker and rng.random() < RESCORED_SHARE:
        return Row(messages, f"{marker}{example.answer}", given=working)
    return Row(messages, example.solution)


def draw_example(rng: random.Random) -> tuple[Arithmetic, Problem, Example]:
    """A problem of the training split, with a uid like those of a run."""
    task = TASKS[rng.choices(list(LEVELS), list(LEVELS.values()))[0]]
    while split_of((problem := draw_problem(rng, task.level)).question) != "train":
        pass
    solution = "\n".join((*problem.working, f"#### {problem.answer}"))
    uid = f"{task.name}/{rng.choice(['train', 'eval'])}/{rng.randrange(10)}-{rng.randrange(8000)}"
    return task, problem, Example(uid, problem.question, str(problem.answer), solution=solution)


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Frequent phrases are single tokens, which makes the fixed wording of prompts and feedback short. A phrase lies between digits,
# capitalized words and line breaks; a line break includes the signs after it (`\n#### `).
PHRASES = r"\p{N}|\p{Lu}\p{L}*|\n+[^\p{L}\p{N}\n]*|[^\p{N}\p{Lu}\n]+"
CONTEXT = 2048


def train_tokenizer(settings: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Byte-level BPE and phrases, from rows of both kinds. Text is split as `AutoTokenizer` expects of a Qwen2 model."""
    texts = list(tokenizer_texts(settings.tokenizer_rows, settings.seed))
    backend = Tokenizer(BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_REGEX), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=settings.vocabulary - settings.phrases,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in frequent_phrases(texts, backend, settings.phrases)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def frequent_phrases(texts: list[str], backend: Tokenizer, count: int) -> list[str]:
    """The `count` phrases that save most tokens, without those in the chat template, which would look like control tokens."""
    split = pre_tokenizers.Split(Regex(PHRASES), behavior="isolated")
    seen = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    saved = {phrase: n * (len(backend.encode(phrase).ids) - 1) for phrase, n in seen.items() if phrase not in CHAT_TEMPLATE}
    return sorted((phrase for phrase in saved if saved[phrase] > 0), key=lambda phrase: (-saved[phrase], phrase))[:count]


def tokenizer_texts(rows: int, seed: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer/{seed}")
    for _ in range(rows):
        for row in (student_row(rng), teacher_row(rng)):
            yield f"user\n{row.messages[0]['content']}"
            yield f"assistant\n{row.given}{row.answer}"


# ---------------------------------------------------------------------------------------------------------------------
# Batches

IGNORED = -100
Encoded = tuple[list[int], list[int]]  # token ids; labels: the learnt token ids, IGNORED elsewhere
DRILL_LINES = 8
# (first step, student rows, teacher rows, drill rows per step). The model soon reads problems and feedback; learning to add,
# subtract, multiply and divide takes most of the time.
ROWS = ((0, 64, 16, 0), (150, 32, 12, 24), (300, 24, 8, 48))


def encode_row(encoder: PromptEncoder, row: Row) -> Encoded:
    prompt = encoder.encode(row.messages) + encoder.encode_text(row.given)
    answer = [*encoder.encode_text(row.answer), encoder.tokenizer.eos_token_id]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def encode_drill(encoder: PromptEncoder, rng: random.Random) -> Encoded:
    """Lines of right working without a problem; only the results are learnt."""
    ids = encoder.encode([{"role": "user", "content": "Compute."}])
    labels = [IGNORED] * len(ids)
    for _ in range(DRILL_LINES):
        task, problem, _ = draw_example(rng)
        expression, equals, result = rng.choice(problem.working).partition(" = ")
        given, learnt = encoder.encode_text(expression + equals), encoder.encode_text(f"{result}\n")
        ids += given + learnt
        labels += [IGNORED] * len(given) + learnt
    return ids, labels


def step_batches(
    encoder: PromptEncoder, step: int, settings: argparse.Namespace
) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The micro-batches of a step by kind of row; they depend only on the seed and the step."""
    rng = random.Random(f"rows/{settings.seed}/{step}")
    student_rows, teacher_rows, drill_rows = next(rows for start, *rows in reversed(ROWS) if step >= start)
    rows = {
        "student": [encode_row(encoder, student_row(rng)) for _ in range(student_rows)],
        "teacher": [encode_row(encoder, teacher_row(rng)) for _ in range(teacher_rows)],
        "drill": [encode_drill(encoder, rng) for _ in range(drill_rows)],
    }
    return {kind: batches(encoded, encoder.tokenizer.pad_token_id) for kind, encoded in rows.items() if encoded}


def batches(rows: list[Encoded], pad: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels `[rows / 2, T]` of the shorter and of the longer half of the rows.

    They are padded on the right, where causal attention cannot see, so no mask is needed.
    """
    rows = sorted(rows, key=lambda row: len(row[0]))
    half = (len(rows) + 1) // 2
    return [collate(part, pad) for part in (rows[:half], rows[half:]) if part]


def collate(rows: list[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = ([torch.tensor(row) for row in column] for column in zip(*rows, strict=True))
    return pad_sequence(ids, batch_first=True, padding_value=pad), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


# ---------------------------------------------------------------------------------------------------------------------
# The model and its training


def new_model(settings: argparse.Namespace) -> Qwen2ForCausalLM:
    torch.manual_seed(settings.seed)
    config = Qwen2Config(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.inner_width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.width // settings.head_width,
        num_key_value_heads=settings.width // settings.head_width // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def in_bfloat16(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """The copy that computes and that ships; the float32 model accumulates updates too small for bfloat16."""
    working = copy.deepcopy(model).to(torch.bfloat16)
    working.set_attn_implementation("eager")  # faster than fused attention for short rows on a CPU
    return working


def new_optimizers(model: Qwen2ForCausalLM, settings: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the embedding, norms and biases."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=settings.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_factor(step: int, settings: argparse.Namespace) -> float:
    """Linear warm-up, constant, linear decay over the last `decay` steps; `steps` may change until the decay starts."""
    return min(1.0, (step + 1) / settings.warmup, (settings.steps - step) / settings.decay)


def answer_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the learnt tokens; the head is applied only at their positions."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    learnt = labels[:, 1:] != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[learnt]).float(), labels[:, 1:][learnt], reduction="sum")


def train(settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # sums in a fixed order
    tokenizer = train_tokenizer(settings)
    encoder = PromptEncoder(tokenizer)
    model = new_model(settings)
    optimizers = new_optimizers(model, settings)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    checkpoint = settings.checkpoint
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        print(f"resuming after step {first}", flush=True)

    working = in_bfloat16(model)
    started, tokens = time.time(), 0
    for step in range(first, settings.steps):
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor(step, settings)
        losses = {}
        kinds = step_batches(encoder, step, settings)
        for kind, parts in kinds.items():
            learnt = sum((labels != IGNORED).sum().item() for _, labels in parts)
            losses[kind] = 0.0
            for ids, labels in parts:
                loss = answer_loss(working, ids, labels) / learnt
                (loss / len(kinds)).backward()
                losses[kind] += loss.item()
                tokens += (ids != tokenizer.pad_token_id).sum().item()
        for parameter, computed in zip(model.parameters(), working.parameters(), strict=True):
            parameter.grad, computed.grad = computed.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        working.load_state_dict(model.state_dict())
        done = step + 1
        if done % settings.log_every == 0 or done == settings.steps:
            row = {
                "step": done,
                **losses,
                "norm": norm.item(),
                "tokens": tokens,
                "seconds": time.time() - started,
                "cpu_seconds": time.process_time(),
            }
            print(json.dumps({k: round(v, 4) for k, v in row.items()}), flush=True)
        if done % settings.save_every == 0 or done == settings.steps:
            state = {"step": done, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
            export(working, tokenizer, settings.output)


def export(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint that ships: bfloat16 weights, the tokenizer, and the tokens that end and pad an answer."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/lab-pretraining.pt"), help="file to resume from after an interruption"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=40, help="steps of linear warm-up")
    parser.add_argument("--decay", type=int, default=500, help="final steps of linear decay")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--vocabulary", type=int, default=2048, help="number of tokens, including phrases")
    parser.add_argument("--phrases", type=int, default=1024)
    parser.add_argument("--tokenizer_rows", type=int, default=3000, help="rows of each kind to train the tokenizer on")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--inner_width", type=int, default=432)
    parser.add_argument("--head_width", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--log_every", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=100)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(read_settings())
