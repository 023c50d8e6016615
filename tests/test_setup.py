"""`load_setup` loads what a run needs, takes the adapter's start from the seed alone, and leaves the caller's settings as they are."""

from __future__ import annotations

import logging
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig, PeftModel, TaskType, get_peft_model, inject_adapter_in_model
from transformers import GenerationConfig

from firedistill import Example, SelfDistillConfig, SelfDistillTrainer, load_task, setup, task
from firedistill.evaluation import answer_examples
from firedistill.memory import OutOfMemory
from firedistill.models.errors import explain_errors
from firedistill.models.lora import add_lora, load_adapter
from firedistill.models.tokens import stop_token_ids
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.run.identity import refuse_another_run, to_plain
from firedistill.setup import given_examples, load_setup, read_method_settings
from firedistill.tasks.guard import GuardedTask, TaskFault
from firedistill.teacher import own_model
from killable import RandomTask, killable_config
from tiny import ToyTask, byte_tokenizer, random_model


@pytest.fixture
def config(model, tmp_path):
    return lambda **changes: killable_config(model, tmp_path / "run", "fire", **changes)


def adapter_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def same(first, second) -> bool:
    first, second = adapter_of(first), adapter_of(second)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_everything_by_name(config):
    setup = load_setup(config(train_size=5, seed=3))
    assert isinstance(setup.task, GuardedTask) and isinstance(setup.task.task, RandomTask)
    assert setup.task.name == "toy" and setup.task.seconds == setup.args.task_timeout == 10.0
    assert setup.encoder.tokenizer is setup.tokenizer and setup.tokenizer.padding_side == "left"
    assert [len(setup.train_examples), len(setup.eval_examples)] == [5, 3]
    assert setup.args.seed == 3 and len(adapter_of(setup.model)) == 2 * 7 * 2


def test_the_callers_settings_are_copied(config, tmp_path):
    settings = config(checkpoint_sampling=True, eval_size=0)
    settings.eval_strategy, settings.eval_on_start, settings._n_gpu = "steps", True, 2
    model = random_model()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, top_k=20, repetition_penalty=1.1)
    before = dict(vars(settings))
    setup = load_setup(settings, model=model, tokenizer=byte_tokenizer())
    assert vars(settings) == before and setup.args is not settings and type(setup.args) is type(settings)
    assert (setup.args.top_k, setup.args.repetition_penalty) == (20, 1.1)
    assert (setup.args.eval_strategy, setup.args.eval_on_start, setup.args.n_gpu) == ("no", False, 1)
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_without_checkpoint_sampling_the_settings_hold(config):
    model = random_model()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, top_k=20, repetition_penalty=1.1)
    setup = load_setup(config(), model=model, tokenizer=byte_tokenizer())
    assert (setup.args.top_k, setup.args.repetition_penalty) == (0, 1.0)
    model = random_model()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    setup = load_setup(config(checkpoint_sampling=True), model=model, tokenizer=byte_tokenizer())
    assert (setup.args.top_k, setup.args.repetition_penalty) == (0, 1.0), "the checkpoint has none"


def test_a_run_with_checkpoint_sampling_may_start_again_before_its_first_checkpoint(config, tmp_path):
    """`config.yaml` has the model's values, which are not known before the model is loaded."""
    settings = config(checkpoint_sampling=True, output_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(to_plain(settings.resolved()) | {"top_k": 20}))
    refuse_another_run(tmp_path / "run", settings)
    with pytest.raises(ValueError, match="top_k was 20, is 0"):
        refuse_another_run(tmp_path / "run", config(output_dir=str(tmp_path / "run")))


def test_settings_of_the_method_have_their_types(model, tmp_path):
    """Texts of the command line are equal to values of a recipe."""
    args = killable_config(model, tmp_path / "run", "srpo", method_settings={"group_size": "4"})
    assert read_method_settings(args).group_size == 4 and args.method_settings == {"group_size": 4}


