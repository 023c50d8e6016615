"""The decoding loop against `generate`, the sampled distribution against transformers' processors, and the merged adapter."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from firedistill.memory import BatchLimit
from firedistill.models.adapter import compute_in_base_dtype
from firedistill.models.lora import add_lora
from firedistill.prompts import PromptEncoder, TokenBudget
from firedistill.rollout import Prompt, Response, Sampling
from firedistill.rollouts import fixed
from firedistill.rollouts.decoding import RoomyLayer, can_decode
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.load import close
from firedistill.rollouts.merging import PackedLinear, can_pack, mergeable_layers, merged_adapter, merged_bytes
from firedistill.rollouts.sampler import Sampler
from firedistill.rollouts.sampling import NOT_FINITE, TOO_FEW, candidates, choose_tokens, penalize_repetition
from firedistill.teacher.ema import EMAWeights
from tiny import ToyTask, byte_tokenizer, enable_checkpointing, random_model

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15, 16, 17, 18, 19], [10, 11], [40] * 30]
GREEDY = Sampling(temperature=0.0, max_new_tokens=24)


def by_generate(*arguments, **options) -> HFRolloutEngine:
    """An engine that samples with the model's own `generate`, as for models without a loop of ours."""
    engine = HFRolloutEngine(*arguments, **options)
    engine.causal_lm = None
    return engine


def ending_with(stops: list[int], kind: str = "qwen2"):
    """A model and a tokenizer whose end-of-sequence tokens are `stops`."""
    model, tokenizer = random_model(kind), byte_tokenizer()
    model.generation_config.eos_token_id = stops or None
    if 2 not in stops:
        tokenizer.eos_token = None
    return model, tokenizer


def adapted(kind="llama", size=0.3, **options):
    model = add_lora(random_model(kind, **options))
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=size, generator=generator)
    return model


# ---- The loop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("stops", [[2], [2, *range(60, 120)], []])
def test_greedy_equals_generate(kind, stops):
    """Ragged prompts, one of them twice; stop tokens that end responses at different steps; limits."""
    model, tokenizer = ending_with(stops, kind)
    for limits in (None, [3, 24, 1, 0, 7, 24]):
        ours, theirs = HFRolloutEngine(model, tokenizer), by_generate(model, tokenizer)
        assert ours.causal_lm is model
        found, expected = (engine.generate(PROMPTS, GREEDY, seed=0, limits=limits) for engine in (ours, theirs))
        assert found == expected
        lengths = [len(response.token_ids) for response in found]
        assert all(length <= limit for length, limit in zip(lengths, limits or [24] * 6, strict=True))
        if len(stops) > 1:
            assert len(set(lengths)) > 2 and any(response.finished for response in found)
        for response in found:  # what follows a stop token is padding
            ends = [token in stops for token in response.token_ids]
            assert not any(ends[:-1]) and response.finished == any(ends)
            assert response.text == tokenizer.decode(response.token_ids, skip_special_tokens=True)
        if not stops:
            assert lengths == (limits or [24] * 6) and not any(response.finished for response in found)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_greedy_with_repetition_penalty(penalty):
    """Without padding, which `generate` would penalize as if it were part of the prompt."""
    model, tokenizer = random_model(), byte_tokenizer()
    prompts = [[5, 6, 7, 8, 0], [10, 11, 12, 10, 9], [40] * 5]
    sampling = Sampling(temperature=0.0, max_new_tokens=30, repetition_penalty=penalty)
    found, expected = (e(model, tokenizer).generate(prompts, sampling, seed=0) for e in (HFRolloutEngine, by_generate))
    assert found == expected
    plain = HFRolloutEngine(model, tokenizer).generate(prompts, Sampling(temperature=0.0, max_new_tokens=30), seed=0)
    assert plain != found
    ragged = HFRolloutEngine(model, tokenizer).generate([*prompts, list(range(20, 60))], sampling, seed=0)
    assert ragged[:3] == found, "padding is not penalized"


def test_a_response_depends_on_neither_batch_nor_batch_size():
    model, tokenizer = random_model(dtype=torch.float64), byte_tokenizer()
    sampling = Sampling(max_new_tokens=12)
    together, apart = (HFRolloutEngine(model, tokenizer, size).generate(PROMPTS, sampling, seed=3) for size in (6, 1))
    assert together == apart
    assert together[1] != together[4], "the same prompt twice is sampled twice"
    alone = [HFRolloutEngine(model, tokenizer).generate([prompt], GREEDY, seed=0)[0] for prompt in PROMPTS]
    assert HFRolloutEngine(model, tokenizer).generate(PROMPTS, GREEDY, seed=9) == alone


