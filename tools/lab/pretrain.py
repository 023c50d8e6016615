"""Make the laboratory's model: a tokenizer and a tiny Qwen2 model, from scratch, on text that this script generates.

    python tools/lab/pretrain.py --output src/firedistill/lab

Rows are the package's own student and teacher messages for the built-in `arithmetic` task, so the model sees exactly what it will
be asked. A student row ends with an attempt of a pupil who makes mistakes (mistakes.py). A teacher row holds the feedback about
such an attempt, and its answer is right as far as the fields that are shown can tell: with all of them it is the gold solution;
without one of them, the mistakes that this field mends occur as often as in the student's answers. So the teacher has to read
the feedback to be better than the student.

Everything follows from the seed: the same command gives the same bits on the same machine and library versions. A run that was
stopped goes on from its last checkpoint. Problems of the `train` split only are used.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mistakes import MENDED_BY, attempt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from firedistill import Example
from firedistill.prompts import Message, PromptEncoder, student_messages, teacher_messages
from firedistill.tasks.arithmetic import Arithmetic, Problem, draw_problem, split_of

# ---------------------------------------------------------------------------------------------------------------------
# Rows of text

LEVELS = {"mixed": 0.7, "easy": 0.1, "medium": 0.1, "hard": 0.1}
TASKS = {level: Arithmetic(level) for level in LEVELS}
WRONG_SHARE = 0.85  # of the attempts that teacher rows are about; a response that is right has feedback too
EMPTY_SHARE = 0.04  # some methods ask the teacher before there is a response
MISSING_FIELD_SHARE = 0.4  # of the teacher rows: one field is left out
RESCORED_SHARE = 0.3  # of the teacher rows with all fields: the attempt's working is given, only the final line is answered


@dataclass(frozen=True)
class Row:
    """Chat messages, the beginning of the answer if it is given, and the rest of the answer, which is learnt."""

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
        remaining = {kind for kind, field in MENDED_BY.items() if field == feedback[missing].name}
        return Row(teacher_messages(task, example, feedback, missing), attempt(problem, rng, remaining))
    messages = teacher_messages(task, example, feedback)
    working, marker, _ = tried.rpartition("\n#### ")
    if marker and rng.random() < RESCORED_SHARE:
        return Row(messages, f"{marker}{example.answer}", given=working)
    return Row(messages, example.solution)


def draw_example(rng: random.Random) -> tuple[Arithmetic, Problem, Example]:
    """A problem of the training split; its uid looks like those of a run."""
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
# How text is cut before merges: as Qwen2 does it, which is also what `AutoTokenizer` assumes for a Qwen2 model.
QWEN2_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Frequent phrases are tokens of their own, which makes the fixed wording of prompts and feedback short. A phrase is what stands
# between two digits, words with a capital or line breaks; a line break takes the signs after it along (`\n#### `).
PHRASES = r"\p{N}|\p{Lu}\p{L}*|\n+[^\p{L}\p{N}\n]*|[^\p{N}\p{Lu}\n]+"
CONTEXT = 2048


def train_tokenizer(settings: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Byte-level BPE and phrases, from rows of both kinds. The pad token is never one that ends an answer."""
    texts = list(tokenizer_texts(settings.tokenizer_rows, settings.seed))
    backend = Tokenizer(BPE())
    backend.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(QWEN2_PIECES), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
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
    """The phrases that save most tokens, at most `count`. None occurs in the chat template: it would pass for a control token."""
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
Encoded = tuple[list[int], list[int]]  # token ids, and the same where they are learnt, IGNORED elsewhere
DRILL_LINES = 8
# From which step on, how many student, teacher and drill rows a step has. To read problems and feedback is soon learnt; to add,
# subtract, multiply and divide takes most of the time.
ROWS = ((0, 64, 16, 0), (150, 32, 12, 24), (300, 24, 8, 48))


def encode_row(encoder: PromptEncoder, row: Row) -> Encoded:
    prompt = encoder.encode(row.messages) + encoder.encode_text(row.given)
    answer = [*encoder.encode_text(row.answer), encoder.tokenizer.eos_token_id]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def encode_drill(encoder: PromptEncoder, rng: random.Random) -> Encoded:
    """Lines of right working without a story; the results are learnt."""
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
    """Micro-batches of the kinds of row in one step; what is in them depends on the seed and the step only."""
    rng = random.Random(f"rows/{settings.seed}/{step}")
    student_rows, teacher_rows, drill_rows = next(rows for start, *rows in reversed(ROWS) if step >= start)
    rows = {
        "student": [encode_row(encoder, student_row(rng)) for _ in range(student_rows)],
        "teacher": [encode_row(encoder, teacher_row(rng)) for _ in range(teacher_rows)],
        "drill": [encode_drill(encoder, rng) for _ in range(drill_rows)],
    }
    return {kind: batches(encoded, encoder.tokenizer.pad_token_id) for kind, encoded in rows.items() if encoded}


def batches(rows: list[Encoded], pad: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(token ids, labels) [rows / 2, T]: the shorter and the longer half of the rows, padded on the right.

    Attention is causal, so what stands after a row does not touch it, and no mask is needed.
    """
    rows = sorted(rows, key=lambda row: len(row[0]))
    half = (len(rows) + 1) // 2
    return [collate(part, pad) for part in (rows[:half], rows[half:]) if part]


def collate(rows: list[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(ids) for ids, _ in rows)
    ids = [ids + [pad] * (length - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORED] * (length - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


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
    """The copy that computes and that ships; the float32 model only collects updates too small for bfloat16."""
    copy = Qwen2ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.set_attn_implementation("eager")  # for short rows on a CPU, faster than fused attention
    return copy


def new_optimizers(model: Qwen2ForCausalLM, settings: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the embedding, norms and biases."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=settings.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_factor(step: int, settings: argparse.Namespace) -> float:
    """Linear warm-up, constant, linear decay over the last `decay` steps: until then, `steps` may still be changed."""
    return min(1.0, (step + 1) / settings.warmup, (settings.steps - step) / settings.decay)


def answer_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the learnt tokens; the head is applied at their positions only."""
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
        print(f"continuing after step {first}", flush=True)

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
    """The checkpoint that ships: weights in bfloat16, the tokenizer, and which tokens end and pad an answer."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/lab-pretraining.pt"), help="to go on after an interruption"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=40, help="steps of linear warm-up")
    parser.add_argument("--decay", type=int, default=500, help="last steps, in which the rate falls")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--vocabulary", type=int, default=2048, help="phrases included")
    parser.add_argument("--phrases", type=int, default=1024)
    parser.add_argument("--tokenizer_rows", type=int, default=3000, help="rows of each kind that the tokenizer is trained on")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--inner_width", type=int, default=432)
    parser.add_argument("--head_width", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--log_every", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=100)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(read_settings())
