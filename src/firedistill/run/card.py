"""The model card of a run, which the Hub accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache

from firedistill.run.log import read_jsonl

CITATION = """\
@software{firedistill,
  title = {firedistill: feedback-based on-policy self-distillation},
  author = {{firedistill contributors}}
}"""


def model_card(config: Any, folder: Path, base: str, steps: int) -> str:
    """What this adapter is, how it was made, what it scored, and how to load it.

    Args:
        config: the settings of the run.
        folder: the run directory, with `evals.jsonl`.
        base: name of the base model: a hub id or a path.
        steps: optimizer steps so far.
    """
    hub_id = base if is_hub_id(base) else None
    kind, place = ("code:", config.task[5:]) if config.task.startswith("code:") else ("", config.task)
    is_path = place.startswith(("/", "~", ".")) or Path(place).exists()
    task = kind + (Path(place).name if is_path else place)
    distilled = config.method != "supervised"
    tags = ["firedistill", *(("self-distillation", "on-policy-distillation") if distilled else ()), "lora", config.method]
    training = "feedback-based on-policy self-distillation" if distilled else "supervised fine-tuning on gold solutions"
    shown = hub_id or Path(base).name
    revision = f", revision={json.dumps(config.model_revision)}" if config.model_revision is not None else ""
    evaluations = read_jsonl(folder / "evals.jsonl")
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=task,
            metric_type="accuracy",
            metric_name=f"greedy accuracy, {row['n']} held-out problems",
            metric_value=round(row["accuracy"], 4),
        )
        for row in evaluations[-1:]
    ]
    data = ModelCardData(
        library_name="peft",
        base_model=hub_id,
        license=licence_of(base),
        pipeline_tag="text-generation",
        tags=tags,
        model_name=f"{shown} {task} {config.method}" if results else None,
        eval_results=results or None,
    )
    table = "".join(
        f"| {row['step']} | {row['accuracy']:.3f} ± {row['stderr']:.3f} | {row['lenient_accuracy']:.3f} "
        f"| {row['well_formed_rate']:.3f} | {row['n']} |\n"
        for row in evaluations
    )
    return f"""\
---
{data.to_yaml()}
---

# {shown} on {task}, {config.method}

A LoRA adapter for `{shown}`, trained by {training} (`{config.method}`) with firedistill: \
{steps} optimizer step{"s" * (steps != 1)}, peak learning rate {config.learning_rate:g}, seed {config.seed}. \
`config.yaml` of the run holds every setting.

## Held-out accuracy, greedy

| step | accuracy | lenient | well-formed | n |
|---|---|---|---|---|
{table}
## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{hub_id or f"path/to/{shown}"}"{revision})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

## Citation

```bibtex
{CITATION}
```
"""


def is_hub_id(base: str) -> bool:
    """Whether the name of a model is `owner/name` and not a folder here."""
    return bool(re.fullmatch(r"[\w-]+/[\w.-]+", base)) and not Path(base).exists()


def licence_of(base: str) -> str | None:
    """The licence that the base model's own card declares, if the card is on this machine; else None."""
    card = try_to_load_from_cache(base, "README.md") if is_hub_id(base) else Path(base) / "README.md"
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.license
    except (ValueError, OSError, yaml.YAMLError):
        return None
    return licence if isinstance(licence, str) else None
