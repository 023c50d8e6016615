"""The wheel: built from the repository, installed in an environment of its own, used outside of the repository."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT)]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode and any(
        sign in told.stderr for sign in ("No matching distribution", "Could not find a version", "Connection")
    ):
        pytest.skip("no package index from which the build backend can be installed")
    assert told.returncode == 0, told.stderr
    (built,) = folder.glob("firedistill-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_what_it_needs(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "py.typed",
        "recipes/lab.yaml",
        "suites/lab.yaml",
        "lab/model.safetensors",
        "report/page.html",
        "tasks/arithmetic.yaml",
    ):
        assert f"firedistill/{name}" in names
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


@pytest.mark.slow
def test_the_wheel_trains_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()
    )
    zipfile.ZipFile(wheel).extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # those of the tests
    where = subprocess.check_output([python, "-c", "import firedistill; print(firedistill.__file__)"], text=True, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    command = [python, "-m", "firedistill", "train", "lab", "--max_steps", "1", "--eval_size", "2", "--use_cpu"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "runs" / "lab-arithmetic-fire-lr0.0003-seed0" / "adapter" / "adapter_config.json").is_file()
