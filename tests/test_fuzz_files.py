"""Whatever lies in run directories and suites: reports, recipes, suites and states are read, or refused in one clear complaint.

FIREDISTILL_FUZZ=10000 python -m pytest tests/test_fuzz_files.py         # longer, outside of continuous integration
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firedistill.coerce import parse_yaml
from firedistill.report.charts import CHARTS
from firedistill.report.groups import read_study
from firedistill.report.page import all_attributions, safe_json, write_page
from firedistill.report.tables import accuracy_tables, csv_text, latex, markdown, overview
from firedistill.run.log import iterate_jsonl, last_row, read_jsonl
from firedistill.suites.plan import make_plan, read_plan
from firedistill.suites.run import STATES, SuiteFolder, complete, run_arguments, summary
from test_report import attribution, write_run

TRIES = int(os.environ.get("FIREDISTILL_FUZZ", 30))
fuzz = settings(
    max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck), derandomize="FIREDISTILL_FUZZ" not in os.environ
)

TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["\ud800", "\x1b[31m", "$x_", "</script>", "nan", "1e999", "../x", "a/b", ""])
)
NUMBERS = st.one_of(
    st.integers(-3, 30),
    st.sampled_from([10**9, 2**53, 2**64, -(10**30), 10**400, 1e300, 1e-320, 0.5, -0.0, math.nan, math.inf, -math.inf]),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
BYTES = st.one_of(
    st.binary(max_size=40),
    TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")),
    VALUES.map(lambda v: as_json(v).encode()),
)


def as_json(value) -> str:
    return json.dumps(value)


def changed(good: dict, values=VALUES):
    """A good mapping of which some values are replaced, some are removed, and some are new."""
    names = st.sampled_from([*good, "new", "accuracy_new"])
    return st.tuples(st.dictionaries(names, values, max_size=4), st.sets(names, max_size=2)).map(
        lambda change: {name: value for name, value in (good | change[0]).items() if name not in change[1]}
    )


METRIC = {"step": 3, "grad_norm": 0.5, "response_length": 20.0, "correct_rate": 0.5, "entropy": 1.0, "generated_tokens": 20}
EVALUATION = {"step": 10, "accuracy": 0.5, "stderr": 0.1, "n": 9, "cumulative_train_seconds": 3.0}
CONFIG = {
    "model": "a/b",
    "task": "gsm8k",
    "method": "fire",
    "seed": 0,
    "learning_rate": 1e-3,
    "max_steps": 10,
    "max_grad_norm": 1.0,
}


def lines(good):
    """Rows, most of them numbers with an increasing step, and lines that are none."""
    rows = st.one_of(changed(good, NUMBERS), changed(good)).map(lambda row: as_json(row).encode())
    return st.lists(st.one_of(rows, rows, rows, BYTES), max_size=12).map(b"\n".join)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# ---- Logs, run directories, attribution files --------------------------------------------------------------------------------


@fuzz
@given(data=lines(METRIC))
def test_every_log_is_rows_with_steps(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, data)
        rows, left_out = read_jsonl(path), Counter()
        assert list(map(repr, iterate_jsonl(path, left_out))) == list(map(repr, rows))
        assert all(isinstance(row["step"], int) and row["step"] >= 0 for row in rows)
        assert repr(last_row(path)) == repr(rows[-1] if rows else None)
        written = [line for line in data.split(b"\n") if line]
        assert 0 <= len(written) - len(rows) - left_out.total() <= 1, "every line is a row or counted, but for the last one"


@fuzz
@given(
    config=st.one_of(
        changed(CONFIG).map(lambda c: yaml.safe_dump(c, allow_unicode=True).encode("utf-8", "surrogatepass")), BYTES
    ),
    metrics=lines(METRIC),
    evaluations=lines(EVALUATION),
    attributions=st.one_of(
        BYTES, changed(attribution()["examples"][0]).map(lambda e: as_json({"step": 1, "examples": [e]}).encode())
    ),
)
def test_a_report_on_nonsense_covers_the_run_beside_it(config, metrics, evaluations, attributions):
    """All but the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        good, bad = write_run(Path(folder) / "good", (0.5, 0.6)), Path(folder) / "bad"
        write(bad / "config.yaml", config)
        write(bad / "metrics.jsonl", metrics)
        write(bad / "evals.jsonl", evaluations)
        write(bad / "attribution" / "step_000001.json", attributions)
        study = read_study([bad, good])
        names = [run.name for run in study.runs]
        assert "good" in names and ("bad" in names or any("bad" in note for note in study.notes))
        json.loads(safe_json(all_attributions(study)))
        tables = accuracy_tables(study)
        assert overview(study) and [form(table) for table in tables for form in (markdown, latex)] and csv_text(tables)
        for _, group in study.groups:
            for chart in CHARTS:
                curve = chart.curve(group.runs)
                assert np.isfinite([*curve.x, *curve.mean, *curve.low, *curve.high]).all()
        page = write_page(study, tables, Path(folder) / "index.html").read_text(encoding="utf-8")
        assert page.count("</script") == 3


