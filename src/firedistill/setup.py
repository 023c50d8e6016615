"""Everything that a run needs before anything is trained: `load_setup`."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firedistill.config import SelfDistillConfig, WarmStartConfig
from firedistill.footprint import memory_of_step
from firedistill.memory import LOADING, LOADING_TEACHER, BatchLimit, OutOfMemory, explained_memory, total_memory, unused_memory
from firedistill.models.adapter import compute_in_base_dtype, computes_in_base_dtype
from firedistill.models.attention import has_bfloat16, use_own_attention
from firedistill.models.errors import ModelError
from firedistill.models.loading import load_model_and_tokenizer, weight_bytes
from firedistill.models.lora import add_lora, check_adapter, load_adapter, sort_targets
from firedistill.models.norms import fuse_norms
from firedistill.models.quantized import prepare_quantized
from firedistill.models.sharding import distributed_config, limit_waiting, lockstep
from firedistill.models.states import is_sharded, unwrap
from firedistill.models.tokens import set_stop_and_pad_tokens
from firedistill.objectives import Objective, load_objective
from firedistill.prompts import PromptEncoder
from firedistill.rollouts.load import choose_engine
from firedistill.rollouts.merging import fusable_layers, merged_bytes
from firedistill.run.trackers import check_trackers
from firedistill.tasks import OBJECT, Example, TableTask, Task, load_task
from firedistill.tasks.guard import read_examples
from firedistill.tasks.gym import GymTask
from firedistill.tasks.judge import load_judge
from firedistill.tasks.judged import guarded_task
from firedistill.tasks.reading import BadRow, rows_of, with_class_names
from firedistill.teacher import Teacher
from firedistill.teacher.ema import FixedWeights
from firedistill.teacher.own_model import adapter_teacher, model_teacher, vocabulary_size
from firedistill.terminal import some

logger = logging.getLogger(__name__)

# The variable without which PyTorch refuses deterministic products on a GPU, and the larger one of the sizes that it accepts
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
NOT_COLUMNS = {"uid", "metadata", "history", "labels", "feedback"}  # fields of `Example` that data do not have as columns


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
        also: further tasks with their held-out problems, by name.
        teacher_model: a teacher with weights of its own; None if they are the student's, or if no teacher was asked for.
        teacher_encoder: turns messages into token ids of the teacher.
        decided: settings that were left open, with what was chosen for the device and why, as texts by name.
    """

    args: SelfDistillConfig
    task: Task
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    train_examples: list[Example]
    eval_examples: list[Example]
    also: dict[str, tuple[Task, list[Example]]]
    teacher_model: PreTrainedModel | PeftModel | None
    teacher_encoder: PromptEncoder
    decided: dict[str, str] = field(default_factory=dict)

    def teacher(self, limit: BatchLimit) -> Teacher:
        """The teacher of the settings; its average starts at the current weights of the student.

        Args:
            limit: padded tokens per forward pass.
        """
        args, own = self.args, self.teacher_model
        if own is not None:
            with explained_memory(f"the teacher does not fit; {LOADING_TEACHER}"):
                if args.teacher_quantization is None:
                    cast(torch.nn.Module, own).to(next(self.model.parameters()).device)
        return Teacher(
            self.model if own is None else own,
            self.task,
            self.teacher_encoder,
            rate={"student": 1.0, "initial": 0.0}.get(args.teacher_kind, args.ema_rate),
            temperature=args.score_temperature,
            share_prefixes=args.share_prefixes,
            limit=limit,
            feedback=args.teacher_feedback,
            groups=args.groups_of_fields,
            most_views=args.attribution_views,
            weights=None if own is None else FixedWeights(own),
            vocabulary_size=None if own is None else vocabulary_size(unwrap(self.model)),
        )


