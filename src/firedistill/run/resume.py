"""A `transformers.Trainer` that writes complete checkpoints and continues exactly from them."""

from __future__ import annotations

import errno
import logging
import math
import shlex
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from accelerate.utils import gather_object
from huggingface_hub import CommitInfo, HfApi
from peft import PeftModel, set_peft_model_state_dict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from firedistill.config import SelfDistillConfig
from firedistill.files import UNFINISHED, written_whole
from firedistill.models.errors import ModelError
from firedistill.models.lora import FACTORS, adapter_state, read_factors, scaling_changes, trained_parameters
from firedistill.models.sharding import lockstep
from firedistill.run import checkpoints, identity
from firedistill.run.checkpoints import CheckpointError
from firedistill.run.directory import FINISHED, RunLock, mark_finished, remove, remove_run
from firedistill.run.signals import StopOverdue, StopRequest

logger = logging.getLogger(__name__)

RETRY_AFTER = 10.0
UPLOADED = ["adapter_*", "tokenizer*", "chat_template*", "special_tokens_map.json", "README.md"]
"""What of a folder is uploaded to the Hub, as patterns."""
# DeepSpeed restores them from its checkpoint.
FIXED_BY_DEEPSPEED = {
    "world_size",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "optim_args",
}


class ResumableTrainer(Trainer):
    """A trainer of adapters whose resumed run equals the uninterrupted one, bit for bit on the same machine.

    A subclass defines what makes a run the same run (`identity`), what a checkpoint holds beyond the adapter, the optimizer, the
    schedule, the random state and Trainer's own state (`save_extra`, `load_extra`), and what happens at both ends of `train`
    (`begin_run`, `end_run`).

    Attributes:
        stop: the request to stop early, if its `signal` is not None.
        evaluation_due: the evaluation after the checkpoint's step has not been made.
        ended: the last training has come to its end, with everything written.
        resumed_from: the checkpoint from which the run was resumed.
        failed_checkpoints: number of checkpoints that could not be written.
        lock: the main process's lock of the run directory while it trains.
    """

    # Trainer declares these more widely, or as possibly None.
    args: SelfDistillConfig
    model: PeftModel
    processing_class: PreTrainedTokenizerBase
    optimizer: Optimizer

    evaluation_due: bool = False
    ended: bool = False
    resumed_from: Path | None = None
    failed_checkpoints: int = 0
    lock: RunLock | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        settings = kwargs["args"]
        # Trainer refuses checkpoints next to a sharded base. Here adapter and optimizer are whole on every process.
        settings.save_only_model = lockstep(kwargs["model"]) is not None
        super().__init__(*args, **kwargs)
        settings.save_only_model = False
        self._random_state: dict[str, Any] | None = None  # of the checkpoint, until the first step takes it
        self._allowed_changes: dict[str, str] = {}
        self._initial = True  # weights, optimizer and teacher are those that the trainer was made with
        self._settled: dict[str, Any] | None = None  # the random state at the end of the last step, until an update begins
        self.stop = StopRequest(self, self.args.stop_within)
        self.add_callback(self.stop)

    def identity(self) -> dict[str, Any]:
        """What makes the run the same run; see `SelfDistillTrainer.identity`."""
        raise NotImplementedError

    @property
    def decided(self) -> Collection[str]:
        """The names of settings that were left open and decided for this device."""
        return ()

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Take over what the checkpoint's run, of these settings, has decided and this one leaves open; called on every process."""

    def save_extra(self, folder: Path) -> None:
        """Write what else a checkpoint holds; called on the main process."""

    def load_extra(self, folder: Path) -> None:
        """Read what `save_extra` wrote; called on every process."""

    def begin_run(self, step: int) -> None:
        """Called before training starts after optimizer step `step`."""

    def end_run(self) -> None:
        """Called when training has reached its last step."""

    # ---- Resuming ------------------------------------------------------------------------------------------------------------

    def train(  # type: ignore[override]  # Trainer's second argument, `trial`, is for hyperparameter searches
        self, resume_from_checkpoint: str | Path | bool | None = None, allow_changes: Sequence[str] = (), **kwargs: Any
    ) -> Any:
        """Train, or resume from a checkpoint, while this process holds the run directory; see `SelfDistillTrainer.train`."""
        with RunLock(self.args.run_dir) if self.is_world_process_zero() else nullcontext() as self.lock:
            return self._train(resume_from_checkpoint, allow_changes, **kwargs)

    @property
    def incomplete(self) -> bool:
        """Whether steps, or the evaluation after the last one, are left."""
        return self.state.global_step < self.state.max_steps or self.evaluation_due

    def _train(self, resume_from_checkpoint: str | Path | bool | None, allow_changes: Sequence[str], **kwargs: Any) -> Any:
        """Train while this process holds the run directory."""
        self.ended = False
        wanted = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        self.resumed_from = folder = self.checkpoint_to_resume(wanted, allow_changes)
        if folder is None and not self._initial:
            raise ValueError(
                "this trainer has trained already, so that it would not start from the initial weights: make a new one, with a model "
                "that is loaded again, or resume from a checkpoint"
            )
        self.refuse_disagreement()
        step = 0
        if folder is not None:
            step = checkpoints.step_of(folder)
            for change in self._allowed_changes.values():
                logger.warning("allowed change: %s", change)
            identity.warn_of_another_machine(checkpoints.read_manifest(folder), self.args.device)
            self.args.eval_on_start = self.evaluation_due and self.args.eval_strategy != "no"
        run = Path(self.args.run_dir)
        if self.is_world_process_zero():
            if step == 0:
                # A run that ended before its first checkpoint has paid for the judge's replies.
                remove_run(run, keep_replies=identity.meaning(wanted) is not False)
            checkpoints.remove_after(run, step)
            remove(run / FINISHED)
        gather_object([None])  # from here on, no process can read a file of a run that is replaced
        self.begin_run(step)
        self.remove_callback(self.stop)
        self.add_callback(self.stop)  # the last one: any other may end the run
        with self.stop:
            try:
                result = super().train(resume_from_checkpoint=str(folder) if folder is not None else None, **kwargs)
            except StopOverdue:
                self.save_settled()
                return TrainOutput(self.state.global_step, math.nan, {})
            if self.stop.signal is None or not self.incomplete:
                self.take_random_state()  # of a run that was stopped after its last step
                self.end_run()
                if self.is_world_process_zero():
                    mark_finished(run, self.state.global_step)
                self.ended = True
        return result

    def refuse_disagreement(self) -> None:
        """Raise ValueError on all processes, before anything is removed, if they have different settings, data or models."""
        found = gather_object([self.identity()])
        names = {name for other in found for name in identity.differences(found[0], other, self.args)}
        if different := sorted(names - {"task"}):  # its files may be in other places; the fingerprints of the data tell
            raise ValueError(
                f"the processes have different {', '.join(different)}: a task must return the same examples for the same arguments, "
                "and every host needs the same options, recipe, model and data files"
            )

    def checkpoint_to_resume(self, wanted: str | Path | bool | None, allow_changes: Sequence[str] = ()) -> Path | None:
        """The checkpoint from which `train` would continue, or None for a new start; raises CheckpointError as `train` does."""
        allow_changes = [allow_changes] if isinstance(allow_changes, str) else allow_changes
        folder = identity.choose(wanted, self.args.run_dir)
        if folder is None and identity.meaning(wanted) is None:
            identity.refuse_another_run(Path(self.args.run_dir), self.args, self.decided)  # before any process replaces the run
        if len(set(gather_object([str(folder)]))) > 1:
            raise CheckpointError(f"the processes see different checkpoints in {self.args.run_dir}: it must be a shared folder")
        if folder is None:
            if allow_changes:
                identity.check_allowed(self.identity(), self.args, allow_changes)
            return None
        step, manifest = checkpoints.step_of(folder), checkpoints.read_manifest(folder)
        if manifest.get("step") != step:
            raise CheckpointError(f"{folder} was renamed: it holds step {manifest.get('step')!r}")
        self.refuse_another_format(folder)
        self.adopt({name: value for name, value in identity.part(manifest, "settings").items() if name not in allow_changes})
        self._allowed_changes = identity.refuse_differences(folder, manifest, self.identity(), self.args, allow_changes)
        fixed = [text for name, text in self._allowed_changes.items() if self.sharded and name in FIXED_BY_DEEPSPEED]
        if fixed:
            raise CheckpointError(
                f"{folder}: {'; '.join(fixed)}. DeepSpeed restores this from its checkpoint: restore the old values, or start from the "
                "beginning with --overwrite or in another --output_dir"
            )
        refuse_another_scale(self.model, folder, allow_changes)
        if step > self.args.max_steps:
            raise CheckpointError(
                f"{folder} is beyond max_steps ({self.args.max_steps}): raise max_steps, or start from the beginning"
            )
        self.evaluation_due = manifest.get("evaluation_due") is True
        return folder

    def refuse_another_format(self, folder: Path) -> None:
        """Raise CheckpointError if DeepSpeed wrote the checkpoint and this run is without it, or the other way around."""
        of_deepspeed = (folder / "latest").is_file()  # it names the folder with DeepSpeed's own files
        if of_deepspeed != self.sharded:
            before, now = ("with", "without") if of_deepspeed else ("without", "with")
            raise CheckpointError(
                f"{folder} was written {before} DeepSpeed, whose checkpoints have a format of their own: resume it {before} DeepSpeed "
                f"(this run is {now}), or start from the beginning with --overwrite or in another --output_dir"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_adapter_weights(self.model, Path(resume_from_checkpoint))
        self._load_rest(Path(resume_from_checkpoint))

    def _load_rest(self, folder: Path) -> None:
        """Load everything but weights, optimizer and schedule."""
        self._initial = False
        states = checkpoints.load_state(folder, "random_state")
        if not isinstance(states, list):
            raise CheckpointError(f"{folder / 'random_state.json'} holds no list of states; use an earlier checkpoint")
        if self.args.process_index < len(states):
            self._random_state = states[self.args.process_index]
        self.load_extra(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.state.global_step != (step := checkpoints.step_of(checkpoint)):  # Trainer starts at 0 where it finds no state
            file = Path(checkpoint) / "trainer_state.json"
            raise CheckpointError(f"{file} was not read, or is of step {self.state.global_step}, not of {step}: try again")
        if self.sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            self._load_rest(Path(checkpoint))  # DeepSpeed loads the weights itself, without `_load_from_checkpoint`
            return
        scheduler = self.lr_scheduler
        assert scheduler is not None  # Trainer creates it first
        groups, rates = self.optimizer.state_dict()["param_groups"], getattr(scheduler, "base_lrs", [])
        optimizer_state, schedule_state = (checkpoints.load_state(checkpoint, name) for name in ("optimizer", "scheduler"))
        try:
            check_optimizer_state(optimizer_state, self.optimizer)
            if not same_structure(schedule_state, scheduler.state_dict()):
                raise ValueError("the state of the schedule has other entries")
            self.optimizer.load_state_dict(optimizer_state)
            scheduler.load_state_dict(schedule_state)
        except Exception as error:  # what PyTorch raises for values that are not states
            raise CheckpointError(f"the optimizer state in {checkpoint} does not fit this run ({error})") from error
        if not self._allowed_changes:
            return
        for group, present in zip(self.optimizer.param_groups, groups, strict=True):
            # The stored group has the old weight decay, ...
            group |= {**present, "params": group["params"], "lr": group["lr"]}
        if isinstance(scheduler, LambdaLR):  # the caller's of another kind keeps its rates
            scheduler.base_lrs = list(rates)
            for group, rate, schedule in zip(self.optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
                group["lr"] = rate * schedule(scheduler.last_epoch)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Does nothing: `take_random_state` restores it before the first step samples, which is earlier than Trainer would."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing: there is no gradient scaler, and Trainer would unpickle a file of that name."""

    def take_random_state(self) -> None:
        """Restore the checkpoint's random state, once, at the point where the uninterrupted run had it."""
        if self._random_state is not None:
            checkpoints.restore_random_state(self._random_state)
            self._random_state = None

    def keep_random_state(self) -> None:
        """Keep the present random state for the first step, whatever the data loader draws until then."""
        self._random_state = checkpoints.random_state()

    def settle(self) -> None:
        """The state is that of the end of a step: weights, optimizer and teacher change only after `unsettle`."""
        self._settled = checkpoints.random_state()

    def unsettle(self) -> None:
        """An update begins."""
        self._settled, self._initial = None, False

    def restore_settled(self) -> None:
        """Undo what a step changes before its first update."""
        assert self._settled is not None
        checkpoints.restore_random_state(self._settled)

    def save_settled(self) -> None:
        """Save the end of the last step from within the next one, or from within an evaluation."""
        step = self.state.global_step
        if self._settled is not None and self.args.world_size == 1:
            self.restore_settled()
            if not checkpoints.checkpoint_folder(self.args.run_dir, step).is_dir():
                self._save_checkpoint(self.model, None)
            logger.warning(
                "the work after step %d did not end within stop_within (%g s) and is discarded; rerun the command to resume",
                step,
                self.stop.within,
            )
        else:
            last = checkpoints.newest_checkpoint(self.args.run_dir)
            kept = f"{last.name} remains" if last is not None else "there is no checkpoint yet"
            logger.warning("step %d took longer than stop_within (%g s) to end: dropped; %s", step + 1, self.stop.within, kept)

    # ---- Writing -------------------------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Optimizer states are spread over processes (DeepSpeed), and every process writes its part."""
        return self.is_deepspeed_enabled

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a complete checkpoint or none. If it cannot be written (a full disk), training continues without it."""
        self.check_state()
        folder = checkpoints.checkpoint_folder(self.args.run_dir, self.state.global_step)
        states = gather_object([checkpoints.random_state()])
        error = None
        try:
            if self.args.should_save or self.sharded:
                self.write_checkpoint(folder, states)
        except OSError as problem:
            if self.sharded:
                raise  # the other processes wait for this one's part
            error = problem
        if any(gather_object([error is not None])):
            self.failed_checkpoints += 1
            logger.error(
                "%s could not be written (%s); training continues without it. Make room on the disk, or change --output_dir",
                folder,
                error or "on the main process",
            )
        elif self.args.should_save:
            checkpoints.rotate(self.args.run_dir, self.args.save_total_limit)
            if self.args.push_to_hub and self.args.hub_strategy != "end":
                self.push(folder)

    def check_state(self) -> None:
        """Raise an error if the run directory is not this run's any more, or if weights or optimizer state are not finite."""
        if self.lock is not None:
            self.lock.check()
        states = [
            (f"optimizer state {name!r}", value) for state in self.optimizer.state.values() for name, value in state.items()
        ]
        for name, value in [*trained_parameters(self.model).items(), *states]:
            if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                raise self.not_finite(name)

    def not_finite(self, what: str) -> ValueError:
        """The error that ends a run whose state cannot be continued; the last checkpoint stays."""
        step, args = self.state.global_step, self.args
        return ValueError(
            f"{what} is not finite after step {step}, and nothing of this state is saved: checkpoints in {args.run_dir} are of "
            f"earlier steps. Check learning_rate ({args.learning_rate:g}), weight_decay ({args.weight_decay:g}) and max_grad_norm "
            f"({args.max_grad_norm:g})"
        )

    def write_checkpoint(self, folder: Path, random_states: Sequence[dict[str, Any]]) -> None:
        """Write all files to a hidden folder, seal it, and rename it; raises OSError if that fails."""
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
                self.save_trainer_state(unfinished)
                content = {
                    "step": self.state.global_step,
                    "evaluation_due": bool(self.evaluation_due),
                    **self.identity(),
                    "machine": identity.machine(self.args.device),
                }
                checkpoints.seal(unfinished, content)
        if self.sharded:
            self.accelerator.wait_for_everyone()

    # ---- The Hub -------------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository; raises ValueError, before anything is trained, if that fails.

        Trainer's own method has no `private` before transformers 5.23.
        """
        if not self.is_world_process_zero():
            return
        name = self.args.hub_model_id or Path(self.args.run_dir).absolute().name
        token = self.args.hub_token if token is None else token
        private = self.args.hub_private_repo if private is None else private
        try:
            created = HfApi().create_repo(name, token=token, private=private, exist_ok=True)
        except Exception as error:
            raise ValueError(
                f"push_to_hub: the repository cannot be created ({type(error).__name__}: {' '.join(str(error).split())[:300]}): check "
                "the connection, HF_TOKEN and hub_model_id, or train without push_to_hub"
            ) from error
        self.push_in_progress = None
        self.hub_model_id = cast(Any, created.repo_id)  # Trainer declares None

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message: str | None = None,
        *,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> CommitInfo | None:
        """Upload adapter, tokenizer and model card as they are now. Nothing else is uploaded, and the run directory stays as it is.

        Args:
            commit_message: "step N" by default.
            token, revision, private: `args.hub_token`, `args.hub_revision` and `args.hub_private_repo` by default.

        Returns:
            The commit; None on all but the main process.

        Raises:
            ValueError: the repository cannot be created.
            Exception: whatever `HfApi.upload_folder` raises.
        """
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder, _internal_call=True)
            if self.is_world_process_zero():
                return self.upload(Path(folder), commit_message, token, revision)
        return None

    def upload(
        self, folder: Path, message: str | None = None, token: str | None = None, revision: str | None = None
    ) -> CommitInfo:
        """Upload adapter, tokenizer and model card from a folder. (Trainer would upload its arguments as a pickle, too.)"""
        return HfApi().upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            allow_patterns=UPLOADED,
            commit_message=message or f"step {self.state.global_step}",
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
        )

    def push(self, folder: Path) -> None:
        """`upload` during a run; a failure is logged."""
        try:
            self.upload(folder)
        except Exception as error:
            chosen = [f"--include={pattern}" for pattern in UPLOADED]
            revision = [f"--revision={self.args.hub_revision}"] if self.args.hub_revision else []
            logger.error(
                "the upload to %s failed (%s: %s); later: %s",
                self.hub_model_id,
                type(error).__name__,
                " ".join(str(error).split())[:300],
                shlex.join(["hf", "upload", str(self.hub_model_id), str(folder), *chosen, *revision]),
            )

    def write_at_the_end(self, write: Callable[[Path], None], target: Path) -> None:
        """Call `write(target)` until it succeeds: while the disk is full, the state stays in memory until a signal ends the run.

        On the first failure, `write` is called once with a temporary folder.

        Raises:
            OSError: another error than a full disk, or a signal was received.
        """
        copy = ""
        while True:
            try:
                return write(target)
            except OSError as error:
                step, reason = self.state.global_step, " ".join(str(error).split())
                if not copy:
                    copy = copy_of(write, target.name)
                    logger.error("%s of step %d cannot be written (%s). %s", target, step, reason, copy)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self.stop.signal is not None:
                    raise OSError(
                        f"{target} of step {step} could not be written ({reason}). {copy}. Make room; the run then resumes from its "
                        "last checkpoint"
                    ) from error
                logger.error("make room on the disk: this is tried again every %.0f s until SIGTERM or Ctrl-C", RETRY_AFTER)
                self.stop.wait(RETRY_AFTER)

    def save_trainer_state(self, folder: Path) -> None:
        """Write Trainer's own state, as `Trainer._save_checkpoint` does."""
        callback_states = cast(dict[str, Any], self.state.stateful_callbacks)  # declared as the list that it is made from
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                callback_states[type(callback).__name__] = callback.state()
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.lr_scheduler is not None
        checkpoints.save_state(self.optimizer.state_dict(), output_dir, "optimizer")
        checkpoints.save_state(self.lr_scheduler.state_dict(), output_dir, "scheduler")


def same_structure(stored: Any, present: Any) -> bool:
    """Whether nested mappings and sequences have the same keys and lengths, and values of the same kind."""
    if isinstance(present, Mapping):
        return (
            isinstance(stored, Mapping)
            and stored.keys() == present.keys()
            and all(same_structure(stored[key], present[key]) for key in present)
        )
    if isinstance(present, list | tuple):
        same = type(stored) is type(present) and len(stored) == len(present)
        return same and all(map(same_structure, stored, present))
    if isinstance(present, int | float) and not isinstance(present, bool):
        return isinstance(stored, int | float) and not isinstance(stored, bool)
    return stored is None or present is None or type(stored) is type(present)


def check_optimizer_state(stored: Any, optimizer: Optimizer) -> None:
    """Raise ValueError if a stored state is not one of this optimizer: the same parameters, and moments of their shapes."""
    present = optimizer.state_dict()["param_groups"]
    same_parameters = [group["params"] for group in stored["param_groups"]] == [group["params"] for group in present]
    if not (same_parameters and same_structure(stored["param_groups"], present)):
        raise ValueError("it has other groups of parameters")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if stored["state"].keys() not in (set(), set(range(len(parameters)))):
        raise ValueError("it lacks the state of some parameters")
    for index, state in stored["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state and (state[name].shape != parameters[index].shape or not state[name].is_floating_point()):
                raise ValueError(f"{name} of parameter {index} has another shape or type")


def copy_of(write: Callable[[Path], None], name: str) -> str:
    """Call `write` with `name` in a new temporary folder; returns a sentence that says where, or why there is no copy."""
    try:
        place = Path(tempfile.mkdtemp(prefix="firedistill-"))
        write(place / name)
    except OSError as error:
        return f"A copy in {tempfile.gettempdir()} failed as well ({' '.join(str(error).split())})"
    return f"A copy is in {place / name}"


def refuse_another_scale(model: PeftModel, folder: Path, allowed: Sequence[str]) -> None:
    """Raise CheckpointError if the stored factors would have another effect in the model's adapter, or its settings are damaged."""
    try:
        changes = scaling_changes(model, folder)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    if refused := [text for name, text in changes.items() if name not in allowed]:
        raise CheckpointError(
            f"the adapter in {folder} has other settings than the model's: {'; '.join(refused)}. Resume with the PeftModel or the "
            f"initial_adapter that the run began with, or with --initial_adapter {folder}"
        )


def load_adapter_weights(model: PeftModel, folder: Path) -> None:
    """Load the stored adapter weights in place; raises CheckpointError if they are missing, damaged, or of another adapter."""
    try:
        factors = read_factors(folder / FACTORS, {name: tensor.shape for name, tensor in adapter_state(model).items()})
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    set_peft_model_state_dict(model, factors, adapter_name=model.active_adapters[0])
