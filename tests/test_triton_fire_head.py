"""The Triton kernels of `fire_head_loss` against its PyTorch arithmetic in float64, which `test_fire_head.py` holds to the equations.

Without a GPU the kernels run in Triton's interpreter, with one they are compiled; the tests are the same.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from firedistill.ops import FireHeadOutput, Head, fire_head
from test_fire_head import HEADS, Case, ExactProjection, make_case, relative_error, row_error

pytest.importorskip("triton", reason="Triton is not installed")
from firedistill.ops import triton_fire_head  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BLOCK = 256


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Triton everywhere, in blocks so small that rows have several."""
    monkeypatch.setattr(fire_head, "KERNELS", "triton")
    monkeypatch.setattr(triton_fire_head, "BLOCK", BLOCK)


@pytest.fixture(autouse=True)
def no_torch_rows(monkeypatch):
    """Only rows in float64 may reach PyTorch's arithmetic."""

    class Float64Student(fire_head._Student):
        def __init__(self, products, *more):
            assert fire_head.KERNELS == "torch" or products.dtype == torch.float64, "the kernels did not run"
            super().__init__(products, *more)

    monkeypatch.setattr(fire_head, "_Student", Float64Student)


def on_device(case: Case) -> Case:
    return replace(case, **{name: x.to(DEVICE) for name, x in vars(case).items() if isinstance(x, torch.Tensor)})


def assert_same(found, expected, tolerance: float = 1e-5, gradient_tolerance: float | None = None) -> None:
    """Every statistic, the loss and the gradients of `Case.fused`."""
    (found, gradients), (expected, expected_gradients) = found, expected
    for name in (field.name for field in dataclass_fields(FireHeadOutput)):
        a, b = getattr(found, name).detach(), getattr(expected, name).detach()
        assert torch.equal(a.isnan(), b.isnan()), name
        assert relative_error(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)) <= tolerance, name
    assert row_error(gradients[0], expected_gradients[0]) <= (gradient_tolerance or tolerance)
    for a, b in zip(gradients[1:], expected_gradients[1:], strict=True):
        assert relative_error(a, b) <= (gradient_tolerance or tolerance)


def assert_equals_float64(case: Case, **more) -> None:
    case = on_device(case)
    expected = case.to(torch.float64).fused(**more)
    assert case.correct.all() or (expected[0].chi > 0).any(), "some tokens must be over the radius"
    assert_same(case.fused(**more), expected)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "fields"),
    [(1, 31, 2), (7, 31, 0), (7, 31, 1), (7, 31, 2), (7, 31, 3), (7, 31, 4), (7, 257, 2), (1, 1001, 1), (7, 1001, 3)],
)
def test_shapes(tokens, vocabulary, fields):
    case = make_case(
        tokens,
        vocabulary,
        fields,
        "mixed" if tokens > 1 else "none",
        gap=1.5,
        seed=fields,
        step_scale=3.0 if tokens > 1 else 30.0,
    )
    assert_equals_float64(case)


def test_the_last_token_of_a_block_and_the_first_of_the_next_may_be_on_top():
    case = make_case(4, 2 * BLOCK, fields=1, correct="none", gap=2.0, step_scale=200.0)
    case.bias, case.teacher_bias = torch.zeros(2, 2 * BLOCK)
    case.bias[BLOCK - 1], case.bias[BLOCK] = 20.0, 19.0
    assert_equals_float64(case)
    case.bias[BLOCK] = 21.0
    assert_equals_float64(case)


@pytest.mark.parametrize("correct", ["all", "none"])
def test_one_branch_alone(correct):
    assert_equals_float64(make_case(5, fields=2, correct=correct, gap=2.0, step_scale=5.0))


@pytest.mark.parametrize("floor", [None, -4.0])
@pytest.mark.parametrize("attribution", [True, False])
@pytest.mark.parametrize("projection", [True, False])
def test_settings(floor, attribution, projection):
    more = dict(step_scale=5.0, log_prob_floor=floor, attribution=attribution, projection=projection)
    assert_equals_float64(make_case(5, 257, fields=2, correct="none", gap=1.0, **more))


@pytest.mark.parametrize("name", HEADS)
def test_heads(name):
    case = make_case(6, fields=2, seed=3, gap=2.0, step_scale=5.0)
    case.head_settings = HEADS[name]
    assert_equals_float64(case, factor=3.0)


