"""The parts of a step at the shape of a model, and whole steps."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from firedistill.benchmarks import harness
from firedistill.benchmarks.gpu.models import EveryStep, GPUTask, MeasuredTrainer, random_model, trainer_of, wrong_rollouts
from firedistill.benchmarks.gpu.sizes import AS_IN_TRAINING, Setting, Shape, Sizes, Work
from firedistill.benchmarks.gpu.timing import DOES_NOT_FIT, Variant, row_of, timed, tried
from firedistill.benchmarks.parts import Skipped
from firedistill.benchmarks.prescribed import student_states
from firedistill.footprint import recomputing
from firedistill.ops.fire_head import is_compiled
from firedistill.prompts import View, student_messages
from firedistill.rollout import Rollout, Sampling
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.merging import fusable_layers

FIRE, FULL_CONTEXT = "fire", "full_context"

# ---- Parts of a step -----------------------------------------------------------------------------------------------------------

# Ways of sampling: whether the adapter is merged, layers are fused, and a graph is replayed
MODES = {
    "merged, layers not fused, graph": (True, False, True),
    "unmerged, graph": (False, False, True),
    "merged, fused layers, no graph": (True, True, False),
}


def switched(engine: Any, names: Iterable[str]) -> Iterator[str]:
    """Let the engine sample in these modes, without those whose graphs it does not have; yields their names."""
    captures = engine.decoder is not None and engine.decoder.captures
    usual = engine.merge_adapter, engine.fuse_layers, captures
    for name in names:
        engine.merge_adapter, engine.fuse_layers, graph = usual if name == AS_IN_TRAINING else MODES[name]
        if captures or not graph:
            if engine.decoder is not None:
                engine.decoder.captures = graph
            yield name
    engine.merge_adapter, engine.fuse_layers, _ = usual
    if engine.decoder is not None:
        engine.decoder.captures = captures


def decoding(setting: Setting) -> Iterator[harness.Row]:
    """Seconds of one step of the engine's loop: what more tokens take, divided by their number. Modes without a graph come last."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    few, many = sizes.new_tokens
    graphs = [name for name, (_, _, graph) in MODES.items() if graph]
    others = [name for name in MODES if name not in graphs]
    middle = sizes.batches[1]
    cases: list[tuple[int, int, list[str]]] = [(batch, sizes.prompt, [AS_IN_TRAINING, *graphs]) for batch in sizes.batches]
    cases += [(middle, sizes.long_prompt, [AS_IN_TRAINING]), (middle, sizes.prompt, others)]
    with trainer_of(setting, random_model(shape, setting.device), rollout_batch_size=max(sizes.batches)) as trainer:
        engine: Any = trainer.rollout_engine
        engine.limit.adjustable = False  # a halved batch would be another case
        for batch, prompt, names in cases:
            task = GPUTask(replace(sizes, prompt=prompt), trainer.setup.tokenizer)
            prompts = [trainer.encoder.encode(student_messages(task, example)) for example in task.examples("train", batch)]
            work = shape.decoding(batch, prompt + few, prompt + many)
            per_step = [(operations / (many - few), read / (many - few)) for operations, read in work]
            for name in switched(engine, names):

                def sample(tokens: int, prompts: list[list[int]] = prompts) -> int:
                    found = engine.generate(prompts, Sampling(0.8, 0.95, tokens), seed=0)
                    return max(len(response.token_ids) for response in found)

                replays = engine.decoder is not None and engine.decoder.captures
                case = {"batch": batch, "prompt": prompt}
                found, fits = tried(partial(per_token, sample, few, many, sizes.decoding_repeats))
                if not fits:
                    yield row_of(case, name, details={"error": DOES_NOT_FIT})
                    continue
                steps, facts = found
                if replays:
                    facts["captured"] = engine.decoder.captures  # false after a capture that failed
                    facts["graphs"] = sum(graph is not None for graph in engine.decoder.graphs.values())
                yield row_of(case, name, steps, work=per_step, details=facts)


def per_token(sample: Callable[[int], int], few: int, many: int, repeats: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds per token beyond the first `few`, by run, and what came before them; one run to warm up."""
    steps, before, lengths = [], [], []
    for turn in range(-1, repeats):
        seconds = []
        for tokens in (few, many):
            harness.synchronize()
            start = time.perf_counter()
            lengths.append(sample(tokens))
            harness.synchronize()
            seconds.append(time.perf_counter() - start)
        if turn >= 0:
            steps.append((seconds[1] - seconds[0]) / (many - few))
            before.append(seconds[0] - few * steps[-1])
    return steps, {"seconds_before_first_token": float(np.median(before)), "tokens": max(lengths)}


def decoding_of_transformers(setting: Setting) -> Iterator[harness.Row]:
    """`generate` on the model without an adapter, which costs what a merged one does; with a static cache, transformers compiles."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    few, many = sizes.new_tokens
    model: Any = random_model(shape, setting.device)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    draw = torch.Generator().manual_seed(0)
    # Every length of a static cache is compiled for a minute: one batch is enough.
    for batch, cache in [*product(sizes.batches, ["dynamic"]), (sizes.batches[1], "static")]:
        ids = torch.randint(3, shape.vocabulary, (batch, sizes.prompt), generator=draw).to(setting.device)

        def sample(tokens: int, ids: Tensor = ids, cache: str = cache) -> int:
            options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0, "cache_implementation": cache}
            with torch.no_grad():
                found = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, **options
                )
            return found.shape[1] - ids.shape[1]

        work = [(o / (many - few), b / (many - few)) for o, b in shape.decoding(batch, sizes.prompt + few, sizes.prompt + many)]
        steps, facts = per_token(sample, few, many, sizes.decoding_repeats)
        yield row_of({"batch": batch, "prompt": sizes.prompt}, f"generate, {cache} cache", steps, work=work, details=facts)


