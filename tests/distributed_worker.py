"""Runs of `test_distributed.py`, by one process or started by torchrun: trains on this rank's share and writes the weights."""

import gc
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.models import LORA_TARGET_MODULES
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.rollout import Response
from firedistill.warmstart import WarmStartConfig, WarmStartTrainer
from tiny import ToyTask, adapter_weights

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
ZERO_2 = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}


class ScriptedEngine:
    """Responses that depend on the prompt and the place in its group alone, not on the process."""

    def generate(self, prompts, sampling, seed, progress=None, limits=None):
        responses = []
        for position, prompt in enumerate(prompts):
            draw = random.Random(f"{prompt} {prompts[:position].count(prompt)}")
            ids = [draw.randrange(40, 100) for _ in range(draw.randrange(2, 9))]
            responses.append(Response(ids, "x" * len(ids), finished=True))
        return responses


class StopLast(TrainerCallback):
    """The last process is asked to stop after the second step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class UnpicklableTask(ToyTask):
    """Its examples cannot be sent from one process to another."""

    def examples(self, split, n=None, seed=0, data_dir=None):
        examples = super().examples(split, n, seed, data_dir)
        return [replace(example, metadata={"check": lambda response: True}) for example in examples]


class OwnExamples(ToyTask):
    """Every process has training examples of its own."""

    def examples(self, split, n=None, seed=0, data_dir=None):
        examples = super().examples(split, n, seed, data_dir)
        return examples[int(os.environ["RANK"]) :] if split == "train" else examples


def worker_config(
    method: str, checkpoint: str, folder: str, **settings: Any
) -> tuple[type[SelfDistillTrainer], SelfDistillConfig]:
    """The trainer of a method, or of "warmstart", and the settings of three steps over the toy task."""
    warm_start = method == "warmstart"
    config_class, trainer_class = (WarmStartConfig, WarmStartTrainer) if warm_start else (SelfDistillConfig, SelfDistillTrainer)
    common = {
        "method": "supervised" if warm_start else method,
        "model": checkpoint,
        "task": "toy",
        "model_dtype": "float32",
        "output_dir": folder,
        "max_steps": 3,
        "warmup_steps": 1,
        "optim": "sgd",  # linear in the gradient: AdamW would blow rounding up to the size of a step
        "eval_size": 5,
        "gradient_checkpointing": False,
        "use_cpu": True,
        # Else each run estimates its memory and draws its curves, which takes most of its time.
        "disable_tqdm": method != "scope",
        "ddp_backend": "gloo" if PROCESSES > 1 else None,
        "deepspeed": ZERO_2 if os.environ.get("FIREDISTILL_TEST_DEEPSPEED") else None,
    }
    return trainer_class, config_class(**common | settings)


def main(kind: str, checkpoint: str, folder: str, batch: int) -> None:
    """`kind` is warmstart, a method, a method with scripted rollouts (`srpo:scripted`) and an adapter of the head as well
    (`fire:head`), one that is stopped and resumed, one with different data (`fire:apart`) or settings (`fire:rates`), or a model with
    an adapter that every process has drawn itself (`fire:drawn`). Writes the weights of student and teacher."""
    method, _, how = kind.partition(":")
    settings = {"learning_rate": 0.3, "max_new_tokens": 9, "per_device_train_batch_size": batch}
    settings["eval_samples"] = 2 if method == "fire" and how not in ("scripted", "head") else 0
    if how == "head":
        settings["lora_target_modules"] = [*LORA_TARGET_MODULES, "lm_head"]
    if how == "rates":
        settings["learning_rate"] += 0.1 * int(os.environ["RANK"])
    trainer_class, config = worker_config(method, checkpoint, folder, **settings)
    own = {}
    if how == "drawn":
        model, own["processing_class"] = load_model_and_tokenizer(checkpoint, dtype="float32")
        torch.manual_seed(config.process_index)
        own["model"] = add_lora(model)
    trainer = trainer_class(args=config, task=OwnExamples() if how == "apart" else UnpicklableTask(), **own)
    if how in ("scripted", "head"):
        trainer.rollout_engine = ScriptedEngine()
    if how == "stopped":
        trainer.add_callback(StopLast())
        trainer.train()
        assert trainer.state.global_step == 2 and trainer.stop.signal == signal.SIGTERM, (
            "both processes stop after the same step"
        )
        trainer = trainer_class(args=config, task=UnpicklableTask())
    trainer.train()
    teacher = {f"teacher.{name}": value for name, value in trainer.teacher.weights.shadow.items()}
    torch.save(adapter_weights(trainer) | teacher, Path(folder) / f"rank{config.process_index}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # each run collects garbage; without the imported libraries that takes no time
    kinds, checkpoint, folder, batch = sys.argv[1:]
    for kind in kinds.split(","):
        main(kind, checkpoint, str(Path(folder) / kind), int(batch))
