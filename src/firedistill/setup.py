"""Everything that a run needs before anything is trained: `load_setup`."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firedistill.config import SelfDistillConfig
from firedistill.memory import LOADING, explained_memory
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora, load_adapter, sort_targets
from firedistill.models.sharding import distributed_config, limit_waiting, lockstep
from firedistill.models.states import is_sharded, unwrap
from firedistill.objectives import load_objective
from firedistill.prompts import PromptEncoder
from firedistill.rollouts.load import choose_engine
from firedistill.tasks import Example, Task, load_task
from firedistill.tasks.guard import GuardedTask, read_examples

logger = logging.getLogger(__name__)


@dataclass
class Setup:
    """What a run needs before anything is trained.

    Attributes:
        args: the settings, with those that follow from model and data filled in; never the caller's own object.
        task: the task in a `GuardedTask`, whose methods return what they promise or raise `TaskFault`.
        model: the causal language model with its LoRA adapter.
        tokenizer: the model's tokenizer.
        encoder: turns messages into token ids.
        train_examples: the training problems; empty if nothing is trained.
        eval_examples: the held-out problems; empty if nothing is evaluated.
    """

    args: SelfDistillConfig
    task: Task
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    train_examples: list[Example]
    eval_examples: list[Example]


def load_setup(
    args: SelfDistillConfig,
    *,
    model: PreTrainedModel | PeftModel | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    task: Task | str | None = None,
    train_examples: Sequence[Example] | None = None,
    eval_examples: Sequence[Example] | None = None,
    train: bool = True,
) -> Setup:
    """Load what a run needs. `args` is copied, not changed.

    Args:
        args: the settings; they name whatever is not given here.
        model: a causal language model or its name. It gets a LoRA adapter unless it has one; `args.seed` alone decides the
            initial values.
        tokenizer: its tokenizer; required with a model object.
        task: a task or its name.
        train_examples, eval_examples: problems to use instead of the task's.
        train: False loads no training problems of the task, for an evaluation.

    Raises:
        ValueError: settings, model, tokenizer or task do not fit together; the message says what to change.
    """
    args = copy.copy(args)
    args.output_dir = os.path.abspath(args.run_dir)  # a task may change the working directory
    if args.data_dir is not None:
        args.data_dir = os.path.abspath(args.data_dir)
    task = task if isinstance(task, Task) else load_task(task or args.task)
    task = cast(Task, GuardedTask(task, args.task_timeout))  # has the interface of a task
    load_objective(args.method, args.method_settings)  # refuses an unknown method before a large model is loaded
    if model is None or isinstance(model, str):
        sharding = sharding_of(args)
        model, tokenizer = load_model_and_tokenizer(
            model or args.model, dtype=args.model_dtype, quantization=args.quantization, distributed_config=sharding
        )
    elif args.fsdp_size not in (None, 1) and not is_sharded(unwrap(model)):
        raise ValueError(
            f"fsdp_size is {args.fsdp_size}, but the model is an object that is loaded already: pass its name instead"
        )
    if tokenizer is None:
        raise ValueError("a model object needs its tokenizer: pass processing_class=... (tokenizer=... of load_setup)")
    if args.checkpoint_sampling:
        args.top_k = model.generation_config.top_k or 0
        args.repetition_penalty = model.generation_config.repetition_penalty or 1.0
    if args.n_gpu > 1:
        logger.warning("one process uses one GPU; for %d GPUs start with: torchrun --nproc_per_node %d", args.n_gpu, args.n_gpu)
        args._n_gpu = 1
    if not hasattr(model, "peft_config"):
        torch.manual_seed(args.seed)  # whatever was drawn while loading, the adapter depends on the seed alone
        model = trainable_adapter(cast(PreTrainedModel, model), args)
    sort_targets(cast(PeftModel, model))
    if args.rollouts == "auto":
        args.rollouts = choose_engine(cast(PeftModel, model), args)
    lockstep(model)  # all processes create it here
    limit_waiting(model, args.ddp_timeout)

    if train_examples is not None:
        train_examples = read_examples(train_examples, "train_examples")
    else:
        train_examples = task.examples("train", args.train_size, args.seed, args.data_dir) if train else []
    if eval_examples is not None:
        eval_examples = read_examples(eval_examples, "eval_examples")
    else:
        eval_examples = task.examples("eval", args.eval_size, args.eval_subset_seed, args.data_dir) if args.eval_size else []
    if train and not train_examples:
        raise ValueError(f"task {task.name!r} has no training examples")
    if not eval_examples:
        args.eval_strategy, args.eval_on_start = "no", False
    if not train and args.device.type == "cuda" and args.quantization is None:
        with explained_memory(f"the model does not fit; {LOADING}"):
            cast(torch.nn.Module, model).to(args.device)  # `Trainer` does it where something is trained
    return Setup(
        args=args,
        task=task,
        model=cast(PeftModel, model),
        tokenizer=tokenizer,
        encoder=PromptEncoder(tokenizer),
        train_examples=train_examples,
        eval_examples=eval_examples,
    )


def sharding_of(args: SelfDistillConfig) -> Any:
    """How the base model is spread over processes, or None if every process holds all of it; raises ValueError if it cannot be."""
    if args.fsdp_size in (None, 1):
        if args.dp_replicate_size is not None:
            raise ValueError(
                "dp_replicate_size is the number of copies of a base model that is spread over processes: set fsdp_size too"
            )
        return None
    for name in ("quantization", "fsdp", "deepspeed"):
        if value := getattr(args, name):
            raise ValueError(
                f"{name} ({value}) cannot be combined with fsdp_size, which shards the base model by itself: use one of them"
            )
    if "lm_head" in args.lora_target_modules:
        raise ValueError("lora_target_modules names lm_head, which is not sharded with an adapter: leave it or fsdp_size out")
    return distributed_config(args.fsdp_size, args.dp_replicate_size, args.world_size)


def trainable_adapter(model: PreTrainedModel, args: SelfDistillConfig) -> PeftModel:
    """The model with the adapter that `args.initial_adapter` names, or else with a new one."""
    if args.initial_adapter is not None:
        return load_adapter(model, args.initial_adapter)
    return add_lora(
        model, r=args.lora_r, alpha=args.lora_alpha, dropout=args.lora_dropout, target_modules=tuple(args.lora_target_modules)
    )
