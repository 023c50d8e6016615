"""Running out of memory: batches are halved for the rest of the run, and an error says what to change when that does not help."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import pytest
import torch

from firedistill import Example, FeedbackField, Verdict
from firedistill.memory import BatchLimit, OutOfMemory, explained_memory, is_out_of_memory
from firedistill.models.lora import add_lora
from firedistill.models.states import unwrap
from firedistill.objectives import Objective, Step, register
from firedistill.ops import Head
from firedistill.prompts import PromptEncoder
from firedistill.rollout import Response, Rollout, Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.remote import RolloutError
from firedistill.run.log import read_jsonl
from firedistill.tasks.endpoint import JudgeError
from firedistill.teacher import Teacher
from tiny import ToyTask, byte_tokenizer, random_model, rows_of, run_trainer

CUDA_ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB"
KERNEL_ERRORS = ["could not create a primitive", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...", "std::bad_alloc"]
CPU_ERROR = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"


@contextmanager
def memory_for(model, tokens: int = 10**9, sequences: int = 10**9, error: Exception | None = None):
    """A forward pass without gradient runs out of memory if it has more padded tokens or more sequences.

    Yields the shapes of the passes that fit.
    """
    fitted = []

    def check(module, arguments, options):
        if not torch.is_grad_enabled():
            ids = options["input_ids"]
            if ids.numel() > tokens or len(ids) > sequences:
                raise error or torch.OutOfMemoryError(CUDA_ERROR)
            fitted.append(tuple(ids.shape))

    hook = unwrap(model).base_model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield fitted
    finally:
        hook.remove()


# ---- The limit -------------------------------------------------------------------------------------------------------------


def sizes_tried(limit: BatchLimit, fits: int, error: Exception | None = None, most: int = 10**9) -> list[int]:
    tried = []
    for attempt in limit.attempts(most):
        with attempt:
            tried.append(min(limit.size, most))
            if tried[-1] > fits:
                raise error or torch.OutOfMemoryError(CUDA_ERROR)
    return tried


@pytest.mark.parametrize("kind", [JudgeError, RolloutError])
def test_a_server_that_runs_out_of_memory_is_another_error(kind):
    error = kind(f"the server at http://a: status 500: {CUDA_ERROR}")
    with pytest.raises(kind) as raised, explained_memory("lower max_new_tokens"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_ERROR),
        MemoryError(),
        RuntimeError(CPU_ERROR),
        OSError(12, "Cannot allocate memory"),
        *map(RuntimeError, KERNEL_ERRORS),
    ],
    ids=repr,
)
def test_a_limit_is_halved_until_the_work_fits_and_stays(error, caplog):
    assert is_out_of_memory(error)
    limit = BatchLimit(33, "rollout_batch_size", "")
    assert sizes_tried(limit, 5, error) == [33, 16, 8, 4]
    assert limit.size == 4 and limit.halved == 3
    assert [record.message for record in caplog.records][-1] == "out of memory: rollout_batch_size is 4 from this point"
    assert sizes_tried(limit, 5, error) == [4] and limit.halved == 3 and len(caplog.records) == 3
    assert sizes_tried(limit, 1, error) == [4, 2, 1]


def test_every_attempt_is_smaller_than_what_has_failed():
    """A limit above what there is would repeat the same work."""
    limit = BatchLimit(32, "rollout_batch_size", "")
    assert sizes_tried(limit, 8, most=8) == [8] and limit.size == 32
    assert sizes_tried(limit, 4, most=8) == [8, 4] and limit.size == 4 and limit.halved == 1
    assert sizes_tried(limit, 3, most=8) == [4, 2] and limit.size == 2


@pytest.mark.parametrize(("size", "smallest", "tried"), [(2, 1, [2, 1]), (256, 64, [256, 128, 64]), (100, 64, [100])])
def test_a_limit_is_not_halved_below_the_smallest(size, smallest, tried):
    limit, found = BatchLimit(size, "tokens", "lower max_new_tokens", smallest=smallest), []
    with pytest.raises(OutOfMemory, match=r"^out of memory \(CUDA out of memory. Tried .* GiB\): lower max_new_tokens$"):
        for attempt in limit.attempts(1000):
            with attempt:
                found.append(limit.size)
                raise torch.OutOfMemoryError("CUDA out of memory.\n  Tried to allocate 2.00 GiB")
    assert found == tried and limit.size == tried[-1]


def test_a_limit_that_processes_share_is_not_adjusted():
    limit = BatchLimit(32, "tokens", "lower max_new_tokens", adjustable=False)
    assert sizes_tried(limit, 32) == [32]
    for most, tried in ((100, 32), (8, 8)):
        named = rf": tokens is 32: lower it below {tried}\. If that does not help: lower max_new_tokens$"
        with pytest.raises(OutOfMemory, match=named):
            sizes_tried(limit, 7, most=most)
    with pytest.raises(OutOfMemory, match=r"GiB\): lower max_new_tokens$"):
        sizes_tried(limit, 0, most=1)
    assert limit.size == 32 and limit.halved == 0


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), ValueError("out of range")], ids=repr)
def test_other_errors_are_not_mistaken_for_memory(error):
    limit = BatchLimit(32, "tokens", "")
    with pytest.raises(type(error)) as raised:
        sizes_tried(limit, 0, error)
    assert raised.value is error and limit.size == 32 and limit.halved == 0 and not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, explained_memory("advice"):
        raise error
    assert raised.value is error


def test_the_tensors_of_a_failed_attempt_are_freed_before_the_next():
    """The exception's traceback refers to every frame down to the one that raised, and those to their tensors."""
    limit, alive, left = BatchLimit(4, "tokens", ""), [], []

    def forward(size: int) -> torch.Tensor:
        states = torch.zeros(size)
        itself = [states]
        itself.append(itself)  # only the garbage collector frees a cycle
        alive.append(weakref.ref(states))
        if size > 1:
            raise torch.OutOfMemoryError(CUDA_ERROR)
        return states

    for attempt in limit.attempts(4):
        left.append([reference() is not None for reference in alive])
        with attempt:
            states = forward(limit.size)
    assert left == [[], [False], [False, False]] and len(states) == 1


