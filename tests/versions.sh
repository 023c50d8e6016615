#!/usr/bin/env bash
# The package against the lowest or the highest versions that pyproject.toml allows, in an environment of its own:
#   tests/versions.sh lowest [FOLDER]      every core dependency at its lower bound
#   tests/versions.sh highest [FOLDER]     every core dependency as new as the package index has it
# PyTorch is the one of constraints.txt in both: its builds differ by platform, and most of them bring gigabytes of CUDA along.
# What is run: the import, FIRE in the trainer, sampling, fused layers, scoring, families of models, loading, and saving.
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:-}
folder=${2:-.venv-$which}
bounds=$(mktemp)
trap 'rm -f "$bounds"' EXIT
${PYTHON:-python3} - "$which" >"$bounds" <<'PY'
import re
import sys
import tomllib

if sys.argv[1] not in ("lowest", "highest"):
    sys.exit("usage: tests/versions.sh lowest|highest [FOLDER]")
with open("pyproject.toml", "rb") as file:
    requirements = tomllib.load(file)["project"]["dependencies"]
with open("constraints.txt") as file:
    print(next(line for line in file if line.startswith("torch==")), end="")
for requirement in requirements:
    name, bound = re.match(r"([\w.-]+)>=([\w.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={bound}" if sys.argv[1] == "lowest" else requirement)
PY
test -x "$folder/bin/python" || ${PYTHON:-python3} -m venv "$folder"
python="$folder/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch -c "$bounds"
# Upgrading takes care of an environment that is there already.
"$python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
    -e . -c "$bounds" "pytest>=8" "pytest-xdist>=3.6" "hypothesis>=6.120" "mpmath>=1.3"
"$python" -m pip list --disable-pip-version-check --format freeze |
    grep -iE "^($(sed -E 's/[=<>].*//' "$bounds" | paste -sd '|' | sed 's/_/[_-]/g'))==" | paste -sd ' '
"$python" -c "import firedistill; firedistill.SelfDistillTrainer"
"$python" -m pytest tests/test_trainer.py -k "fire and not hard"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n 2 --dist loadfile \
    tests/test_rollouts.py tests/test_teacher.py tests/test_loading.py tests/test_families.py tests/test_layers.py tests/test_disk.py