# ---- YAML, recipes, suites -----------------------------------------------------------------------------------------------------


WORDS = [
    "a",
    "b",
    ":",
    ": ",
    "- ",
    "\n",
    "  ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&x ",
    "*x",
    "<<: ",
    "? ",
    "|\n",
    ">\n",
    "'",
    '"',
    "#",
    "---",
    "...",
]
WORDS += [f"!!{kind} " for kind in ("int", "set", "omap", "binary", "bool", "timestamp", "float")]
WORDS += ["%YAML", "2001-99-99", "1:60", "0x", "~"]


@fuzz
@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=20).map("".join)))
def test_every_yaml_text_is_plain_values_or_a_complaint(text):
    try:
        value = parse_yaml(text)
    except ValueError as error:
        assert str(error)
    else:
        assert len(repr(value)) < 100 * (len(text) + 1)


BLOCK = {
    "recipes": ["lab"],
    "methods": ["fire"],
    "seeds": [0, 1],
    "settings": {"max_steps": 3},
    "learning_rate_factors": [1, 2],
}


@fuzz
@given(
    content=st.one_of(
        changed({"title": "x", "blocks": [BLOCK]}),
        st.tuples(changed({"title": "x", "seeds": [3]}), st.lists(changed(BLOCK), max_size=2)).map(
            lambda c: c[0] | {"blocks": c[1]}
        ),
    ).map(lambda content: yaml.safe_dump(content, allow_unicode=True).encode("utf-8", "surrogatepass"))
    | BYTES
)
def test_a_suite_is_a_plan_or_a_complaint(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suite.yaml"
        path.write_bytes(content)
        try:
            plan = make_plan(str(path))
        except (ValueError, OSError) as error:
            assert str(error)
        else:
            suite = SuiteFolder(Path(folder) / "s")
            assert suite.widen(plan) == read_plan(suite.plan_path)


RUN = {"id": "x-fire-seed0", "command": "train", "recipe": "lab", "settings": {"seed": 0}, "model": "m", "task": "t", "method": "fire",
       "seed": 0, "learning_rate": 1e-3, "max_steps": 10, "variant": "", "needs": None}  # fmt: skip
RECORD = {"state": "running", "host": "here", "pid": 12345, "since": 1.0, "from_step": 0, "seconds": 3.0, "steps": 2, "accuracy": 0.5,
          "error": "exit status 3"}  # fmt: skip


@fuzz
@given(
    plan=st.one_of(
        changed({"suite": "s", "title": "t", "options": {}, "runs": [RUN]}),
        st.lists(changed(RUN), max_size=3).map(lambda runs: {"suite": "s", "title": "t", "options": {}, "runs": runs}),
        VALUES,
    ),
    state=st.one_of(changed(RECORD), changed(RECORD | {"state": "done"}), changed(RECORD | {"state": "failed"})).map(
        lambda record: as_json(record).encode()
    )
    | BYTES,
    finished=BYTES,
    metrics=lines(METRIC),
)
def test_a_folder_of_nonsense_is_a_suite_with_states_or_a_complaint(plan, state, finished, metrics):
    with tempfile.TemporaryDirectory() as folder:
        suite = SuiteFolder(folder)
        write(suite.plan_path, as_json(plan).encode())
        try:
            runs = suite.plan.runs
        except ValueError as error:
            assert "is not the plan of a suite" in str(error)
            return
        for run in runs:
            assert suite.run_folder(run).parent == suite.folder / "runs", "no id leads out of the folder"
            write(suite.state_path(run), state)
            write(suite.run_folder(run) / "metrics.jsonl", metrics)
            write(suite.run_folder(run) / "evals.jsonl", metrics)
            write(suite.run_folder(run) / "finished.json", finished)
            assert complete(suite.run_folder(run), run.max_steps) in (True, False)
            assert run_arguments(suite, run, suite.checkpoint(run))
        states = suite.states(suite.plan)
        assert all(state.name in STATES for state in states.values()) and isinstance(summary(suite.plan, states), str)