def test_checkpoint_sampling_overrides_no_setting(config):
    model = random_model()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, top_k=20, repetition_penalty=1.1)
    for changes, complaint in (
        ({"top_k": 7}, "top_k is 7, but checkpoint_sampling uses the checkpoint's, 20: leave one"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2, but checkpoint_sampling uses the checkpoint's, 1.1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load_setup(config(checkpoint_sampling=True, **changes), model=model, tokenizer=byte_tokenizer())
    recorded = config(checkpoint_sampling=True, top_k=20, repetition_penalty=1.1)
    assert load_setup(recorded, model=model, tokenizer=byte_tokenizer()).args.top_k == 20


@pytest.mark.parametrize(
    "changes",
    [
        {"model_dtype": "bfloat16"},
        {"quantization": "nf4"},
        {"quantization": "auto"},
        {"attn_implementation": "eager"},
        {"model_revision": "v1"},
        {"fsdp_size": 2},
    ],
    ids=str,
)
def test_settings_of_another_model_than_the_object_are_refused(changes, config):
    ((name, value),) = changes.items()
    complaint = f"{name} is {value}, but the model is an object that is loaded already .float32, attention sdpa.: pass its name"
    with pytest.raises(ValueError, match=complaint):
        load_setup(config(**changes), model=random_model(), tokenizer=byte_tokenizer())


def test_settings_that_agree_with_the_object_are_recorded(config):
    for asked in ("auto", "bfloat16"):
        model = random_model(dtype=torch.bfloat16)
        settings = config(model_dtype=asked, attn_implementation="sdpa")
        assert load_setup(settings, model=model, tokenizer=byte_tokenizer()).args.model_dtype == "bfloat16"


def test_quantized_weights_of_an_object_stay_trainable(config):
    """As those of a model that is loaded by its name; see `prepare_quantized`."""
    model = random_model()
    model.model.layers[0].mlp.up_proj.support_avx512bf16_for_cpu = True  # as layers of bitsandbytes have
    load_setup(config(), model=model, tokenizer=byte_tokenizer())
    assert not model.model.layers[0].mlp.up_proj.base_layer.support_avx512bf16_for_cpu


@pytest.mark.parametrize("name", ["quantization", "teacher_quantization"])
def test_quantized_weights_are_read_to_the_device_of_the_run(name, config, model, monkeypatch):
    """Without a device, the quantizer of transformers takes a GPU also where the run uses the CPU."""
    devices = []

    def load(where, *arguments, quantization=None, device=None, **options):
        devices.append((quantization, device))
        return random_model(), byte_tokenizer()

    monkeypatch.setattr("firedistill.setup.load_model_and_tokenizer", load)
    monkeypatch.setattr("firedistill.teacher.own_model.load_model_and_tokenizer", load)
    load_setup(config(teacher=model, **{name: "nf4"}))
    assert sorted(devices, key=str) == [("nf4", torch.device("cpu")), (None, None)]


def test_several_gpus_are_reported(config, caplog):
    settings = config()
    settings._n_gpu = 4
    with caplog.at_level(logging.WARNING):
        assert load_setup(settings).args.n_gpu == 1
    assert "for all 4 start with: torchrun --no-python --standalone --nproc_per_node 4 firedistill" in caplog.text


def test_every_path_may_begin_with_the_home_folder(config, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        (tmp_path / "d" / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "Two.\\n#### 2"}\n')
    (tmp_path / "judge.yaml").write_text("url: http://localhost:1/v1\nmodel: m\nreply: {mistake: The first mistake.}\n")
    load_setup(config()).model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "model").symlink_to(model)
    paths = {
        "data_dir": "~/d",
        "judge": "~/judge.yaml",
        "output_dir": "~/run",
        "initial_adapter": "~/adapter",
        "teacher": "~/adapter",
    }
    args = load_setup(SelfDistillConfig(model="~/model", task="gsm8k", eval_size=1, use_cpu=True, **paths)).args
    assert (args.data_dir, args.output_dir) == (str(tmp_path / "d"), str(tmp_path / "run"))
    own = load_setup(config(task="~/d/train.jsonl", eval_data="~/d/test.jsonl", answer="numeric", eval_size=1))
    assert own.eval_examples[0].answer == "2"
    for name, file in {"deepspeed": "none.json", "judge": "none.yaml"}.items():
        with pytest.raises(ValueError, match=f"{name} is '{tmp_path}/{file}'"):
            load_setup(config(**{name: f"~/{file}"}))


def test_the_seed_alone_decides_the_adapter(config):
    setup = load_setup(config(seed=1))
    torch.rand(17)
    assert same(load_setup(config(seed=1)).model, setup.model)
    assert not same(load_setup(config(seed=2)).model, setup.model)
    base = random_model()
    torch.manual_seed(1)
    assert same(add_lora(base, r=4, dropout=0.1), setup.model)
    assert same(SelfDistillTrainer(args=config(seed=1), optimizers=None).model, setup.model)


def test_an_adapter_that_is_given_stays(config, tmp_path):
    saved = load_setup(config(seed=1)).model
    with torch.no_grad():
        for parameter in adapter_of(saved).values():
            parameter.fill_(0.25)
    saved.save_pretrained(tmp_path / "adapter")
    for train in (True, False):
        assert same(load_setup(config(initial_adapter=str(tmp_path / "adapter")), train=train).model, saved)
    setup = load_setup(config(), model=saved, tokenizer=byte_tokenizer())
    assert setup.model is saved and set(saved.peft_config) == {"default"}
    with pytest.raises(ValueError, match="initial_adapter is .*, but the model is an object that is loaded already"):
        load_setup(config(initial_adapter=str(tmp_path / "adapter")), model=saved, tokenizer=byte_tokenizer())


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"], **changes})


def test_the_adapter_that_is_given_is_recorded(config):
    model = get_peft_model(random_model(), lora(lora_dropout=0.25))
    args = load_setup(config(), model=model, tokenizer=byte_tokenizer()).args
    assert (args.lora_r, args.lora_alpha, args.lora_dropout) == (4, 6, 0.25)
    assert args.lora_target_modules == ["q_proj", "v_proj"]
    again = load_setup(config(lora_target_modules=["v_proj", "q_proj"]), model=model, tokenizer=byte_tokenizer())
    assert again.args.lora_target_modules == ["v_proj", "q_proj"], "the same ones"


def test_a_model_that_still_holds_adapter_layers_is_refused(config):
    """The adapter of an earlier trainer, or of `inject_adapter_in_model` (`add_adapter`), would be trained or left in the base."""
    model, added = random_model(), random_model()
    setup = load_setup(config(), model=model, tokenizer=byte_tokenizer())
    inject_adapter_in_model(lora(), added)
    for held in (model, added):
        with pytest.raises(ValueError, match="the model holds the layers of an adapter .*trainer.model.unload"):
            load_setup(config(), model=held, tokenizer=byte_tokenizer())
    setup.model.unload()
    assert same(load_setup(config(), model=model, tokenizer=byte_tokenizer()).model, load_setup(config()).model)


def test_adapters_that_cannot_be_trained_are_refused(config, tmp_path):
    two = get_peft_model(random_model(), lora())
    two.add_adapter("two", lora())
    half = get_peft_model(random_model(dtype=torch.bfloat16), lora(), autocast_adapter_dtype=False)
    in_part = get_peft_model(random_model(), lora())
    next(parameter for name, parameter in in_part.named_parameters() if "lora_A" in name).requires_grad_(False)
    get_peft_model(random_model(), lora()).save_pretrained(tmp_path / "adapter")
    with_head = get_peft_model(random_model(), lora())
    with_head.get_output_embeddings().requires_grad_(True)
    for model, complaint in (
        (
            with_head,
            r"the model trains \S*(lm_head|embed_tokens)\.weight beside its adapter, which alone is saved: requires_grad_",
        ),
        (two, r"the adapters 'default' \(LORA\), 'two' \(LORA\): expected one LoRA adapter called 'default'"),
        (get_peft_model(random_model(), lora(), adapter_name="mine"), r"the adapters 'mine' \(LORA\): expected one"),
        (get_peft_model(random_model(), IA3Config(task_type="CAUSAL_LM")), r"the adapters 'default' \(IA3\): expected one"),
        (half, "LoRA factors are bfloat16, in which small updates are rounded away"),
        (
            PeftModel.from_pretrained(random_model(), tmp_path / "adapter"),
            "the model's adapter is frozen: .* is_trainable=True",
        ),
        (in_part, "the model's adapter is frozen: .* all its factors are trained"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load_setup(config(), model=model, tokenizer=byte_tokenizer())


def test_an_evaluation_takes_a_frozen_adapter(config, tmp_path):
    get_peft_model(random_model(), lora()).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(random_model(), tmp_path / "adapter")
    setup = load_setup(config(), model=model, tokenizer=byte_tokenizer(), train=False, teacher=False)
    engine = HFRolloutEngine(setup.model, setup.tokenizer, setup.args.eval_batch_size)
    rollouts, _ = answer_examples(engine, setup.task, setup.encoder, setup.eval_examples, setup.args.greedy, setup.args.budget)
    assert len(rollouts) == 3 and setup.args.lora_r == 4
    with pytest.raises(ValueError, match="the model's adapter is frozen"):
        load_setup(config(), model=model, tokenizer=byte_tokenizer(), train=False)


UNREADABLE = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "layers_to_transform": 0,
    "target_modules": ".*q_proj",
    "init_lora_weights": "olora",
    "trainable_token_indices": [1],
    "exclude_modules": {"layers.0.self_attn.q_proj"},
}


@pytest.mark.parametrize(("key", "value"), [*UNREADABLE.items(), ("target_modules", ["embed_tokens", "q_proj"])], ids=str)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_that_cannot_be_read_back_are_refused(key, value, config):
    model = get_peft_model(random_model(), lora(**{key: value}))
    with pytest.raises(
        ValueError, match=rf"the model's adapter.*: {key} (is|names) .*(expected|supported|no such linear layer)"
    ):
        load_setup(config(), model=model, tokenizer=byte_tokenizer())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"alpha_pattern": {"q_proj": 64, "layers.1.self_attn.q_proj": 8}},
            "alpha_pattern has two values for .*layers.1.*q_proj",
        ),
        ({"rank_pattern": {"q_proj": 3, "layers.1.self_attn.q_proj": 2}}, "rank_pattern has two values for .*layers.1.*q_proj"),
        ({"target_modules": ["default", "q_proj"]}, "its factors are not those that its settings declare"),
    ],
    ids=str,
)
def test_adapters_that_would_be_read_back_otherwise_are_refused(changes, complaint, config):
    with pytest.raises(ValueError, match=f"the model's adapter cannot be read back: {complaint}"):
        load_setup(config(), model=get_peft_model(random_model(), lora(**changes)), tokenizer=byte_tokenizer())


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 64}},
        {"init_lora_weights": "gaussian", "target_modules": "all-linear"},
        {"task_type": TaskType.CAUSAL_LM},
    ],
    ids=str,
)
def test_adapters_that_are_accepted_can_be_read_back(changes, config, tmp_path):
    model = get_peft_model(random_model(), lora(**changes))
    load_setup(config(), model=model, tokenizer=byte_tokenizer()).model.save_pretrained(tmp_path)
    assert same(load_adapter(random_model(), tmp_path), model)


