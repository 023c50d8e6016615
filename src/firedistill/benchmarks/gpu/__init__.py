"""What a GPU does with the package, in parts: from its ceilings to whole steps at the shapes of Qwen2.5.

Nothing is downloaded: models have random weights, made on the device from a configuration, and a tokenizer of whole words.

Every row has the `work` that its floor is made of: pairs of operations and bytes, one for each phase that cannot overlap with the
others. `page.py` turns them into seconds by the ceilings that the first part measures.

On a CPU the same parts run at `TINY` sizes.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from firedistill.benchmarks.gpu.sizes import Setting
from firedistill.benchmarks.parts import Part

PARTS = (
    Part("ceilings", "Bandwidth, matrix products, the cost of an operator and of a wait", 15),
    Part("decoding", "Sampling at the shape of Qwen2.5 1.5B, per token", 90),
    Part("tests", "The tests that need a GPU", 60, alone=True),
    Part("head-check", "The head and loss against the equations in float64", 90, alone=True),
    Part("step-1.5b", "Whole steps at the shape of Qwen2.5 1.5B", 115),
    Part("head", "Head and loss, forward and backward, by chunk size", 35),
    Part("waits", "Waits for the device in a FIRE step", 30),
    Part("same-seed", "The embedded model trained twice with the same seed", 120, alone=True),
    Part("student", "The student's forward and backward pass", 25),
    Part("scoring", "The teacher's forward passes", 40),
    Part("rows", "The head's rows without the matrix products, and the same rows by torch.compile", 90),
    Part("profile", "Where the time of a FIRE step and of decoding goes", 45),
    Part("step-14b", "Whole steps at the shape of Qwen2.5 14B", 200),
    Part("step-3b", "Whole steps at the shape of Qwen2.5 3B", 100),
    Part("decoding-transformers", "Sampling by `generate` of transformers", 150, alone=True),
    Part("vllm", "A whole step with rollouts by vLLM at the shape of Qwen2.5 1.5B", 200, alone=True),
)

# Module, function and further arguments of each part
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "ceilings": ("kernels", "ceilings"),
    "head-check": ("kernels", "head_check"),
    "head": ("kernels", "head"),
    "rows": ("kernels", "rows_alone"),
    "decoding": ("steps", "decoding"),
    "decoding-transformers": ("steps", "decoding_of_transformers"),
    "scoring": ("steps", "scoring"),
    "student": ("steps", "student"),
    "step-1.5b": ("steps", "whole_step", "1.5b"),
    "step-3b": ("steps", "whole_step", "3b"),
    "step-14b": ("steps", "whole_step", "14b"),
    "vllm": ("steps", "step_with_vllm"),
    "waits": ("inspection", "waits"),
    "profile": ("inspection", "profile"),
    "same-seed": ("inspection", "same_seed"),
    "tests": ("inspection", "tests"),
}


def measure(name: str, setting: Setting) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The facts and the rows of a part; see `parts.measured`."""
    import torch  # takes seconds, and the command's own process does without

    from firedistill.benchmarks import fire_head, harness
    from firedistill.terminal import quiet_libraries

    quiet_libraries()
    module, function, *more = FUNCTIONS[name]
    rows = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    fire_head.output_embedding.cache_clear()  # of another part, on the device
    gc.collect()
    gc.freeze()  # what is left are modules, which the collections between runs need not look at
    if setting.is_gpu:
        torch.cuda.empty_cache()
    facts = {"device": setting.device, "tiny": setting.tiny, "hardware": harness.hardware(), "sizes": asdict(setting.sizes)}
    return facts, rows(setting, *more)
