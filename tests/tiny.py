"""Tiny random models, a byte-level tokenizer, a toy task and tiny runs: every code path of a run in seconds."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from firedistill import Example, FeedbackField, SelfDistillConfig, SelfDistillTrainer, Task, Verdict
from firedistill.run.log import read_jsonl

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEVICE = os.environ.get("FIREDISTILL_TEST_DEVICE", "cpu")
"""Of the runs of `run_config`."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, three special tokens in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def random_model(
    kind: str = "qwen2",
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    rows: int = 263,
    sizes: tuple[int, int] = (32, 48),
):
    """Two layers of these sizes, hidden and intermediate; weights large enough for distributions that are not uniform."""
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=rows,
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.25,
    )
    model = model_class(config).to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def enable_checkpointing(model, settings: dict | None = None) -> None:
    """Activation checkpointing by the name that the installed transformers has for it."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)(settings)


def save_checkpoint(folder: Path, **options) -> str:
    """A checkpoint folder that `load_model_and_tokenizer` reads."""
    random_model(**options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def run_config(checkpoint: str, folder: Path, **changes) -> SelfDistillConfig:
    """Four steps over the toy task, with evaluations and checkpoints after the second and the fourth."""
    settings = {
        "model": checkpoint,
        "task": "tiny:ToyTask",
        "model_dtype": "float32",
        "output_dir": str(folder),
        "max_steps": 4,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "nominal_learning_rate": 1e-3,
        "max_new_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "eval_size": 5,
        "eval_steps": 2,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_checkpointing": False,
        "use_cpu": DEVICE == "cpu",
        "disable_tqdm": True,
    }
    return SelfDistillConfig(**{**settings, **changes})


def run_trainer(checkpoint: str, folder: Path, task: Task | None = None, **changes) -> SelfDistillTrainer:
    return SelfDistillTrainer(args=run_config(checkpoint, folder, **changes), task=task or ToyTask())


def adapter_weights(trainer: SelfDistillTrainer) -> dict[str, torch.Tensor]:
    """Copies of the trained parameters, by name."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def rows_of(trainer: SelfDistillTrainer) -> list[dict]:
    """The rows of a run that comes to its end."""
    trainer.train()
    rows = read_jsonl(Path(trainer.args.output_dir) / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, trainer.args.max_steps + 1)), "the run came to its end"
    return rows


class ToyTask(Task):
    """Correct answers have an even length, so a random model gives both branches work. Two feedback fields."""

    name = "toy"
    type_name = "toy"
    format_instruction = "Say something."

    def examples(self, split, n=None, seed=0, data_dir=None):
        count = n or 12
        return [
            Example(f"toy/{split}/{i}", f"Question {i}: " + "why " * (i % 3), "even", solution="ab" * (i % 4 + 1))
            for i in range(count)
        ]

    def verify(self, example, response):
        right = len(response) % 2 == 0
        return Verdict(right, str(len(response)), "even", well_formed=True, lenient_correct=right)

    def feedback(self, example, response, verdict):
        return (
            FeedbackField("outcome", f"The length {len(response)} is odd."),
            FeedbackField("hint", "Answers are right when their length is even. " * 2),
        )


def is_training(folder: str | Path) -> bool:
    """Whether another process trains in the run directory; within that process always False."""
    path = Path(folder) / ".lock"
    if not path.is_file():
        return False
    with path.open("rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError | PermissionError)
    return False
