"""The HTML page: one file that needs nothing else, no server and no network.

Text of models and datasets reaches the page in two ways only: through the template, which escapes it, and as JSON that cannot end
its own element, from which the script sets `textContent`. The page's policy allows no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from firedistill import __version__
from firedistill.report import collapse
from firedistill.report.read import CHARTS, Chart, Group, Run, Setting, Study, rate_curve
from firedistill.report.tables import OVERVIEW_COLUMNS, AccuracyTable, overview

# Where the page marks an event: the chart whose curve shows it.
CHART_OF_COLUMN = {
    "grad_norm": "gradient-norm",
    "response_length": "response-length",
    "truncated_rate": "response-length",
    "correct_rate": "sampled-answers",
    "accuracy": "accuracy",
}
NUMBERS_OF_TOKEN = ["rho", "gradient_norm", "chi", "alpha_full", "eta", "beta"]


def write_page(study: Study, tables: Sequence[AccuracyTable], path: Path) -> Path:
    """Write the page of a study."""
    attributions = [found for run in study.runs for found in attributions_of(run, study.notes)]
    path.write_text(render(study, tables, attributions), encoding="utf-8")
    return path


def render(study: Study, tables: Sequence[AccuracyTable], attributions: Sequence[dict[str, Any]]) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    folder = resources.files("firedistill.report")
    style, script, template = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    finished = sum(run.finished for run in study.runs)
    return environment.from_string(template).render(
        title=study.title,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        finished=finished,
        total=len(study.runs),
        notes=study.notes,
        columns=OVERVIEW_COLUMNS,
        overview=overview(study),
        tables=tables,
        events=events(study),
        rules=rules(),
        attributions=len(attributions),
        style=style,
        script=script,
        digest=digest,
        data=safe_json(
            {"charts": charts(study), "settings": list(map(setting_data, study.settings)), "attributions": attributions}
        ),
    )


def safe_json(content: Any) -> str:
    """JSON for a `<script>` element: without a character that could end it or begin a comment, and without NaN."""
    text = json.dumps(finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half a surrogate pair, as a byte-level tokenizer may leave it, cannot be encoded.
    return text.encode("utf-8", "replace").decode()


def finite(content: Any) -> Any:
    """Numbers to six digits, those that JSON does not have as null."""
    if isinstance(content, float):
        return float(f"{content:.6g}") if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content


def rules() -> list[str]:
    """The rules of the collapse detector, from where they are documented."""
    text = collapse.__doc__.partition("\n- ")[2]
    return [" ".join(rule.split()).replace("**", "").rstrip(";.") + "." for rule in text.split("\n- ")]


# ---- What the script draws -------------------------------------------------------------------------------------------------


def charts(study: Study) -> list[dict[str, Any]]:
    described = [
        {
            "name": chart.name,
            "title": chart.title,
            "x": chart.x_title,
            "y": chart.y_title,
            "log": chart.logarithmic,
            "spread": chart.spread,
            "window": chart.window,
            "steps": chart.source == "metrics",
        }
        for chart in CHARTS
    ]
    if any(group.factor != 1 for setting in study.settings for group in setting.groups):
        described.append(
            {
                "name": "learning-rates",
                "title": "Learning rates",
                "x": "peak learning rate",
                "y": "final accuracy (%)",
                "log": False,
                "xlog": True,
                "spread": "± sample standard deviation",
            }
        )
    return described


def setting_data(setting: Setting) -> dict[str, Any]:
    return {"title": setting.title, "groups": [group_data(setting, group) for group in setting.groups]}


def group_data(setting: Setting, group: Group) -> dict[str, Any]:
    curves = {chart.name: vars(chart.curve(group.runs)) for chart in CHARTS}
    if group.factor == 1 and len(sweep := setting.sweep(group)) > 1:
        curve = rate_curve(sweep)
        curves["learning-rates"] = vars(curve) | {
            "mean": percent(curve.mean),
            "low": percent(curve.low),
            "high": percent(curve.high),
        }
    return {
        "label": group.label,
        "colour": group.colour,
        "broken": group.broken,
        "compared": group.factor == 1,
        "curves": curves,
        "runs": [run_data(run) for run in group.runs],
    }


def percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def run_data(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "seed": run.seed,
        "points": {chart.name: run_points(chart, run) for chart in CHARTS},
        "events": [
            {"chart": CHART_OF_COLUMN[event.key], "step": event.step, "rule": event.rule, "text": event.text}
            for event in run.events
        ],
    }


def run_points(chart: Chart, run: Run) -> dict[str, list[float]]:
    x, y = chart.points(run)
    return {"x": x, "mean": y}


def events(study: Study) -> list[dict[str, Any]]:
    """Rows of the table of what went wrong."""
    return [
        {"setting": setting.title, "label": group.label, "run": run.name, "seed": run.seed} | vars(event)
        for setting in study.settings
        for group in setting.groups
        for run in group.runs
        for event in run.events
    ]


def attributions_of(run: Run, notes: list[str]) -> list[dict[str, Any]]:
    """The files that `firedistill inspect RUN --save` left; one that cannot be read is noted and left out."""
    found = []
    for path in sorted(run.folder.glob("attribution/*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            examples = [checked_example(example) for example in content["examples"]]
            if not examples:
                continue
            found.append({"run": run.name, "method": run.method, "step": int(content["step"]), "examples": examples})
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{path} is left out, it is no attribution file: {type(error).__name__} {error}")
    return found


def checked_example(example: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        KeyError, TypeError, ValueError: something is missing or does not fit together.
    """
    tokens, fields = [str(token) for token in example["tokens"]], example["fields"]
    checked: dict[str, Any] = {name: str(example[name]) for name in ("uid", "prompt", "submitted", "expected")}
    checked |= {"correct": bool(example["correct"]), "tokens": tokens}
    checked["fields"] = [{"name": str(field["name"]), "text": str(field["text"])} for field in fields]
    for name in NUMBERS_OF_TOKEN:
        checked[name] = [float(value) for value in example[name]]
    for name in ("alpha", "energy"):
        checked[name] = [[float(value) for value in of_field] for of_field in example[name]]
        if len(checked[name]) != len(fields):
            raise ValueError(f"{name} has {len(checked[name])} rows for {len(fields)} fields")
    if any(len(row) != len(tokens) for name in NUMBERS_OF_TOKEN for row in [checked[name]]):
        raise ValueError("the numbers of the tokens are not as many as the tokens")
    if any(len(row) != len(tokens) for name in ("alpha", "energy") for row in checked[name]):
        raise ValueError("the numbers of the fields are not as many as the tokens")
    return checked