class CaseOfTwoHeads(Case):
    """The teacher's head has settings of its own."""

    def heads(self, trained: bool = False) -> tuple[Head, Head]:
        head, teacher_head = super().heads(trained)
        teacher_head.softcap, teacher_head.scale, teacher_head.temperature = 7.0, 1.5, 0.6
        return head, teacher_head


def test_the_teacher_may_have_another_head():
    case = CaseOfTwoHeads(**vars(make_case(6, fields=2, correct="none", gap=1.0, log_prob_floor=-6.0, step_scale=5.0)))
    case.head_settings, case.teacher_weight = HEADS["all"], case.weight.roll(1, 0) / 2 + case.weight
    assert_equals_float64(case)


@pytest.mark.parametrize("lazy", [True, False])
def test_chunks_and_a_trained_head(lazy):
    case = on_device(make_case(9, fields=2, gap=1.5, seed=1))
    loo_hidden = (lambda rows: case.loo_hidden[:, rows]) if lazy else None
    double = case.to(torch.float64)
    expected = double.fused(loo_hidden=(lambda rows: double.loo_hidden[:, rows]) if lazy else None, trained=True)
    assert (expected[0].chi > 0).any() and (expected[0].chi == 0).any()
    assert_same(case.fused(loo_hidden=loo_hidden, trained=True, chunk_size=4), expected)


@pytest.mark.parametrize(("gap", "step_scale"), [(0.1, 200.0), (1.0, 1.0), (5.0, 1.0)])
@pytest.mark.parametrize("correct", ["all", "none"])
def test_nearly_deterministic_students(gap, step_scale, correct):
    case = make_case(13, fields=1, spread=8.0, gap=gap, correct=correct, step_scale=step_scale)
    top = case.to(torch.float64).twin(closed_form=True)[3].softmax(-1).amax(-1)
    assert (top > 1 - 1e-6).sum() >= 2, "some must be nearly deterministic"
    assert_equals_float64(case)


@pytest.mark.parametrize("projection", [True, False])
def test_a_token_that_the_teacher_forbids(projection, monkeypatch):
    """A finite logit against float64; infinity, whose stand-in depends on the dtype, against PyTorch in float32."""
    case = make_case(5, fields=1, correct="none", projection=projection)
    forbidden = (case.hidden @ case.weight.T).argmax(-1).unique()
    case.bias, case.teacher_bias = torch.zeros(2, 31)
    case.teacher_bias[forbidden] = -1000.0
    assert_equals_float64(case)
    case.teacher_bias[forbidden] = -math.inf
    case = on_device(case)
    found = case.fused()
    monkeypatch.setattr(fire_head, "KERNELS", "torch")
    assert_same(found, case.fused())
    assert all(gradient.isfinite().all() for gradient in found[1])


def test_a_token_that_everybody_forbids_changes_nothing():
    case = on_device(make_case(6, fields=1, gap=2.0))
    nowhere = torch.tensor([-math.inf], device=DEVICE)
    padded = replace(
        case, weight=torch.cat([case.weight, case.weight[:1]]), bias=torch.cat([torch.zeros_like(case.weight[:, 0]), nowhere])
    )
    assert_same(padded.fused(), case.to(torch.float64).fused())


class RoundedProjection(torch.nn.Linear):
    """The same bfloat16 products for states of any dtype."""

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden.double(), self.weight.double()).bfloat16().to(hidden.dtype)


def test_bfloat16_products(monkeypatch):
    """Given its products, only the gradient is rounded: on its way back through the head, and there is nothing else to lose."""
    monkeypatch.setattr(torch.nn, "Linear", RoundedProjection)
    case = on_device(make_case(7, 257, fields=2, gap=2.0).to(torch.bfloat16))
    found = case.fused()
    assert found[1][0].dtype == torch.bfloat16
    assert_same(found, case.to(torch.float64).fused(), gradient_tolerance=2**-7)


def test_nothing_hides_a_nan():
    case = on_device(make_case(5, fields=1, correct="none", log_prob_floor=-6.0))
    teacher = case.teacher_hidden.clone()
    teacher[2] = math.nan
    output, (gradient,) = replace(case, teacher_hidden=teacher).fused()
    assert output.token_loss.isnan().tolist() == [False, False, True, False, False]
    assert gradient.isnan().all(-1).tolist() == [False, False, True, False, False]
    student = case.hidden.clone()
    student[1] = math.nan
    output, _ = replace(case, hidden=student, correct=torch.ones_like(case.correct), teacher_hidden=teacher[:0]).fused(
        loo_hidden=case.loo_hidden[:, :0]
    )
    assert output.token_loss.isnan().tolist() == [False, True, False, False, False]


