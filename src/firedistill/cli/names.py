"""Names of options and methods, read from the source files: a mistake is reported before torch is imported."""

from __future__ import annotations

import ast
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

# Options of TRL's trainers and scripts under their names here; docs/from-trl.md explains them.
OF_TRL = {
    "model_name_or_path": "--model",
    "dataset_name": "--task",
    "num_generations": "--method_settings.group_size",
    "max_prompt_length": "--max_prompt_tokens",
    "max_completion_length": "--max_new_tokens",
    "max_reprompt_len": "--max_feedback_tokens",
    "teacher_update_rate": "--ema_rate",
    "teacher_model_kind": "--teacher",
    "use_vllm": "--rollouts vllm",
    "vllm_mode": "--rollouts vllm",
    "vllm_server_base_url": "--rollouts http://host:port",
    "dtype": "--model_dtype",
    "load_in_4bit": "--quantization nf4",
    "warmup_ratio": "--warmup_steps below 1",
}


@cache
def setting_types() -> dict[str, str]:
    """The options of a run by name, the inherited ones included, with their annotations."""
    package = Path(str(files("firedistill")))
    transformers = find_spec("transformers")
    assert transformers is not None and transformers.submodule_search_locations
    inherited = Path(transformers.submodule_search_locations[0]) / "training_args.py"
    sources = {
        "TrainingArguments": inherited,
        "SelfDistillConfig": package / "config.py",
        "WarmStartConfig": package / "config.py",
    }
    return {name: kind for of_class, path in sources.items() for name, kind in _fields(path, of_class).items()}


@cache
def method_names() -> frozenset[str]:
    """The names under which the package registers its methods."""
    names = set()
    for path in (Path(str(files("firedistill"))) / "objectives").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else []:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register":
                    names.add(ast.literal_eval(call.args[0]))
    return frozenset(names)


def _fields(path: Path, of_class: str) -> dict[str, str]:
    """The annotations of a dataclass's fields by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of_class)
    return {ast.unparse(line.target): ast.unparse(line.annotation) for line in found.body if isinstance(line, ast.AnnAssign)}