def scoring(setting: Setting) -> Iterator[harness.Row]:
    """The teacher's full views, and the views without a field, of wrong responses."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    with trainer_of(setting, random_model(shape, setting.device)) as trainer:
        teacher, rollouts = trainer.teacher, wrong_rollouts(trainer, max(sizes.scored), sizes.response)
        teacher.limit.adjustable = False  # a halved batch would be another variant
        usual = teacher.limit.size, teacher.share_prefixes
        choices: tuple[list[View], ...] = (["full"], list(range(len(sizes.fields))))
        for count, views in product(sizes.scored, choices):
            few = rollouts[:count]
            lengths = [teacher.view_tokens(rollout, view) for rollout in few for view in views]
            work: Work = [(shape.forward(lengths), 2.0 * shape.in_layers)]

            def read(limit: int, share: bool, few: list[Rollout] = few, views: list[View] = views) -> None:
                teacher.limit.size, teacher.share_prefixes = limit, share
                try:
                    teacher.states(few, views)
                finally:
                    teacher.forget()
                    teacher.limit.size, teacher.share_prefixes = usual

            facts = {"tokens": sum(lengths)}
            variants = {AS_IN_TRAINING: Variant(partial(read, *usual), work, facts, memory=True)}
            for limit in sizes.per_forward:
                variants[f"batches of {limit} tokens"] = Variant(partial(read, limit, False), work, facts, memory=True)
            variants["shared prefixes"] = Variant(partial(read, usual[0], True), work, facts)
            name = "full" if views == ["full"] else "without a field"
            yield from timed({"responses": count, "views": name}, variants, sizes.repeats)


def student(setting: Setting) -> Iterator[harness.Row]:
    """Forward and backward pass up to the last hidden states, with and without recomputing activations."""
    sizes, shape = setting.sizes, setting.sizes.shapes["1.5b"]
    with trainer_of(setting, random_model(shape, setting.device)) as trainer:
        model: Any = trainer.model
        rollouts = wrong_rollouts(trainer, max(sizes.micro_batches), sizes.response)

        def step(few: list[Rollout]) -> None:
            states = student_states(model, few).hidden
            torch.manual_seed(0)
            states.backward(torch.randn_like(states))
            model.zero_grad(set_to_none=True)

        for count, recompute in product(sizes.micro_batches, (False, True)):
            few = rollouts[:count]
            lengths = [len(rollout.prompt_ids) + len(rollout.response_ids) for rollout in few]
            passes = 3 if recompute else 2  # the base is frozen: back, only the inputs take a gradient
            work: Work = [(passes * shape.forward(lengths), 0.0)]
            variant = Variant(partial(step, few), work, {"tokens": sum(lengths)}, memory=True)
            name = f"recomputing {'all layers' if recompute else 'nothing'}"
            with recomputing(model.get_base_model(), recompute):
                yield from timed({"responses": count}, {name: variant}, sizes.repeats)


# ---- Whole steps ---------------------------------------------------------------------------------------------------------------


def whole_step(setting: Setting, shape: str) -> Iterator[harness.Row]:
    """Steps of Full Context, of FIRE with a tenth of the tokens over the radius and, for the smallest model, with all of them."""
    sizes = setting.sizes.shapes[shape]
    cases: list[tuple[str, float | None]] = [(FULL_CONTEXT, None), (FIRE, 0.1)]
    for method, over in [*cases, (FIRE, 1.0)] if shape == "1.5b" else cases:
        yield from steps_of(setting, sizes, partial(random_model, sizes, setting.device), method, over)


def long_responses(setting: Setting) -> Iterator[harness.Row]:
    """Two steps of FIRE each, after one to warm up."""
    shape = setting.sizes.shapes["1.5b"]
    for response in setting.sizes.long_responses:
        longer = replace(setting, changes={"response": response, "warm_up_steps": 1, "steps": 2})
        context = response + 2048  # more than the teacher's prompts
        model = partial(random_model, shape, setting.device)
        yield from steps_of(longer, shape, model, FIRE, 0.1, max_context_tokens=context)


def step_with_vllm(setting: Setting) -> Iterator[harness.Row]:
    """FIRE with vLLM's rollouts. vLLM reads the model from a folder."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    from firedistill.models.loading import load_model_and_tokenizer

    shape = setting.sizes.shapes["1.5b"]
    with tempfile.TemporaryDirectory() as folder:
        _, tokenizer = load_model_and_tokenizer("lab")  # vLLM and the loader want a tokenizer that keeps any text
        random_model(shape, setting.device).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield from steps_of(setting, shape, lambda: folder, FIRE, 0.1, tokenizer, rollouts="vllm")


