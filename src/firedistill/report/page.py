"""The HTML page: one file that works without a server or network access.

Text of models and datasets reaches the page in two ways only: through the template, which escapes it, and as JSON that cannot end
its element and that the script only ever assigns to `textContent`. The page's policy allows no other script.
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

from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps

from firedistill import __version__
from firedistill.files import written_at_once
from firedistill.report import collapse
from firedistill.report.charts import CHARTS, MEASURES, THINNED, Chart, charts_of, rate_curve
from firedistill.report.groups import Group, Setting, Study
from firedistill.report.paired import HEADER, Difference, row
from firedistill.report.read import Run
from firedistill.report.tables import AccuracyTable, overview
from firedistill.terminal import shortened, visible

# The chart on which the page marks an event, by the column that shows it.
CHART_OF_COLUMN = {chart.y: chart.name for chart in reversed([*CHARTS, *MEASURES])} | {"truncated_rate": "response-length"}
# Bytes of attribution files on a page.
MOST_ATTRIBUTIONS = 32 * 2**20
# What reading a file of nonsense raises.
NOT_ATTRIBUTION = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
NUMBERS_OF_TOKEN = ["rho", "gradient_norm", "chi", "alpha_full", "eta", "beta"]
NUMBERS_OF_FIELD = ["alpha", "energy"]


def write_page(study: Study, tables: Sequence[AccuracyTable], path: Path, differences: Sequence[Difference] = ()) -> Path:
    """Write the page of a study. Attribution files that cannot be read are noted in the study and left out."""
    attributions = all_attributions(study)
    drawn = charts_of(study.runs)
    settings = [
        {"title": setting.title, "groups": [group_data(setting, group, drawn) for group in setting.groups]}
        for setting in study.settings
    ]
    data = {"charts": charts(study, drawn), "settings": settings, "attributions": attributions, "thinned": THINNED}
    folder = resources.files("firedistill.report")
    style, script, template = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(
        title=study.title,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        finished=sum(run.finished for run in study.runs),
        total=len(study.runs),
        notes=study.notes,
        overview=overview(study),
        tables=tables,
        differences={"header": HEADER, "rows": [row(difference) for difference in differences]},
        events=[(s, group, run, event) for s, group in study.groups for run in group.runs for event in run.events],
        rules=rules(),
        attributions=len(attributions),
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=safe_json(data),
    )
    with written_at_once(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def safe_json(content: Any) -> str:
    """JSON for a `<script>` element: plain ASCII without NaN and without a character that could end the element."""
    return htmlsafe_json_dumps(finite(content), allow_nan=False, separators=(",", ":"))


def finite(content: Any) -> Any:
    """The content with floats rounded to six digits, and None in place of NaN and infinity, which JSON lacks."""
    if isinstance(content, float):
        return float(f"{content:.6g}") if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content


def rules() -> list[str]:
    """The rules of the collapse detector, from the docstring of its module."""
    text = collapse.__doc__.partition("\n- ")[2]
    return [" ".join(rule.split()).replace("**", "").rstrip(";.") + "." for rule in text.split("\n- ")]


# ---- What the script draws -------------------------------------------------------------------------------------------------


def charts(study: Study, drawn: Sequence[Chart]) -> list[dict[str, Any]]:
    """What the script needs to know of every chart."""
    shared = " (some runs shared their machine)" if any(run.shared for run in study.runs) else ""
    described: list[dict[str, Any]] = [
        {
            "name": chart.name,
            "title": chart.title + (shared if chart.x == "cumulative_train_seconds" else ""),
            "x": chart.x_title,
            "y": chart.y_title,
            "log": chart.logarithmic,
            "spread": chart.spread,
            "window": chart.window,
            "steps": chart.over_steps,
        }
        for chart in drawn
    ]
    if any(group.factor != 1 for _, group in study.groups):
        rates = {"name": "learning-rates", "title": "Learning rates", "x": "peak learning rate", "y": "final accuracy (%)"}
        described.append(rates | {"log": False, "xlog": True, "spread": "± sample standard deviation"})
    return described


def group_data(setting: Setting, group: Group, drawn: Sequence[Chart]) -> dict[str, Any]:
    curves = {chart.name: vars(chart.curve(group.runs)) for chart in drawn}
    if group.factor == 1 and len(sweep := setting.sweep(group)) > 1:
        curves["learning-rates"] = vars(rate_curve(sweep))
    return {
        "label": group.label,
        "colour": group.colour,
        "broken": group.broken,
        "compared": group.factor == 1,
        "curves": curves,
        "runs": [run_data(run, drawn) for run in group.runs],
    }


def run_data(run: Run, drawn: Sequence[Chart]) -> dict[str, Any]:
    curves = [(chart, chart.points(run)) for chart in drawn]
    return {
        "name": run.name,
        "seed": run.seed,
        "points": {chart.name: {"x": points.x, "mean": points.mean, "of": points.of} for chart, points in curves},
        "events": [
            {"chart": CHART_OF_COLUMN[event.key], "step": event.step, "rule": event.rule, "text": event.text}
            for event in run.events
        ],
    }


# ---- Attribution -----------------------------------------------------------------------------------------------------------


def all_attributions(study: Study) -> list[dict[str, Any]]:
    """Those of all runs, as far as there is room on the page."""
    room = MOST_ATTRIBUTIONS
    attributions = []
    for run in study.runs:
        found, size = attributions_of(run, study.notes, room)
        attributions += found
        room -= size
    return attributions


def attributions_of(run: Run, notes: list[str], room: int = MOST_ATTRIBUTIONS) -> tuple[list[dict[str, Any]], int]:
    """The files that `firedistill inspect RUN --save` wrote; one that cannot be read is noted and left out.

    Args:
        room: bytes that the files may have.

    Returns:
        What they hold, and their size in bytes.
    """
    found, total = [], 0
    for path in sorted(run.folder.glob("attribution/*.json")):
        try:
            if not path.is_file():
                raise ValueError("it is not a regular file")
            size = path.stat().st_size
            if total + size > room:
                raise ValueError(f"a page has room for {MOST_ATTRIBUTIONS // 2**20} MiB of attributions")
            content = json.loads(path.read_text(encoding="utf-8"))
            examples = [checked_example(example) for example in content["examples"]]
            if examples:
                found.append({"run": run.name, "method": run.method, "step": int(content["step"]), "examples": examples})
                total += size
        except NOT_ATTRIBUTION as error:
            problem = shortened(visible(f"{type(error).__name__} {error}"))
            notes.append(f"{visible(str(path))} is left out because it is not an attribution file that can be shown: {problem}")
    return found, total


def checked_example(example: dict[str, Any]) -> dict[str, Any]:
    """An example of an attribution file, with every value converted to its type.

    Raises:
        KeyError, TypeError, ValueError: something is missing, or lists differ in length.
    """
    checked: dict[str, Any] = {name: str(example[name]) for name in ("uid", "prompt", "submitted", "expected")}
    checked["correct"] = bool(example["correct"])
    checked["tokens"] = [str(token) for token in example["tokens"]]
    checked["fields"] = [{"name": str(field["name"]), "text": str(field["text"])} for field in example["fields"]]
    for name in NUMBERS_OF_TOKEN:
        checked[name] = [float(value) for value in example[name]]
    for name in NUMBERS_OF_FIELD:
        checked[name] = [[float(value) for value in of_field] for of_field in example[name]]
        if len(checked[name]) != len(checked["fields"]):
            raise ValueError(f"{name} has {len(checked[name])} lists for {len(checked['fields'])} fields")
    per_token = [checked[name] for name in NUMBERS_OF_TOKEN] + [values for name in NUMBERS_OF_FIELD for values in checked[name]]
    if any(len(values) != len(checked["tokens"]) for values in per_token):
        raise ValueError(f"a list of numbers does not have one value for each of the {len(checked['tokens'])} tokens")
    return checked
