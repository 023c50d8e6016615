"""LoRA products in the data type of the base, held to peft's own arithmetic and to float64."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from firedistill.models import adapter
from firedistill.models.adapter import compute_in_base_dtype
from firedistill.models.lora import add_lora, load_adapter
from firedistill.models.states import last_hidden_states
from firedistill.rollouts.merging import merged_adapter
from firedistill.teacher.ema import EMAWeights
from tiny import enable_checkpointing, random_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [30, 31, 32, 33, 34, 35, 36]])
# Operators that compute nothing
VIEWS = {"t", "view", "_unsafe_view", "transpose", "slice", "unsqueeze", "expand", "detach", "split_with_sizes", "split"}
VIEWS |= {"alias", "new_empty", "empty_like"}


def adapted(kind: str = "qwen2", dtype: torch.dtype = torch.bfloat16, fused: bool = True, **settings):
    """A model whose factors B are not zero; the same values for all arguments."""
    model = add_lora(random_model(kind).to(dtype), **settings).train()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return compute_in_base_dtype(model) if fused else model


def states_and_gradient(model, seed: int = 0):
    """Hidden states, and the gradient of a random function of them for all factors."""
    torch.manual_seed(seed)
    states = last_hidden_states(model, IDS)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (states * direction).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None for g in gradients)
    model.zero_grad()
    return states.detach().double(), torch.cat([g.double().flatten() for g in gradients])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_as_close_to_float64_as_float32_factors(kind):
    """The gap between the two arithmetics is that which rounding of the base leaves in any case."""
    exact, fused, peft = adapted(kind, torch.float64, fused=False).double(), adapted(kind), adapted(kind, fused=False)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), peft.parameters(), strict=True):
            p.copy_(q)  # the same rounded base
    (h, g), (h_fused, g_fused), (h_peft, g_peft) = map(states_and_gradient, (exact, fused, peft))
    assert distance(h_fused, h) < 1.5 * distance(h_peft, h) < 0.1
    assert distance(g_fused, g) < 1.5 * distance(g_peft, g) < 0.2
    assert torch.cosine_similarity(g_fused, g_peft, 0) > 0.99


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_each_layer_is_the_literal_sum(kind):
    model = adapted(kind, r=3, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])  # groups with some of their members
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            layer.register_forward_hook(lambda layer, x, out, name=name: found.update({name: (layer, x[0], out)}))
    last_hidden_states(model, IDS)
    assert len(found) == 2 * 4
    for layer, x, out in found.values():
        a, b = (factors["default"].weight.detach().bfloat16().double() for factors in (layer.lora_A, layer.lora_B))
        base, x = layer.base_layer, x.detach()
        bias = 0 if base.bias is None else base.bias.detach().double()
        exact = x.double() @ base.weight.double().T + bias + layer.scaling["default"] * (x.double() @ a.T) @ b.T
        assert out.dtype == torch.bfloat16 and out.shape[:-1] == x.shape[:-1]
        torch.testing.assert_close(out.detach().double(), exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


def test_the_gap_shrinks_with_the_rounding_of_the_base():
    """float16 rounds eight times finer than bfloat16."""
    for fine, coarse in zip(gaps(torch.float16), gaps(torch.bfloat16), strict=True):
        assert 0 < fine < coarse / 4


def gaps(dtype: torch.dtype) -> list[float]:
    found, expected = states_and_gradient(adapted(dtype=dtype)), states_and_gradient(adapted(dtype=dtype, fused=False))
    return [distance(a, b) for a, b in zip(found, expected, strict=True)]


def test_a_float32_base_computes_as_peft_does():
    found, expected = adapted(dtype=torch.float32), adapted(dtype=torch.float32, fused=False)
    for a, b in zip(states_and_gradient(found), states_and_gradient(expected), strict=True):
        assert torch.equal(a, b)


def test_a_disabled_adapter_adds_nothing():
    model = adapted()
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(last_hidden_states(model, IDS), last_hidden_states(random_model().bfloat16(), IDS))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(dropout, reentrant):
    plain, recomputed = adapted(dropout=dropout), adapted(dropout=dropout)
    enable_checkpointing(recomputed.get_base_model(), {"use_reentrant": reentrant})
    recomputed.enable_input_require_grads()
    for a, b in zip(states_and_gradient(plain), states_and_gradient(recomputed), strict=True):
        assert torch.equal(a, b)
    if dropout:
        assert not torch.equal(states_and_gradient(plain)[0], states_and_gradient(plain, seed=1)[0])


def test_a_teacher_between_forward_and_backward_leaves_the_gradient_alone():
    model, alone = adapted(), adapted()
    for each in (model, alone):
        enable_checkpointing(each.get_base_model())
    teacher = EMAWeights(model, 1.0)
    with torch.no_grad():
        for parameter in teacher.parameters.values():
            parameter.mul_(0.5)
    before = last_hidden_states(model, IDS)
    with teacher.applied():
        inside = last_hidden_states(model, IDS)
    with torch.no_grad():
        assert torch.equal(inside, last_hidden_states(alone.eval(), IDS)), "the teacher has the weights before the change"
        for parameter in EMAWeights(alone.train(), 1.0).parameters.values():
            parameter.mul_(0.5)
    expected = last_hidden_states(alone, IDS)
    assert torch.equal(before, expected) and not torch.equal(before, inside)
    for states in (before, expected):
        states.float().square().sum().backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert a.grad is None and b.grad is None or torch.equal(a.grad, b.grad)


def test_each_pass_reads_the_present_factors_and_keeps_nothing():
    model = adapted()
    with torch.no_grad():
        before = last_hidden_states(model, IDS)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.zero_()  # unseen by autograd's version counters
        assert torch.equal(last_hidden_states(model, IDS), last_hidden_states(random_model().bfloat16(), IDS))
    assert not torch.equal(before, last_hidden_states(model, IDS))
    found = {id(block): block for block in blocks_of(model)}
    assert len(found) == 2 * 2 and {len(block.groups) for block in found.values()} == {2}
    assert all((block.dtype, block.alone, block.together) == (None, {}, []) for block in found.values())


def blocks_of(model) -> list[adapter.Block]:
    """Of each module that computes through one."""
    replaced = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    return [getattr(forward, "func", forward).__self__ for forward in replaced]


@pytest.mark.parametrize("fuse_layers", [False, True])
def test_a_merged_model_does_not_round_its_factors(fuse_layers, monkeypatch):
    model, rounded, original = adapted(), [], adapter._rounded
    groups = {(id(block), names) for block in blocks_of(model) for names in block.groups}
    monkeypatch.setattr(adapter, "_rounded", lambda dtype, active: rounded.append(len(active)) or original(dtype, active))
    with torch.no_grad(), merged_adapter(model, fuse_layers=fuse_layers):
        last_hidden_states(model, IDS)
    assert rounded == []
    last_hidden_states(model, IDS)
    assert rounded == [len(groups)] == [2 * 4]


def test_a_copy_has_factors_of_its_own():
    model = adapted()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(states_and_gradient(twin)[0], states_and_gradient(adapted())[0])


def test_saved_and_loaded_as_by_peft(tmp_path):
    model = compute_in_base_dtype(adapted())  # a second call changes nothing
    model.save_pretrained(tmp_path)
    loaded = load_adapter(random_model().bfloat16(), tmp_path)
    assert {p.dtype for p in loaded.parameters() if p.requires_grad} == {torch.float32}
    with torch.no_grad():
        expected = last_hidden_states(model, IDS)
        assert torch.equal(last_hidden_states(compute_in_base_dtype(loaded), IDS), expected)


class Operators(TorchDispatchMode):
    """Counts the operators that compute something."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name not in VIEWS:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def operators_per_layer(**settings) -> int:
    counts = []
    for layers in (1, 2):
        config = random_model().config
        config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        model = add_lora(Qwen2ForCausalLM(Qwen2Config(**config.to_dict())).bfloat16())
        if settings["fused"]:
            compute_in_base_dtype(model)
        with Operators() as operators:
            last_hidden_states(model, IDS)
        counts.append(operators.count.total())
    return counts[1] - counts[0]


def test_operators_per_layer():
    assert operators_per_layer(fused=True) <= 45 and operators_per_layer(fused=False) == 80


def test_recomputing_a_layer_ends_before_its_last_product():
    counts = []
    for checkpointing in (False, True):
        model = adapted()
        model.enable_input_require_grads()
        if checkpointing:
            enable_checkpointing(model)
        states = last_hidden_states(model, IDS)
        with Operators() as operators:
            states.sum().backward()
        counts.append(operators.count["addmm_"])
    # Of two layers with seven projections, k, v and up add to a gradient, and four without a bias write a product with B.
    assert counts == [2 * 3, 2 * (3 + 6 + 4)]


def kept_bytes(model, repeats: int = 20) -> int:
    """Memory of activations that a forward pass keeps for the backward pass."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = last_hidden_states(model, IDS.repeat(1, repeats))
    del states
    return sum(kept.values())


def test_activations_take_a_third_less_memory():
    assert kept_bytes(adapted()) < 2 / 3 * kept_bytes(adapted(fused=False))
