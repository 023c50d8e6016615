"""Every setting of a run, on top of `transformers.TrainingArguments`."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from firedistill.files import written_at_once
from firedistill.models import LORA_TARGET_MODULES
from firedistill.prompts import TokenBudget
from firedistill.rollouts.engine import Sampling


def _option(group: str, default: Any, text: str, **metadata: Any) -> Any:
    metadata = {"help": text, "group": group, **metadata}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def training_setting(default: Any, text: str) -> Any:
    return _option("What to train", default, text)


def method_setting(default: Any, text: str) -> Any:
    return _option("Method", default, text)


def rollout_setting(default: Any, text: str) -> Any:
    return _option("Rollouts", default, text)


def model_setting(default: Any, text: str) -> Any:
    return _option("Model and adapter", default, text)


def optimisation_setting(default: Any, text: str) -> Any:
    return _option("Optimisation", default, text)


def run_setting(default: Any, text: str) -> Any:
    return _option("Evaluation and the run directory", default, text)


@dataclass
class SelfDistillConfig(TrainingArguments):
    """Settings of `SelfDistillTrainer`: the fields below, and every field of `transformers.TrainingArguments`.

    The defaults are the paper's shared settings. A YAML recipe has these names as its keys.

    Raises:
        ValueError: a value that cannot be meant; the message names the option.
    """

    # --- What to train
    model: str = training_setting(
        "smollm2",
        "Hub id, local folder or .gguf file of an instruct model; 'smollm2' is SmolLM2-135M-Instruct, 'lab' a tiny model that "
        "comes with the package.",
    )
    task: str = training_setting("arithmetic", "Task name (gsm8k, asdiv, ...), 'gym:<dataset>', or a dotted path module:Class.")
    method: str = training_setting(
        "fire", "Objective: fire, an ablation, one of the baselines, or a dotted path module:Class; listed below."
    )
    method_settings: dict[str, Any] = training_setting(
        {}, "Settings of the method itself; one of them is set by --method_settings.NAME VALUE."
    )
    data_dir: str | None = training_setting(
        None, "Folder with local copies of the datasets (<split>.jsonl, .jsonl.gz or .parquet)."
    )
    task_timeout: float | None = training_setting(
        10.0, "Seconds that the task may take for one verdict or feedback before it counts as failed; 'none' for no limit."
    )
    train_size: int | None = training_setting(None, "Problems in the training pool; all of the split if not given.")

    # --- Method
    nominal_learning_rate: float | None = method_setting(
        None,
        "FIRE's nominal rate a_0: the radius shrinks while the learning rate is above it. The peak learning rate if not given.",
    )
    ema_rate: float = method_setting(0.03, "1 - mu, the weight of the new student in each update of the EMA teacher.")
    log_prob_floor: float | None = method_setting(
        math.log(1e-10), "Floor on normalised teacher log-probabilities (natural log); 'none' turns it off."
    )
    score_temperature: float = method_setting(1.0, "Temperature of the scored distributions of student and teacher.")
    drop_unfinished_rollouts: bool = method_setting(
        False, "Leave rollouts without end-of-sequence or without a well-formed answer line out of training (not out of N)."
    )

    # --- Rollouts
    temperature: float = rollout_setting(0.8, "Sampling temperature.")
    top_p: float = rollout_setting(0.95, "Nucleus mass; 1 is off.")
    top_k: int = rollout_setting(0, "Sample from the k most likely tokens only; 0 is off, whatever the checkpoint says.")
    repetition_penalty: float = rollout_setting(1.0, "1 is off, whatever the checkpoint says.")
    checkpoint_sampling: bool = rollout_setting(
        False, "Take top-k and repetition penalty from the checkpoint's generation settings, as the authors' code did."
    )
    max_new_tokens: int = rollout_setting(384, "Tokens sampled at most per response.")
    max_prompt_tokens: int = rollout_setting(
        1280, "A longer student prompt leaves its example out; counted and named in the log."
    )
    max_feedback_tokens: int = rollout_setting(768, "Longer feedback is cut field by field, with a visible mark.")
    max_context_tokens: int = rollout_setting(2560, "Prompt and response together; a longer prompt leaves its example out.")
    rollout_batch_size: int = rollout_setting(32, "Prompts per generate call.")

    # --- Model and adapter
    model_dtype: str = model_setting(
        "bfloat16", "Data type of the base model: bfloat16, float16 or float32. LoRA factors are float32."
    )
    quantization: str | None = model_setting(None, "'nf4' loads the base model in 4 bits (needs the extra [quant]).")
    initial_adapter: str | None = model_setting(None, "Folder of a LoRA adapter to continue from, for instance a warm start.")
    lora_r: int = model_setting(16, "Rank of the LoRA factors.")
    lora_alpha: int = model_setting(32, "LoRA scaling.")
    lora_dropout: float = model_setting(0.0, "LoRA dropout.")
    lora_target_modules: list[str] = model_setting(LORA_TARGET_MODULES, "Modules that get a LoRA adapter.")
    gradient_checkpointing: bool | None = model_setting(
        True, "Recompute activations in the backward pass: less memory, about a fifth slower."
    )
    share_prefixes: bool | None = model_setting(
        None, "Read what the teacher's views of a rollout have in common once (row by row); by default on a CPU only."
    )
    score_tokens_per_forward: int = model_setting(8192, "Padded tokens per forward pass of the teacher.")

    # --- Optimisation
    max_steps: int = optimisation_setting(200, "Optimizer steps.")
    learning_rate: float = optimisation_setting(4e-6, "Peak learning rate.")
    warmup_steps: float = optimisation_setting(25, "Steps of linear warm-up (a share of all steps if below 1).")
    lr_scheduler_type: str = optimisation_setting("cosine", "After the warm-up: 'cosine' or 'constant'.")
    per_device_train_batch_size: int = optimisation_setting(
        8,
        "Prompts per micro-batch and device, each with its responses; times the next option: prompts per step (the paper: 8).",
    )
    gradient_accumulation_steps: int = optimisation_setting(
        1, "Micro-batches per optimizer step; how the prompts are split changes memory, not the result."
    )
    weight_decay: float = optimisation_setting(0.01, "AdamW weight decay.")
    adam_beta2: float = optimisation_setting(0.95, "AdamW beta 2.")
    max_grad_norm: float = optimisation_setting(1.0, "Clip gradients to this norm.")
    seed: int = optimisation_setting(0, "Seed of everything: data order, adapter, sampling.")

    # --- Evaluation and the run directory
    output_dir: str | None = run_setting(None, "The run directory; runs/<task>-<method>-seed<seed> if not given.")
    eval_steps: float | None = run_setting(
        25, "Evaluate every so many steps (0: never in between), and always before the first and after the last."
    )
    eval_size: int = run_setting(192, "Held-out problems; 0 turns evaluation off.")
    eval_subset_seed: int = run_setting(0, "Seed that picks the held-out problems; the same for all training seeds.")
    eval_batch_size: int = run_setting(64, "Prompts per generate call in evaluation.")
    save_steps: float = run_setting(50, "Write a checkpoint every so many steps.")
    save_total_limit: int | None = run_setting(2, "Keep this many checkpoints.")
    report_to: None | str | list[str] = run_setting(
        "none", "Trackers: trackio, wandb, tensorboard, ...; a run has the name of its folder there."
    )
    log_rollouts: bool = run_setting(True, "Write every step's rollouts to rollouts/*.parquet.")
    attribution_examples: int = run_setting(
        0, "Sampled wrong answers, before the first step and after the last, whose attribution is saved for the report."
    )

    # --- Settings of TrainingArguments that a self-distillation run needs otherwise
    eval_strategy: str = field(default="steps", metadata={"help": "Do not change; use eval_size and eval_steps."})
    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})
    logging_steps: float = field(default=1, metadata={"help": "Report to trackers every so many steps."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Do not change; batches hold no tensors."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Do not change; examples are no columns."})

    project: str = field(default="firedistill", metadata={"help": "What trackers file the run under."})

    def __post_init__(self) -> None:
        if self.output_dir is None:
            self.output_dir = run_folder(self.task, self.method, self.seed)
        self.run_name = self.run_name or Path(self.output_dir).name  # for trackers
        self._check()
        if not self.eval_steps:
            self.eval_steps = self.max_steps  # before the first step and after the last
        if self.eval_size == 0:
            self.eval_strategy, self.eval_on_start = "no", False
        # Recent versions of transformers call the same thing activation checkpointing, and warn of this name.
        checkpointing, self.gradient_checkpointing = bool(self.gradient_checkpointing), None
        super().__post_init__()
        self.gradient_checkpointing = self.activation_checkpointing = checkpointing

    def _check(self) -> None:
        """Refuse what cannot be meant, naming the option and the mend."""
        above_zero = (
            "max_steps max_new_tokens max_prompt_tokens max_feedback_tokens max_context_tokens rollout_batch_size eval_batch_size "
            "score_tokens_per_forward lora_r learning_rate score_temperature per_device_train_batch_size gradient_accumulation_steps"
        )
        for name in above_zero.split():
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        rules = [
            (0 < self.ema_rate <= 1, "ema_rate", "1 - mu lies in (0, 1]; the paper uses 0.03 and 0.01"),
            (
                self.nominal_learning_rate is None or self.nominal_learning_rate > 0,
                "nominal_learning_rate",
                "a_0 must be above 0",
            ),
            (self.temperature >= 0, "temperature", "0 is greedy, above 0 samples"),
            (
                self.eval_steps is None or self.eval_steps >= 0,
                "eval_steps",
                "0 or none evaluates before and after training only",
            ),
            (0 <= self.lora_dropout < 1, "lora_dropout", "expected a share in [0, 1)"),
            (self.lora_alpha > 0, "lora_alpha", "it must be above 0"),
            (self.repetition_penalty > 0, "repetition_penalty", "1 is off"),
            (self.top_k >= 0, "top_k", "0 is off"),
            (not self.fp16, "fp16", "the base model has its own data type: use model_dtype instead of mixed precision"),
            (not self.bf16, "bf16", "the base model has its own data type: use model_dtype instead of mixed precision"),
            (0 < self.top_p <= 1, "top_p", "expected a share in (0, 1]"),
            (self.log_prob_floor is None or self.log_prob_floor < 0, "log_prob_floor", "a natural logarithm below 0, or none"),
            (str(self.lr_scheduler_type) in {"cosine", "constant"}, "lr_scheduler_type", "expected 'cosine' or 'constant'"),
            (self.model_dtype in {"bfloat16", "float16", "float32"}, "model_dtype", "expected bfloat16, float16 or float32"),
            (self.quantization in {None, "nf4"}, "quantization", "expected 'nf4', or leave it out"),
            (self.eval_size >= 0, "eval_size", "0 turns evaluation off"),
            (self.attribution_examples >= 0, "attribution_examples", "0 saves none"),
            (self.task_timeout is None or self.task_timeout > 0, "task_timeout", "expected seconds above 0, or none"),
            (
                not self.save_only_model,
                "save_only_model",
                "a checkpoint here can always be continued; for the adapter alone take adapter/ in the run directory",
            ),
            (self.train_size is None or self.train_size > 0, "train_size", "leave it out to use the whole split"),
            (
                self.max_new_tokens < self.max_context_tokens,
                "max_new_tokens",
                f"it must leave room for a prompt within max_context_tokens ({self.max_context_tokens})",
            ),
        ]
        for holds, name, mend in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}: {mend}")

    @property
    def sampling(self) -> Sampling:
        """The law of the training rollouts."""
        return Sampling(self.temperature, self.top_p, self.max_new_tokens, self.top_k, self.repetition_penalty)

    @property
    def greedy(self) -> Sampling:
        """The law of the evaluation."""
        return Sampling(0.0, 1.0, self.max_new_tokens, 0, self.repetition_penalty)

    @property
    def budget(self) -> TokenBudget:
        return TokenBudget(self.max_prompt_tokens, self.max_feedback_tokens, self.max_context_tokens)

    @property
    def run_dir(self) -> str:
        """`output_dir`, which `__post_init__` has settled."""
        assert self.output_dir is not None
        return self.output_dir

    def resolved(self) -> dict[str, Any]:
        """All of our settings, and those inherited ones that differ from their defaults, as plain YAML values."""
        defaults = {f.name: f.default for f in fields(TrainingArguments) if f.default is not MISSING}
        ours = {f.name for f in fields(type(self)) if "group" in f.metadata}
        values = self.to_dict()
        return {
            name: value
            for name, value in values.items()
            if name in ours or (name in defaults and value != defaults[name] and name not in DERIVED_OPTIONS)
            if not name.endswith("_token")  # secrets stay where they are
        }

    def save_yaml(self, path: str | Path) -> None:
        """Write the resolved settings; `firedistill train` takes the file as a recipe."""
        with written_at_once(Path(path)) as unfinished:
            unfinished.write_text(yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True), encoding="utf-8")


def run_folder(task: str, what: str, seed: int) -> str:
    """`runs/<task>-<what>-seed<seed>`; names cannot lead out of `runs`."""
    return str(Path("runs") / re.sub(r"[^\w.+-]+", "-", f"{task}-{what}-seed{seed}").lstrip("."))


# Inherited settings that `__post_init__` derives from others; written out, they would contradict a later change.
DERIVED_OPTIONS = {
    "activation_checkpointing",
    "logging_dir",
    "run_name",
    "disable_tqdm",
    "eval_strategy",
    "eval_on_start",
    "logging_steps",
    "remove_unused_columns",
    "dataloader_pin_memory",
    "logging_strategy",
    "local_rank",
    "accelerator_config",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "resume_from_checkpoint",
    "lr_scheduler_kwargs",
    "fsdp_config",
    "debug",
}
