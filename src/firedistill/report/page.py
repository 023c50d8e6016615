"""The HTML page: one file that works without a server or network access.

Text of models and datasets reaches the page in two ways only: through the template, which escapes it, and as packed JSON that the
script assigns to `textContent`, or escapes for the chart library, which reads a few tags in its labels. The page's policy allows two
scripts by their digests: the page's own and the library.
"""

from __future__ import annotations

import base64
import functools
import gzip
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
from firedistill.files import write_text
from firedistill.report import collapse
from firedistill.report.charts import Chart, charts_of
from firedistill.report.groups import Group, Study
from firedistill.report.paired import HEADER, Difference, reference_of, row
from firedistill.report.plots import names, plots_of
from firedistill.report.read import Run
from firedistill.report.rollouts import questions, rollouts_of
from firedistill.report.tables import AccuracyTable, differing_settings, overview, without_constants
from firedistill.report.verdict import Verdict, verdicts, with_minus
from firedistill.terminal import shortened, visible

# Groups that are drawn in colour when the page opens.
MOST_CHOSEN = 6
# Bytes of attribution files on a page.
MOST_ATTRIBUTIONS = 32 * 2**20
# What reading a file of nonsense raises.
NOT_ATTRIBUTION = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
NUMBERS_OF_TOKEN = ["rho", "gradient_norm", "chi", "alpha_full", "eta", "beta"]
NUMBERS_OF_FIELD = ["alpha", "energy"]


def write_page(study: Study, tables: Sequence[AccuracyTable], path: Path, differences: Sequence[Difference] = ()) -> Path:
    """Write the page of a study. Files of attribution and rollouts that cannot be read are noted in the study and left out."""
    found = verdicts(study)
    data = page_data(study, found)
    folder = resources.files("firedistill.report")
    style, script, template = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    library, digest_of_library = packed_library()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["signed"] = with_minus
    events = [
        {
            "Setting": s.title,
            "Algorithm": group.label,
            "Run": run.name,
            "Step": str(event.step),
            "Rule": event.rule,
            "Details": event.text,
        }
        for s, group in study.groups
        for run in group.runs
        for event in run.events
    ]
    page = environment.from_string(template).render(
        title=study.title,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        finished=sum(run.finished for run in study.runs),
        total=len(study.runs),
        notes=study.notes,
        verdicts=found,
        overview=without_constants(overview(study)),
        tables=tables,
        differences=without_constants(
            [{n or "Judgement": c for n, c in zip(HEADER, row(d), strict=True)} for d in differences]
        ),
        differing=differing_settings(study),
        events=without_constants(events),
        rules=rules(),
        attributions=len(data["attributions"]),
        rollouts=len(data["rollouts"]["rows"]),
        style=style,
        script=script,
        digests=[digest(script), digest_of_library],
        library=library,
        data=packed(safe_json(data)),
    )
    write_text(path, page)
    return path


def packed(text: str) -> str:
    """Text as gzip in base64, for a `<script>` element that is not run: the page's script unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def digest(script: str) -> str:
    """The SHA-256 by which a page's policy allows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@functools.cache
def packed_library() -> tuple[str, str]:
    """plotly.js, packed, and its digest."""
    from plotly.offline import get_plotlyjs

    library = get_plotlyjs()
    return packed(library), digest(library)


def safe_json(content: Any) -> str:
    """JSON for a `<script>` element: plain ASCII without NaN and without a character that could end the element."""
    return htmlsafe_json_dumps(finite(content), allow_nan=False, separators=(",", ":"))


def finite(content: Any) -> Any:
    """The content with floats rounded to six digits, and None in place of NaN and infinity, which JSON lacks."""
    if isinstance(content, float):
        if not math.isfinite(content):
            return None
        rounded = float(f"{content:.6g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content


def rules() -> list[str]:
    """The rules of the collapse detector, from the docstring of its module."""
    text = collapse.__doc__.partition("\n- ")[2]
    return [" ".join(rule.split()).replace("**", "").rstrip(";.") + "." for rule in text.split("\n- ")]


# ---- What the script draws -------------------------------------------------------------------------------------------------


def page_data(study: Study, found: Sequence[Verdict]) -> dict[str, Any]:
    """What the script needs to know."""
    drawn = charts_of(study.runs)
    runs = [{"name": run.name, "label": f"{group.label}, seed {run.seed}"} for _, group in study.groups for run in group.runs]
    return {
        "settings": [setting_data(verdict, drawn) for verdict in found],
        "attributions": all_attributions(study),
        "rollouts": rollouts_of(study.runs, study.notes),
        "runs": runs,
        "main": main_run(found),
    }


def setting_data(verdict: Verdict, drawn: Sequence[Chart]) -> dict[str, Any]:
    plots, constant = plots_of(verdict.setting, drawn)
    chosen = {id(group) for group in chosen_groups(verdict)}
    groups = [
        {"label": group.label, "names": names(group.label), "line": vars(group.line)}
        | {"chosen": id(group) in chosen, "several": len(group.runs) > 1}
        for group in verdict.setting.groups
    ]
    return {"title": verdict.setting.title, "groups": groups, "plots": plots, "constant": constant}


def chosen_groups(verdict: Verdict) -> list[Group]:
    """The groups that are drawn in colour when the page opens: all, or the best, the reference, what collapsed, and others."""
    groups = verdict.candidates if len(verdict.candidates) > 1 else verdict.setting.groups
    if len(groups) <= MOST_CHOSEN:
        return groups
    first = [group for group in (verdict.best, reference_of(verdict.setting)) if group]
    plain = [group for group in groups if group.method == "full_context"]
    fallen = [group for group, _ in verdict.collapsed if group in groups]
    return list({id(group): group for group in [*first, *plain, *fallen, *groups]}.values())[:MOST_CHOSEN]


def main_run(found: Sequence[Verdict]) -> str:
    """The name of the run with which the views of single runs open: of the reference if it has attribution data, else of the best."""
    groups = [group for verdict in found for group in (reference_of(verdict.setting), verdict.best) if group]
    runs = [run for group in groups for run in [*group.finished, *group.runs]]
    return next((run.name for run in runs if (run.folder / "attribution").is_dir()), runs[0].name)


# ---- Attribution -----------------------------------------------------------------------------------------------------------


def all_attributions(study: Study) -> list[dict[str, Any]]:
    """Those of all runs, as far as there is room on the page."""
    room = MOST_ATTRIBUTIONS
    attributions = []
    for run in study.runs:
        found, size = attributions_of(run, study.notes, room)
        question = questions(example["prompt"] for of_step in found for example in of_step["examples"])
        for example in (example for of_step in found for example in of_step["examples"]):
            example["question"] = question[example["prompt"]]
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