def test_a_model_object_can_be_given_again_after_an_error(config, tmp_path):
    base, tokenizer = random_model(), byte_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    with pytest.raises(ValueError, match="chat template"):
        load_setup(config(), model=base, tokenizer=tokenizer)
    assert not any("lora" in name for name, _ in base.named_modules())
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="no training examples"):
        load_setup(config(), model=base, tokenizer=tokenizer, train_examples=[])
    assert load_setup(config(), model=base, tokenizer=tokenizer).model.get_nb_trainable_parameters()[0] > 0


def test_the_type_of_an_adapter_that_is_in_use_is_not_changed_silently(config):
    settings = {"model_dtype": "bfloat16"}
    first = load_setup(config(**settings, lora_dtype="base"))
    load_setup(config(**settings, lora_dtype="base"), model=first.model, tokenizer=first.tokenizer)
    with pytest.raises(ValueError, match="lora_dtype is float32, but the adapter of the model already computes in the type of"):
        load_setup(config(**settings, lora_dtype="float32"), model=first.model, tokenizer=first.tokenizer)


def test_arguments_of_other_types_are_refused(config, model):
    with pytest.raises(ValueError, match="args is a dict: expected a SelfDistillConfig"):
        load_setup({"model": model})
    with pytest.raises(ValueError, match="model is a int: expected a PreTrainedModel, a PeftModel, or the name of a model"):
        load_setup(config(), model=42)
    for name in ("train_examples", "eval_examples"):
        with pytest.raises(TypeError, match=f"{name} is a int: expected examples or rows, such as a list of mappings"):
            load_setup(config(), **{name: 3})
    assert load_setup(config(), model=Path(model)).args.model == str(model)
    some = torch.utils.data.Subset([Example("a", "1 + 1?", "2"), Example("b", "1 + 2?", "3")], [1])  # has no __iter__
    assert [e.uid for e in load_setup(config(), task=ToyTask(), train_examples=some).train_examples] == ["b"]