def steps_of(
    setting: Setting,
    shape: Shape,
    model: Callable[[], Any],
    method: str,
    over: float | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Iterator[harness.Row]:
    """A row for the whole step, and one for each of its phases.

    Args:
        model: makes the model, or returns the name of one.
    """
    sizes = setting.sizes

    def before(step: int) -> None:
        if setting.is_gpu and step == sizes.warm_up_steps:
            torch.cuda.reset_peak_memory_stats()

    with trainer_of(setting, model(), tokenizer, EveryStep(before), method=method, **settings) as trainer:
        trainer.over = over
        trainer.train(preflight=False)
        rows = trainer.rows[sizes.warm_up_steps :]
        compiling = {
            "first_step_seconds": trainer.rows[0]["train_seconds"],  # with the compiler's
            "head_compiled": is_compiled(torch.device(setting.device), torch.bfloat16),
        }
        checkpointing = bool(getattr(trainer.args, "gradient_checkpointing", False))
        sampled = ways_of_sampling(trainer)
        teacher_prompt = max(trainer.teacher.view_tokens(r, "full") for r in wrong_rollouts(trainer, 1, sizes.response))
    peak = torch.cuda.max_memory_allocated() / harness.MIB if setting.is_gpu else None
    reserved = {"reserved_mib": torch.cuda.max_memory_reserved() / harness.MIB} if setting.is_gpu else {}
    halved = {"out_of_memory": sum(row.get("out_of_memory", 0) for row in trainer.rows)}
    del trainer
    gc.collect()  # the next model may not fit beside this one
    if setting.is_gpu:
        torch.cuda.empty_cache()  # nor do its blocks count as reserved for the next one
    median = {
        name: float(np.median([row.get(name, 0.0) for row in rows]))
        for name in ("correct_rate", "chi_active", "teacher_tokens", "generated_tokens")
    }
    scale = rows[-1]["step_scale"]
    work = step_work(sizes, shape, method, teacher_prompt, median["chi_active"] if method == FIRE else 0.0, checkpointing)
    phases = {
        "whole step": ("train_seconds", [phase for part in work.values() for phase in part]),
        "sampling": ("seconds_rollout", work["sampling"]),
        "teacher": ("seconds_score", work["teacher"]),
        "student, head, optimizer": ("seconds_update", work["update"]),
    }
    case = {"method": method, "tokens": sizes.response} | ({} if over is None else {"over": over})
    steps = {"warm_up_steps": sizes.warm_up_steps, "steps": len(rows), "step_scale": scale, "checkpointing": checkpointing}
    facts = median | steps | sampled | reserved | compiling | halved
    for phase, (column, of_phase) in phases.items():
        seconds = [row.get(column, 0.0) for row in rows]
        more = {"peak_mib": peak, "details": facts} if phase == "whole step" else {}
        yield row_of(case, phase, seconds, work=of_phase, **more)


def ways_of_sampling(trainer: MeasuredTrainer) -> dict[str, Any]:
    """Whether the package's engine merges the adapter, how many layers it fuses, and on a GPU whether it replays graphs."""
    engine = trainer.rollout_engine
    if not isinstance(engine, HFRolloutEngine):
        return {}
    merges = bool(trainer.args.merge_adapter)
    found = {
        "merges_adapter": merges,
        "fused_layers": len(fusable_layers(trainer.model)) if merges and engine.fuse_layers else 0,
    }
    return found if engine.decoder is None else found | {"captured": engine.decoder.captures}


def step_work(sizes: Sizes, shape: Shape, method: str, teacher_tokens: int, over: float, recompute: bool) -> dict[str, Work]:
    """The least work of a step: every response has its full length, a token over the radius is as likely anywhere in it."""
    read = sizes.prompt + sizes.response
    wrong = sizes.prompts if method == FULL_CONTEXT else sizes.prompts // 2
    without = [teacher_tokens - sizes.fields[0]] * (wrong * len(sizes.fields)) if over else []
    tokens = sizes.prompts * sizes.response
    share = wrong / sizes.prompts
    # Tokens of correct responses have one product forward and one back.
    products = tokens * (2 + share * (1 + over * len(sizes.fields)))
    return {
        "sampling": [
            (shape.forward([sizes.prompt] * sizes.prompts), 2.0 * shape.in_layers),
            *shape.decoding(sizes.prompts, sizes.prompt, read),
        ],
        "teacher": [(shape.forward([teacher_tokens] * wrong + without), 2.0 * shape.in_layers)],
        "update": [
            ((3 if recompute else 2) * shape.forward([read] * sizes.prompts), 0.0),
            (2.0 * shape.in_head * products, 2.0 * shape.in_head),
            (0.0, 2.0 * shape.vocabulary * products),
        ],
    }
