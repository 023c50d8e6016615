"""Triton kernels of decoder layers against their equations in float64: here in Triton's interpreter."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM

from firedistill.models import attention, kernels
from firedistill.models.adapter import compute_in_base_dtype
from firedistill.models.norms import fuse_norms
from firedistill.models.states import last_hidden_states
from firedistill.rollout import Sampling
from firedistill.rollouts import fixed
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.merging import merged_adapter
from firedistill.rollouts.sampling import NOT_FINITE, TOO_FEW, draw
from test_blocks import share_products
from test_layers import FAMILIES, PROMPTS, adapted
from tiny import byte_tokenizer

# Of float32 in the interpreter, which rounds bfloat16 in ways of its own, and of the types on a GPU
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
IN_INTERPRETER = ("cpu", torch.float32)
ON_GPU = [pytest.param("cuda", dtype, marks=pytest.mark.gpu, id=f"cuda-{dtype}") for dtype in (torch.float16, torch.bfloat16)]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where there is a GPU")
WHERE = [pytest.param(*IN_INTERPRETER, marks=WITHOUT_GPU, id="interpreter"), *ON_GPU]


pytest.importorskip("triton", reason="needs Triton, which PyTorch brings along on Linux with CUDA")


def random(*shape, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found, expected):
    scale = expected.abs().max()
    assert found.dtype in TOLERANCE and (found.double() - expected).abs().max() < TOLERANCE[found.dtype] * scale


# Sequences, heads, groups, columns, size of a head: of Qwen2.5 1.5B, one head per group, many heads per group, one part, many parts
SHAPES = [(3, 12, 2, 300, 128), (2, 4, 4, 64, 16), (1, 20, 1, 7, 32), (2, 2, 1, 4480, 64), (2, 8, 2, 130, 256)]


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, device, dtype):
    """In a part of a larger cache, as the views of projections, with padding on the left and room on the right."""
    count, heads, groups, columns, size = shape
    projected = random(count, 1, heads + 2 * groups, size, device=device, dtype=dtype)
    query = projected[:, :, :heads].transpose(1, 2)
    key, value = (random(count + 1, groups, columns + 9, size, device=device, dtype=dtype, seed=s) for s in (1, 2))
    key, value = (x[:count, :, :columns] for x in (key, value))
    mask = torch.zeros(count + 1, 1, 1, columns + 9, dtype=torch.bool, device=device)
    for row in range(count):
        mask[row, ..., row : columns - 2 * row] = True
    mask = mask[:count, ..., :columns]
    with torch.no_grad():
        found = kernels.one_query_attention(query, key, value, mask, 0.3)
    scores = query.double().unflatten(1, (groups, -1)) @ key.double().unsqueeze(2).mT * 0.3
    weights = scores.masked_fill(~mask.unsqueeze(2), -torch.inf).softmax(-1)
    expected = (weights @ value.double().unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    assert found.shape == (count, 1, heads, size)
    assert_close(found, expected)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
def test_columns_that_are_not_visible_have_no_effect(device, dtype):
    """A part of the cache without a visible column is not read at all."""
    query, key, value = (random(1, 2, n, 16, device=device, dtype=dtype, seed=n) for n in (1, 200, 200))
    mask = torch.zeros(1, 1, 1, 200, dtype=torch.bool, device=device)
    mask[..., 70:120] = True
    found = kernels.one_query_attention(query, key, value, mask, 0.25)
    alone = kernels.one_query_attention(query, key[:, :, 70:120], value[:, :, 70:120], mask[..., 70:120], 0.25)
    torch.testing.assert_close(found, alone, rtol=0, atol=TOLERANCE[dtype])
    key[:, :, :64], value[:, :, 128:] = torch.nan, torch.inf
    assert torch.equal(kernels.one_query_attention(query, key, value, mask, 0.25), found)
    key[:, :, 80] = torch.nan  # the caller finds out
    assert kernels.one_query_attention(query, key, value, mask, 0.25).isnan().all()


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 5, 1, 130, 64)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["angles per sequence", "shared angles"])
def test_attention_of_a_new_token(shape, shared, device, dtype):
    """Queries and the new key are rotated; the cache, part of a larger one, changes in one column. What that held is not read."""
    count, heads, groups, columns, size = shape
    projected = random(count, 1, heads + 2 * groups, size, device=device, dtype=dtype)
    angles = random(1 if shared else count, 1, size // 2, device=device, seed=1)
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    caches = [random(count + 1, groups, columns + 9, size, device=device, dtype=dtype, seed=s) for s in (2, 3)]
    keys, values = (cache[:count, :, :columns] for cache in caches)
    mask = torch.zeros(count, 1, 1, columns, dtype=torch.bool, device=device)
    for row in range(count):
        mask[row, ..., row : columns - 2] = True
    for place in {0, columns // 2, columns - 3}:
        now = mask.clone()
        now[..., place] = True
        expected_keys, expected_values = keys.double(), values.double()
        keys[:, :, place], values[:, :, place] = torch.nan, torch.inf
        before = [cache.clone() for cache in caches]
        column = torch.full((1,), place, device=device)
        found = kernels.new_token_attention(projected, cos, sin, keys, values, column, now, 0.3)
        exact = projected.double()
        turned = torch.cat([-exact[..., size // 2 :], exact[..., : size // 2]], -1)
        rotated = (exact * cos.double().unsqueeze(2) + turned * sin.double().unsqueeze(2)).transpose(1, 2)
        assert_close(keys[:, :, place], rotated[:, heads : heads + groups, 0])
        assert torch.equal(values[:, :, place], projected[:, 0, heads + groups :])
        for cache, old in zip(caches, before, strict=True):
            old[:count, :, place] = cache[:count, :, place]
            assert torch.equal(cache, old)
        # Rounded as the cache is
        expected_keys[:, :, place], expected_values[:, :, place] = keys[:, :, place].double(), values[:, :, place].double()
        queries = rotated[:, :heads].to(dtype).double().unflatten(1, (groups, -1))
        weights = (queries @ expected_keys.unsqueeze(2).mT * 0.3).masked_fill(~now.unsqueeze(2), -torch.inf).softmax(-1)
        assert_close(found, (weights @ expected_values.unsqueeze(2)).flatten(1, 2).transpose(1, 2))


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("width", [1, 48, 1024, 2500])
def test_gates(width, device, dtype):
    states = random(3, 1, 2 * width, device=device, dtype=dtype) * 4
    gate, up = states.double().chunk(2, -1)
    found = kernels.silu_product(states)
    assert found.shape == (3, 1, width)
    assert_close(found, gate * gate.sigmoid() * up)


def gradient_of(function, states, gradient):
    """Value and gradient of a function in float64."""
    exact = states.double().requires_grad_()
    value = function(exact)
    value.backward(gradient.double())
    return value.detach(), exact.grad


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("width", [1, 48, 1024, 2500])
def test_gradient_of_the_gates(width, device, dtype):
    states = random(2, 3, 2 * width, device=device, dtype=dtype) * 4
    gradient = random(2, 3, 2 * width, device=device, dtype=dtype, seed=1)[..., ::2]  # not contiguous
    _, expected = gradient_of(lambda x: x[..., :width].sigmoid() * x[..., :width] * x[..., width:], states, gradient)
    assert_close(kernels.silu_product_backward(gradient, states), expected)


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("shape", [(2, 5, 16, 128, 14), (1, 3, 6, 16, 5), (3, 1, 40, 32, 40)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["angles per sequence", "shared angles"])
def test_rotation_of_many_tokens(shape, shared, device, dtype):
    """Forward and backward; the heads behind the first ones stay as they are."""
    count, length, heads, size, turned = shape
    states, gradient = (random(count, length, heads + 2, size, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    states, gradient = states[:, :, :heads], gradient[:, :, 2:].transpose(1, 2).contiguous().transpose(1, 2)  # as in training
    cos, sin = (random(1 if shared else count, length, size, device=device, dtype=dtype, seed=seed) for seed in (2, 3))

    def rotated(x):
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        both = x * cos.double().unsqueeze(2) + half * sin.double().unsqueeze(2)
        return torch.cat([both[:, :, :turned], x[:, :, turned:]], 2)

    expected, expected_gradient = gradient_of(rotated, states, gradient)
    found, back = kernels.rotate(states, cos, sin, turned), kernels.rotate(gradient, cos, sin, turned, back=True)
    assert_close(found, expected)
    assert_close(back, expected_gradient)
    assert torch.equal(found[:, :, turned:], states[:, :, turned:]) and torch.equal(
        back[:, :, turned:], gradient[:, :, turned:]
    )


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize("width", [1, 48, 1536, 5120])
def test_norm(width, device, dtype):
    states = random(3, 2, width, device=device, dtype=dtype) * torch.tensor([1e-3, 30.0], device=device)[:, None].to(dtype)
    weight = random(width, device=device, dtype=dtype, seed=1)
    found = kernels.normalized(states, weight, 1e-6)
    exact = states.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert found.shape == states.shape
    for token in range(2):
        assert_close(found[:, token], expected[:, token])


@pytest.mark.parametrize(("device", "dtype"), WHERE)
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (70, 300, 16), (64, 128, 5), (200, 37, 40)])
def test_sum_of_a_matrix_and_a_product(rows, columns, rank, device, dtype):
    """Into some rows of a larger matrix; factors in float32, whose product is small, as an adapter's is."""
    matrix, around = (random(n, columns, device=device, dtype=dtype, seed=n) for n in (rows, rows + 3))
    second, first = random(rows, rank, device=device, seed=1), random(columns, rank, device=device, seed=2).t()
    before = around.clone()
    kernels.add_product(matrix, second, first, 0.01, around[2 : rows + 2])
    exact = matrix.double() + 0.01 * second.double() @ first.double()
    assert_close(around[2 : rows + 2], exact)
    assert torch.equal(around[:2], before[:2]) and torch.equal(around[rows + 2 :], before[rows + 2 :])
    if dtype != torch.float32:  # a product of factors in a half precision, or in tf32, would be rounded otherwise
        assert (around[2 : rows + 2] != exact.to(dtype)).double().mean() < 0.01


