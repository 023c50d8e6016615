"""Warnings from our lines fail the tests; those of the libraries do not (`filterwarnings` in pyproject.toml)."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

OURS = ["firedistill", "firedistill.models.loading", *sorted(path.stem for path in Path(__file__).parent.glob("*.py"))]


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_a_warning_of_ours_is_an_error(category):
    for module in OURS:
        with pytest.raises(category, match="old"):
            warnings.warn_explicit("old", category, "somewhere.py", 1, module=module)


def test_a_file_left_open_is_an_error():
    with pytest.raises(ResourceWarning):
        warnings.warn_explicit("unclosed file", ResourceWarning, "somewhere.py", 1, module="json")


def test_a_deprecated_call_is_an_error_but_for_the_one_that_is_pefts():
    where = dict(filename="elsewhere.py", lineno=1, module="transformers.modeling_utils")
    with pytest.raises(FutureWarning):
        warnings.warn_explicit("`gradient_checkpointing_enable` is deprecated", FutureWarning, **where)
    warnings.warn_explicit("`is_gradient_checkpointing` is deprecated", FutureWarning, **where)


@pytest.mark.parametrize("module", ["transformers.modeling_utils", "peft.peft_model", "torch.nn", "firedistillation"])
def test_a_librarys_own_is_not(module):
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn_explicit("internal", FutureWarning, "elsewhere.py", 1, module=module)
    assert len(shown) == 1