def load_setup(
    args: SelfDistillConfig,
    *,
    model: PreTrainedModel | PeftModel | str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    task: Any = None,
    train_examples: Iterable[Any] | None = None,
    eval_examples: Iterable[Any] | None = None,
    train: bool = True,
    teacher: bool = True,
) -> Setup:
    """Load what a run needs. `args` is copied, not changed.

    Args:
        args: the settings; they name whatever is not given here.
        model: a causal language model, its name or folder, or a `PeftModel` with one LoRA adapter, which is trained on. Any other model
            gets a LoRA adapter, whose initial values `args.seed` alone decides.
        tokenizer: the model's own by default; required with a model object. A pad token that is missing or ends a response is replaced,
            in place.
        task: a task, its name, or rows (see `load_task`).
        train_examples, eval_examples: problems to use instead of the task's: examples, or rows (mappings, a `datasets.Dataset`) with
            the columns that the task's method `example` reads, or else with the fields of `Example`.
        train: False loads no training problems of the task, for an evaluation.
        teacher: False loads no teacher, for an evaluation.

    Raises:
        TypeError: `tokenizer` or the problems are something else.
        ValueError: settings, model, tokenizer or task do not fit together; the message says what to change.
    """
    check_types(args, model, tokenizer, train_examples=train_examples, eval_examples=eval_examples)
    args = copy.copy(args)
    args.output_dir = os.path.abspath(args.run_dir)  # a task may change the working directory
    if args.data_dir is not None:
        args.data_dir = os.path.abspath(os.path.expanduser(args.data_dir))
    if args.deterministic:
        use_deterministic_algorithms()
    check_trackers(args.report_to)
    judge = load_judge(args.judge, key=train or teacher) if args.judge is not None else None
    if judge is not None and not judge.decides and not (train or teacher):
        judge = None  # nobody reads its fields, and nobody needs its key
    task = named_task(task, args, judged=judge is not None and judge.decides)
    if isinstance(task, TableTask):
        task.check()  # before a large model is loaded
    task = guarded_task(task, args.task_timeout, judge)
    # Refuses an unknown method, and a teacher that does not serve it, before a large model is loaded.
    objective = read_method_settings(args)
    objective.check_teacher(args.teacher_kind, args.teacher_feedback)
    if judge is not None and not judge.decides and not reads_feedback(args, objective):
        raise ValueError(
            f"judge {args.judge} gives feedback fields, which nothing reads with method {args.method} and these options of the "
            "teacher: leave judge out, or name a verdict or a threshold in the file"
        )
    evaluates = bool(args.eval_size) and not (isinstance(eval_examples, Sized) and len(eval_examples) == 0)
    also = also_evaluated(args) if evaluates else {}
    student, tokenizer, decided = load_student(args, model, tokenizer, train=train or teacher)
    with ExitStack() as on_failure:
        if isinstance(model, PreTrainedModel):
            on_failure.callback(student.unload)  # the caller corrects the error and gives the same object again
        teacher_model, teacher_tokenizer = load_teacher(args, student, tokenizer) if teacher else (None, tokenizer)
        for each in (student, teacher_model):
            if each is not None and args.device.type == "cuda":
                decided["norms"] = f"{fuse_norms(each)} fused, the default for cuda"
            if each is not None and prefers_own_attention(args, each):
                use_own_attention(each)
        if args.rollouts == "auto":
            args.rollouts = choose_engine(student, args)
            decided["rollouts"] = f"{args.rollouts}: chosen by auto"
        if args.rollouts == "hf":
            args.vllm_weights = None  # of an engine that `auto` has not chosen
        decided |= decide_for_device(args, student, teacher_model)
        lockstep(student)  # all processes create it here
        limit_waiting(student, args.ddp_timeout)

        train_examples, eval_examples = examples_of(args, task, train_examples, eval_examples, train)
        if not train and args.device.type == "cuda" and args.quantization is None and not is_sharded(unwrap(student)):
            with explained_memory(f"the model does not fit; {LOADING}"):
                student.to(args.device)  # `Trainer` does it where something is trained
        encoder, teacher_encoder = PromptEncoder(tokenizer), PromptEncoder(teacher_tokenizer)
        on_failure.pop_all()
        return Setup(
            args=args,
            task=task,
            model=student,
            tokenizer=tokenizer,
            encoder=encoder,
            train_examples=train_examples,
            eval_examples=eval_examples,
            also=also if eval_examples else {},
            decided=decided,
            teacher_model=teacher_model,
            teacher_encoder=teacher_encoder,
        )