@WITHOUT_GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_train_alike_with_kernels(family, monkeypatch):
    """In float32, in the interpreter: states, and gradients of all weights."""
    found, used = [], set()
    for name in ("rotate", "silu_product", "silu_product_backward"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, name=name, of=function, **more: used.add(name) or of(*args, **more))
    for with_kernels in (False, True):
        for name in ("takes_heads", "takes_states"):
            monkeypatch.setattr(kernels, name, lambda states, answer=with_kernels: answer)
        torch.manual_seed(0)
        trunk = share_products(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family])).base_model)
        states = trunk(torch.arange(5, 41).view(3, 12)).last_hidden_state
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        found.append([states.detach(), *(parameter.grad for parameter in trunk.parameters())])
        assert used == ({"rotate", "silu_product", "silu_product_backward"} if with_kernels else set())
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, for what is not finite
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=WITHOUT_GPU, id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("width", [128, 1024, 2048])
@pytest.mark.parametrize("vocabulary", [7, 300, 10_000])
@pytest.mark.parametrize("deviation", [0.3, 3.0, 30.0])
def test_draw(vocabulary, deviation, width, device, monkeypatch):
    """The tokens of PyTorch's operators: of wide and of narrow nuclei, and where the best tokens are too few."""
    rows, sampling = 64, Sampling(0.8, 0.9, 1)
    scores = random(rows, vocabulary, device=device) * deviation
    scores[3], scores[5, 2], scores[6] = 1.5, float("-inf"), float("-inf")  # equal ones, an excluded one, no distribution
    scores[7, 1], scores[8, 1] = float("nan"), float("inf")
    uniforms = torch.rand(rows, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(device)[:, 0]
    uniforms[9], uniforms[10] = 0, 1 - 2**-53
    found = []
    for with_kernels in (False, True):
        monkeypatch.setattr(kernels, "is_usable", lambda tensor, answer=with_kernels: answer)
        found.append(draw(scores, sampling, uniforms, width))
    assert torch.equal(*found)
    assert (found[0] == NOT_FINITE).nonzero().flatten().tolist() == [6, 7, 8]
    assert (found[0] == TOO_FEW).any() == (vocabulary > width), "of equal scores, all candidates are in the nucleus"
    assert (found[0] >= 0).any() == (vocabulary <= width or deviation > 1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_kernels_compile(capability, tmp_path):
    """In half precision, for A100, H100 and B200. Triton's interpreter takes programs that its compiler refuses."""
    compiler = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, compiler, capability], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    sizes = {name: list(map(int, rest)) for _, name, *rest in map(str.split, done.stdout.splitlines())}
    assert len(sizes) == 9 and all(of_kernel and min(of_kernel) > 0 for of_kernel in sizes.values()), sizes


def test_kernels_are_for_gpus_and_half_precision():
    states = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    assert not kernels.takes_heads(states)
    if torch.cuda.is_available():
        assert [kernels.takes_heads(states.cuda().to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [
            True,
            True,
            False,
        ]
        assert not kernels.takes_heads(states.cuda()[..., :48]) and not kernels.takes_heads(states.cuda()[..., :8])


def test_states_without_memory_are_left_to_pytorch(monkeypatch):
    """As those of a pass that is only estimated, on a GPU."""
    monkeypatch.setattr(kernels, "compiles", lambda device: True)
    with FakeTensorMode():
        states = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
        assert states.is_cuda and not (kernels.is_usable(states) or kernels.takes_states(states) or kernels.takes_heads(states))


def test_a_machine_without_a_compiler_samples_with_pytorch(monkeypatch, caplog):
    def fails(states):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    def out_of_memory(states):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "silu_product", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)
    kernels.compiles.cache_clear()
    with caplog.at_level("WARNING"):
        assert [kernels.compiles(torch.device("cuda", index)) for index in (0, 0)] == [False, False]
    (record,) = caplog.records
    assert record.getMessage() == (
        "PyTorch's kernels are used instead of those of Triton: Failed to find C compiler. Please specify via CC"
    )
    with monkeypatch.context() as context:
        context.setattr(kernels, "silu_product", out_of_memory)
        for _ in range(2):  # nothing is concluded from it
            with pytest.raises(torch.OutOfMemoryError):
                kernels.compiles(torch.device("cuda", 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not kernels.compiles(torch.device("cuda", 1))
    kernels.compiles.cache_clear()


@WITHOUT_GPU
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fuse", [True, False], ids=["fused layers", "layers of transformers"])
def test_layers_sample_the_same_tokens_with_kernels(family, fuse, monkeypatch):
    """In float32, in the interpreter; layers of transformers use the attention alone."""
    used = set()
    for name in ("one_query_attention", "new_token_attention", "rotate", "silu_product", "normalized", "add_product"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, name=name, of=function, **more: used.add(name) or of(*args, **more))
    model, tokenizer = adapted(FAMILIES[family]), byte_tokenizer()
    tokenizer.eos_token = None
    assert fuse_norms(model)
    engine = HFRolloutEngine(model, tokenizer, merge_adapter=True, fixed=True, fuse_layers=fuse)
    sampling = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=3)
    expected = engine.generate(PROMPTS[:3], sampling, seed=3)
    assert not used

    def large_enough(states):
        return states.shape[-1] >= 8

    for module in (kernels, fixed):
        monkeypatch.setattr(module, "takes_heads", large_enough)
    monkeypatch.setattr(kernels, "takes_states", lambda states: True)
    assert engine.generate(PROMPTS[:3], sampling, seed=3) == expected
    # A window takes keys from a cache that the kernels do not write to.
    of_a_layer = {"rotate", "silu_product", "normalized"} if fuse else set()
    if fuse and family != "mistral, window":
        of_a_layer.add("new_token_attention")
    assert used == {"one_query_attention", "add_product", *of_a_layer}


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, m: (q, k, v, m.to(q.dtype)),  # numbers to add
        lambda q, k, v, m: (q.float(), k, v, m),
        lambda q, k, v, m: (q, k, v[..., :8], m),
        lambda q, k, v, m: (q, k.mT.contiguous().mT, v, m),
        lambda q, k, v, m: (q.repeat(1, 33, 1, 1), k, v, m),  # too many heads per group
    ],
)
def test_other_attention_is_left_to_pytorch(change, monkeypatch):
    """So is all of training: the kernels have no gradient."""
    query, key = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    tensors = query, key, key, torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with torch.no_grad():
        assert not attention.has_kernel(*tensors), "on a CPU"
    monkeypatch.setattr(kernels, "takes_heads", lambda states: True)
    assert not attention.has_kernel(*tensors)
    with torch.no_grad():
        assert attention.has_kernel(*tensors) and not attention.has_kernel(*change(*tensors))


def states_of(model, with_kernels, monkeypatch):
    """Logits of some steps of decoding that read given tokens, `[steps, B, V]`."""
    with monkeypatch.context() as context, torch.no_grad():
        if not with_kernels:
            for module in (kernels, fixed):
                context.setattr(module, "takes_heads", lambda states: False)
            context.setattr(kernels, "takes_states", lambda states: False)
        engine = HFRolloutEngine(model, byte_tokenizer(), merge_adapter=True, fixed=True, fuse_layers=True)
        engine.stop_ids.clear()
        with merged_adapter(model, engine.copies, fuse_layers=True):
            batch = fixed.FixedBatch(engine.decoder, PROMPTS, Sampling(0.0, 1.0, 24), torch.zeros(len(PROMPTS), 24))
            found = []
            for step in range(8):
                engine.decoder.tensors["tokens"].copy_(torch.arange(5, 5 + batch.rows) + step)
                with attention.own_attention(engine.decoder.model):
                    found.append(
                        engine.decoder.forward(batch.rows, engine.decoder.bucket(batch.rows, batch.width + step)).clone()
                    )
                engine.decoder.put(engine.decoder.tensors["tokens"][: batch.rows].clone())
    return torch.stack(found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [name for name in FAMILIES if "window" not in name])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_on_a_gpu_is_no_larger_with_kernels(family, dtype, monkeypatch):
    """Distance of the logits to those of the same weights in float64, root mean square over many tokens."""
    model, merged = adapted(with_heads_of(16, FAMILIES[family]), dtype).cuda(), []
    add_product = kernels.add_product
    monkeypatch.setattr(kernels, "add_product", lambda *args: merged.append(add_product(*args)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()  # merging rounds nothing
    exact = states_of(copy.deepcopy(model).double(), False, monkeypatch)
    with_kernels, without = ((states_of(model, k, monkeypatch) - exact).square().mean().sqrt() for k in (True, False))
    assert 0 < with_kernels < 1.05 * without
    assert len(merged) == 7 * model.config.num_hidden_layers, "once; in float64 and without kernels, PyTorch merges"


def with_heads_of(size, config):
    config = copy.deepcopy(config)
    config.head_dim, config.hidden_size = size, size * config.num_attention_heads
    return config


def training_of(model, with_kernels, monkeypatch):
    """States of some tokens, and the gradient of a random function of them for the adapter."""
    with monkeypatch.context() as context:
        if not with_kernels:
            for name in ("takes_heads", "takes_states"):
                context.setattr(kernels, name, lambda states: False)
        states = last_hidden_states(model, torch.arange(5, 165, device=model.device).view(4, 40) % 90)
        direction = random(*states.shape, device=model.device, dtype=torch.float64)
        (states * direction).sum().backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return states.detach().double(), torch.cat(gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [name for name in FAMILIES if "window" not in name])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_of_training_on_a_gpu_is_no_larger_with_kernels(family, dtype, monkeypatch):
    """Distance of states and gradient to those of the same weights in float64, root mean square over models, whose single ones vary."""
    used, errors = set(), {True: [], False: []}
    for name in ("rotate", "silu_product", "silu_product_backward"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, name=name, of=function, **more: used.add(name) or of(*args, **more))
    for seed in range(8):
        model = adapted(with_heads_of(16, FAMILIES[family]), seed=seed).train()
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        exact = training_of(copy.deepcopy(model).double().cuda(), False, monkeypatch)
        compute_in_base_dtype(model.cuda())
        for with_kernels, of_models in errors.items():
            used.clear()
            found = training_of(model, with_kernels, monkeypatch)
            assert used == ({"rotate", "silu_product", "silu_product_backward"} if with_kernels else set())
            of_models.append([float((a - b).norm() / b.norm()) ** 2 for a, b in zip(found, exact, strict=True)])
    ours, theirs = (torch.tensor(errors[with_kernels]).mean(0).sqrt() for with_kernels in (True, False))
    assert (ours > 0).all() and (ours < 1.1 * theirs).all(), (ours, theirs)