def test_a_tokenizer_that_is_given_replaces_that_of_the_model(config):
    mine = byte_tokenizer()
    mine.chat_template, mine.pad_token = "Mine. " + mine.chat_template, None
    setup = load_setup(config(), tokenizer=mine)
    assert setup.tokenizer is setup.encoder.tokenizer is mine and mine.pad_token == "<|endoftext|>"
    assert setup.encoder.render([{"role": "user", "content": "Why?"}]).startswith("Mine. ")
    mine.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        load_setup(config(), tokenizer=mine)
    for model in (None, random_model()):
        with pytest.raises(TypeError, match="processing_class .tokenizer of load_setup. is a str: expected a tokenizer"):
            load_setup(config(), model=model, tokenizer="lab")


def test_a_model_object_gets_the_tokens_that_end_and_pad(config):
    for model in (random_model(), get_peft_model(random_model(), lora())):
        tokenizer = byte_tokenizer()
        tokenizer.pad_token, tokenizer.eos_token = None, "<|endoftext|>"
        model.generation_config.eos_token_id = 0
        setup = load_setup(config(), model=model, tokenizer=tokenizer)
        assert setup.tokenizer is tokenizer and tokenizer.pad_token == "<|im_start|>", "the only one that ends nothing"
        assert stop_token_ids(setup.model, tokenizer) == [0, 2], "the template ends a turn with <|im_end|>"
    tokenizer.pad_token = tokenizer.eos_token
    assert load_setup(config(), model=model, tokenizer=tokenizer).tokenizer.pad_token == "<|im_start|>"


