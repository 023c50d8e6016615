"""`transformers.Trainer` with runs that go on exactly where they stopped."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from accelerate.utils import gather_object
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_callback import ExportableState

from firedistill.config import SelfDistillConfig
from firedistill.files import UNFINISHED, written_whole
from firedistill.run import checkpoints, identity
from firedistill.run.checkpoints import CheckpointError
from firedistill.run.signals import StopOnSignal, StopRequest

logger = logging.getLogger(__name__)


class ResumableTrainer(Trainer):
    """A trainer of adapters whose continued run equals the uninterrupted one: to the bit on the same machine.

    A subclass says what a run is (`identity`), what a checkpoint holds beyond adapter, optimizer, schedule, random state and
    Trainer's own state (`save_extra`, `load_extra`), and what happens at the two ends of `train` (`begin_run`, `end_run`).

    Attributes:
        stop: the request to end early, while training.
        evaluation_due: the last step of the checkpoint asked for an evaluation that was not made.
        resumed_from: the checkpoint that the run went on from.
        failed_checkpoints: how many could not be written.
    """

    # What Trainer declares more widely, or as possibly None.
    args: SelfDistillConfig
    model: PeftModel
    processing_class: PreTrainedTokenizerBase
    optimizer: Optimizer

    stop: StopRequest | None = None
    evaluation_due: bool = False
    resumed_from: Path | None = None
    failed_checkpoints: int = 0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._random_state: dict[str, Any] | None = None  # of the checkpoint, until the first step takes it
        self._new_settings: list[identity.Difference] = []
        self.add_callback(StopOnSignal(self))

    def identity(self) -> dict[str, Any]:
        """What makes the run this run; see `firedistill.run.identity.identity`."""
        raise NotImplementedError

    def save_extra(self, folder: Path) -> None:
        """Write what else a checkpoint holds; called on the main process."""

    def load_extra(self, folder: Path) -> None:
        """Read what `save_extra` wrote; called on every process."""

    def begin_run(self, step: int) -> None:
        """Training is about to begin after optimizer step `step`."""

    def end_run(self) -> None:
        """Training has reached its last step."""

    # ---- Going on ------------------------------------------------------------------------------------------------------------

    def train(  # type: ignore[override]  # Trainer's second argument, `trial`, is for searches over hyperparameters
        self, resume_from_checkpoint: str | Path | bool | None = None, allow_changes: Sequence[str] = (), **kwargs: Any
    ) -> Any:
        """Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint: None or "auto" goes on from the newest complete checkpoint of the run directory if there is
                one; True does, and insists that there is one; a path names one; False starts anew and replaces the run that is there.
            allow_changes: names of settings (and of `train_data`, `eval_data`, `base_model`, `world_size`) that may differ from the
                checkpoint's; the new ones hold from there on.

        Raises:
            CheckpointError (a ValueError): no complete checkpoint, or one of another run; lists what differs.
        """
        wanted = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        folder = self.checkpoint_to_resume(wanted, allow_changes)
        self.resumed_from = folder
        if folder is not None:
            for difference in self._new_settings:
                logger.warning("allowed change: %s", difference)
            identity.warn_of_another_machine(
                checkpoints.read_manifest(folder).get("machine"), identity.machine(self.args.device)
            )
            self.args.eval_on_start = self.evaluation_due and self.args.eval_strategy != "no"
        step = checkpoints.step_of(folder) if folder is not None else 0
        if self.is_world_process_zero():
            checkpoints.remove_after(self.args.run_dir, step)
        self.begin_run(step)
        with StopRequest() as self.stop:
            result = super().train(resume_from_checkpoint=str(folder) if folder is not None else None, **kwargs)
        if self.stop.signal is None or self.state.global_step >= self.state.max_steps:
            self.end_run()
        return result

    def checkpoint_to_resume(self, wanted: str | Path | bool | None, allow_changes: Sequence[str] = ()) -> Path | None:
        """The checkpoint that `train` would go on from, found complete and of this run; None for a new start.

        Raises:
            CheckpointError: as in `train`.
        """
        folder = identity.choose(wanted, self.args.run_dir)
        if len(set(gather_object([str(folder)]))) > 1:
            raise CheckpointError(
                f"the processes see different checkpoints in {self.args.output_dir}: it must be a shared folder"
            )
        if folder is None:
            return None
        step = checkpoints.step_of(folder)
        manifest = checkpoints.read_manifest(folder)
        if manifest.get("step") != step:
            raise CheckpointError(f"{folder} is of step {manifest.get('step')!r}: it was renamed")
        self._new_settings = identity.refuse_differences(
            manifest, self.identity(), identity.defaults_of(self.args), allow_changes, str(folder)
        )
        if step > self.args.max_steps:
            raise CheckpointError(
                f"{folder} is beyond max_steps ({self.args.max_steps}); allow a larger max_steps, or start anew"
            )
        self.evaluation_due = manifest.get("evaluation_due") is True
        return folder

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_adapter_weights(self.model, Path(resume_from_checkpoint))
        self._load_rest(Path(resume_from_checkpoint))

    def _load_rest(self, folder: Path) -> None:
        """Everything but weights, optimizer and schedule."""
        states = checkpoints.load_state(folder, "random_state")
        if self.args.process_index < len(states):
            self._random_state = states[self.args.process_index]
        self.load_extra(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None and self.is_deepspeed_enabled:
                self._load_rest(Path(checkpoint))  # DeepSpeed has loaded the weights by itself
            return
        scheduler = self.lr_scheduler
        assert scheduler is not None  # made before it is loaded
        fresh = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rates = list(scheduler.base_lrs)
        try:
            self.optimizer.load_state_dict(checkpoints.load_state(checkpoint, "optimizer"))
            scheduler.load_state_dict(checkpoints.load_state(checkpoint, "scheduler"))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"the optimizer in {checkpoint} is not one of this run ({error})") from error
        if self._new_settings:  # the stored states hold the old rates, decay, ...
            done = scheduler.last_epoch
            factors = [schedule(done) for schedule in scheduler.lr_lambdas]
            for group, values, rate, factor in zip(self.optimizer.param_groups, fresh, rates, factors, strict=True):
                group.update({**values, "lr": rate * factor})
            scheduler.base_lrs = rates

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing here: `take_random_state` does it before the first step samples, where Trainer would do it after."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is no gradient scaler; Trainer would unpickle a file of that name."""

    def take_random_state(self) -> None:
        """Put the checkpoint's random state in place, once: where the uninterrupted run had it."""
        if self._random_state is not None:
            checkpoints.restore_random_state(self._random_state)
            self._random_state = None

    def keep_random_state(self) -> None:
        """Take the random state as it is now for the first step, whatever is drawn until then (by the data loader)."""
        self._random_state = checkpoints.random_state()

    # ---- Writing -------------------------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Weights or optimizer states are spread over processes, and every process writes its part."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A whole checkpoint or none. Where it cannot be written (a full disk), the earlier ones stay and training goes on."""
        folder = checkpoints.checkpoint_folder(self.args.run_dir, self.state.global_step)
        states = gather_object([checkpoints.random_state()])
        error = None
        try:
            if self.args.should_save or self.sharded:
                self.write_checkpoint(folder, states)
        except (OSError, SafetensorError) as problem:
            if self.sharded or self.args.world_size > 1 and not self.args.should_save:
                raise  # the other processes wait for this one's part
            error = problem
        if any(gather_object([error is not None])):
            self.failed_checkpoints += 1
            logger.error(
                "%s could not be written (%s); training goes on, and the next one is tried. Make room, or change --output_dir",
                folder,
                error or "on the main process",
            )
        elif self.args.should_save:
            checkpoints.rotate(self.args.run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(folder))

    def write_checkpoint(self, folder: Path, random_states: Sequence[dict[str, Any]]) -> None:
        """Write everything into a hidden folder, seal it, and move it to its place.

        Raises:
            OSError: it could not be written.
        """
        main = self.args.should_save
        hidden = folder.with_name(UNFINISHED + folder.name)
        with written_whole(folder) if main else nullcontext(hidden) as unfinished:
            if self.sharded:
                self.accelerator.wait_for_everyone()
            self.save_model(str(unfinished), _internal_call=True)
            self._save_optimizer_and_scheduler(str(unfinished))
            if self.sharded:
                self.accelerator.wait_for_everyone()
            if main:
                checkpoints.save_state(list(random_states), unfinished, "random_state")
                self.save_extra(unfinished)
                if self.state.best_global_step:
                    best = checkpoints.checkpoint_folder(self.args.run_dir, self.state.best_global_step)
                    self.state.best_model_checkpoint = str(best) if best.is_dir() or best == folder else None
                # `stateful_callbacks` is declared as the list that the mapping is made from.
                callback_states = cast(dict[str, Any], self.state.stateful_callbacks)
                for callback in [*self.callback_handler.callbacks, self.control]:
                    if isinstance(callback, ExportableState):
                        callback_states[type(callback).__name__] = callback.state()
                self.state.save_to_json(str(unfinished / "trainer_state.json"))
                content = {
                    "step": self.state.global_step,
                    "evaluation_due": bool(self.evaluation_due),
                    **self.identity(),
                    "machine": identity.machine(self.args.device),
                }
                checkpoints.seal(unfinished, content)
        if self.sharded:
            self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.lr_scheduler is not None
        checkpoints.save_state(self.optimizer.state_dict(), output_dir, "optimizer")
        checkpoints.save_state(self.lr_scheduler.state_dict(), output_dir, "scheduler")


def load_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Put the stored adapter into the model's own, in place.

    Raises:
        CheckpointError: it is missing, damaged, or of another adapter.
    """
    path = folder / "adapter_model.safetensors"
    try:
        stored: dict[str, Tensor] = load_file(path)
        found: Any = set_peft_model_state_dict(model, stored, adapter_name=model.active_adapters[0])
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be taken: {' '.join(str(error).split())[:300]}") from error
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(trainable.intersection(found.missing_keys))
    if missing or found.unexpected_keys:
        raise CheckpointError(
            f"{path} was made for another model or adapter: it lacks {missing[:3]} and has {list(found.unexpected_keys)[:3]} too many"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A mapping in a JSON file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no mapping")
    return values