def examples_of(
    args: SelfDistillConfig, task: Task, train_examples: Iterable[Any] | None, eval_examples: Iterable[Any] | None, train: bool
) -> tuple[list[Example], list[Example]]:
    """The training and the held-out problems: those that are given, or else the task's.

    Evaluation is turned off in `args` if there are no held-out problems.

    Raises:
        ValueError: `train` is set and there are no training problems.
    """
    if train_examples is not None:
        train_examples = given_examples(train_examples, task, "train_examples")
    else:
        train_examples = task.examples("train", args.train_size, args.seed, args.data_dir) if train else []
    if eval_examples is not None:
        eval_examples = given_examples(eval_examples, task, "eval_examples")
    else:
        eval_examples = held_out(task, args, args.eval_split) if args.eval_size else []
    if train and not train_examples:
        raise ValueError(
            f"task {task.name!r} has no training examples: its split 'train' is empty; add problems or name another task"
        )
    if not eval_examples:
        args.eval_strategy, args.eval_on_start = "no", False
    return train_examples, eval_examples


def check_types(args: Any, model: Any, tokenizer: Any, **examples: Any) -> None:
    """Raise TypeError or ValueError unless `load_setup` can use what it is given."""
    if not isinstance(args, SelfDistillConfig):
        raise ValueError(f"args is a {type(args).__name__}: expected a SelfDistillConfig")
    if not isinstance(model, PreTrainedModel | PeftModel | str | os.PathLike | None):
        raise ValueError(f"model is a {type(model).__name__}: expected a PreTrainedModel, a PeftModel, or the name of a model")
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise TypeError(
            f"processing_class (tokenizer of load_setup) is a {type(tokenizer).__name__}: expected a tokenizer, such as "
            "AutoTokenizer.from_pretrained returns"
        )
    for name, given in examples.items():
        try:
            iter(() if given is None else given)
        except TypeError as error:
            text = f"{name} is a {type(given).__name__}: expected examples or rows, such as a list of mappings"
            raise TypeError(text) from error


