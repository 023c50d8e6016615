"""A recipe on the workers of a Ray cluster: Ray Train launches the trainer as it is, in the place of torchrun.

    pip install '.[ray]'
    python examples/ray_train.py lab --workers 2 --max_steps 20 --output_dir runs/ray

All other options are settings of a run, as in `firedistill train`; its `--resume`, `--overwrite`, `--preflight` and `--allow_changes`
are unknown here. The working directory and the run directory must be on a file system that all workers share. If a worker is lost, Ray
starts all of them again, and the run resumes from its last checkpoint.
"""

import argparse
import os
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.cli.arguments import parse_settings
from firedistill.recipes import build_config
from firedistill.run.identity import meaning


def train(settings: dict) -> None:
    """The work of every worker. Ray has set RANK, WORLD_SIZE and MASTER_ADDR, and started the process group.

    Ray starts workers in a folder of its own; relative paths in the options are relative to the working directory of `main`.
    """
    directory = Path(settings["directory"])
    if not directory.is_dir():
        raise FileNotFoundError(
            f"this node has no directory {directory}, to which the paths in the options are relative: start examples/ray_train.py in a "
            "directory that all nodes share"
        )
    os.chdir(directory)
    config = build_config(SelfDistillConfig, settings["recipe"], settings["overrides"])
    SelfDistillTrainer(args=config).train()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's name or path")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument(
        "--gpus", action=argparse.BooleanOptionalAction, help="give each worker a GPU; default: if the cluster has any"
    )
    parser.add_argument("--restarts", type=int, default=0, help="how often lost workers are started again")
    options, rest = parser.parse_known_args(arguments)

    overrides = parse_settings(rest)
    config = build_config(SelfDistillConfig, options.recipe, overrides)  # so that wrong options fail here
    if options.restarts and meaning(config.resume_from_checkpoint) not in (None, True):
        parser.error(
            "--restarts repeats resume_from_checkpoint, which would remove the later checkpoints: leave one of the two out"
        )
    folder = Path(config.run_dir).absolute()
    ray.init(ignore_reinit_error=True)
    gpus = ray.cluster_resources().get("GPU", 0) > 0 if options.gpus is None else options.gpus  # this machine may have none
    TorchTrainer(
        train,
        train_loop_config={"directory": os.getcwd(), "recipe": options.recipe, "overrides": overrides},
        torch_config=TorchConfig(timeout_s=config.ddp_timeout),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=gpus),
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder.parent / "ray_results"),
            failure_config=FailureConfig(max_failures=options.restarts),
        ),
    ).fit()


if __name__ == "__main__":
    main()
