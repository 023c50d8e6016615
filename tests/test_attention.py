"""The package's own attention, held to PyTorch's and to float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from firedistill.models import attention as own
from firedistill.models.attention import (
    NAME,
    attention,
    causal_attention,
    multiplies_bfloat16,
    own_attention,
    tiled_attention,
    use_own_attention,
)
from firedistill.models.lora import add_lora
from firedistill.models.states import last_hidden_states
from firedistill.setup import load_setup
from tiny import enable_checkpointing, random_model, run_config, save_checkpoint

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [30, 31, 32, 33, 34, 35, 36]])


class Layer(torch.nn.Module):
    is_causal = True

    def __init__(self, sharing: int = 2):
        super().__init__()
        self.num_key_value_groups = sharing


def inputs(batch, heads, groups, length, width, size, value_size=None, seed=0, dtype=torch.bfloat16):
    """Queries, keys and values as a layer makes them, with tokens before heads in memory, and a gradient of the result."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [
        (length, heads, size),
        (width, groups, size),
        (width, groups, value_size or size),
        (length, heads, value_size or size),
    ]
    query, key, value, gradient = (2 * torch.randn(batch, *shape, generator=draw) for shape in shapes)
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in (query, key, value)], gradient.to(dtype)


def exact(parts, mask, scale, gradient):
    """Attention in float64, and the gradient for queries, keys and values."""
    query, key, value = (x.detach().double().requires_grad_() for x in parts)
    sharing = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(sharing, 1) for x in (key, value))
    scores = scale * query @ keys.transpose(2, 3)
    found = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values).transpose(1, 2)
    return found.detach(), *torch.autograd.grad(found, (query, key, value), gradient.double())


def with_gradients(found, parts, gradient):
    return found.detach(), *torch.autograd.grad(found, parts, gradient)


def distances(found, expected):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def assert_close_to(expected, found):
    """Within two roundings to bfloat16: of the factors of a product, and of its result."""
    assert [x.dtype for x in found] == [torch.bfloat16] * 4
    assert max(distances(found, expected)) <= 2**-8


def lower_right(length, width):
    return torch.ones(length, width, dtype=torch.bool).tril(width - length)[None, None]


SHAPES = [(1, 4, 2, 7, 7, 16), (3, 6, 2, 33, 33, 8), (2, 3, 3, 5, 19, 24), (1, 9, 3, 70, 131, 64), (2, 4, 1, 1, 9, 16)]


