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

# Each part, and what computes it: a module, its function, and further arguments
CALLS = {
    Part("ceilings", "Bandwidth, matrix products, the cost of an operator and of a wait", 15): "kernels ceilings",
    Part("decoding", "Sampling at the shape of Qwen2.5 1.5B, per token", 90): "steps decoding",
    Part("tests", "The tests that need a GPU", 195, alone=True): "inspection tests",
    Part("head-check", "The head and loss against the equations in float64", 90, alone=True): "kernels head_check",
    Part("step-1.5b", "Whole steps at the shape of Qwen2.5 1.5B", 140): "steps whole_step 1.5b",
    Part("head", "Head and loss, forward and backward, by chunk size", 35): "kernels head",
    Part("waits", "Waits for the device in a FIRE step", 35): "inspection waits",
    Part("same-seed", "The lab model trained twice with the same seed", 120, alone=True): "inspection same_seed",
    Part("student", "The student's forward and backward pass", 25): "steps student",
    Part("scoring", "The teacher's forward passes", 40): "steps scoring",
    Part("rows", "The head's rows without the matrix products, and the same rows by torch.compile", 90): "kernels rows_alone",
    Part("one-token", "Operations of a layer that reads one token per sequence", 40): "layers one_token_layers",
    Part("profile", "Where the time of a FIRE step and of decoding goes", 45): "inspection profile",
    Part("step-long", "Whole steps at the shape of Qwen2.5 1.5B with long responses", 75): "steps long_responses",
    Part("step-14b", "Whole steps at the shape of Qwen2.5 14B", 260): "steps whole_step 14b",
    Part("step-3b", "Whole steps at the shape of Qwen2.5 3B", 125): "steps whole_step 3b",
    Part("decoding-transformers", "Sampling by `generate` of transformers", 150, alone=True): "steps decoding_of_transformers",
    Part("vllm", "A whole step with rollouts by vLLM at the shape of Qwen2.5 1.5B", 200, alone=True): "steps step_with_vllm",
}
PARTS = tuple(CALLS)


def measure(name: str, setting: Setting) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The facts and the rows of a part; see `parts.measured`."""
    import torch  # takes seconds, and the command's own process does without

    from firedistill.benchmarks import fire_head, harness
    from firedistill.terminal import quiet_libraries

    quiet_libraries()
    module, function, *more = {part.name: call for part, call in CALLS.items()}[name].split()
    rows = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    fire_head.output_embedding.cache_clear()  # of another part, on the device
    gc.collect()
    gc.freeze()  # what is left are modules, which the collections between runs need not look at
    if setting.is_gpu:
        torch.cuda.empty_cache()
        torch.backends.cuda.enable_cudnn_sdp(name == "decoding-transformers")  # training does without
    facts = {"device": setting.device, "tiny": setting.tiny, "hardware": harness.hardware(), "sizes": asdict(setting.sizes)}
    return facts, rows(setting, *more)
