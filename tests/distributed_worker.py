"""Started by torchrun in `test_distributed.py`: trains on this rank's share and writes what came out."""

import sys
from pathlib import Path

import torch

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.warmstart import WarmStartConfig, WarmStartTrainer
from tiny import ToyTask


def main(kind: str, checkpoint: str, folder: str, batch: int) -> None:
    config_class, trainer_class = {
        "warmstart": (WarmStartConfig, WarmStartTrainer),
        "fire": (SelfDistillConfig, SelfDistillTrainer),
    }[kind]
    config = config_class(
        model=checkpoint,
        task="toy",
        model_dtype="float32",
        output_dir=folder,
        max_steps=3,
        warmup_steps=1,
        learning_rate=1e-2,
        max_new_tokens=9,
        eval_size=5,
        per_device_train_batch_size=batch,
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo",
    )
    trainer = trainer_class(args=config, task=ToyTask())
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    torch.save(weights, Path(folder) / f"rank{config.process_index}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
