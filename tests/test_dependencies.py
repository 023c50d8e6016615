"""The bounds of `pyproject.toml`, the tested set and its hashes agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE)}


def requirements() -> dict[str, Requirement]:
    return {canonicalize_name(found.name): found for found in map(Requirement, PROJECT["dependencies"])}


def test_the_tested_set_is_within_the_bounds_and_has_hashes():
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    constraints = {canonicalize_name(name): version for name, version in constraints.items()}
    assert {name: version for name, version in TESTED.items() if name in constraints}.items() <= constraints.items()
    for name, requirement in requirements().items():
        assert requirement.specifier.contains(TESTED[name]), f"{name} {TESTED[name]}"
    entries = re.split(r"^(?=\w)", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(TESTED) and all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in LOCK, "no address of a package index"


def test_versions_that_run_code_of_others_are_excluded():
    bounds = requirements()
    assert not bounds["peft"].specifier.contains("0.19.1"), "imports whatever module an adapter names"
    assert not bounds["jinja2"].specifier.contains("3.1.5"), "its sandbox can be left"
    for name in ("peft", "accelerate", "datasets", "huggingface-hub", "transformers", "torch"):
        assert any(part.operator == "<" for part in bounds[name].specifier), f"{name} has no upper bound"