def test_problems_that_are_given_are_used(config):
    mine = [Example("mine/0", "Why?", "even", solution="ab")]
    setup = load_setup(config(), task=ToyTask(), train_examples=mine, eval_examples=())
    assert setup.train_examples == mine and setup.train_examples is not mine and setup.eval_examples == []
    assert setup.args.eval_strategy == "no"


class HeldOutOnly(ToyTask):
    def examples(self, split, n=None, seed=0, data_dir=None):
        assert split == "eval", "no training problem is loaded"
        return super().examples(split, n, seed, data_dir)


def test_problems_may_be_rows_of_a_dataset(config):
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1), "solution": "ab", "labels": ["a"]} for i in range(3)]
    setup = load_setup(config(), task=ToyTask(), train_examples=datasets.Dataset.from_list(rows), eval_examples=rows[:1])
    assert [(e.uid, e.answer, e.labels) for e in setup.train_examples] == [
        (f"train_examples/{i}", str(i + 1), ("a",)) for i in range(3)
    ]
    assert setup.eval_examples[0].question == "0 + 1?"
    published = datasets.Dataset.from_list([{"question": "1 + 1?", "answer": "Two.\n#### 2"}])
    numbers = load_setup(config(), task="gsm8k", train_examples=published, eval_examples=[{"question": "2 + 2?", "answer": 4}])
    (read,), (given,) = numbers.train_examples, numbers.eval_examples
    assert (read.answer, given.answer) == ("2", "4"), "columns that the task reads, and fields of an example"
    row = {"question": "1 + 1?", "answer": 2}
    (judged,) = given_examples([row], task([row], name="own")(lambda row, response: True), "eval_dataset")
    assert (judged.answer, judged.metadata["row"]) == ("2", row), "what a verifier in Python reads"
    (judged,) = given_examples([row | {"uid": "mine"}], task([row], name="own")(lambda row, response: True), "eval_dataset")
    assert (judged.uid, judged.metadata["row"]["answer"]) == ("mine", 2)
    with pytest.raises(ValueError, match="eval_dataset/0: .*answer"):
        given_examples([{"question": "2 + 2?", "answer": ""}], load_task([row], answer="numeric"), "eval_dataset")
    with pytest.raises(ValueError, match="train_examples/0 has the columns prompt, which example of toy does not read"):
        load_setup(config(), task=ToyTask(), train_examples=[{"prompt": "x"}])