def test_exhausted_memory_is_explained():
    with explained_memory("lower lora_r"):
        pass
    with pytest.raises(OutOfMemory, match=r"out of memory \(MemoryError\): lower lora_r"), explained_memory("lower lora_r"):
        raise MemoryError
    with pytest.raises(OutOfMemory) as raised, explained_memory("lower lora_r"):
        raise torch.OutOfMemoryError("x" * 1000)
    assert len(str(raised.value)) < 300 and isinstance(raised.value, ValueError)


# ---- What it limits --------------------------------------------------------------------------------------------------------


def rollouts(count: int = 4) -> list[Rollout]:
    fields = (FeedbackField("outcome", "wrong"), FeedbackField("hint", "longer " * 5))
    example = Example("toy/train/0", "Why?", "even")
    verdict = Verdict(False, None, "even")
    return [Rollout(example, [5, 6, 7], Response([20, 21 + i], "", True), verdict, fields) for i in range(count)]


def teacher_of(model, **options) -> Teacher:
    return Teacher(model, ToyTask(), PromptEncoder(byte_tokenizer()), **options)


def test_the_teacher_reads_in_smaller_batches():
    model, members = random_model(dtype=torch.float64), rollouts()
    expected = teacher_of(model, share_prefixes=False).states(members, ["full", 0])
    longest = max(teacher_of(model).view_tokens(member, "full") for member in members)
    teacher = teacher_of(model, share_prefixes=False, limit=BatchLimit(8 * longest, "tokens", "does not fit"))
    with memory_for(model, tokens=2 * longest) as fitted:
        found = teacher.states(members, ["full", 0])
        again = teacher.full(members)
    assert teacher.limit.size == 2 * longest and teacher.limit.halved == 2 and [count for count, _ in fitted] == [2] * 6
    for a, b in zip([*found, again], [*expected, expected[0]], strict=True):
        torch.testing.assert_close(a.hidden, b.hidden, rtol=1e-9, atol=1e-9)
    with memory_for(model, tokens=longest - 1), pytest.raises(OutOfMemory, match="does not fit"):
        teacher.states(members, ["full", 0])


