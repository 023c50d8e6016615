"""Runs of `test_sharding.py`: by one process with a whole base model, or by two, started by torchrun, with half of it each."""

from __future__ import annotations

import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from distributed_worker import PROCESSES, ScriptedEngine, StopLast, worker_config
from firedistill import SelfDistillTrainer, Verdict
from firedistill.models.sharding import local, reshard
from firedistill.rollout import Response
from tiny import ToyTask, adapter_weights


class LongForLongPrompts(ScriptedEngine):
    """Twice the tokens in response to long prompts."""

    def generate(self, prompts, sampling, seed, progress=None, limits=None):
        responses = super().generate(prompts, sampling, seed)
        return [
            Response(r.token_ids * 2, r.text * 2, finished=True) if len(prompt) > 100 else r
            for prompt, r in zip(prompts, responses, strict=True)
        ]


class UnevenTask(ToyTask):
    """What the second of two processes samples is all right, not to be trained on, cannot be judged, or long."""

    def __init__(self, how: str):
        self.how, self.second = how, set()

    def examples(self, split, n=None, seed=0, data_dir=None):
        examples = super().examples(split, n, seed, data_dir)
        for example in examples if self.how == "long" else []:
            if example.uid in self.second:
                object.__setattr__(example, "question", example.question + " why" * 20)
        return examples

    def verify(self, example, response):
        if example.uid not in self.second:
            return super().verify(example, response)
        if self.how == "failing":
            raise RuntimeError("the verifier is broken")
        if self.how == "right":
            return Verdict(True, "", "even", well_formed=True, lenient_correct=True)
        if self.how == "nothing":
            return Verdict(False, "", "even", well_formed=False, lenient_correct=False)
        return super().verify(example, response)


class Gradients(TrainerCallback):
    """Keeps the gradients of the last update of every step."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def main(kind: str, checkpoint: str, folder: str, **changes: Any) -> None:
    """`kind` is a method or warmstart. After a colon it says how the run differs from one with scripted rollouts and a sharded base:
    a whole base, an `UnevenTask`, sampled rollouts, those of `generate`, stopped and resumed, stopped, continued from a copy."""
    method, _, how = kind.partition(":")
    settings = {
        "learning_rate": 0.001,  # at 0.01 the rounding of one step changes the gradients of the next ones by 1e-6 of their size
        "max_new_tokens": 20,
        "attribution_examples": 1,
        # One prompt per micro-batch: its padding, and with it the rounding, does not depend on the number of processes.
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4 // PROCESSES,
        "drop_unfinished_rollouts": how == "nothing",
        "fsdp_size": PROCESSES if PROCESSES > 1 and how != "whole" else None,
    }
    trainer_class, config = worker_config(method, checkpoint, folder, **settings | changes)
    task = UnevenTask(how)
    if how in ("right", "nothing", "failing", "long"):
        order = SelfDistillTrainer(args=config, task=task).train_dataset
        task.second = {order[i].uid for i in range(len(order)) if i % 2}
    gradients = Gradients()
    trainer = trainer_class(args=config, task=task, callbacks=[gradients])
    if how not in ("sampled", "stopped", "generated") and config.rollouts == "hf":
        trainer.rollout_engine = LongForLongPrompts()
    if how == "generated":
        trainer.rollout_engine.causal_lm = None
    if how in ("stopped", "half"):
        trainer.add_callback(StopLast())
        trainer.train()
        assert trainer.state.global_step == 2 and trainer.stop.signal == signal.SIGTERM
        if how == "half":
            return
        trainer = trainer_class(args=config, task=task)
    changes = ("world_size", "fsdp_size", "gradient_accumulation_steps") if how == "continued" else ()
    trainer.train(allow_changes=changes)
    found = {"weights": adapter_weights(trainer), "teacher": trainer.teacher.weights.shadow, "gradients": gradients.found}
    reshard(trainer.model)
    found["held"] = sum(local(p).numel() for p in trainer.model.parameters() if not p.requires_grad)
    found["given"] = trainer.identity()["given"]
    torch.save(found, Path(folder) / f"rank{config.process_index}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # each run collects garbage; without the imported libraries that takes no time
    for kind, checkpoint, folder, changes in json.loads(sys.argv[1]):
        print(kind, flush=True)
        main(kind, checkpoint, folder, **changes)
