"""What a rollout costs: `generate` and our decoding loop, each without and with a merged adapter, and bare forwards.

    python benchmarks/rollouts.py MODEL ADAPTER --batch 8 32 --new-tokens 200 --output benchmarks/results/rollouts.json

All in one process, the variants in turn, so that whatever else the machine does hits all of them alike; with one thread, the processor
time is what remains when other work takes its turns. Fixed length: nothing stops a response. Stopping: the model's own stop tokens.
The bare forwards are the floor of a loop that runs the merged model as it is: the prompts once, then a token per row and step, the
responses unread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel

from firedistill.config import SelfDistillConfig
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.prompts import PromptEncoder, student_messages
from firedistill.rollouts.decoding import _Batch
from firedistill.rollouts.engine import Sampling
from firedistill.rollouts.hf import HFRolloutEngine, inference_mode
from firedistill.rollouts.merging import merged_adapter
from firedistill.tasks import load_task

VARIANTS = ["generate, unmerged", "generate, merged", "decode, unmerged", "decode, merged", "bare forwards, merged"]


class GenerateEngine(HFRolloutEngine):
    """Always by `generate`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.causal_lm = None


def sampled_tokens(engine: HFRolloutEngine, prompts: list[list[int]], law: Sampling) -> int:
    return sum(len(response.token_ids) for response in engine.generate(prompts, law, seed=0))


def bare_forwards(engine: HFRolloutEngine, prompts: list[list[int]], steps: int) -> int:
    with inference_mode(engine.model), merged_adapter(engine.model):
        batch = _Batch(engine.causal_lm, [tuple(p) for p in prompts], steps, 0, remember=False)
        batch.read_prompts()
        for _ in range(steps - 1):
            batch.read(torch.full((len(prompts),), 5, device=engine.model.device))
    return len(prompts) * steps


def measure(jobs: dict[str, Callable[[], int]], repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of wall clock and processor per variant (median, minimum, maximum) and the tokens sampled."""
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            wall, processor = time.perf_counter(), time.process_time()
            tokens = job()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[name].append((time.perf_counter() - wall, time.process_time() - processor, tokens))
    summary = {}
    for name, runs in found.items():
        walls, processors, tokens = zip(*runs, strict=True)
        summary[name] = {
            "seconds": statistics.median(walls),
            "min": min(walls),
            "max": max(walls),
            "processor_seconds": statistics.median(processors),
            "processor_min": min(processors),
            "processor_max": max(processors),
            "tokens": statistics.median(tokens),
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--data-dir", help="where the questions are, if not on the hub")
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--group", type=int, default=1, help="responses per prompt")
    parser.add_argument("--modes", nargs="+", default=["fixed length", "stopping"], choices=["fixed length", "stopping"])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    model, tokenizer = load_model_and_tokenizer(options.model)
    model = PeftModel.from_pretrained(model, options.adapter).eval()
    task, encoder = load_task(options.task), PromptEncoder(tokenizer)
    examples = task.examples("train", n=max(options.batch), data_dir=options.data_dir)
    questions = [encoder.encode(student_messages(task, example)) for example in examples]
    defaults = SelfDistillConfig.__dataclass_fields__
    law = Sampling(defaults["temperature"].default, defaults["top_p"].default, options.new_tokens)

    results: dict = {
        "machine": {
            "device": str(model.device.type),
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "threads": options.threads,
            "torch": torch.__version__,
        },
        "sampling": {"temperature": law.temperature, "top_p": law.top_p, "new_tokens": law.max_new_tokens},
        "repeats": options.repeats,
        "group": options.group,
    }
    for batch in options.batch:
        prompts = [questions[i // options.group] for i in range(batch)]
        for mode in options.modes:
            engines = {
                "generate, unmerged": GenerateEngine(model, tokenizer, batch, merge_adapter=False),
                "generate, merged": GenerateEngine(model, tokenizer, batch, merge_adapter=True),
                "decode, unmerged": HFRolloutEngine(model, tokenizer, batch, merge_adapter=False),
                "decode, merged": HFRolloutEngine(model, tokenizer, batch, merge_adapter=True),
            }

            jobs = {name: partial(sampled_tokens, engine, prompts, law) for name, engine in engines.items()}
            if mode == "fixed length":
                for engine in engines.values():
                    engine.stop_ids = []
                jobs["bare forwards, merged"] = partial(bare_forwards, engines["decode, merged"], prompts, law.max_new_tokens)
            for name in engines.keys() & options.variants:  # the first call pays for memory and kernels
                sampled_tokens(engines[name], prompts[:4], replace(law, max_new_tokens=2))
            jobs = {name: job for name, job in jobs.items() if name in options.variants}
            found = measure(jobs, options.repeats, model.device)
            results[f"batch {batch}, {mode}"] = found | {"prompt_tokens": [len(p) for p in prompts]}
            reference = found[options.variants[0]]
            print(f"batch {batch}, {mode}, prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
            for name, row in found.items():
                print(
                    f"  {name:24}{row['seconds']:8.2f} s ({row['min']:.2f} to {row['max']:.2f}), "
                    f"processor {row['processor_seconds']:.2f} s, {row['tokens']:.0f} tokens, "
                    f"x{reference['seconds'] / row['seconds']:.2f} wall, "
                    f"x{reference['processor_seconds'] / row['processor_seconds']:.2f} processor",
                    flush=True,
                )
            if options.output:
                options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