def test_the_teacher_gives_up_cached_prefixes_first():
    """Keys and values of whole prompts are what memory is short of; they are freed before the next attempt."""
    model, members = random_model(dtype=torch.float64), rollouts()
    expected = teacher_of(model).full(members).hidden
    teacher, reads, kept = teacher_of(model, share_prefixes=True), [], []

    def fail(module, arguments, options):
        packed = options.get("packed")
        kept.append([reference() is not None for reference in reads])
        if packed is not None and reads:
            raise torch.OutOfMemoryError(CUDA_ERROR)
        if packed is not None:
            reads.append(weakref.ref(packed.readings[0].kept))

    hook = unwrap(model).base_model.register_forward_pre_hook(fail, with_kwargs=True)
    found = teacher.full(members).hidden
    hook.remove()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert kept == [[], [True], [False], [False]], "a response, a failure of those that begin alike, then two batches without"
    assert not teacher.share_prefixes and teacher.limit.halved == 1


def test_student_scores_of_a_step_are_computed_in_smaller_batches():
    model = random_model(dtype=torch.float64)
    teacher, members = teacher_of(model, limit=BatchLimit(40, "tokens", "")), rollouts(8)
    step = Step(members, 8, 0.0, 0, model, Head.of(model), teacher)
    expected = step.student_log_probs(members)
    with memory_for(model, sequences=2) as fitted:
        found = step.student_log_probs(members)
    assert teacher.limit.size == 10 and fitted == [(2, 5)] * 4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_sampling_continues_in_smaller_batches_with_the_same_responses():
    model = add_lora(random_model(dtype=torch.float64))
    engine, sampling = HFRolloutEngine(model, byte_tokenizer()), Sampling(max_new_tokens=20)
    prompts = [[5, 6, 7, 8 + i] for i in range(7)]
    modules, expected = dict(model.named_modules()), engine.generate(prompts, sampling, seed=3)
    told = []
    with memory_for(model, sequences=3, error=RuntimeError(CPU_ERROR)):
        assert engine.generate(prompts, sampling, seed=3, progress=told.append) == expected
    assert engine.limit.size == 3 and engine.limit.halved == 1 and told == [3, 6, 7], "half of 7 prompts, not of a limit of 32"
    assert model.training and dict(model.named_modules()) == modules, "merged layers are restored after every attempt"
    with memory_for(model, sequences=0), pytest.raises(OutOfMemory, match="sampling does not fit; lower rollout_batch_size"):
        engine.generate(prompts, sampling, seed=3)


# ---- Runs ------------------------------------------------------------------------------------------------------------------


def run(checkpoint, folder, **changes):
    return run_trainer(checkpoint, folder, **{"max_steps": 2, "eval_size": 0, "save_strategy": "no", **changes})


@pytest.fixture(scope="module")
def undisturbed(checkpoint, tmp_path_factory) -> list[dict]:
    return rows_of(run(checkpoint, tmp_path_factory.mktemp("runs") / "undisturbed", share_prefixes=False))


def test_a_run_scores_in_smaller_batches(checkpoint, tmp_path, undisturbed, caplog):
    trainer = run(checkpoint, tmp_path / "run", share_prefixes=False, score_tokens_per_forward=8192)
    with memory_for(trainer.model, tokens=1000):
        rows = rows_of(trainer)
    assert trainer.limits["scoring"].size <= 1024 and trainer.teacher.limit is trainer.limits["scoring"]
    halved = caplog.text.count("out of memory: score_tokens_per_forward is")
    assert [row.get("out_of_memory", 0) for row in rows] == [halved, 0] and halved
    assert f"score_tokens_per_forward is {trainer.limits['scoring'].size} from this point" in caplog.text
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in undisturbed], rel=1e-4)