def load_student(
    args: SelfDistillConfig,
    model: PreTrainedModel | PeftModel | str | os.PathLike[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    train: bool,
) -> tuple[PeftModel, PreTrainedTokenizerBase, dict[str, str]]:
    """The model with its adapter, its tokenizer, and why settings that were left open got their value, by name.

    `args` gets these values, and those that follow from a given model.

    Args:
        train: the factors are trained, or a teacher follows them.
    """
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if model is None and args.model.startswith(OBJECT):
        text = f"the model of this run was a Python object ({args.model.removeprefix(OBJECT)}): name one that can be loaded by --model"
        raise ValueError(text)
    if model is not None:
        args.model = (
            model if isinstance(model, str) else unwrap(model).config._name_or_path or f"{OBJECT}{type(unwrap(model)).__name__}"
        )
    decided: dict[str, str] = {}
    if model is None or isinstance(model, str):
        name, sharding = model or args.model, sharding_of(args)
        decided = decide_dtype(args, name) | decide_quantization(args, name)
        model, tokenizer = load_model_and_tokenizer(
            name,
            dtype=args.model_dtype,
            quantization=args.quantization,
            attn_implementation=args.attn_implementation,
            revision=args.model_revision,
            distributed_config=sharding,
            device=loading_device(args, args.quantization) if sharding is None else None,
            tokenizer=tokenizer,
        )
    elif tokenizer is None:
        raise ValueError("a model object needs its tokenizer: pass processing_class=... (tokenizer=... of load_setup)")
    else:
        match_object(args, model, train=train)
        prepare_quantized(model)
        set_stop_and_pad_tokens(unwrap(model), tokenizer)
    if args.checkpoint_sampling:
        use_checkpoint_sampling(args, model)
    if args.n_gpu > 1:
        launcher = f"torchrun --no-python --standalone --nproc_per_node {args.n_gpu} firedistill ..."
        logger.warning("one process uses one GPU; for all %d start with: %s", args.n_gpu, launcher)
        args._n_gpu = 1
    if not isinstance(model, PeftModel):
        torch.manual_seed(args.seed)  # whatever was drawn while loading, the adapter depends on the seed alone
        model = trainable_adapter(model, args)
    student = sort_targets(model)
    if args.lora_dtype == "base":
        compute_in_base_dtype(student)
    elif computes_in_base_dtype(student):
        raise ValueError(
            "lora_dtype is float32, but the adapter of the model already computes in the type of the base, as an earlier trainer "
            "has set it: set lora_dtype to base, or load the model and its adapter again"
        )
    return student, tokenizer, decided


def loading_device(args: SelfDistillConfig, quantization: str | None) -> torch.device | None:
    """Where weights are read to; None is the host. A quantized model stays there, and transformers would choose a GPU for it."""
    return args.device if args.device.type == "cuda" or quantization is not None else None


def reads_feedback(args: SelfDistillConfig, objective: Objective) -> bool:
    """Whether the feedback of the task has an effect on what is trained."""
    if isinstance(args, WarmStartConfig):
        return args.feedback_share > 0
    return objective.uses_teacher and objective.reads_feedback and args.teacher_feedback


def load_teacher(
    args: SelfDistillConfig, student: PeftModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel | PeftModel | None, PreTrainedTokenizerBase]:
    """The teacher's model, None if its weights are the student's, and its tokenizer.

    Args:
        tokenizer: that of the student.

    Raises:
        ModelError: there is no such teacher, or it does not fit the student.
        OutOfMemory: it does not fit into memory.
    """
    if args.teacher_kind == "adapter":
        adapter = adapter_teacher(student, args.teacher)
        if args.lora_dtype == "base":
            compute_in_base_dtype(adapter)
        return adapter, tokenizer
    if args.teacher_kind != "model":
        return None, tokenizer
    try:
        return model_teacher(
            args.teacher,
            student,
            tokenizer,
            dtype=args.teacher_dtype or args.model_dtype,
            quantization=args.teacher_quantization,
            attn_implementation=args.attn_implementation,
            device=loading_device(args, args.teacher_quantization),
        )
    except ModelError as error:
        raise ModelError(f"teacher {args.teacher}: {error}") from error
    except OutOfMemory as error:
        raise OutOfMemory(str(error).replace(LOADING, LOADING_TEACHER)) from error


def named_task(task: Any, args: SelfDistillConfig, judged: bool) -> Task:
    """The task that is given, or that the settings name. `args.task` names it from then on, so that `config.yaml` is true.

    Args:
        judged: see `load_task`.
    """
    if task is None or isinstance(task, str):
        args.task = args.task if task is None else task
        return load_task(args.task, judged=judged, **args.data_options)
    kind = type(task)
    if isinstance(task, Task) and (options := ", ".join(args.data_options)):
        raise ValueError(
            f"{options}: a task that is a {kind.__name__} says itself what its data are; leave out what is set here"
        )
    found = task if isinstance(task, Task) else load_task(task, judged=judged, **args.data_options)
    if args.task != f"{kind.__module__}:{kind.__qualname__}":
        # Not the module, which is __main__ where a script defines the class.
        args.task = f"{OBJECT}{found.name if isinstance(found, TableTask) else kind.__qualname__}"
    return found


def given_examples(rows: Iterable[Any], task: Task, where: str) -> list[Example]:
    """Examples that the caller gives, as examples or as rows.

    The task reads a row. Where it cannot, or the row has a field of `Example` that is no column of data, the row holds the fields. A
    `TableTask` or `GymTask` reads every row but those with a uid and metadata, or with lists of messages, labels or fields.

    Raises:
        ValueError: a row is neither; the message names it and its columns.
    """
    names = {declared.name for declared in fields(Example)}
    own = getattr(task, "task", task)
    table = own if isinstance(own, TableTask) else None
    if table is not None and hasattr(rows, "column_names") and isinstance(rows, Sized):
        rows = with_class_names(rows_of(rows, where)).records
    found = []
    for number, row in enumerate(rows):
        uid = f"{where}/{number}"
        if isinstance(row, Mapping):
            has_fields = {"question", "answer"} <= row.keys() <= names
            as_fields = has_fields and bool(NOT_COLUMNS & row.keys())
            if as_fields and isinstance(own, TableTask | GymTask):  # whose rows may have such columns
                lists = any(isinstance(row.get(name), list | tuple) for name in ("history", "labels", "feedback"))
                as_fields = lists or ("uid" in row and isinstance(row.get("metadata"), Mapping))
            try:
                own_uid = row.get("uid")
                named = own_uid if isinstance(own_uid, str) and own_uid else uid
                row = example_of(row, uid) if as_fields else task.example(row, named)
            except Exception as error:  # a task of others may raise any
                if table is not None and isinstance(error, BadRow) and table.has_question(row):
                    raise ValueError(f"{uid}: {error}") from error
                if not has_fields:
                    raise ValueError(
                        f"{uid} has the columns {', '.join(map(str, row))}, which example of {task.name} does not read ({error}): "
                        f"expected question and answer, and nothing but {', '.join(sorted(names))}"
                    ) from error
                row = example_of(row, uid)
        found.append(row)
    return read_examples(found, where)


def example_of(row: Mapping[str, Any], uid: str) -> Example:
    """A row with the fields of `Example`, whose uid is this one unless it has its own."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    if isinstance(values["answer"], int | float):
        values["answer"] = str(values["answer"])
    return Example(**{"uid": uid, **values})


def held_out(task: Task, args: SelfDistillConfig, split: str) -> list[Example]:
    """`eval_size` problems of a split on which nothing is trained.

    Raises:
        ValueError: the split is the one that is trained on, or the task has no such split.
    """
    trained, evaluated = (getattr(task, name, None) for name in ("train_split", "eval_split"))
    if split == "train" or (split == trained != evaluated):
        raise ValueError(
            f"eval_split is {split!r}, which {task.name} is trained on; expected 'eval' or another published split"
        )
    if resolve := getattr(task, "resolve_split", None):
        try:
            resolve(split)
        except ValueError as error:
            own = isinstance(getattr(task, "task", task), TableTask)
            other = "; eval_data names a file of held-out problems" if own else ""
            raise ValueError(f"eval_split is {split!r}: {error} Without eval_split it is 'eval'{other}") from error
    return task.examples(split, args.eval_size, args.eval_subset_seed, args.data_dir)


def also_evaluated(args: SelfDistillConfig) -> dict[str, tuple[Task, list[Example]]]:
    """The tasks that `eval_also` names, with their held-out problems. Only those that read `data_dir` get it.

    Raises:
        ValueError: there is no such task, or it has no held-out problems.
    """
    found = {}
    for name in args.eval_also:
        try:
            task, settings = guarded_task(load_task(name), args.task_timeout), copy.copy(args)
            if not getattr(task, "reads_data_dir", True):
                settings.data_dir = None
            found[name] = task, held_out(task, settings, "eval")
        except (ValueError, ImportError) as error:
            raise ValueError(f"eval_also names {name!r}: {error}") from error
        if not found[name][1]:
            raise ValueError(f"eval_also names {name!r}, which has no held-out problems: leave it out")
    return found


def use_deterministic_algorithms() -> None:
    """Let PyTorch use deterministic algorithms only, and raise where it has none.

    PyTorch looks at `CUBLAS_WORKSPACE_CONFIG` once, at the first matrix product on a GPU. A process that has made one before this call
    must have set the variable itself: the next product raises RuntimeError otherwise.
    """
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False  # every element is written before it is read
    torch.backends.cudnn.benchmark = False


def match_object(args: SelfDistillConfig, model: PreTrainedModel | PeftModel, train: bool) -> None:
    """Record the data type and the adapter of a model that is an object in the settings.

    Args:
        train: as in `record_adapter`.

    Raises:
        ValueError: the object is no language model, is in float16 or on several devices, its adapter cannot be trained or read back, or
            a setting asks for another model than the object is.
    """
    if not unwrap(model).can_generate():
        raise ValueError(
            f"the model is a {type(unwrap(model)).__name__}, without a language-model head: load it by AutoModelForCausalLM"
        )
    if any(p.dtype == torch.float16 for p in model.parameters()):
        raise ValueError(
            "the model is in float16, whose smallest numbers are larger than the gradients of most logits: load it in bfloat16 or "
            "float32 (model_dtype; dtype=... of from_pretrained)"
        )
    if len(places := {str(place) for place in (getattr(unwrap(model), "hf_device_map", None) or {}).values()}) > 1:
        raise ValueError(
            f"the layers of the model are on several devices ({', '.join(sorted(places))}): load it onto one (device_map of "
            "from_pretrained), or pass its name and set fsdp_size to spread it over processes"
        )
    if isinstance(model, PeftModel):
        record_adapter(args, model, train)
    elif any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "the model holds the layers of an adapter that an earlier trainer or add_adapter has put into it: load the model again, "
            "take the layers out (trainer.model.unload()), or pass the PeftModel (trainer.model) to continue with its adapter"
        )
    base = unwrap(model)
    dtype = str(base.dtype).removeprefix("torch.")
    attention = base.config.get_text_config(decoder=True)._attn_implementation
    for name, accepted in (
        ("model_revision", (None,)),
        ("model_dtype", ("auto", dtype)),
        ("quantization", (None,)),
        ("attn_implementation", (None, attention)),
        ("fsdp_size", (args.fsdp_size,) if is_sharded(base) else (None, 1)),
        ("initial_adapter", (None,) if isinstance(model, PeftModel) else (args.initial_adapter,)),
    ):
        if (value := getattr(args, name)) not in accepted:
            raise ValueError(
                f"{name} is {value}, but the model is an object that is loaded already ({dtype}, attention {attention}): pass its "
                f"name instead, or leave {name} out"
            )
    args.model_dtype = dtype


def record_adapter(args: SelfDistillConfig, model: PeftModel, train: bool) -> None:
    """Record the adapter of a model in the settings.

    Args:
        train: the factors are trained, or a teacher follows them.

    Raises:
        ValueError: the model has something else than one LoRA adapter in float32 that is called "default" and that `load_adapter` reads
            back, or a factor that would be trained is frozen.
    """
    adapters: dict[str, Any] = dict(model.peft_config)
    kinds = {name: config.peft_type.value for name, config in adapters.items()}
    if kinds != {"default": "LORA"}:
        found = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
        raise ValueError(
            f"the model has the adapters {found}: expected one LoRA adapter called 'default'. Delete the others (delete_adapter), or "
            "merge them into the base model (merge_and_unload) and add one by get_peft_model"
        )
    check_adapter(model)
    factors = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    if train and not all(factor.requires_grad for factor in factors):
        raise ValueError(
            "the model's adapter is frozen: load it by PeftModel.from_pretrained(..., is_trainable=True); all its factors are trained"
        )
    others = [name for name, parameter in model.named_parameters() if parameter.requires_grad and ".lora_" not in name]
    if train and others:
        raise ValueError(
            f"the model trains {some(others)} beside its adapter, which alone is saved: requires_grad_(False) freezes them"
        )
    if any(factor.dtype == torch.bfloat16 for factor in factors):
        raise ValueError(
            "the model's LoRA factors are bfloat16, in which small updates are rounded away: convert the base model before it gets "
            "the adapter, and leave autocast_adapter_dtype of peft at True"
        )
    config = adapters["default"]
    args.lora_r, args.lora_alpha, args.lora_dropout = config.r, config.lora_alpha, config.lora_dropout
    targets = sorted(config.target_modules)
    if targets != sorted(args.lora_target_modules):  # their order has no effect
        args.lora_target_modules = targets


def use_checkpoint_sampling(args: SelfDistillConfig, model: PreTrainedModel | PeftModel) -> None:
    """Replace `top_k` and `repetition_penalty` by those of the checkpoint's generation settings.

    Raises:
        ValueError: one of them is set to another value.
    """
    for name, disabled in (("top_k", 0), ("repetition_penalty", 1.0)):
        value, own = getattr(args, name), getattr(model.generation_config, name) or disabled
        if value not in (disabled, own):
            raise ValueError(
                f"{name} is {value}, but checkpoint_sampling uses the checkpoint's, {own}: leave one of the two options out"
            )
        setattr(args, name, own)


def smallest(memory: float) -> float:
    """The smallest value of all processes, which therefore decide alike."""
    return min(gather_object([memory]))


def decide_dtype(args: SelfDistillConfig, name: str) -> dict[str, str]:
    """Replace model_dtype 'auto' by the type that the device multiplies fast.

    A CPU without bfloat16 products takes several times as long for them as for those in float32. Older GPUs emulate them.
    """
    if args.model_dtype != "auto":
        return {}
    args.model_dtype, why = "bfloat16", f"the default for {args.device.type}"
    if args.quantization != "nf4" and not all(gather_object([has_bfloat16(args.device)])):
        on_cpu, need = args.device.type == "cpu", weight_bytes(name, "float32", args.model_revision)
        memory = smallest(total_memory() if on_cpu else unused_memory(args.device))
        args.model_dtype = "float32" if need <= memory / 4 else "bfloat16"
        sizes = (
            f"the weights in float32 take {need / 1e9:.1f} GB, its {'' if on_cpu else 'unused '}memory is {memory / 1e9:.1f} GB"
        )
        why = f"the {args.device.type} device does not multiply bfloat16; {sizes}"
    return {"model_dtype": f"{args.model_dtype}: {why}"}


def decide_quantization(args: SelfDistillConfig, name: str) -> dict[str, str]:
    """Replace quantization 'auto' by 'nf4' where the unused memory is below 1.5 times the weights in `model_dtype`."""
    if args.quantization != "auto":
        return {}
    need, unused = 1.5 * weight_bytes(name, args.model_dtype, args.model_revision), smallest(unused_memory(args.device))
    args.quantization = "nf4" if unused < need else None
    sizes = f"unused memory is {unused / 1e9:.1f} GB, 1.5 times the weights are {need / 1e9:.1f} GB"
    return {"quantization": f"{args.quantization or 'none'}: {sizes}"}


def read_method_settings(args: SelfDistillConfig) -> Objective:
    """The method of a run. Texts in `args.method_settings`, as of the command line, become what the method reads them as.

    Raises:
        ValueError: as `load_objective`.
    """
    objective = load_objective(args.method, args.method_settings)
    args.method_settings = {
        name: getattr(objective, name) if isinstance(value, str) else value for name, value in args.method_settings.items()
    }
    return objective


def decide_for_device(
    args: SelfDistillConfig, model: PeftModel, teacher: PreTrainedModel | PeftModel | None = None
) -> dict[str, str]:
    """Replace `gradient_checkpointing` and `merge_adapter` by what suits the device where they are None; returns why, by name.

    On a GPU, PyTorch does without the attention of cuDNN from then on.
    """
    decided, on_gpu = {}, args.device.type == "cuda"
    if on_gpu:  # cuDNN plans its attention on the host for every new shape, and the shapes of steps differ
        torch.backends.cuda.enable_cudnn_sdp(False)
    # The model may still have to move to the device.
    waiting = 0 if unwrap(model).device.type == "cuda" else sum(p.nbytes for p in model.parameters())
    unused = smallest(unused_memory(args.device)) - waiting if on_gpu else 0
    if args.merge_adapter is None:
        copies = merged_bytes(model)
        args.merge_adapter = copies > 0 and (not on_gpu or copies < unused / 2)
        why = f"copies take {copies / 1e9:.1f} GB, {unused / 1e9:.1f} GB are unused" if on_gpu else "the default for cpu"
        why = why if copies else "no projection can be merged"
        if on_gpu and args.merge_adapter and args.rollouts == "hf":
            why += f"; sampling fuses {len(fusable_layers(model))} layers"
        decided["merge_adapter"] = f"{str(args.merge_adapter).lower()}: {why}"
    checkpointing = args.activation_checkpointing
    if checkpointing is None:
        checkpointing, why = True, f"the default {'with fsdp_size' if on_gpu else 'for cpu'}"
        if not unwrap(model).supports_gradient_checkpointing:
            checkpointing, why = False, f"{type(unwrap(model)).__name__} does not support it"
        elif on_gpu and not is_sharded(unwrap(model)):
            parts = memory_of_step(args, model, checkpointing=False, teacher=teacher)
            need = sum(parts.values()) - sum(p.nbytes for p in model.parameters())
            checkpointing = need > 0.9 * unused
            why = f"without it a step adds up to {need / 1e9:.1f} GB, {unused / 1e9:.1f} GB are unused"
        decided["gradient_checkpointing"] = f"{str(checkpointing).lower()}: {why}"
        args.gradient_checkpointing = args.activation_checkpointing = checkpointing
    return decided


def prefers_own_attention(args: SelfDistillConfig, model: PreTrainedModel | PeftModel) -> bool:
    """Whether `models/attention.py` replaces PyTorch's attention: not on GPUs in half precision, and not where one is named."""
    return args.attn_implementation is None and (args.device.type != "cuda" or unwrap(model).dtype == torch.float32)


def sharding_of(args: SelfDistillConfig) -> Any:
    """How the base model is spread over processes, or None if every process holds all of it; raises ValueError if it cannot be."""
    if args.fsdp_size in (None, 1):
        if args.dp_replicate_size is not None:
            raise ValueError(
                "dp_replicate_size is the number of copies of a base model that is spread over processes: set fsdp_size too"
            )
        return None
    for name in ("quantization", "deepspeed"):
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
    with explained_memory(f"the adapter does not fit; lower lora_r ({args.lora_r})"):
        return add_lora(
            model,
            r=args.lora_r,
            alpha=args.lora_alpha,
            dropout=args.lora_dropout,
            target_modules=tuple(args.lora_target_modules),
        )