def test_an_evaluation_needs_no_training_problems(config):
    setup = load_setup(config(), task=HeldOutOnly(), train=False)
    assert setup.train_examples == [] and len(setup.eval_examples) == 3
    assert same(setup.model, load_setup(config()).model), "decoding goes through the same layers as in training"
    engine = HFRolloutEngine(setup.model, setup.tokenizer, setup.args.eval_batch_size)
    rollouts, skipped = answer_examples(
        engine, setup.task, setup.encoder, setup.eval_examples, setup.args.greedy, setup.args.budget
    )
    assert len(rollouts) == 3 and not skipped


def test_further_tasks_get_the_data_that_they_read(config, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "Two.\\n#### 2"}\n')
    (tmp_path / "own.jsonl").write_text("".join(f'{{"question": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(9)))
    others = [
        "arithmetic",
        "functions:easy",
        "planted:answer:0.3:arithmetic",
        "planted:answer:0:gsm8k",
        str(tmp_path / "own.jsonl"),
    ]
    setup = load_setup(config(task="gsm8k", data_dir=str(tmp_path), eval_also=others, eval_size=1))
    assert {name: len(problems) for name, (_, problems) in setup.also.items()} == dict.fromkeys(others, 1)
    assert load_setup(config(eval_also=["arithmetik"], eval_size=0)).also == {}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("arithmetik", "unknown task 'arithmetik'"),
        ("gsm8k", "data_dir .*nowhere is not a folder"),
        ("nowhere:Task", "unknown task: found no module 'nowhere'"),
    ],
)
def test_further_tasks_are_read_before_the_model(name, complaint, config, monkeypatch):
    monkeypatch.setattr(setup, "load_model_and_tokenizer", lambda *args, **kwargs: pytest.fail("loads the model"))
    with pytest.raises(ValueError, match=f"^eval_also names '{name}': {complaint}"):
        load_setup(config(eval_also=[name], data_dir="nowhere"))


class Faulty(ToyTask):
    def verify(self, example, response):
        raise LookupError("no such key")

    def feedback(self, example, response, verdict):
        return "text"


def test_the_task_is_guarded(config):
    setup = load_setup(config(task_timeout=None), task=Faulty())
    verdict = setup.task.verify(setup.train_examples[0], "ab")
    assert verdict.failed and not verdict.correct and setup.task.seconds is None
    with pytest.raises(TaskFault, match="returned a str"):
        setup.task.feedback(setup.train_examples[0], "ab", verdict)


class Empty(ToyTask):
    def examples(self, split, n=None, seed=0, data_dir=None):
        return []


