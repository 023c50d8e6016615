"""Methods and tasks of others: files, modules, and the entry points of installed packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from firedistill import imports, load_task
from firedistill.cli import main as cli
from firedistill.objectives import Objective, load_objective, register, setting
from firedistill.objectives.full_context import FullContext

PACKAGE = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "firedistill-extras"
version = "1.2"

[project.entry-points."firedistill.methods"]
calm = "firedistill_extras.methods:Calm"
fire = "firedistill_extras.methods:Calm"
no_module = "firedistill_extras.nowhere:Calm"
raises = "firedistill_extras.broken:Calm"
no_method = "firedistill_extras.tasks:Echo"

[project.entry-points."firedistill.tasks"]
echo = "firedistill_extras.tasks:Echo"
arithmetic = "firedistill_extras.tasks:Echo"
no_task = "firedistill_extras.methods:Calm"

[tool.setuptools]
packages = ["firedistill_extras"]
"""
METHODS = """\
from dataclasses import dataclass

from firedistill.objectives import setting
from firedistill.objectives.full_context import FullContext


@dataclass
class Calm(FullContext):
    \"\"\"As full_context, but calm.\"\"\"

    patience: float = setting(1.0, "How calm.")
"""
TASKS = """\
from firedistill import Example, FeedbackField, Task, Verdict


class Echo(Task):
    name, format_instruction = "echo", "Repeat."

    def examples(self, split, n=None, seed=0, data_dir=None):
        return [Example(f"echo/{split}/{i}", f"Say {i}", str(i), solution=str(i)) for i in range(n or 6)]

    def verify(self, example, response):
        return Verdict(example.answer in response, response[:9], example.answer, True)

    def feedback(self, example, response, verdict):
        return (FeedbackField("said", f"Say {example.answer}."),)
"""


def install(folder: Path, target: Path) -> None:
    """Build a small package and install it into a folder, as pip does it."""
    (folder / "firedistill_extras").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PACKAGE)
    files = {"__init__": "", "methods": METHODS, "tasks": TASKS, "broken": "1 / 0\n"}
    for name, text in files.items():
        (folder / "firedistill_extras" / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    told = subprocess.run([*command, "--target", str(target), str(folder)], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    install(folder / "source", folder / "site")
    return folder / "site"


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    for function in (imports.plugins, imports.refuse_plugin):
        function.cache_clear()
    yield
    for function in (imports.plugins, imports.refuse_plugin):
        function.cache_clear()
    for name in [name for name in sys.modules if name.startswith("firedistill_extras")]:
        del sys.modules[name]


def test_a_package_brings_methods_and_tasks(installed):
    calm = load_objective("calm", {"patience": 2})
    assert isinstance(calm, FullContext) and calm.patience == 2.0
    assert load_task("echo").name == "echo"


def test_a_package_does_not_replace_what_is_built_in(installed, caplog):
    assert type(load_objective("fire")).__module__ == "firedistill.objectives.fire"
    assert load_task("arithmetic:easy").name == "arithmetic:easy"
    for name, group in (("fire", "methods"), ("arithmetic", "tasks")):
        text = f"the entry point {name!r} of firedistill-extras 1.2 (group firedistill.{group}) is refused, because"
        assert sum(message.startswith(text) for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_objective, "no_module", r"'no_module' of the package firedistill-extras 1.2 \(firedistill_extras.nowhere:Calm\)"),
        (load_objective, "raises", r"cannot be loaded: importing firedistill_extras.broken raised ZeroDivisionError"),
        (load_objective, "no_method", "method 'no_method' is not a subclass of firedistill.objectives.Objective"),
        (load_objective, "clam", "unknown method 'clam'; did you mean calm.; known are calm, "),
        (load_task, "no_task", "no_task is not a task: derive it from firedistill.Task"),
        (load_task, "ecko", "unknown task 'ecko'. Did you mean echo"),
    ],
)
def test_a_broken_plugin_names_itself(load, name, message, installed):
    with pytest.raises(ValueError, match=message):
        load(name)
    assert load_objective("calm") and load_task("echo"), "the others are there"


