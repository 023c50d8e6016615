"""The documentation is executed: its Python runs as it is printed, and its command lines are taken by the program.

A command line runs up to the point where a model would be loaded (a training, an evaluation, an inspection) or measured (a benchmark):
its recipe, options, method and task have been understood by then. Reports and the dry runs of suites are run to their end, and what
resumes or inspects a run is run on a tiny model. Not run: what needs a GPU, several machines, or a model of the hub.
"""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import firedistill.benchmarks
import firedistill.cli.main
from chat_server import serving
from firedistill import SelfDistillConfig, SelfDistillTrainer, load_task
from firedistill.cli.arguments import parse_suite
from firedistill.cli.main import COMMANDS, PRINTING_OPTIONS, main
from firedistill.cli.names import OF_TRL
from firedistill.cli.suite import planned
from firedistill.coerce import built_in_names
from firedistill.config import SelfDistillConfig as Config
from firedistill.objectives import load_objective, registered_objectives
from firedistill.run.log import read_jsonl
from firedistill.setup import named_task
from firedistill.suites.plan import make_plan
from firedistill.tasks.judge import load_judge
from firedistill.warmstart import WarmStartConfig
from tiny import ToyTask, save_checkpoint

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
# How the Python examples of each page begin; the tests below run them.
PYTHON = {
    "README.md": ["from firedistill import SelfDistillConfig", "from firedistill import Example"],
    "docs/own-data.md": [
        "from firedistill import task\n\nWORDS",
        "from firedistill import task\n\n\n@task",
        "from datasets import Dataset",
        "from firedistill import SelfDis",
    ],
    "docs/add-a-method.md": ["from dataclasses import dataclass\n\nfrom firedistill.functional"],
    "docs/tutorial.md": ["from firedistill import SelfDistillConfig"],
    "docs/from-trl.md": ["# firedistill\nconfig = SelfDistillConfig(", "from datasets import Dataset"],
}
TINY = dict(
    model_dtype="float32",
    warmup_steps=1,
    learning_rate=1e-2,
    max_new_tokens=6,
    gradient_checkpointing=False,
    use_cpu=True,
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def example(page: str, start: str) -> str:
    (source,) = [block for block in blocks(page, "python") if block.startswith(start)]
    return source


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The examples that are modules, where Python finds them."""
    (tmp_path / "desk").mkdir()
    (tmp_path / "hopeful.py").write_text(example("docs/add-a-method.md", PYTHON["docs/add-a-method.md"][0]), encoding="utf-8")
    for name in ("reverse_words", "my_module", "desk/reverse"):
        (tmp_path / f"{name}.py").write_text(example("README.md", PYTHON["README.md"][1]), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("hopeful", "reverse_words", "my_module"):
        sys.modules.pop(name, None)


def write_own_data(folder: Path, judge: str = "http://localhost:8000/v1") -> None:
    """The files that docs/own-data.md and docs/judges.md show.

    Args:
        judge: the address in the judge files.
    """
    for name, content in zip(("judge.yaml", "rubric.yaml", "verdict.yaml"), blocks("docs/judges.md", "yaml"), strict=True):
        (folder / name).write_text(re.sub(r"(?m)^url: .*", f"url: {judge}", content), encoding="utf-8")
    (folder / "essays.jsonl").write_text(blocks("docs/judges.md", "jsonl")[0], encoding="utf-8")
    for name, language in (("problems.csv", "csv"), ("capitals.jsonl", "jsonl")):
        (content,) = blocks("docs/own-data.md", language)
        (folder / name).write_text(content, encoding="utf-8")
    pq.write_table(
        pa.table({"question": [f"{i} + 1?" for i in range(20)], "answer": list(range(1, 21))}), folder / "pairs.parquet"
    )
    for name, start in zip(("words.py", "sums.py", "pairs.py"), PYTHON["docs/own-data.md"], strict=False):
        (folder / name).write_text(example("docs/own-data.md", start), encoding="utf-8")
    (folder / "my.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}\n{"prompt": "1 + 2?", "answer": 3}\n', encoding="utf-8")


@pytest.fixture
def hopeful(modules):
    return "hopeful:Hopeful"


@pytest.mark.parametrize("page", PAGES)
def test_every_python_example_is_one_that_is_run(page):
    found = blocks(page, "python")
    starts = PYTHON.get(page, [])
    assert len(found) == len(starts) and all(map(str.startswith, found, starts))
    assert not re.search(r"^ +```", text_of(page), re.MULTILINE)  # blocks() looks at the margin only


def test_the_example_method_trains_whatever_the_micro_batches(hopeful, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "base")
    weights = []
    for size, accumulation in ((4, 1), (1, 4)):
        config = SelfDistillConfig(
            model=checkpoint,
            task="toy",
            method=hopeful,
            method_settings={"group_size": 3, "power": "2"},
            output_dir=str(tmp_path / f"run{size}"),
            max_steps=3,
            eval_size=0,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            **TINY,
        )
        trainer = SelfDistillTrainer(args=config, task=ToyTask())
        trainer.train()
        rows = read_jsonl(tmp_path / f"run{size}" / "metrics.jsonl")
        assert all(0 < row["hopeful_success"] < 1 and row["kl"] >= 0 and row["grad_norm"] > 0 for row in rows)
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


def test_the_example_method_refuses_what_it_does_not_know(hopeful):
    assert load_objective(hopeful, {"power": 0.5}).power == 0.5
    with pytest.raises(ValueError, match="no setting 'powr'; did you mean 'power'"):
        load_objective(hopeful, {"powr": 2})
    with pytest.raises(ValueError, match="power is -1.0"):
        load_objective(hopeful, {"power": -1})
    with pytest.raises(ValueError, match="group_size is 0"):
        load_objective(hopeful, {"group_size": 0})
    with pytest.raises(ValueError, match="power is 'much'; expected a number"):
        load_objective(hopeful, {"power": "much"})


def test_the_readmes_task_trains_and_fire_attributes_to_its_fields(modules, tmp_path):
    config = SelfDistillConfig(
        model=save_checkpoint(tmp_path / "base"),
        task="reverse_words:Reverse",
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        eval_size=2,
        per_device_train_batch_size=4,
        **TINY,
    )
    SelfDistillTrainer(args=config).train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["correct_rate"] == 0 and row["grad_norm"] > 0 for row in rows)
    assert {"alpha_full", "alpha_verdict", "alpha_length"} <= rows[0].keys()
    assert [row["n"] for row in read_jsonl(tmp_path / "run" / "evals.jsonl")] == [2] * 2


def write_gsm8k(folder: Path) -> None:
    for split in ("train", "test"):
        rows = [{"question": f"{split}: {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(9)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def test_the_readmes_first_example_runs(tmp_path, monkeypatch):
    """As printed, but for a tiny model and tiny data in place of those of the hub, and two steps."""
    checkpoint = save_checkpoint(tmp_path / "base")
    data = tmp_path / "data"
    data.mkdir()
    write_gsm8k(data)
    source = example("README.md", PYTHON["README.md"][0])
    tiny = "".join(f", {name}={value!r}" for name, value in TINY.items() if name not in {"learning_rate"})
    for printed, stand_in in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', repr(checkpoint)),
        ("max_steps=100", f"max_steps=2, eval_size=2, per_device_train_batch_size=2, data_dir={str(data)!r}{tiny}"),
    ):
        assert source.count(printed) == 1
        source = source.replace(printed, stand_in)
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "readme"}
    exec(compile(source, "README.md", "exec"), names)
    assert len(read_jsonl(tmp_path / "runs" / "my-run" / "metrics.jsonl")) == 2
    trained = {name for name, _ in names["model"].named_parameters() if "lora_" in name}
    assert trained


def test_the_example_of_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = example("docs/tutorial.md", PYTHON["docs/tutorial.md"][0])
    few = "eval_size=2, max_new_tokens=6, per_device_train_batch_size=2,"
    assert source.count("eval_size=8,") == 1
    exec(compile(source.replace("eval_size=8,", few), "tutorial.md", "exec"), {"__name__": "readme"})
    assert len(read_jsonl(tmp_path / "runs" / "python" / "metrics.jsonl")) == 4
    assert "held-out, step 4: " in capsys.readouterr().out


def test_the_recipe_for_those_who_know_trl_is_one_of_ours():
    source = example("docs/from-trl.md", PYTHON["docs/from-trl.md"][0]).partition("\nSelfDistillTrainer(")[0]
    names = {"SelfDistillConfig": lambda **settings: SelfDistillConfig(use_cpu=True, **settings)}
    exec(compile(source, "from-trl.md", "exec"), names)
    assert names["config"].method == "full_context"


def test_the_task_of_those_who_know_trl_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = example("docs/from-trl.md", "from datasets import Dataset")
    few = "use_cpu=True, max_new_tokens=6, per_device_train_batch_size=2, max_steps=1, "
    assert source.count("max_steps=2, ") == 1
    exec(compile(source.replace("max_steps=2, ", few), "from-trl.md", "exec"), {"__name__": "from_trl"})
    (row,) = read_jsonl("runs/is-right/metrics.jsonl")
    assert "alpha_hint" in row or row["correct_rate"] == 1
    assert "task: object:is_right" in Path("runs/is-right/config.yaml").read_text()


def test_names_of_trl_are_told_and_explained(capsys):
    names = {f.name for f in fields(Config)}
    page = text_of("docs/from-trl.md")
    for name, here in OF_TRL.items():
        assert name not in names and f"{name}" in page, name
        assert main(["train", "lab", f"--{name}", "x"]) == 2
        assert f"unknown option {name!r} on the command line; what TRL calls {name} is {here} here" in capsys.readouterr().err


def test_the_suite_of_ones_own_is_a_suite(tmp_path, monkeypatch):
    (source,) = blocks("docs/suites.md", "yaml")
    monkeypatch.chdir(tmp_path)
    Path("my-suite.yaml").write_text(source, encoding="utf-8")
    Path("mine.yaml").write_text("task: gsm8k\n", encoding="utf-8")
    runs = make_plan("my-suite.yaml", None, None, {}).runs
    # Two recipes, two methods and two seeds; then two more rates of the one recipe; and one warm start.
    assert len([run for run in runs if run.command == "train"]) == 2 * 2 * 2 + 2 * 2


def test_the_json_examples_are_json():
    found = [json.loads(block) for page in PAGES for block in blocks(page, "json")]
    assert [config["zero_optimization"]["stage"] for config in found] == [2]


# Command lines


def command_lines(text: str) -> list[str]:
    """Every `firedistill COMMAND ...` of a page: in its blocks, in indented lines, in the text, and inside of other commands."""
    found = []
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = "\n".join(line for line in prose.splitlines() if line.startswith("    "))
    for block in [*fenced, indented]:
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^.*-m firedistill\.cli |^\.venv/bin/firedistill ", "firedistill ", line.strip())
            line = re.sub(r"^# \S+: ", "", line)  # a file's first line that says how to use it
            if line.startswith("firedistill "):
                found.append(re.split(r"\s+#\s|\s{2,}(?!-)", line)[0])
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("    "))
    for span in re.findall(r"`([^`]+)`", prose):
        if inner := re.search(r'"(firedistill [^"]*)"', span):
            span = inner[1]
        span = re.sub(r"^.*-m firedistill\.cli ", "firedistill ", " ".join(span.split()))
        if span.startswith("firedistill "):
            found.append(span)
    return list(dict.fromkeys(found))


def makefile_lines() -> list[str]:
    lines = re.findall(r"\$\(BIN\)/(firedistill .*)", text_of("Makefile"))
    return [re.split(r'\s{2,}|"', line)[0] for line in lines]


LINES = [(page, line) for page in PAGES for line in command_lines(text_of(page))]
LINES += [("Makefile", line) for line in makefile_lines()]
LINES += [("--help", line) for line in command_lines(firedistill.cli.main.EPILOGUE.replace("\n  ", "\n    "))]
# What stands for something of the reader's.
PLACEHOLDERS = {
    "DIR": "runs/my-run/adapter",
    "MODEL": "lab",
    "RUN": "runs/my-run",
    "RECIPE": "quickstart",
    "TASK": "asdiv",
    "METHOD": "srpo",
    "SEED": "1",
    "N": "5",
    "S": "0.5",
    "LR": "1e-4",
    "RATE": "1e-4",
}
# These are carried through, on a run of the tiny model.
CARRIED_OUT = {
    "firedistill train runs/my-run",
    "firedistill train runs/my-run --resume",
    "firedistill inspect runs/quickstart --example 1",
    "firedistill inspect runs/a --save --count 8",
    "firedistill inspect runs/a --save --count 8 --checkpoint 100",
    "firedistill eval runs/my-run --eval_size 500",
    "firedistill train lab --max_steps 2 --eval_size 4 --output_dir runs/model --teacher lab",
    "firedistill train lab --max_steps 2 --eval_size 4 --output_dir runs/plain --teacher initial --teacher_feedback false "
    "--method full_context",
    "firedistill train lab --max_steps 2 --eval_size 4 --output_dir runs/groups --attribution_groups 'p*=diagnostics'",
}


def arguments_of(line: str) -> list[str]:
    words = shlex.split(line)[1:]
    if words[-1] == "..." and not words[-2].startswith("--"):
        words.pop()  # "and so on"
    return ["runs/new" if word == "..." else PLACEHOLDERS.get(word, word) for word in words]


class Loads(Exception):
    """A model would be loaded now."""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    config = SelfDistillConfig(
        model=save_checkpoint(folder / "base"),
        task="arithmetic:easy",
        output_dir=str(folder / "run"),
        max_steps=2,
        eval_size=2,
        save_steps=2,
        per_device_train_batch_size=2,
        **TINY,
    )
    SelfDistillTrainer(args=config).train()
    return folder / "run"


@pytest.fixture(scope="module")
def runs(finished_run, tmp_path_factory):
    """A folder with the runs that the command lines name."""
    place = tmp_path_factory.mktemp("runs")
    of_the_tutorial = [f"lab-arithmetic-{method}-lr0.0003-seed0" for method in ("fire", "full_context")]
    for name in ("my-run", "quickstart", "quickstart-full-context", "a", "b", "x", "squares", *of_the_tutorial):
        shutil.copytree(finished_run, place / name)
    (place / "a" / "checkpoint-2").rename(place / "a" / "checkpoint-100")
    for name in ("lab", "lab-rates"):
        suite, plan, _ = planned(*parse_suite([name, "--seeds", "0", "--only", "fire", "-o", str(place / name)]))
        suite.widen(plan)
        shutil.copytree(finished_run, suite.run_folder(plan.runs[0]))
    return place


@pytest.fixture
def desk(modules, runs, monkeypatch):
    """A folder with the files that the command lines name."""
    place = modules / "desk"
    shutil.copytree(runs, place / "runs")
    monkeypatch.chdir(place)
    Path("my-recipe").write_text("task: gsm8k\nmodel: Qwen/Qwen2.5-0.5B-Instruct\n", encoding="utf-8")
    Path("problems.jsonl").write_text(blocks("docs/code-tasks.md", "jsonl")[0], encoding="utf-8")
    Path("mine.yaml").write_text("task: gsm8k\n", encoding="utf-8")
    Path("my-suite.yaml").write_text(blocks("docs/suites.md", "yaml")[0], encoding="utf-8")
    Path("my-recipe.yaml").write_text(blocks("docs/own-data.md", "yaml")[0], encoding="utf-8")
    with serving() as judge:
        write_own_data(place, judge.url)
        yield place


def stop_at_the_model(monkeypatch):
    """Configurations and benchmarks are looked up as ever; then `Loads` is raised."""

    def load(args, **_):
        raise Loads(args)

    class Benchmark:
        SIZES = {"quick": None, "full": None}

        def run(sizes, options):
            raise Loads(options)

    look_up = firedistill.benchmarks.load_benchmark
    for trainer in ("SelfDistillTrainer", "WarmStartTrainer"):
        monkeypatch.setattr(f"firedistill.cli.train.{trainer}.__init__", lambda self, args: load(args))
    monkeypatch.setattr("firedistill.cli.inspect.load_setup", load)
    monkeypatch.setattr("firedistill.benchmarks.load_benchmark", lambda name: look_up(name) and Benchmark)
    monkeypatch.setattr("firedistill.cli.bench.check_device", lambda device: None)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)  # --threads would last beyond the test
    monkeypatch.setattr("firedistill.benchmarks.parts.run_parts", lambda *arguments: load(arguments))
    monkeypatch.setattr("firedistill.cli.bench.write_page", load)


def test_the_command_lines_are_found():
    pages = {page for page, _ in LINES}
    assert pages >= {
        "README.md",
        "Makefile",
        "--help",
        "docs/scale.md",
        "docs/suites.md",
        "docs/reports.md",
        "docs/performance.md",
    }
    assert {line.split()[1] for _, line in LINES} == COMMANDS.keys() and len(LINES) > 60
    assert {line for _, line in LINES} >= CARRIED_OUT


def help_of(command: str, capsys) -> str:
    capsys.readouterr()
    try:
        assert main([command, "--help-all" if command in {"train", "warmstart"} else "--help"]) == 0
    except SystemExit as leaves:  # argparse
        assert leaves.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_line_is_one_that_the_program_takes(page, line, desk, monkeypatch, capsys):
    arguments = arguments_of(line)
    if len(arguments) == 1 and arguments != ["bench"]:  # a mention of the command
        assert help_of(arguments[0], capsys)
        return
    if arguments[0] == "suite" and not {"--status", "--dry-run"} & set(arguments):
        arguments += ["--dry-run"]
    stop_at_the_model(monkeypatch)
    try:
        status = main(arguments)
    except Loads as loads:
        (settings,) = loads.args
        if isinstance(settings, Config):
            named_task(None, settings, judged=settings.judge is not None and load_judge(settings.judge).decides)
            assert settings.method == "supervised" or load_objective(settings.method, settings.method_settings)
        return
    assert status == 0, capsys.readouterr().err
    assert arguments[0] in {"suite", "report", "data"} or "--help" in arguments


@pytest.mark.parametrize("line", sorted(CARRIED_OUT))
def test_a_command_line_is_carried_out(line, desk, capsys):
    arguments = arguments_of(line)
    if "--eval_size" in arguments:
        arguments[arguments.index("--eval_size") + 1] = "2"
    assert main(arguments) == 0, capsys.readouterr().err


OWN_DATA = [
    line
    for page in ("docs/own-data.md", "docs/judges.md")
    for line in command_lines(text_of(page))
    if line.startswith("firedistill train lab")
]


TASKS = ("./sums.py:sums", "./pairs.py:pairs", "./reverse.py:Reverse")


@pytest.mark.parametrize("line", [*OWN_DATA, *(f"firedistill train lab --task {task}" for task in TASKS)])
def test_the_examples_of_own_data_train_the_lab_model(line, desk, capsys):
    arguments = re.sub(r" --(max_steps|eval_size) \d+", "", shlex.join(arguments_of(line)))
    arguments = shlex.split(arguments)
    few = "--max_steps 2 --warmup_steps 1 --per_device_train_batch_size 2 --max_new_tokens 6 --eval_size 2 --output_dir run --use_cpu"
    assert main([*arguments, *few.split()]) == 0, capsys.readouterr().err
    rows = read_jsonl(Path("run/metrics.jsonl"))
    assert len(rows) == 2 and len(read_jsonl(Path("run/evals.jsonl"))) == 2
    names = {"capitals.jsonl": "reference", "./words.py:backwards": "letters", "judge.yaml": "advice", "essays.jsonl": "length"}
    names |= {"./pairs.py:pairs": "steps", "./reverse.py:Reverse": "length"}
    added = f"alpha_{names[arguments[3]]}" if arguments[3] in names else None
    assert added is None or any(added in row for row in rows)
    assert not any("alpha_parser" in row for row in rows) or arguments[3] != "./words.py:backwards"


def test_rows_from_python_train_the_lab_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = example("docs/own-data.md", PYTHON["docs/own-data.md"][3])
    few = ", ".join(f"{name}={value!r}" for name, value in TINY.items()) + ", per_device_train_batch_size=2, eval_size=2"
    assert source.count("max_steps=20, warmup_steps=2") == 1
    exec(
        compile(source.replace("max_steps=20, warmup_steps=2", f"max_steps=1, {few}"), "own-data.md", "exec"),
        {"__name__": "own_data"},
    )
    assert len(read_jsonl("runs/squares/metrics.jsonl")) == 1
    assert main(["eval", "runs/squares"]) == 2
    assert "the task of this run was a Python object" in capsys.readouterr().err


def test_an_option_that_is_gone_is_noticed(desk, capsys):
    """The tests above fail where they should."""
    for line in ("train quickstart --learning_rates 1", "suite lab --dry-run --seed 0", "train quickstat", "bench stepp"):
        assert main(line.split()) == 2, line
    with pytest.raises(SystemExit):
        main(["report", "runs/a", "--outputs", "x"])


@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_text_exist(page, capsys):
    known = {f.name for kind in (Config, WarmStartConfig) for f in fields(kind) if f.init}
    known |= {name.lstrip("-").replace("-", "_") for name in PRINTING_OPTIONS}
    for command in COMMANDS:
        known |= {name.replace("-", "_") for name in re.findall(r"--([a-z][\w-]*)", help_of(command, capsys))}
    known |= set(re.findall(r'"--(\w+)"', text_of("tests/kill_test.py") + text_of("tests/fault_test.py")))
    named = {word for span in re.findall(r"`(--[^`]+)`", text_of(page)) for word in span.split() if word.startswith("--")}
    assert {word for word in named if re.split(r"[=.]", word[2:])[0].replace("-", "_") not in known} == set()


def first_column(page: str, header: str) -> set[str]:
    """The names in code type in the first column of a table."""
    (table,) = re.findall(rf"^\| {header} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text_of(page), re.MULTILINE)
    return {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_tables_name_what_there_is():
    methods = {name for name in first_column("README.md", "method") if not name.startswith(("my_module", "./my_file"))}
    ours = {name for name, kind in registered_objectives().items() if kind.__module__.startswith("firedistill.")}
    assert methods == ours - {"supervised"}  # tests register methods of their own
    tasks = {name for name in first_column("README.md", "task") if not name.startswith(("my_module", "./my_file", ":", "gym:"))}
    assert all(load_task(name) for name in tasks)
    assert {name.removeprefix("firedistill ") for name in first_column("README.md", "command")} == COMMANDS.keys()
    assert first_column("docs/suites.md", "suite") == set(built_in_names("suites"))


def anchors_of(page: Path) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page):
    """Its links with their anchors, its pictures, and the scripts and tests in its text."""
    text = text_of(page)
    scripts = re.findall(r"\b(?:tests|examples|benchmarks)/\w+\.(?:py|sh)", text)
    missing = [script for script in scripts if not (ROOT / script).exists()]
    images = re.findall(r'\b(?:src|srcset)="([^"]+)"', text)
    missing += [image for image in images if not ((ROOT / page).parent / image).is_file()]
    generated = {"reference/options.md", "reference/methods.md"}  # by docs/conf.py, not in the repository
    for link in re.findall(r"\]\(([^):]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if name in generated or not target.exists() or (anchor and anchor not in anchors_of(target)):
            missing.append(link)
    assert missing == []


def rows_of_fidelity() -> list[list[str]]:
    """The cells of the tables of equations and choices, whose last two name code and tests."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text_of("docs/fidelity.md").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if len(row) in (3, 5) and row[-1].strip() != "Test"]


def test_code_and_tests_of_the_fidelity_page_exist():
    """Every function and every test that a row names is there, and every row names its code."""
    rows = rows_of_fidelity()
    assert len(rows) > 80
    for row in rows:
        code, tests = re.findall(r"`([^`]+)`", row[-2]), re.findall(r"`([^`]+)`", row[-1])
        assert code or row[-1] == "–" or row[-2].startswith("follows"), row[0]
        assert tests or row[-1] == "–", row[0]
        for name in code:
            assert pkgutil.resolve_name(f"firedistill.{name}") is not None
        for name in tests:
            file, _, test = name.partition(".")
            assert f"\ndef {test}(" in text_of(f"tests/{file}.py"), name
