"""Attention and MLP over shared products against the modules of transformers, forward and backward."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GemmaConfig

from firedistill.models import blocks
from firedistill.models.adapter import compute_in_base_dtype
from firedistill.models.attention import use_own_attention
from firedistill.models.lora import add_lora
from firedistill.models.states import last_hidden_states
from test_adapter import IDS, Operators, blocks_of, distance, kept_bytes, states_and_gradient
from test_layers import FAMILIES, SIZES, with_values
from tiny import enable_checkpointing


def adapted(family: str = "qwen2", dtype: torch.dtype = torch.bfloat16, together: bool = True, **settings):
    """A model whose adapter, biases and norms all change what it computes; the same values for all types."""
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family]) if family in FAMILIES else GemmaConfig(**SIZES, num_hidden_layers=2)
    model = with_values(add_lora(AutoModelForCausalLM.from_config(config, dtype=torch.float32), **settings).train())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16().to(dtype)
    compute_in_base_dtype(model)
    return model if together else apart(model)


def apart(model, functions=(blocks.attend, blocks.gated)):
    """Let every projection of an attention, of an MLP, or of both compute alone, in the modules of transformers."""
    for block in blocks_of(model):
        if block.function in functions:
            block.groups = ()
    return model


def operators_of(model) -> int:
    with Operators() as operators:
        states_and_gradient(model)
    return operators.count.total()


def joined(*layers: nn.Module):
    """Layers of the same states as one product."""
    return lambda x: torch.cat([layer(x) for layer in layers], -1)


def share_products(trunk):
    """Let its attention and MLP compute over such products."""
    for layer in trunk.layers:
        attention, mlp = layer.self_attn, layer.mlp
        to_heads = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        attention.forward = partial(blocks.attend, attention, to_heads, attention.o_proj)
        mlp.forward = partial(blocks.gated, mlp, joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj)
    return trunk


@pytest.mark.parametrize("family", FAMILIES)
def test_they_compute_what_the_modules_do(family):
    """In float64: states, and the gradients of all weights, with padding on the left."""
    torch.manual_seed(0)
    trunk = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=torch.float64).base_model
    ids, mask = torch.arange(5, 41).view(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    found = []
    for fused in (False, True):
        if fused:
            share_products(trunk)
        states = trunk(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        found.append([states.detach(), *(parameter.grad for parameter in trunk.parameters())])
        trunk.zero_grad()
    assert all(tensor is not None and tensor.any() for tensors in found for tensor in tensors)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("turned", [1, 3, 4])
def test_gradients(turned):
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, 4, 6, generator=draw).double().requires_grad_()
    gates = torch.randn(2, 5, 14, generator=draw).double().requires_grad_()
    cos, sin = (torch.randn(1, 3, 6, generator=draw).double() for _ in range(2))  # of no angles: all places differ
    assert torch.autograd.gradcheck(lambda x: blocks.Rotation.apply(x, cos, sin, turned), states)
    assert torch.autograd.gradcheck(blocks.SiluProduct.apply, gates)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_that_of_projections_alone(family, own):
    """Distance of states and gradient to those of the same weights in float64, whatever the attention."""
    exact = adapted(family, torch.float64).double()
    models = [adapted(family, together=together) for together in (True, False)]
    if own:
        [use_own_attention(model) for model in models]
    expected = states_and_gradient(exact)
    together, alone = ([distance(a, b) for a, b in zip(states_and_gradient(m), expected, strict=True)] for m in models)
    assert all(0 < a < 1.1 * b for a, b in zip(together, alone, strict=True)), (together, alone)
    assert operators_of(models[0]) < operators_of(models[1])


def test_the_product_of_the_gates_keeps_its_input_alone():
    """Of each layer and token, the activation of the gates is not kept for the backward pass."""
    few, more = ([kept_bytes(adapted(together=together), repeats) for together in (True, False)] for repeats in (20, 30))
    together, alone = ((b - a) / (10 * IDS.numel()) for a, b in zip(few, more, strict=True))
    assert alone - together == 2 * SIZES["intermediate_size"] * 2


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("name", ["self_attn", "self_attn.k_proj", "mlp", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_called(kind, name):
    if name == "self_attn" and "backward" in kind:
        pytest.skip("transformers passes states by name, which backward hooks do not see")
    model, called = adapted(), []
    model.enable_input_require_grads()
    for layer in model.base_model.model.model.layers:
        getattr(layer.get_submodule(name), kind)(lambda *of_call: called.append(name))
    states_and_gradient(model)
    assert called == [name] * 2


def test_a_replaced_forward_stays():
    """As that of a module which accelerate has put on a device."""
    torch.manual_seed(0)
    model, called = add_lora(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen2"]), dtype=torch.bfloat16)), []
    for layer in model.base_model.model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            before = module.forward
            module.forward = lambda *args, before=before, **kwargs: called.append(1) or before(*args, **kwargs)
    states_and_gradient(compute_in_base_dtype(model))
    assert len(called) == 2 * 2


def test_an_interrupted_pass_leaves_nothing():
    model = adapted()
    with model.disable_adapter():
        expected = states_of(model)
    hook = model.base_model.model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        last_hidden_states(model, IDS)
    hook.remove()
    with model.disable_adapter():
        assert torch.equal(states_of(model), expected)


def interrupt(*of_call):
    raise KeyboardInterrupt


@torch.no_grad()
def states_of(model):
    return last_hidden_states(model, IDS)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("family", ["qwen2", "llama with biases"])
def test_a_sharded_base(family, checkpointing, tmp_path):
    """The weights of a layer, biases included, are whole in its own forward and backward pass only."""
    expected = states_and_gradient(adapted(family))
    model = adapted(family)
    init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, ignored_params={p for p in layer.parameters() if p.requires_grad})
        if checkpointing is not None:
            enable_checkpointing(model.get_base_model(), {"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        for a, b in zip(states_and_gradient(model), expected, strict=True):
            assert torch.equal(a, b)
    finally:
        destroy_process_group()


def with_a_hook():
    model = adapted()
    for layer in model.base_model.model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *of_call: None)
        layer.mlp.up_proj.base_layer.register_forward_hook(lambda *of_call: None)
    return model


def test_attention_of_another_kind():
    models = [adapted(), apart(adapted(), [blocks.attend])]
    for model in models:
        model.config._attn_implementation = "eager"
    for a, b in zip(*map(states_and_gradient, models), strict=True):
        assert torch.equal(a, b)


def with_another_scale():
    model = adapted()
    for layer in model.base_model.model.model.layers:
        layer.self_attn.k_proj.scaling["default"] *= 2
        layer.mlp.up_proj.scaling["default"] *= 2
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_a_hook,
        with_another_scale,
        partial(adapted, dropout=0.2),
        partial(adapted, target_modules=["q_proj", "v_proj", "up_proj"]),
        partial(adapted, "gemma"),
    ],
)
def test_others_compute_alone(make):
    for a, b in zip(states_and_gradient(make()), states_and_gradient(apart(make())), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["bias", "weight"])
def test_a_trained_base_gets_its_gradient(name):
    found = []
    for model in (adapted(dtype=torch.float64).double(), adapted(), adapted(together=False)):
        (parameter,) = (p for n, p in model.named_parameters() if n.endswith(f"layers.1.self_attn.k_proj.base_layer.{name}"))
        parameter.requires_grad_()
        states, gradient = states_and_gradient(model)
        trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        found.append([states, gradient, gradient.split([*trained.values()])[[*trained].index(id(parameter))]])
    together, alone = ([distance(a, b) for a, b in zip(tensors, found[0], strict=True)] for tensors in found[1:])
    assert all(0 < a < 1.1 * b for a, b in zip(together, alone, strict=True)), (together, alone)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama with biases", "qwen3"])
def test_recomputing_gives_the_same_gradient(family, reentrant):
    plain, recomputed = adapted(family), adapted(family)
    enable_checkpointing(recomputed.get_base_model(), {"use_reentrant": reentrant})
    recomputed.enable_input_require_grads()
    for a, b in zip(states_and_gradient(plain), states_and_gradient(recomputed), strict=True):
        assert torch.equal(a, b)