def test_what_does_not_fit_is_refused(config):
    with pytest.raises(ValueError, match="a model object needs its tokenizer: pass processing_class"):
        load_setup(config(), model=random_model())
    with pytest.raises(ValueError, match="task 'toy' has no training examples"):
        load_setup(config(), task=Empty())
    with pytest.raises(ValueError, match="unknown task 'nowhere'"):
        load_setup(config(), task="nowhere")
    with pytest.raises(ValueError, match="neither a folder, nor a GGUF file, nor a name on the hub"):
        load_setup(config(), model="./nowhere")
    settings = config()
    settings.method = "no_such_method"
    with pytest.raises(ValueError, match="no_such_method"):
        load_setup(settings, model="./nowhere")  # the model is not read
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        load_setup(config(), model=random_model(), tokenizer=tokenizer)


def test_a_tracker_without_its_package_is_named(config, monkeypatch):
    monkeypatch.setattr("firedistill.run.trackers.get_available_reporting_integrations", lambda: ["tensorboard"])
    with pytest.raises(ImportError, match="report_to wandb: its package is not installed: pip install wandb"):
        load_setup(config(report_to=["wandb"]))


def test_an_optimizer_that_is_given_decides_the_rate(config, caplog):
    setup = load_setup(config(learning_rate=1e-4, nominal_learning_rate=None))
    optimizer = torch.optim.SGD([p for p in setup.model.parameters() if p.requires_grad], lr=3e-3, momentum=0.9)
    options = {"model": setup.model, "processing_class": setup.tokenizer, "task": RandomTask(), "optimizers": (optimizer, None)}
    trainer = SelfDistillTrainer(args=config(learning_rate=1e-4, nominal_learning_rate=None), **options)
    assert trainer.args.learning_rate == 3e-3 and "learning_rate is that of the optimizer, 0.003, not 0.0001" in caplog.text
    trainer.train()
    assert trainer.last_metrics["step_scale"] == 1.0


def test_the_peak_rate_is_the_one_before_a_schedule_lowers_it(config):
    model = get_peft_model(random_model(), lora())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    options = {"processing_class": byte_tokenizer(), "optimizers": (optimizer, schedule)}
    assert SelfDistillTrainer(model, config(), **options).args.learning_rate == 3e-3


def test_an_optimizer_of_other_parameters_is_refused(config):
    """Those of a model that gets its adapter later are frozen."""
    model = random_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    with pytest.raises(
        ValueError, match="the optimizer holds none of the adapter's parameters: pass a model that has its adapter"
    ):
        SelfDistillTrainer(model, config(), processing_class=byte_tokenizer(), optimizers=(optimizer, None))


def test_a_schedule_that_follows_evaluations_is_refused(config):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(
        ValueError, match="the schedule is a ReduceLROnPlateau, which follows a metric of evaluations: pass one"
    ):
        SelfDistillTrainer(random_model(), config(), processing_class=byte_tokenizer(), optimizers=(optimizer, schedule))


def test_the_rate_of_a_step_is_the_largest_of_the_optimizer(config):
    """As that of the run, whatever the order of the groups."""
    model = add_lora(random_model())
    first, *others = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": [first], "lr": torch.tensor(1e-3)}, {"params": others, "lr": 3e-3}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = SelfDistillTrainer(model, config(), processing_class=byte_tokenizer(), optimizers=(optimizer, schedule))
    trainer.train()
    assert trainer.last_metrics["learning_rate"] == pytest.approx(3e-3) == trainer.args.learning_rate


def test_a_teacher_that_does_not_fit_names_its_own_options(config, checkpoint, monkeypatch):
    def loads(name, **options):
        with explain_errors(name, "weights"):
            raise MemoryError

    monkeypatch.setattr(own_model, "load_model_and_tokenizer", loads)
    with pytest.raises(OutOfMemory, match="loading .* does not fit; use --teacher_quantization nf4, --teacher_dtype bfloat16"):
        load_setup(config(teacher=checkpoint))


def test_an_adapter_that_does_not_fit_is_an_error_that_names_its_rank(checkpoint, tmp_path, monkeypatch):
    def too_large(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(setup, "add_lora", too_large)
    with pytest.raises(OutOfMemory, match=r"the adapter does not fit; lower lora_r \(99999999\)"):
        setup.trainable_adapter(None, SelfDistillConfig(output_dir=str(tmp_path), lora_r=99_999_999))