def test_sampling_follows_the_configured_parameters_alone():
    """The checkpoint's own top-k, repetition penalty, temperature and minimum length must not leak in."""
    model, tokenizer = random_model(dtype=torch.float64), byte_tokenizer()
    model.generation_config = GenerationConfig(
        eos_token_id=2, pad_token_id=0, top_k=1, repetition_penalty=50.0, temperature=0.01, min_new_tokens=3, do_sample=True
    )
    engine = HFRolloutEngine(model, tokenizer, batch_size=4000)
    prompt = [40, 41, 42, 43]
    responses = engine.generate([prompt] * 4000, Sampling(temperature=0.8, top_p=0.9, max_new_tokens=1), seed=1)
    counts = torch.zeros(263, dtype=torch.float64)
    for response in responses:
        counts[response.token_ids[0]] += 1
    p = (model(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1).detach()
    ordered, index = p.sort(descending=True)
    inside = ordered.cumsum(-1) - ordered < 0.9
    expected = torch.zeros_like(p)
    expected[index[inside]] = ordered[inside] / ordered[inside].sum()
    assert counts[expected == 0].sum() == 0
    likely = expected > 0.005
    z = (counts[likely] - 4000 * expected[likely]) / (4000 * expected[likely] * (1 - expected[likely])).sqrt()
    assert z.abs().max() < 4.5
    assert model.generation_config.top_k == 1, "the checkpoint's settings are restored"


def test_greedy_is_the_argmax_and_seeds_repeat():
    model, tokenizer = random_model(dtype=torch.float64), byte_tokenizer()
    model.generation_config.repetition_penalty = 3.0
    engine = HFRolloutEngine(model, tokenizer, batch_size=3)
    greedy = Sampling(temperature=0.0, max_new_tokens=5)
    together = engine.generate(PROMPTS[:4], greedy, seed=0)
    for prompt, response in zip(PROMPTS[:4], together, strict=True):
        ids = list(prompt)
        for token in response.token_ids:
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
        assert response.finished == (response.token_ids[-1] == 2)
    state = torch.random.get_rng_state()
    first, again, other = (engine.generate(PROMPTS[:4], Sampling(max_new_tokens=6), seed=s) for s in (5, 5, 6))
    assert first == again and first != other
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training, "the training flag is restored"


def test_long_responses_outgrow_the_room_of_the_cache():
    model, tokenizer = ending_with([])
    sampling = Sampling(temperature=0.0, max_new_tokens=2 * RoomyLayer.ROOM + 9)
    engines = HFRolloutEngine(model, tokenizer), by_generate(model, tokenizer)
    found, expected = (engine.generate(PROMPTS[:2], sampling, seed=0) for engine in engines)
    assert found == expected and len(found[0].token_ids) == 2 * RoomyLayer.ROOM + 9


def test_sliding_windows():
    torch.manual_seed(0)
    sizes = dict(vocab_size=263, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8, initializer_range=0.25, eos_token_id=2)
    model = MistralForCausalLM(config).eval()
    engines = HFRolloutEngine(model, byte_tokenizer()), by_generate(model, byte_tokenizer())
    assert engines[0].causal_lm is model
    found, expected = (engine.generate(PROMPTS, GREEDY, seed=0) for engine in engines)
    assert found == expected


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 3, 6], ids=lambda heads: f"{heads} of 6 heads have keys")
def test_keys_that_heads_share_are_not_copied(heads, padded, monkeypatch):
    torch.manual_seed(0)
    sizes = dict(vocab_size=263, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6)
    model = MistralForCausalLM(
        MistralConfig(**sizes, num_key_value_heads=heads, sliding_window=None, initializer_range=0.25, eos_token_id=2)
    )
    attention, shapes = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(query, key, value, **options):
        shapes.append((tuple(query.shape[:3]), key.shape[1], bool(options.get("enable_gqa"))))
        return attention(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    prompts = PROMPTS[:3] if padded else [[5, 6, 7, 8], [8, 9, 10, 11], [11, 12, 13, 14]]
    model.double().eval()
    before = model.config._attn_implementation
    found = HFRolloutEngine(model, byte_tokenizer()).generate(prompts, GREEDY, seed=0)
    of_tokens = [shape for shape in shapes if shape[0][2] == 6 // heads]
    assert set(of_tokens) == {((rows, heads, 6 // heads), heads, False) for rows in {shape[0][0] for shape in of_tokens}}
    assert len(of_tokens) == 2 * (max(len(response.token_ids) for response in found) - 1)
    assert model.config._attn_implementation == before == "sdpa"
    assert found == by_generate(model, byte_tokenizer()).generate(prompts, GREEDY, seed=0)


def test_progress_and_seeds_and_restored_state():
    model, tokenizer = adapted(), byte_tokenizer()
    model.train()
    enable_checkpointing(model.get_base_model())
    frozen = model.get_base_model().model.norm
    frozen.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    engine, told, state = HFRolloutEngine(model, tokenizer, batch_size=2), [], torch.random.get_rng_state()
    sampling = Sampling(max_new_tokens=20)
    first = engine.generate(PROMPTS, sampling, seed=5, progress=told.append, limits=[20, 20, 0, 20, 20, 20])
    assert told == [3, 5, 6], "the prompt without room counts as done"
    assert torch.equal(state, torch.random.get_rng_state())
    assert {name: module.training for name, module in model.named_modules()} == modes and not frozen.training
    assert first[2].token_ids == [] and not first[2].finished
    assert engine.generate(PROMPTS, sampling, seed=5)[3] == first[3]
    assert engine.generate(PROMPTS, sampling, seed=6) != engine.generate(PROMPTS, sampling, seed=5)
    assert engine.generate([], sampling, seed=0) == []


def test_models_that_generate_themselves():
    """Recurrent states and inputs of another kind are left to the model's own `generate`, with the same interface."""
    torch.manual_seed(0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=263, hidden_size=16, num_hidden_layers=1, state_size=4, eos_token_id=2))
    assert not can_decode(mamba)
    engine = HFRolloutEngine(mamba, byte_tokenizer())
    assert engine.causal_lm is None
    found = engine.generate(PROMPTS, Sampling(max_new_tokens=3), seed=0, limits=[3, 2, 1, 0, 3, 3])
    assert [len(r.token_ids) for r in found][3] == 0 and all(len(found[i].token_ids) >= 1 for i in (0, 1, 2, 4, 5))
    assert can_decode(GPT2LMHeadModel(GPT2Config(vocab_size=263, n_embd=16, n_layer=1, n_head=2)))

    class OwnInputs(type(random_model())):
        def prepare_inputs_for_generation(self, *arguments, **options):
            return super().prepare_inputs_for_generation(*arguments, **options)

    assert not can_decode(OwnInputs(random_model().config))


def test_a_model_that_is_not_finite_is_refused():
    model = random_model()
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        HFRolloutEngine(model, byte_tokenizer()).generate([[5]], Sampling(max_new_tokens=2), seed=0)
    assert model.training


# ---- The distribution of the next token ------------------------------------------------------------------------------------


def scores_of_many_kinds() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(12, 700, generator=generator)
    return torch.cat(
        [
            noise[:4] * 4,
            noise[4:8] * 0.01,  # flat: a nucleus far wider than the first candidates
            (noise[8:10] * 2).round(),  # ties everywhere
            torch.zeros(1, 700),
            noise[11:].masked_fill(torch.arange(700) % 7 > 0, -torch.inf),
        ]
    )


def full_distribution(scores: torch.Tensor, sampling: Sampling, width: int) -> torch.Tensor:
    """`[B, V]` probabilities, widened as the draw does."""
    probabilities = torch.zeros(scores.shape, dtype=torch.float64)
    rows = torch.arange(len(scores))
    while len(rows):
        weights, tokens, complete, finite = candidates(scores[rows] / sampling.temperature, sampling, width)
        assert finite.all()
        full = torch.zeros(len(rows), scores.shape[-1], dtype=torch.float64).scatter_(-1, tokens, weights.double())
        probabilities[rows[complete]] = (full / full.sum(-1, keepdim=True))[complete]
        rows, width = rows[~complete], 16 * width
    return probabilities


@pytest.mark.parametrize("width", [4, 128, 700])
@pytest.mark.parametrize("top_k", [0, 1, 5, 200, 699, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
def test_the_distribution_is_that_of_the_warpers(top_p, top_k, width):
    scores, temperature = scores_of_many_kinds(), 0.7
    warpers = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(min(top_k, 700)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = LogitsProcessorList(warpers)(torch.zeros(12, 1, dtype=torch.long), scores.clone()).softmax(-1).double()
    found = full_distribution(scores, Sampling(temperature=temperature, top_p=top_p, top_k=top_k), max(width, top_k + 1))
    # Among tokens of equal score at the border it is open which are in: there only the probabilities are compared, not whose.
    tied = [8, 9, 10]
    others = [row for row in range(12) if row not in tied]
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found[tied].sort(-1).values, expected[tied].sort(-1).values, rtol=1e-4, atol=1e-7)
    allowed = found[tied] > 0
    smallest = scores[tied].masked_fill(~allowed, torch.inf).amin(-1, keepdim=True)
    assert not ((scores[tied] > smallest) & ~allowed).any(), "whatever scores higher than an allowed token is allowed"


def test_the_repetition_penalty_is_that_of_the_processor():
    scores, ids = scores_of_many_kinds(), torch.randint(0, 700, (12, 40), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(12, 700, dtype=torch.bool).scatter_(-1, ids, True)
    for penalty in (1.2, 0.8):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores.clone())
        torch.testing.assert_close(penalize_repetition(scores, seen, penalty), expected, rtol=0, atol=0)


@pytest.mark.parametrize("top_p, top_k", [(1.0, 0), (0.9, 0), (0.9, 30), (1.0, 4)])
def test_the_draw_inverts_the_distribution_function(top_p, top_k):
    """Evenly spaced numbers fall on each token as often as its probability says, to within two; excluded tokens are never drawn."""
    sampling, count = Sampling(temperature=0.7, top_p=top_p, top_k=top_k), 20_000
    uniforms = torch.arange(count, dtype=torch.float64) / count
    uniforms[-1] = 1 - 2**-53
    for scores in scores_of_many_kinds()[[0, 5, 10, 11]]:
        expected = full_distribution(scores[None], sampling, 128)[0]
        chosen = torch.cat([choose_tokens(scores.expand(len(part), -1), sampling, part) for part in uniforms.split(2000)])
        found = torch.bincount(chosen, minlength=700)
        assert found[expected == 0].sum() == 0
        assert (found - count * expected).abs().max() <= 2


# ---- The merged adapter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_undone(dtype):
    model = adapted("qwen2", dtype=dtype)
    modules, tensors = dict(model.named_modules()), {name: p.clone() for name, p in model.named_parameters()}
    owners = {name: (p, p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        unmerged = model(ids).logits
        with merged_adapter(model):
            assert not mergeable_layers(model), "no adapted layer is left"
            merged = model(ids).logits
        again = model(ids).logits
        with model.disable_adapter():
            base = model(ids).logits
    if dtype == torch.float32:
        torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    assert (base - unmerged).abs().max() > 1 and torch.equal(again, unmerged)
    with pytest.raises(RuntimeError, match="half-way"), merged_adapter(model):
        raise RuntimeError("half-way")
    assert dict(model.named_modules()) == modules
    for name, p in model.named_parameters():
        assert (p, p.data_ptr(), p.requires_grad) == (owners[name][0], *owners[name][1:])
        assert torch.equal(p, tensors[name])
    assert merged_bytes(model) == sum(p.nbytes for name, p in tensors.items() if name.endswith("base_layer.weight"))


def test_merged_sampling_is_that_of_the_unmerged_model_and_follows_its_weights():
    """In float64 both round alike; the student is updated in place, the teacher lends its weights."""
    model, tokenizer = adapted(dtype=torch.float64), byte_tokenizer()
    model.double()
    weights, sampling = EMAWeights(model, 0.5), Sampling(max_new_tokens=15)
    merged, unmerged = (HFRolloutEngine(model, tokenizer, merge_adapter=choice) for choice in (True, False))
    first = merged.generate(PROMPTS, sampling, seed=1)
    assert merged.causal_lm is model.get_base_model() and first == unmerged.generate(PROMPTS, sampling, seed=1)
    with torch.no_grad():
        for p in weights.parameters.values():
            p.add_(0.2)
    moved = merged.generate(PROMPTS, sampling, seed=1)
    assert moved != first and moved == unmerged.generate(PROMPTS, sampling, seed=1)
    with weights.applied():
        assert merged.generate(PROMPTS, sampling, seed=1) == first
    assert merged.generate(PROMPTS, sampling, seed=1) == moved
    assert by_generate(model, tokenizer, merge_adapter=True).generate(PROMPTS, GREEDY, seed=1) == merged.generate(
        PROMPTS, GREEDY, seed=1
    )


@pytest.mark.skipif(not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this CPU or build has no bfloat16 kernels")
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_layer_is_the_plain_one(biased):
    """Both sum in float32 and round once: what differs is the order of the sum."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 200, bias=biased).bfloat16()
    packed = PackedLinear(plain.weight, plain.bias)
    for shape in [(1, 1, 96), (5, 1, 96), (3, 40, 96)]:
        states = torch.randn(shape).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(packed(states), plain(states), rtol=2**-7, atol=2**-9)


def test_packed_copies_are_what_a_merged_bfloat16_model_runs_on():
    model = adapted("qwen2", dtype=torch.bfloat16)
    packs = can_pack(model.get_output_embeddings().weight)
    with merged_adapter(model):
        assert sum(isinstance(module, PackedLinear) for module in model.modules()) == (2 * 7 + 1 if packs else 0)
    float32 = adapted("qwen2", dtype=torch.bfloat16).float()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad(), merged_adapter(model):
        merged = model(ids).logits.float()
        expected, tolerance = float32(ids).logits, {"rtol": 0.05, "atol": 0.3}
        with float32.disable_adapter():
            assert not torch.allclose(float32(ids).logits, expected, **tolerance)
    torch.testing.assert_close(merged, expected, **tolerance)


def test_training_continues_after_merging():
    model = adapted()
    HFRolloutEngine(model, byte_tokenizer(), merge_adapter=True).generate(PROMPTS, GREEDY, seed=0)
    model(torch.arange(5, 25)[None]).logits.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


def test_what_cannot_be_merged_runs_unmerged():
    """Here DoRA; quantized layers are of other classes than the plain one, too."""
    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    model = get_peft_model(random_model(), config)
    assert mergeable_layers(model) == [] and merged_bytes(model) == 0
    found, expected = (
        HFRolloutEngine(model, byte_tokenizer(), merge_adapter=choice).generate(PROMPTS, GREEDY, seed=0)
        for choice in (True, False)
    )
    assert found == expected
    plain = adapted()
    assert len(mergeable_layers(plain)) == 2 * 7
    with plain.disable_adapter():
        assert mergeable_layers(plain) == []


@pytest.mark.parametrize(("choice", "merges"), [(None, [False, True]), (True, [True, True]), (False, [False, False])])
def test_a_call_merges_where_that_pays(choice, merges):
    """By default, a call of 16 decoding steps or more."""
    model = adapted()
    engine, merged = HFRolloutEngine(model, byte_tokenizer(), merge_adapter=choice), []
    for steps in (15, 16):
        sampling = Sampling(max_new_tokens=steps)
        engine.generate([[5]], sampling, seed=0, progress=lambda done: merged.append(not mergeable_layers(model)))
    assert merged == merges


# ---- Without the host --------------------------------------------------------------------------------------------------------

SAMPLINGS = [
    GREEDY,
    Sampling(max_new_tokens=40),
    Sampling(temperature=1.3, top_p=1.0, top_k=7, max_new_tokens=40),
    Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.3, max_new_tokens=40),
]


@pytest.fixture
def few_candidates(monkeypatch):
    """Draws often need more candidates than the first ones, and buckets are narrow."""
    monkeypatch.setattr(fixed, "CANDIDATES", 3)
    monkeypatch.setattr(fixed, "BUCKET", 8)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "nucleus", "top-k", "penalty"])
@pytest.mark.parametrize("stops", [[2], [2, *range(60, 120)], []], ids=["one stop", "many stops", "no stop"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_fixed_decoding_gives_the_same_tokens(kind, stops, sampling, few_candidates):
    """Ragged prompts, one of them twice, limits, and a second batch of another size in the same memory."""
    model, tokenizer = ending_with(stops, kind)
    model.double()
    growing, one = (HFRolloutEngine(model, tokenizer, fixed=choice) for choice in (False, True))
    assert one.decoder is not None and growing.decoder is None
    for prompts, limits in ((PROMPTS, None), (PROMPTS, [3, 24, 1, 0, 7, 24]), (PROMPTS[:1], None), (PROMPTS[3:], None)):
        expected, found = (engine.generate(prompts, sampling, seed=4, limits=limits) for engine in (growing, one))
        assert found == expected
    assert model.config._attn_implementation == "sdpa"


def test_fixed_decoding_keeps_every_address():
    """Merged copies, keys, values and all that a graph would read; the copies follow the adapter."""
    model, tokenizer = adapted("qwen2"), byte_tokenizer()
    engine, plain = (HFRolloutEngine(model, tokenizer, merge_adapter=True, fixed=choice) for choice in (True, False))

    def addresses():
        buffers = [buffer for layer in engine.decoder.layers for buffer in layer.buffers]
        copies = [copy.weight for copy in engine.copies.values()]
        return [tensor.data_ptr() for tensor in (*buffers, *copies, *engine.decoder.tensors.values())], engine.decoder.addresses

    sampling = Sampling(max_new_tokens=20)
    first, before = engine.generate(PROMPTS, sampling, seed=1), addresses()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.2)
    moved = engine.sharing(BatchLimit(6, "eval_batch_size", "")).generate(PROMPTS[::-1], sampling, seed=1)
    assert addresses() == before and len(engine.copies) == 2 * 4
    assert moved == plain.generate(PROMPTS[::-1], sampling, seed=1) and moved[::-1] != first


def test_values_that_are_not_finite_end_with_their_batch():
    """Greedy choice raises no error, and a mask does not hide NaN."""
    model, tokenizer = adapted("qwen2"), byte_tokenizer()
    engine = HFRolloutEngine(model, tokenizer, fixed=True)
    first = engine.generate(PROMPTS, GREEDY, seed=0)
    for layer in engine.decoder.layers:
        for buffer in layer.buffers:
            buffer.fill_(float("nan"))
    assert engine.generate(PROMPTS, GREEDY, seed=0) == first


class HostReads(TorchDispatchMode):
    """Counts the operations by which the host reads a value of the device or waits for one."""

    WAITING = {
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.nonzero,
        torch.ops.aten.equal,
        torch.ops.aten.is_nonzero,
        torch.ops.aten.masked_select,
        torch.ops.aten.index.Tensor.overloadpacket,  # with a mask, it counts
    }

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = function.overloadpacket is torch.ops.aten.index and all(
            index is None or index.dtype != torch.bool for index in args[1]
        )
        if function.overloadpacket in self.WAITING and not masks:
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "nucleus", "top-k", "penalty"])
def test_no_step_of_fixed_decoding_waits_for_the_device(sampling, merged, monkeypatch):
    """One look per 16 tokens; the growing loop, which waits for every token, shows that the count works."""
    model, tokenizer = adapted("qwen2"), byte_tokenizer()
    engine, looks, advances = HFRolloutEngine(model, tokenizer, merge_adapter=merged, fixed=True), [], []
    engine.stop_ids.clear()
    tolist, advance = torch.Tensor.tolist, fixed.Decoder.advance
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(self.shape) or tolist(self))

    def counted(self, *arguments):
        with HostReads() as reads:
            advance(self, *arguments)
        advances.append(reads.found)

    monkeypatch.setattr(fixed.Decoder, "advance", counted)
    engine.generate([[5, 6], [7]], replace(sampling, max_new_tokens=40), seed=0)
    assert advances == [[]] * 39, "the first token comes from the prompts"
    assert looks == [(2, 16), (2, 16), (2, 8)]
    with HostReads() as reads:
        HFRolloutEngine(model, tokenizer, fixed=False).generate([[5, 6], [7]], SAMPLINGS[1], seed=0)
    assert reads.found


class Replayed:
    """Stands for a CUDA graph: runs the step with the arguments with which it was captured."""

    def __init__(self, step, arguments):
        self.step, self.arguments, self.replays = step, arguments, 0

    def replay(self):
        self.replays += 1
        self.step(*self.arguments)


def test_each_bucket_and_size_has_its_graph(few_candidates, monkeypatch):
    """The first step of a kind runs by itself; a later call replays what an earlier one captured, unless a weight lies elsewhere."""
    model, tokenizer = ending_with([])
    model.double()
    engine, plain, captured = HFRolloutEngine(model, tokenizer, fixed=True), HFRolloutEngine(model, tokenizer), []
    engine.decoder.captures = True

    def capture(self, *arguments):
        captured.append(Replayed(self.step, arguments))
        return captured[-1]

    monkeypatch.setattr(fixed.Decoder, "capture", capture)
    sampling = Sampling(temperature=0.0, max_new_tokens=20)
    for _ in range(2):
        assert engine.generate(PROMPTS[:2], sampling, seed=0) == plain.generate(PROMPTS[:2], sampling, seed=0)
    assert [graph.arguments[1] for graph in captured] == [8, 16, 24] and sum(g.replays for g in captured) == 2 * 19 - 3
    model.model.norm.weight.data = 2 * model.model.norm.weight.data
    assert engine.generate(PROMPTS[:2], sampling, seed=0) == plain.generate(PROMPTS[:2], sampling, seed=0)
    assert len(captured) == 6


def test_a_model_that_cannot_be_captured_runs_step_by_step(caplog):
    """Here because there is no GPU."""
    model, tokenizer = ending_with([])
    engine, plain = HFRolloutEngine(model, tokenizer, fixed=True), HFRolloutEngine(model, tokenizer)
    engine.decoder.captures = True
    assert engine.generate(PROMPTS, GREEDY, seed=0) == plain.generate(PROMPTS, GREEDY, seed=0)
    assert "without a CUDA graph" in caplog.text and not engine.decoder.captures


class FailingCapture:
    """Stands for the parts of `torch.cuda` that a capture uses, and fails at the stages that are named.

    Attributes:
        device: the current one.
        streams: by device, the current one and the one of the capture.
        freed: device and pool of what ended, apart from captures that succeed.
    """

    def __init__(self, monkeypatch, stages, error):
        self.stages, self.error, self.current, self.allocates, self.users = stages, error, "main", False, 0
        self.device, self.streams, self.freed = torch.device("cuda", 0), [], []
        for name, value in {
            "CUDAGraph": object,
            "graph_pool_handle": lambda: (0, 7),
            "current_stream": lambda: self.current,
            "device": partial(self.switched, "device"),
            "stream": partial(self.switched, "current"),
            "Stream": lambda device: ("own", device),
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)
        step = fixed.Decoder.step
        monkeypatch.setattr(fixed.Decoder, "step", lambda *arguments: self.step(step, *arguments))

    def graph(self, graph, stream, **settings):
        self.streams.append((self.device, stream))
        return self

    @contextmanager
    def switched(self, name, value):
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def __enter__(self):
        self.current, self.allocates, self.users = "side", True, self.users + 1
        self.fail("begin")

    def __exit__(self, *error):
        self.fail("end")
        self.current = "main"
        self.end_allocation(0, (0, 7))

    def fail(self, stage):
        if stage in self.stages:
            raise RuntimeError("capture is invalid") if stage == "end" else self.error

    def step(self, step, *arguments):
        if self.current == "side":  # nothing is computed
            return self.fail("step")
        return step(*arguments)

    def end_allocation(self, device, pool):
        if not self.allocates:
            raise RuntimeError("not currently recording")
        self.allocates = False
        self.freed.append((device, pool))

    def release(self, device, pool):
        self.users -= 1
        self.freed.append((device, pool))


@pytest.mark.parametrize("stages", [("begin",), ("step",), ("end",), ("step", "end")], ids=" and ".join)
def test_a_capture_that_fails_leaves_nothing_behind(stages, monkeypatch, caplog):
    model, tokenizer = ending_with([])
    engine, plain = HFRolloutEngine(model, tokenizer, fixed=True), HFRolloutEngine(model, tokenizer)
    expected = plain.generate(PROMPTS, GREEDY, seed=0)
    engine.decoder.captures = True
    device = FailingCapture(monkeypatch, stages, TypeError("this module cannot be captured"))
    assert engine.generate(PROMPTS, GREEDY, seed=0) == expected
    decoder = engine.decoder
    assert (
        device.current == "main" and not device.allocates and device.users == (stages == ("step",))
    )  # then the graph is a user
    assert decoder.pool is None and not any(decoder.graphs.values()) and not decoder.captures
    reason = "capture is invalid" if stages == ("end",) else "this module cannot be captured"
    assert [record.message for record in caplog.records] == [f"sampling runs without a CUDA graph: {reason}"]


@pytest.mark.parametrize("stages", [(), ("step", "end")], ids=["success", "failure"])
def test_a_capture_is_made_on_the_device_of_the_model(stages, monkeypatch):
    """Not on the current one, of another model, whose captures have a stream of their own. A failed one is cleaned up there, too."""
    monkeypatch.setattr(torch.cuda, "default_generators", ["", SimpleNamespace(clone_state=list, graphsafe_set_state=None)])
    decoders = [fixed.Decoder(SimpleNamespace(device=torch.device("cuda", index)), 0, [2]) for index in (0, 1)]
    recorder, states = FailingCapture(monkeypatch, stages, TypeError("no")), []
    torch.cuda.default_generators[1].graphsafe_set_state = states.append
    for decoder in (*decoders, decoders[1]):
        decoder.capture(2, 256, GREEDY)
        assert decoder.captures == (not stages)
    devices = [decoder.model.device for decoder in (*decoders, decoders[1])]
    assert recorder.streams == [(device, ("own", device)) for device in devices]
    assert recorder.device == torch.device("cuda", 0) and recorder.current == "main"
    if stages:
        assert recorder.freed == [(index, (0, 7)) for index in (0, 0, 1, 1, 1, 1)] and states == [[], []]


@pytest.mark.parametrize("stages", [("step",), ("step", "end")], ids=" and ".join)
def test_a_capture_that_runs_out_of_memory_says_so(stages, monkeypatch):
    """A smaller batch follows, by graphs again."""
    decoder = fixed.Decoder(random_model(), 0, [2])
    decoder.captures = True
    device = FailingCapture(monkeypatch, stages, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        decoder.capture(2, 256, GREEDY)
    assert device.current == "main" and not device.allocates and decoder.pool is None and decoder.captures


def test_graphs_that_are_dropped_take_their_pool_along(few_candidates, monkeypatch):
    model, tokenizer = ending_with([])
    engine, pools = HFRolloutEngine(model, tokenizer, fixed=True), []
    engine.decoder.captures = True

    def capture(self, *arguments):
        pools.append(self.pool)
        self.pool = self.pool or (0, 7)
        return Replayed(self.step, arguments)

    monkeypatch.setattr(fixed, "GRAPHS", 2)
    monkeypatch.setattr(fixed.Decoder, "capture", capture)
    engine.generate(PROMPTS[:2], replace(GREEDY, max_new_tokens=20), seed=0)
    assert pools == [None, (0, 7), None], "the third bucket found two graphs"
    (key,) = engine.decoder.graphs
    assert all(isinstance(part, int) for part in key), "a key is cheap to look up"


def test_buckets_widen_and_long_answers_have_few():
    """Every bucket holds the present column, and at most half as many columns past it as up to it."""
    decoder = fixed.Decoder(random_model(), 0, [2])
    decoder.columns = 66 * fixed.BUCKET
    buckets = [decoder.bucket(1, column) for column in range(359, 360 + 16_384)]
    assert buckets == sorted(buckets) and len(set(buckets)) <= fixed.GRAPHS / 2
    assert all(column < bucket <= max(1.5 * column + 1, column + fixed.BUCKET) for column, bucket in enumerate(buckets, 359))
    assert {bucket for bucket in buckets if bucket <= 8 * fixed.BUCKET} == {fixed.BUCKET * n for n in range(2, 9)}
    assert buckets[-1] == decoder.columns, "never more than there is"


def test_wide_buckets_give_the_same_tokens(monkeypatch):
    monkeypatch.setattr(fixed, "BUCKET", 2)
    model, tokenizer = ending_with([])
    growing, one = (HFRolloutEngine(model.double(), tokenizer, fixed=choice) for choice in (False, True))
    shown, show = [], fixed.FixedLayer.show
    monkeypatch.setattr(
        fixed.FixedLayer, "show", lambda self, rows, columns: shown.append(columns) or show(self, rows, columns)
    )
    assert one.generate(PROMPTS[:1], GREEDY, seed=0) == growing.generate(PROMPTS[:1], GREEDY, seed=0)
    assert sorted(set(shown)) == [6, 8, 10, 12, 14, 16, 24, 30] and shown[-1] == 30, "5 + 24 tokens have 30 columns"


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["default", "warn", "error"])
def test_keys_and_values_are_written_without_a_sort_in_deterministic_runs(mode):
    """CUDA's deterministic kernel sorts indices, and a single one cannot collide. All other operations stay deterministic."""

    class Modes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            writes = function.overloadpacket is torch.ops.aten.index_copy_ and args[0].dim() == 4
            modes[writes].add(torch.get_deterministic_debug_mode())
            return function(*args, **(kwargs or {}))

    modes, engine = {True: set(), False: set()}, HFRolloutEngine(random_model(), byte_tokenizer(), fixed=True)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        with Modes():
            engine.generate(PROMPTS[:1], GREEDY, seed=0)
        after = torch.get_deterministic_debug_mode()
    finally:
        torch.set_deterministic_debug_mode(before)
    assert modes == {True: {0}, False: {mode}} and after == mode


def test_a_row_without_a_distribution_is_reported_after_another_was_drawn_again(monkeypatch):
    """Where seen tokens have a penalty, the marks of both rows are made anew."""
    model, tokenizer = ending_with([])
    engine, calls, draw = HFRolloutEngine(model, tokenizer, fixed=True), [], fixed.draw

    def drawn(scores, *arguments):
        calls.append(draw(scores, *arguments))
        if len(calls) == 2:
            calls[-1][1] = NOT_FINITE
        elif len(calls) == 4:
            calls[-1][0] = TOO_FEW
        return calls[-1]

    monkeypatch.setattr(fixed, "draw", drawn)
    with pytest.raises(ValueError, match="not finite"):
        engine.generate(PROMPTS[:2], Sampling(repetition_penalty=1.3, max_new_tokens=12), seed=0)
    assert len(calls) > 11, "drawn again"


# ---- On a GPU by graphs, elsewhere step by step ----------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "two buckets": ([[5 + i % 200 for i in range(250)], [10, 11]], Sampling(max_new_tokens=24)),
    "penalty": (PROMPTS, Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.3, max_new_tokens=40)),
    "draws that need more candidates": (PROMPTS, Sampling(temperature=1.3, max_new_tokens=40)),
}


def three_ways(model, tokenizer, **options) -> list[HFRolloutEngine]:
    """Engines with caches that grow, with fixed addresses step by step, and with fixed addresses as the device allows."""
    engines = [HFRolloutEngine(model, tokenizer, fixed=choice, **options) for choice in (False, True, True)]
    engines[1].decoder.captures = False
    return engines


def sampled(engines, prompts, sampling, seed):
    """The responses, which are the same for all engines; on a GPU the last one has used graphs."""
    found = [engine.generate(prompts, sampling, seed=seed) for engine in engines]
    assert all(others == found[0] for others in found)
    decoder = engines[-1].decoder
    assert decoder.captures == any(decoder.graphs.values()) == (decoder.model.device.type == "cuda")
    return found[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_every_way_of_decoding_gives_the_same_tokens(case, device, monkeypatch):
    """In float64, where no two rounding errors make another token. The second call replays the graphs of the first."""
    if case.startswith("draws"):
        monkeypatch.setattr(fixed, "CANDIDATES", 3)
    model, tokenizer = ending_with([])
    engines, again, draw_again = three_ways(model.double().to(device), tokenizer), [], fixed.FixedBatch.draw_again
    monkeypatch.setattr(fixed.FixedBatch, "draw_again", lambda self, step: again.append(step) or draw_again(self, step))
    prompts, sampling = CASES[case]
    assert sampled(engines, prompts, sampling, 4) != sampled(engines, prompts, sampling, 5)
    assert bool(again) == case.startswith("draws")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("merged", [False, True])
def test_decoding_follows_other_sizes_and_weights(merged, device):
    """More rows and columns than there was room for, fewer again, and an adapter that is updated in place, or moves."""
    model, sampling = adapted("qwen2").double().to(device), Sampling(max_new_tokens=20)
    engines = three_ways(model, byte_tokenizer(), merge_adapter=merged)
    for prompts in (PROMPTS[:2], PROMPTS, [[5] * 250], PROMPTS[:2]):
        sampled(engines, prompts, sampling, 1)
    found = [sampled(engines, PROMPTS, sampling, 1)]
    factors = [p for name, p in model.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for p in factors:
            p.add_(0.2)
        found.append(sampled(engines, PROMPTS, sampling, 1))
        for p in factors:
            p.data = p.data + 0.2
        found.append(sampled(engines, PROMPTS, sampling, 1))
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("merged", [False, True])
def test_graphs_repeat_the_steps_of_a_bfloat16_model_to_the_bit(merged, device):
    """With the products of the adapter in bfloat16, as in training."""
    model = adapted("qwen2", dtype=torch.bfloat16)
    compute_in_base_dtype(model)
    engines = three_ways(model.to(device), byte_tokenizer(), merge_adapter=merged)[1:]
    for seed in (1, 2):
        sampled(engines, PROMPTS, Sampling(max_new_tokens=20), seed)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_device_that_is_not_the_current_one():
    """The first model's captures are on the current device."""
    for device in ("cuda:0", "cuda:1"):
        model, tokenizer = ending_with([])
        engines = three_ways(model.double().to(device), tokenizer)
        assert sampled(engines, PROMPTS, Sampling(max_new_tokens=20), 4) != sampled(
            engines, PROMPTS, Sampling(max_new_tokens=20), 5
        )
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_the_gpu_stays_usable_after_a_capture_that_fails(caplog):
    """The model looks at a value, which a capture forbids."""
    model, tokenizer = ending_with([])
    model.double().cuda()
    looks, stream = [], torch.cuda.current_stream()
    hook = model.model.norm.register_forward_hook(lambda module, arguments, output: looks.append(output.sum().item()))
    engines = three_ways(model, tokenizer)
    found = [engine.generate(PROMPTS, GREEDY, seed=0) for engine in engines]
    assert found[0] == found[1] == found[2] and looks and not engines[2].decoder.captures
    assert "without a CUDA graph" in caplog.text and torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").max() < 1, "the generator counts on"
    hook.remove()
    assert sampled(three_ways(model, tokenizer), PROMPTS, GREEDY, 0) == found[0]


def test_memory_that_is_kept_is_freed_where_it_is_short(monkeypatch):
    model, tokenizer = adapted(), byte_tokenizer()
    engine = HFRolloutEngine(model, tokenizer, 4, merge_adapter=True, fixed=True)
    expected, advance, failed = engine.generate(PROMPTS, GREEDY, seed=0), fixed.Decoder.advance, []

    def once_out_of_memory(self, rows, *arguments):
        if rows == 4 and not failed:
            failed.append(len(engine.copies))
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(failed) == 1:
            failed.append((self.rows, engine.limit.size))
        advance(self, rows, *arguments)

    monkeypatch.setattr(fixed.Decoder, "advance", once_out_of_memory)
    assert engine.generate(PROMPTS, GREEDY, seed=0) == expected
    assert failed == [8, (2, 2)], "copies were dropped, and the buffers are those of two rows"


def test_keys_and_values_are_freed_before_larger_ones_are_made(monkeypatch):
    engine, new_zeros, alive = HFRolloutEngine(random_model(), byte_tokenizer(), fixed=True), torch.Tensor.new_zeros, []
    engine.generate(PROMPTS[:2], GREEDY, seed=0)

    def buffers():
        return [weakref.ref(buffer) for layer in engine.decoder.layers for buffer in layer.buffers]

    small = buffers()

    def watched(self, *sizes):
        alive.append([reference() is not None for reference in small])
        return new_zeros(self, *sizes)

    monkeypatch.setattr(torch.Tensor, "new_zeros", watched)
    engine.generate(PROMPTS, GREEDY, seed=0)
    assert alive == [[False] * 4] * 4
    large = buffers()
    engine.decoder.release()
    assert len(large) == 4 and not any(reference() is not None for reference in large)


def test_a_closed_engine_keeps_nothing_and_samples_again():
    engine = HFRolloutEngine(adapted(), byte_tokenizer(), merge_adapter=True, fixed=True)
    expected = engine.generate(PROMPTS, GREEDY, seed=0)
    assert len(engine.copies) == 8 and engine.decoder.rows == 8
    close(engine)
    assert engine.copies == {} and engine.decoder.rows == 0
    assert engine.generate(PROMPTS, GREEDY, seed=0) == expected


@pytest.mark.parametrize(("prompts", "kept"), [(2, True), (3, False)])
def test_what_makes_room_for_more_returns_it(prompts, kept):
    engine = HFRolloutEngine(random_model(), byte_tokenizer(), fixed=True)
    engine.generate(PROMPTS[:2], GREEDY, seed=0)
    layers = engine.decoder.layers
    with engine.sharing(BatchLimit(8, "eval_batch_size", "")).returning_memory():
        engine.generate(PROMPTS[:prompts], GREEDY, seed=0)
    assert (engine.decoder.layers is layers) == kept and engine.decoder.rows == (2 if kept else 0)


def test_what_decoding_at_fixed_addresses_leaves_out():
    """Windows, other attention and frequencies that depend on the length are left to the loop that grows."""
    sizes = dict(vocab_size=263, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    windowed = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8))
    model = random_model()
    assert not fixed.can_fix(windowed) and fixed.can_fix(model)
    model.config._attn_implementation = "eager"
    assert not fixed.can_fix(model)
    model = random_model()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    assert not fixed.can_fix(model)


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_returns_another_number_of_responses_is_named(count):
    engine = SimpleNamespace(generate=lambda *arguments: [Response([5], "x", True)] * count)
    prompts = [Prompt(example, [5], index) for index, example in enumerate(ToyTask().examples("train", 2))]
    sampler = Sampler(engine, ToyTask(), PromptEncoder(byte_tokenizer()), Sampling(1.0, 1.0, 4), TokenBudget())
    with pytest.raises(ValueError, match=f"generate of the engine SimpleNamespace returned {count} responses to 2 prompts"):
        sampler.student(prompts)