def test_a_run_samples_and_evaluates_in_smaller_batches(checkpoint, tmp_path):
    runs = []
    for name in ("undisturbed", "run"):
        trainer = run(checkpoint, tmp_path / name, eval_size=4, eval_batch_size=32)  # the teacher reads one by one
        with memory_for(trainer.model, sequences=2 if name == "run" else 4, error=RuntimeError(CPU_ERROR)):
            runs.append((rows_of(trainer), read_jsonl(tmp_path / name / "evals.jsonl")))
    assert {name: limit.size for name, limit in trainer.limits.items()} == {"rollouts": 2, "evaluation": 2, "scoring": 8192}
    (expected, expected_evaluations), (rows, evaluations) = runs
    # The evaluation before the first step halves its 4 prompts, and so does the sampling of the first step.
    assert rows[0]["out_of_memory"] == 2 and "out_of_memory" not in rows[1]
    assert [row["generated_tokens"] for row in rows] == [row["generated_tokens"] for row in expected]
    assert [row["accuracy"] for row in evaluations] == [row["accuracy"] for row in expected_evaluations]


@pytest.mark.parametrize("error", KERNEL_ERRORS)
def test_an_evaluation_continues_in_smaller_batches_whatever_library_runs_out_of_memory(error, checkpoint, tmp_path):
    trainer = run(checkpoint, tmp_path / "run", eval_size=4, eval_batch_size=32)
    with memory_for(trainer.model, sequences=2, error=RuntimeError(error)):
        assert trainer.evaluate()["eval_n"] == 4
    assert trainer.limits["evaluation"].size == 2


def test_an_evaluation_that_does_not_fit_names_its_own_options(checkpoint, tmp_path):
    trainer = run(checkpoint, tmp_path / "run", eval_size=4)
    with memory_for(trainer.model, sequences=0), pytest.raises(OutOfMemory, match="evaluation does not fit; lower eval_batch_"):
        trainer.evaluate()

    class Engine:
        def generate(self, *arguments, **options):
            raise torch.OutOfMemoryError(CUDA_ERROR)

    trainer.eval_engine = Engine()
    with pytest.raises(OutOfMemory, match="evaluation does not fit; lower eval_batch_size"):
        trainer.evaluate()


def test_attributions_that_do_not_fit_are_left_out_of_the_run(checkpoint, tmp_path, caplog):
    trainer = run(checkpoint, tmp_path / "run", max_steps=1, attribution_examples=1, eval_size=0)
    inspected, saved = [], trainer.save_attributions

    def short_of_memory(step):
        before = trainer.teacher.limit.size, trainer.teacher.share_prefixes
        with memory_for(trainer.model, tokens=200 if step else 10):  # enough to sample, and not even that
            saved(step)
        trainer.teacher.limit.size, trainer.teacher.share_prefixes = before
        inspected.append(step)

    trainer.save_attributions = short_of_memory
    rows_of(trainer)
    assert inspected == [0, 1] and not (tmp_path / "run" / "attribution").exists()
    assert "the attribution of step 0 is missing (out of memory" in caplog.text and "sampling does not fit" in caplog.text
    assert "scoring a single response does not fit" in caplog.text and "left out of the attribution" in caplog.text


def test_a_run_whose_smallest_teacher_pass_does_not_fit(checkpoint, tmp_path):
    trainer = run(checkpoint, tmp_path / "run")
    message = "out of memory .*scoring a single response does not fit; lower max_context_tokens"
    with memory_for(trainer.model, tokens=400), pytest.raises(OutOfMemory, match=message):
        trainer.train()


@register("too_large")
class TooLarge(Objective):
    """A loss that does not fit into memory."""

    def needs_teacher(self, rollout):
        return False

    def loss(self, batch):
        raise torch.OutOfMemoryError(CUDA_ERROR)


def test_a_run_whose_training_pass_does_not_fit(checkpoint, tmp_path):
    with pytest.raises(OutOfMemory, match="lower per_device_train_batch_size and raise gradient_accumulation_steps"):
        run(checkpoint, tmp_path / "run", method="too_large").train()