def test_help_lists_plugins_and_survives_broken_ones(installed, capsys):
    assert cli.main(["train", "--help"]) == 0
    told = capsys.readouterr().out
    assert "calm (firedistill-extras 1.2): As full_context, but calm." in told and "patience (1.0): How calm." in told
    assert (
        "raises (firedistill-extras 1.2): method 'raises' could not be loaded: 'raises' of the package" in told
        and "echo (firedistill-extras 1.2)" in told
    )


def test_two_packages_with_one_name_are_refused(installed, tmp_path, monkeypatch):
    other = tmp_path / "firedistill_other-3.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: firedistill-other\nVersion: 3.0\n")
    (other / "entry_points.txt").write_text("[firedistill.methods]\ncalm = json:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    imports.plugins.cache_clear()
    with pytest.raises(ValueError, match="'calm' is an entry point of firedistill-other 3.0 and firedistill-extras 1.2"):
        load_objective("calm")


def test_the_command_line_trains_with_a_plugin(installed, tmp_path, capsys):
    few = "--max_steps 1 --eval_size 2 --per_device_train_batch_size 2 --max_new_tokens 6 --use_cpu"
    arguments = ["train", "lab", "--method", "calm", "--task", "echo", "--output_dir", str(tmp_path / "run"), *few.split()]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert "method: calm" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_method_in_a_file_or_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "my_plugin_methods.py").write_text(METHODS)
    (tmp_path / "fails.py").write_text("1 / 0\n")
    (tmp_path / "value.py").write_text("int('x')\n")
    (tmp_path / "package.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    for name in ("my_plugin_methods:Calm", "./my_plugin_methods.py:Calm", f"{tmp_path}/my_plugin_methods.py:Calm"):
        assert load_objective(name, {"patience": 3}).patience == 3.0
    sys.modules.pop("my_plugin_methods")
    for name, message in (
        ("my_plugin_methods:Clam", "my_plugin_methods has no Clam; did you mean Calm"),
        ("./nowhere.py:Calm", "there is no file .*nowhere.py"),
        ("fails:Calm", "importing fails raised ZeroDivisionError"),
        ("./value.py:Calm", "importing ./value.py raised ValueError: invalid literal"),
        ("./package.py:Calm", "importing ./package.py raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("my_plugin_methods:dataclass", "is not a subclass of firedistill.objectives.Objective"),
    ):
        with pytest.raises(ValueError, match=message):
            load_objective(name)
    sys.modules.pop("my_plugin_methods")


def test_a_method_of_ones_own_cannot_take_a_built_in_name():
    with pytest.raises(ValueError, match="'fire' is a built-in method: register Mine under another name"):

        @register("fire")
        class Mine(Objective):
            pass

    assert type(load_objective("fire")).__name__ == "Fire"


def test_limits_of_settings(monkeypatch):
    monkeypatch.setattr("firedistill.objectives.registry._REGISTRY", {})

    @register("limited")
    @dataclass
    class Limited(Objective):
        group_size: int = setting(4, "Responses sampled per prompt.")
        power: float | None = setting(None, "An exponent.", above=0, at_most=1)
        seen: int = field(init=False)

    assert load_objective("limited").power is None
    refused = {"power": "0.0: expected a number above 0 and at most 1", "group_size": "0: expected a number at least 1"}
    for name, found_and_expected in refused.items():
        with pytest.raises(ValueError, match=f"method_settings of 'limited': {name} is {found_and_expected}"):
            load_objective("limited", {name: 0})
    with pytest.raises(TypeError, match="setting has no limit at_leest: expected above, at_least, below, at_most"):
        setting(1.0, "An exponent.", at_leest=0)


def test_settings_need_a_dataclass(monkeypatch):
    """The value of such a setting would be the declaration itself. The order of the two decorators has no effect."""
    monkeypatch.setattr("firedistill.objectives.registry._REGISTRY", {})

    @register("no_dataclass")
    class NoDataclass(Objective):
        power: float = setting(1.0, "An exponent.")

    with pytest.raises(ValueError, match=r"method 'no_dataclass' declares power by setting\(...\), which needs @dataclass"):
        load_objective("no_dataclass")
    dataclass(NoDataclass)
    assert load_objective("no_dataclass", {"power": 2}).power == 2.0