def test_without_gradients_there_is_only_the_loss():
    case = on_device(make_case(5, fields=1, gap=2.0))
    head, teacher_head = case.heads()
    with torch.no_grad():
        output = fire_head.fire_head_loss(
            head,
            case.hidden,
            case.token_weights,
            token_ids=case.token_ids,
            correct=case.correct,
            teacher_hidden=case.teacher_hidden,
            loo_hidden=case.loo_hidden,
            teacher_head=teacher_head,
        )
    assert not output.loss.requires_grad
    assert relative_error(output.loss, case.to(torch.float64).fused()[0].loss.detach()) <= 1e-5


def test_who_handles_the_rows(monkeypatch):
    class OwnLogits(Head):
        def logits(self, projected):
            return projected.float() + 1

    head, own = Head(torch.nn.Linear(8, 31)), OwnLogits(torch.nn.Linear(8, 31))
    cpu, cpu64 = SimpleNamespace(dtype=torch.float32, is_cuda=False), SimpleNamespace(dtype=torch.float64, is_cuda=False)
    gpu, gpu64 = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True), SimpleNamespace(dtype=torch.float64, is_cuda=True)
    kernels = triton_fire_head.TritonFireHead

    def chosen(hidden, teacher_head=head):
        return fire_head.row_arithmetic(hidden, head, teacher_head)

    assert chosen(cpu) is chosen(gpu) is kernels
    assert chosen(cpu64) is chosen(gpu64) is chosen(gpu, own) is fire_head._FireHead
    monkeypatch.setattr(fire_head, "KERNELS", "torch")
    assert chosen(gpu) is fire_head._FireHead
    monkeypatch.setattr(fire_head, "KERNELS", "auto")
    assert chosen(gpu) is kernels and chosen(cpu) is chosen(gpu64) is fire_head._FireHead
    monkeypatch.setitem(sys.modules, "firedistill.ops.triton_fire_head", None)  # as if there were no Triton
    assert chosen(gpu) is fire_head._FireHead
    monkeypatch.setattr(fire_head, "KERNELS", "triton")
    with pytest.raises(ImportError):
        chosen(gpu)
    monkeypatch.setattr(fire_head, "KERNELS", "fast")
    with pytest.raises(ValueError, match="FIREDISTILL_KERNELS"):
        chosen(gpu)


class TransposedProjection(torch.nn.Linear):
    """Products whose tokens of one row do not lie side by side."""

    def forward(self, hidden):
        return (self.weight @ hidden.T).T


def test_products_that_the_kernels_cannot_read_are_left_to_pytorch(monkeypatch):
    monkeypatch.undo()  # PyTorch may be met
    monkeypatch.setattr(fire_head, "KERNELS", "triton")
    assert not triton_fire_head.known(TransposedProjection(8, 31)(torch.zeros(2, 8)))
    assert all(triton_fire_head.known(torch.zeros(2, 31, dtype=x)) for x in (torch.float32, torch.bfloat16, torch.float16))
    assert not triton_fire_head.known(torch.zeros(2, 31), torch.zeros(2, 31, dtype=torch.float64))
    monkeypatch.setattr(torch.nn, "Linear", TransposedProjection)
    case = on_device(make_case(5, fields=1, gap=2.0))
    assert_same(case.fused(), case.to(torch.float64).fused())


@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its compiler for Linux")
def test_the_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter is more lenient than the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, worker, "90"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {name for name in vars(triton_fire_head) if name.endswith("_kernel")}
    assert set(done.stdout.split()) == kernels


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("floor", [None, math.log(1e-10)])
@pytest.mark.parametrize(
    ("dtype", "projection"), [(torch.float32, ExactProjection), (torch.bfloat16, RoundedProjection)], ids=str
)
@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_at_the_size_of_a_real_vocabulary(spread, dtype, projection, floor, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.nn, "Linear", projection)
    case = on_device(make_case(64, 151_936, fields=4, gap=spread, spread=spread, seed=1, log_prob_floor=floor).to(dtype))
    expected = case.to(torch.float64).fused()
    assert (expected[0].chi > 0).any()
    assert_same(case.fused(), expected, gradient_tolerance=2**-7 if dtype is torch.bfloat16 else None)