@pytest.mark.parametrize("tile", [(2**20, 64), (200, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_are_close_to_float64(shape, tile, monkeypatch):
    monkeypatch.setattr(own, "SCORES", tile[0])
    monkeypatch.setattr(own, "ROWS", tile[1])
    parts, gradient = inputs(*shape)
    mask, scale = lower_right(shape[3], shape[4]), shape[5] ** -0.5
    expected = exact(parts, mask, scale, gradient)
    assert_close_to(expected, with_gradients(tiled_attention(*parts, None, None), parts, gradient))


def masks(batch, length, width):
    """Padding on the left, padding on the right, a band, and no structure at all; every query sees a key."""
    draw = torch.Generator().manual_seed(3)
    columns, rows = torch.arange(width), torch.arange(length)[:, None] + width - length
    left, right = (torch.randint(0, width // 2, (batch, 1, 1, 1), generator=draw) for _ in range(2))
    plain = lower_right(length, width)
    return {
        "left": (plain & (columns >= left)) | (columns == rows),
        "right": plain & (columns < width - right) | (columns == 0),
        "band": (plain & (columns > rows - 4)).expand(batch, -1, -1, -1),
        "any": (torch.rand(batch, 1, length, width, generator=draw) < 0.3) | (columns == 2),
        "one for all": plain,
    }


@pytest.mark.parametrize("kind", masks(1, 2, 2))
@pytest.mark.parametrize("scale", [None, 0.3])
def test_masks(kind, scale, monkeypatch):
    monkeypatch.setattr(own, "ROWS", 4)
    monkeypatch.setattr(own, "SCORES", 300)
    parts, gradient = inputs(3, 4, 2, 13, 21, 16, value_size=8)
    mask = masks(3, 13, 21)[kind]
    expected = exact(parts, mask, scale or 0.25, gradient)
    assert_close_to(expected, with_gradients(tiled_attention(*parts, mask, scale), parts, gradient))


def test_sequences_of_many_lengths_have_tiles_of_few_widths():
    """oneDNN keeps code for every shape of a product."""
    widths, full = set(), set()
    for length, width in ((200, 700), (201, 713), (187, 745), (150, 790)):
        found = list(own.tiles(torch.empty(1, 4, length, 8), torch.empty(1, 2, width, 8), None))
        assert [tile.queries.start for tile in found] == list(range(0, length, own.ROWS)) and found[-1].width == width
        for tile in found[:-1]:
            assert tile.width >= width - length + tile.queries.stop  # all keys that a query sees
            widths.add(tile.width)
        full.add(width)
    assert all(width % own.ROWS == 0 or width in full for width in widths) and len(widths) < 8


def test_a_query_that_sees_no_key_is_finite():
    parts, gradient = inputs(2, 4, 2, 6, 6, 16)
    mask = (torch.arange(6) >= torch.tensor([0, 3])[:, None, None, None]) & lower_right(6, 6)
    found = with_gradients(tiled_attention(*parts, mask, None), parts, gradient)
    assert all(x.isfinite().all() for x in found)
    seen = exact([x[1:, :, 3:] for x in parts], lower_right(3, 3), 0.25, gradient[1:, 3:])[0]
    assert distances([found[0][1:, 3:]], [seen])[0] < 0.01


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (2, 4, 1, 7), None], ids=["a mask", "a mask per head", "no mask"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_in_float32_it_is_that_of_transformers(tokens, shape):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, 8, generator=generator) for heads, length in ((4, tokens), (2, 7), (2, 7))
    )
    mask = None if shape is None else (torch.rand(shape, generator=generator) < 0.7).expand(-1, -1, tokens, -1)
    module = Layer()
    module.is_causal = False
    arguments = dict(attention_mask=mask, scaling=0.3)
    found, _ = attention(module, query, key, value, **arguments)
    expected, _ = sdpa_attention_forward(module, query, key, value, **arguments)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_last_tokens_attend_to_all_before_them(length, dtype):
    parts, gradient = inputs(1, 4, 2, length, 9, 16, dtype=dtype)
    mask = lower_right(length, 9)
    expected = exact(parts, mask, 0.25, gradient)
    error = max(distances(with_gradients(causal_attention(Layer(), *parts, None), parts, gradient), expected))
    if dtype == torch.float64 or multiplies_bfloat16():
        assert error < (1e-12 if dtype == torch.float64 else 0.01)
    else:  # PyTorch's attention, whose kernels with and without a mask round differently
        plain = sdpa_attention_forward(Layer(), *parts, mask)[0]
        assert error < 1.1 * max(distances(with_gradients(plain, parts, gradient), expected)) < 0.02


def test_what_tiles_do_not_compute_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(own, "multiplies_bfloat16", lambda: True)

    def refuse(*arguments):
        raise AssertionError("tiles")

    monkeypatch.setattr(own.TiledAttention, "apply", refuse)
    parts, _ = inputs(2, 4, 2, 7, 7, 16)
    mask = lower_right(7, 7)
    with pytest.raises(AssertionError, match="tiles"):
        attention(Layer(), *parts, None)
    floats = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    bidirectional = Layer()
    bidirectional.is_causal = False
    for module, given, options in [
        (Layer(), mask.expand(2, 4, -1, -1), {}),
        (Layer(), floats, {}),
        (Layer(), mask, {"position_bias": torch.ones(1, 4, 7, 7, dtype=torch.bfloat16)}),
        (Layer(), None, {"is_causal": False}),
        (bidirectional, None, {}),
    ]:
        found, expected = (call(module, *parts, given, **options)[0] for call in (attention, sdpa_attention_forward))
        assert torch.equal(found, expected)
    attention(Layer(), *parts, mask, dropout=0.5)
    attention(Layer(), *(x.float() for x in parts), mask)
    monkeypatch.setattr(own, "multiplies_bfloat16", lambda: False)
    attention(Layer(), *parts, mask)


def test_a_layer_with_a_mask_of_its_own_is_not_packed():
    """Its mask would be lost; the placeholder that a packed pass gives has one element."""
    query, layer = torch.randn(1, 2, 3, 8), torch.nn.Identity()
    packed = SimpleNamespace(attention=lambda *arguments: "packed")
    for mask in (torch.ones(1, 1, 1, 1, dtype=torch.bool), None):
        assert own.attention(layer, query, query, query, mask, packed=packed)[0] == "packed"
    mask = torch.randn(1, 2, 3, 3)
    found = own.attention(layer, query, query, query, mask, packed=packed)[0]
    torch.testing.assert_close(found, sdpa_attention_forward(layer, query, query, query, mask)[0])


def test_the_precision_of_products_is_restored():
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with pytest.raises(RuntimeError, match="in between"), own.bfloat16_products():
        assert settings.fp32_precision == "bf16"
        raise RuntimeError("in between")
    parts, gradient = inputs(2, 4, 2, 7, 7, 16)
    with_gradients(tiled_attention(*parts, None, None), parts, gradient)
    assert settings.fp32_precision == before


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_states_and_gradients_of_a_model(kind, checkpointing, monkeypatch):
    """In bfloat16, no farther from float64 than with PyTorch's attention; checkpoints recompute with the same attention."""
    monkeypatch.setattr(own, "multiplies_bfloat16", lambda: True)
    used = []
    monkeypatch.setattr(own, "tiled_attention", lambda *arguments: used.append(1) or tiled_attention(*arguments))
    found = {}
    for name in ("exact", "torch", "own"):
        model = add_lora(random_model(kind, dtype=torch.bfloat16))
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        model = model.double() if name == "exact" else model
        if name == "own":
            use_own_attention(model)
            assert model.config._attn_implementation == NAME
        model.train()
        if checkpointing:
            enable_checkpointing(model.get_base_model())
        states = last_hidden_states(model, IDS)
        (states.double() * torch.randn(states.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad])
        found[name] = states.detach().double(), gradient
    assert len(used) == 2 * (2 if checkpointing else 1), "each of two layers, and again in the backward pass"
    ours, theirs = (distances(found[name], found["exact"]) for name in ("own", "torch"))
    assert all(mine <= 1.25 * other for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_keys_are_repeated_where_no_kernel_shares_them(kind, monkeypatch):
    """As on a GPU in float32: the same states and gradients."""
    found, used = [], []
    for repeats in (False, True):
        monkeypatch.setattr(own, "repeats_keys", lambda query, key, repeats=repeats: used.append(repeats) or repeats)
        model = add_lora(random_model(kind))
        use_own_attention(model)
        states = last_hidden_states(model, IDS)
        (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        found.append([states.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert used.count(True) == used.count(False) == 2, "in each of two layers"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_generate_of_transformers_with_padding():
    model = random_model().eval()
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    mask[0, :3] = 0
    options = dict(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    expected = model.generate(**options)
    use_own_attention(model)
    assert torch.equal(model.generate(**options), expected)


def test_a_saved_model_loads_where_this_package_is_not(tmp_path):
    model = random_model()
    use_own_attention(model)
    model.save_pretrained(tmp_path)
    assert not any(NAME in path.read_text() for path in tmp_path.glob("*.json"))


def test_other_attention_stays():
    model = random_model()
    model.set_attn_implementation("eager")
    with own_attention(model):
        assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="in between"), own_attention(model):
        assert model.config._attn_implementation == NAME
        raise RuntimeError("in between")
    assert use_own_attention(model) == "sdpa" and model.config._attn_implementation == NAME


@pytest.mark.parametrize(("asked", "found"), [(None, NAME), ("sdpa", "sdpa"), ("eager", "eager")])
def test_the_attention_of_a_run_on_a_cpu(asked, found, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "model")
    setup = load_setup(run_config(checkpoint, tmp_path / "run", attn_implementation=asked))
    assert setup.model.get_base_model().config._attn_implementation == found
