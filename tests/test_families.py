"""Families of models, with tiny random weights, against their own forward passes without padding, caches and shared prefixes."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from firedistill.models import loading
from firedistill.models.attention import NAME, use_own_attention
from firedistill.models.errors import ModelError
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.states import inference_mode, last_hidden_states, score_responses, unwrap
from firedistill.ops.head import Head, check_head
from firedistill.rollout import Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.teacher.prefix_cache import Reading, read, shares_prefixes
from tiny import byte_tokenizer

SIZES = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SHARED_KEYS = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 263,
    "global_head_dim": 8,
}
FAMILIES = {
    "llama": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": LINEAR,
    "gemma3_text": MIXED,
    "gemma4_text": MIXED | SHARED_KEYS | {"num_global_key_value_heads": 2},
    "gpt_oss": MIXED | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS,
    "deepseek_v32": LATENT | EXPERTS | {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 16},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 16},
    "cohere2": MIXED | {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "lm_head_multiplier": 0.5},
    "smollm3": {},
    "phi3": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"n_layer": 4, "n_head": 4},
}
# As docs/models.md has them.
SHARE_PREFIXES = {"llama", "granite", "smollm3", "qwen3_moe", "deepseek_v3", "phi3"}
FIXED_MEMORY = SHARE_PREFIXES - {"phi3"}
OWN_LOOP = FIXED_MEMORY | {"gemma3_text", "cohere2", "llama4_text", "gpt_oss", "falcon"}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15, 16, 17, 18, 19], [10, 11], list(range(40, 70))]
RESPONSES = [[21, 22, 23], [24], list(range(25, 39)), [39, 40], [41, 42, 43, 44], [60] * 5]


def tiny(family: str):
    sizes = SIZES | FAMILIES[family]
    if family == "falcon":
        del sizes["head_dim"]  # which its configuration computes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def own_logits(model, ids: list[int]) -> torch.Tensor:
    """`[T, V]` by the model's own forward pass with its own attention."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A model, and its own logits at the tokens of the responses."""
    model = tiny(request.param)
    logits = [own_logits(model, p + r)[len(p) - 1 : -1] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return model, torch.cat(logits)


def assert_close(found, expected):
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_scores_are_the_models_own(family):
    model, expected = family
    before = model.config._attn_implementation
    head = Head.of(model)
    check_head(model, head)
    try:
        use_own_attention(model)
        with torch.no_grad():
            assert_close(head(score_responses(model, PROMPTS, RESPONSES).hidden), expected)
    finally:
        model.config._attn_implementation = before


def test_shared_prefixes_change_nothing(family):
    """A prompt after the keys and values of another one that begins alike."""
    model, expected = family
    shared = model.config.model_type in SHARE_PREFIXES
    assert shares_prefixes(True, model, model.device) == shared
    if not shared:
        return
    with inference_mode(model):
        first = Reading(PROMPTS[5], [60], keep=20)
        read(model, [first], 1000)
        begins_alike = PROMPTS[5][:10] + [3, 4]
        readings = [Reading(*each) for each in zip(PROMPTS, RESPONSES, strict=True)] + [
            Reading(begins_alike, [7, 8], first.kept)
        ]
        read(model, readings, 1000)
        states = torch.cat([reading.states for reading in readings])
    assert readings[-1].start == 10
    assert_close(Head.of(model)(states), torch.cat([expected, own_logits(model, begins_alike + [7, 8])[11:13]]))


@pytest.mark.parametrize("fixed", [False, True])
def test_samples_are_the_models_own(family, fixed):
    """Greedy, in one batch with padding, against one sequence at a time that is read anew for every token."""
    model, _ = family
    if model.config.model_type == "deepseek_v32" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("generate of transformers 5.16 is wrong for padded prompts of this family, that of 5.23 is right")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    engine = HFRolloutEngine(model, tokenizer, fixed=fixed)
    # Gemma 4 prepares the inputs of a step itself in transformers 5.23, not in 5.16.
    if model.config.model_type != "gemma4_text" or Version(transformers.__version__) >= Version("5.23"):
        assert (engine.causal_lm is not None) == (model.config.model_type in OWN_LOOP)
    assert (engine.decoder is not None) == (fixed and model.config.model_type in FIXED_MEMORY)
    found = [response.token_ids for response in engine.generate(PROMPTS, Sampling(temperature=0, max_new_tokens=12), seed=0)]
    for prompt, response in zip(PROMPTS, found, strict=True):
        assert own_logits(model, prompt + response)[len(prompt) - 1 : -1].argmax(-1).tolist() == response


def test_gradients_of_a_batch_are_those_of_its_responses(family):
    """With padding and the package's attention, against one response at a time with the model's own."""
    model, _ = family
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    try:
        adapted = add_lora(
            model, target_modules=sorted(layers & {"q_proj", "o_proj", "qkv_proj", "query_key_value", "q_b_proj"})
        )
        factors = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        with torch.no_grad():
            for factor in factors:
                factor.normal_(std=0.1, generator=torch.Generator().manual_seed(len(factor)))
        weights = torch.linspace(-1, 1, 32)

        def gradient(states):
            return torch.cat([part.flatten() for part in torch.autograd.grad((states @ weights).sum(), factors)])

        expected = sum(
            gradient(last_hidden_states(adapted, torch.tensor([p + r]))[:, len(p) - 1 : -1])
            for p, r in zip(PROMPTS, RESPONSES, strict=True)
        )
        before = use_own_attention(adapted)
        found = gradient(score_responses(adapted, PROMPTS, RESPONSES).hidden)
        unwrap(adapted).config._attn_implementation = before
        assert expected.abs().max() > 1e-3
        assert (found - expected).norm() < 1e-4 * expected.norm()
    finally:
        adapted.unload()


def test_attention_is_exchanged_where_that_is_right():
    """Not for classes that look at its name, nor for layers that select keys and mask the others under known names only."""
    for name, expected in {
        "llama": NAME,
        "qwen3_5_text": NAME,
        "gemma3_text": NAME,
        "falcon": "sdpa",
        "deepseek_v32": "sdpa",
    }.items():
        model = tiny(name)
        use_own_attention(model)
        assert model.config._attn_implementation == expected, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_of_single_tokens_are_read_as_generate_reads_them(device):
    """On GPUs that lack a kernel for groups of tokens, each group is a call of its own, which the host waits for."""
    model, seen = tiny("qwen3_moe").to(device), []
    names = {False: "grouped_mm", True: "batched_mm" if device == "cuda" else "grouped_mm"}

    def look(module, args, kwargs):
        seen.append((kwargs["input_ids"].shape[-1] == 1, module.config._experts_implementation))

    with model.model.register_forward_pre_hook(look, with_kwargs=True):
        HFRolloutEngine(model, byte_tokenizer()).generate([[5, 6, 7]], Sampling(0.0, 1.0, 6), seed=0)
    assert dict(seen) == names and set(seen) == set(names.items()) and model.config._experts_implementation == "grouped_mm"


def test_experts_in_four_bits_are_refused(tmp_path, monkeypatch):
    """They are no linear layers, and would stay in bfloat16."""
    monkeypatch.setattr(loading, "_quantization_config", lambda *_: None)  # bitsandbytes may not be there
    byte_tokenizer().save_pretrained(tmp_path)
    tiny("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"nf4 covers linear layers, and \d\d% of the weights of this model are in others"):
        load_model_and_tokenizer(str(tmp_path), quantization="nf4")


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_experts_in_place_of_linear_layers_are_refused():
    """peft would adapt the experts of this model in place of its dense layers, which `load_adapter` could not read back."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["ernie4_5_moe"](**SIZES, **EXPERTS, moe_num_experts=4, moe_k=2))
    with pytest.raises(ModelError, match="experts in place of the linear layers down_proj, gate_proj, up_proj.*k_proj, o_proj"):
        add_lora(model)
    with pytest.raises(ModelError, match="peft cannot adapt up_proj"):
        add_lora(model, target_modules=["up_proj"])
    assert add_lora(model, target_modules=["q_proj"]).get_nb_trainable_parameters()[0] > 0
