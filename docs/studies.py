"""The numbers of docs/results.md and docs/results-tables.md, from the runs of the study suites.

    python docs/studies.py collect runs/study-parts    # a row per finished run in docs/studies/study-parts.csv; other rows stay
    python docs/studies.py collect_steps runs/study-asdiv    # a row per step in docs/studies/study-asdiv.csv; other rows stay
    python docs/studies.py collect_weights runs/study-noise  # a row per attributed answer in docs/studies/study-noise-weights.csv
    python docs/studies.py tables                      # writes the tables between the marks of both pages

A row holds the settings that the study varies, the numbers of the last evaluation, statistics of the training log, and the answers to
every held-out problem: `greedy` has a digit per problem, 1 for a right answer; `sampled` has the number of right samples. The row of a
step holds its entry in the training log, and the evaluation after it where there is one. The row of an attributed answer holds the
weight of the view without the noisy field.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from firedistill import Example
from firedistill.report.groups import METHODS
from firedistill.report.read import Run, read_suite
from firedistill.run.directory import rollout_file
from firedistill.tasks.planted import number_of

STUDIES = Path(__file__).parent / "studies"
PAGES = [Path(__file__).parent / name for name in ("results.md", "results-tables.md")]
KEYS = ["method", "variant", "rate", "seed"]
KEYS_OF_STEP = ["method", "rate", "seed", "step"]
FINAL = [
    "accuracy",
    "stderr",
    "well_formed_rate",
    "response_length",
    "sampled_accuracy",
    "pass_at_8",
    "sampled_entropy",
    "distinct_answers",
    "also_arithmetic:hard",
]
LOGGED = ["grad_norm", "policy_kl", "policy_kl_max", "policy_step", "max_bound_ratio"]  # median and largest
NOISY = {"answer": "verifier", "hint": "hint"}  # the field of each kind of planted noise
WEIGHTS = ["alpha_format", "alpha_parser", "alpha_answer", "alpha_verifier", "alpha_hint"]  # mean
OF_STEP = ["correct_rate", "generated_tokens", "grad_norm", "policy_kl", "chi_active", "step_scale", "train_seconds"]
OF_EVALUATION = ["accuracy", "stderr", "lenient_accuracy", "well_formed_rate", "truncated_rate", "response_length"]
RESAMPLES = 10_000


def collect(suite: Path) -> pd.DataFrame:
    """A row per run of a suite whose last evaluation is done."""
    runs, _, _ = read_suite(suite)
    rows = []
    for run in runs:
        if not (run.finished and len(run.evaluations)):
            continue
        evaluations = pd.read_json(run.folder / "evals.jsonl", lines=True).iloc[-1]
        log = pd.read_json(run.folder / "metrics.jsonl", lines=True)
        variant, rate = variant_of(run)
        row = {"method": run.method, "variant": variant, "rate": rate}
        row |= {"seed": run.seed} | {key: evaluations[key] for key in FINAL if key in evaluations}
        row |= {"sampled_right_last_tenth": log["correct_rate"].iloc[-len(log) // 10 :].mean()}
        row |= {"generated_tokens": log["cumulative_generated_tokens"].iloc[-1]}
        for key in LOGGED:
            if key in log and log[key].notna().any():
                row |= {f"{key}_median": log[key].median(), f"{key}_largest": log[key].max()}
        if "policy_step_share" in log:
            row |= {"shortened": (log["policy_step_share"] < 1).mean()}  # share of the updates
        row |= {key: log[key].mean() for key in WEIGHTS if key in log}
        row |= {"marked": "; ".join(sorted({event.rule for event in run.events}))}
        row |= {"greedy": answers(run.folder, "eval", run.max_steps), "sampled": answers(run.folder, "sampled", run.max_steps)}
        rows.append(row)
    return pd.DataFrame(rows)


def collect_steps(suite: Path) -> pd.DataFrame:
    """A row per step of every run of a suite, finished or not; step 0 is the evaluation before training."""
    runs, tables = read_suite(suite)[0], []
    for run in runs:
        log = pd.read_json(run.folder / "metrics.jsonl", lines=True).set_index("step").reindex(columns=OF_STEP)
        evaluations = pd.read_json(run.folder / "evals.jsonl", lines=True).set_index("step")[OF_EVALUATION]
        evaluations["greedy"] = [answers(run.folder, "eval", step) for step in evaluations.index]
        table = log.join(evaluations, how="outer").reset_index()
        table.insert(0, "method", run.method)
        table.insert(1, "rate", variant_of(run)[1])
        table.insert(2, "seed", run.seed)
        tables.append(table)
    return pd.concat(tables)


def collect_weights(suite: Path) -> pd.DataFrame:
    """A row per wrong held-out answer whose attribution FIRE's runs of study-noise saved, before and after training.

    `weight` is that of the view without the noisy field, a mean over the tokens of the answer; `wrong`, whether this field is wrong.
    """
    rows = []
    for run in read_suite(suite)[0]:
        place, _, share = variant_of(run)[0].partition("-")
        for path in sorted((run.folder / "attribution").glob("step_*.json")) if run.method == "fire" else ():
            saved = json.loads(path.read_text(encoding="utf-8"))
            for example in saved["examples"]:
                field = [field["name"] for field in example["fields"]].index(NOISY[place])
                row = {"variant": f"{place}-{share}", "seed": run.seed, "step": saved["step"], "uid": example["uid"]}
                row |= {"wrong": int(number_of(Example(example["uid"], "", ""), "wrong") < float(share))}
                rows.append(row | {"weight": float(np.mean(example["alpha"][field]))})
    return pd.DataFrame(rows)


def variant_of(run: Run) -> tuple[str, float]:
    """The label of a run's block, and its learning rate as a multiple of the recipe's."""
    label, rate = re.fullmatch(r"(.*?) ?(?:([\d.]+)x)?", run.variant or "").groups()
    return label, float(rate or 1)


def answers(folder: Path, kind: str, step: int) -> str:
    """A digit per held-out problem, in the order of their ids: how many of its answers are right. `=` before them marks a text."""
    path = folder / "rollouts" / rollout_file(kind, step)
    if not path.is_file():
        return ""
    counts = pq.read_table(path, columns=["uid", "correct"]).to_pandas().groupby("uid")["correct"].sum()
    assert counts.max() < 10, f"{path}: more than nine samples per problem do not fit a digit"
    return "=" + "".join(map(str, counts.sort_index()))


def matrix(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Share of right answers by seed (row) and problem (column), in percent."""
    digits = np.array([[int(digit) for digit in text[1:]] for text in rows[kind]], dtype=float)
    return pd.DataFrame(100 * digits / (8 if kind == "sampled" else 1), index=rows["seed"].to_list())


def paired(rows: pd.DataFrame, reference: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Accuracy minus that of the reference, in points, by seed (row) and problem (column), for the seeds that both have."""
    first, second = matrix(rows, kind), matrix(reference, kind)
    seeds = first.index.intersection(second.index)
    return first.loc[seeds] - second.loc[seeds]


@lru_cache(maxsize=4)
def draws(*sizes: int) -> list[np.ndarray]:
    """For each size, the shares that draws with replacement give to its members: a row per resample."""
    generator = np.random.default_rng(0)
    return [generator.multinomial(size, np.full(size, 1 / size), RESAMPLES) / size for size in sizes]


def interval(differences: pd.DataFrame) -> tuple[float, float, float]:
    """Mean, and the ends of a 95 % interval.

    The interval is that of a bootstrap that draws seeds and problems, both with replacement. With few seeds it is too narrow.
    """
    of_seeds, of_problems = draws(*differences.shape)
    drawn = np.einsum("rs,sp,rp->r", of_seeds, differences.to_numpy(), of_problems)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(differences.to_numpy().mean()), float(low), float(high)


def read_rows(study: str) -> pd.DataFrame:
    """The collected rows of a study."""
    rows = pd.read_csv(STUDIES / f"{study}.csv", keep_default_na=False, na_values=["NaN"], dtype={"variant": str})
    numbers = [key for key in rows if key not in ("method", "variant", "uid", "marked", "greedy", "sampled")]
    rows[numbers] = rows[numbers].apply(pd.to_numeric)
    return rows


# ---- Cells -------------------------------------------------------------------------------------------------------------------------


def spread(values: pd.Series, digits: int = 1) -> str:
    """Mean ± sample standard deviation over seeds."""
    mean = f"{values.mean():.{digits}f}"
    return f"{mean} ± {values.std():.{digits}f}" if len(values) > 1 else mean


def points(differences: pd.DataFrame) -> str:
    if differences.empty:  # no seed in common
        return ""
    mean, low, high = interval(differences)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def apart(rows: pd.DataFrame, reference: pd.DataFrame, kind: str) -> str:
    return points(paired(rows, reference, kind))


def select(table: pd.DataFrame, **values: object) -> pd.DataFrame:
    for key, value in values.items():
        table = table[table[key] == value]
    return table


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


# ---- Tables ------------------------------------------------------------------------------------------------------------------------

PARTS = {
    ("full_context", ""): "none (Full Context)",
    ("full_context", "attribution"): "attribution",
    ("full_context", "projection"): "projection",
    ("full_context", "both"): "attribution, projection",
    ("routing", ""): "routing",
    ("no_projection", ""): "routing, attribution",
    ("no_attribution", ""): "routing, projection",
    ("fire", ""): "routing, attribution, projection (FIRE)",
}


def parts(table: pd.DataFrame, rate: float) -> str:
    header = ["parts", "seeds", "greedy, %", "sampled, %", "sampled, minus FIRE's (95 %)", "entropy, nats"]
    header += ["gradient norm: median, largest", "policy KL of every fifth step, 1e-4 nats: median, largest"]
    rows, table = [], select(table, rate=rate)
    fire = select(table, method="fire", variant="")
    for (method, variant), title in PARTS.items():
        found = select(table, method=method, variant=variant)
        if len(found):
            same = apart(found, fire, "sampled") if method != "fire" else ""
            row = [title, str(len(found)), spread(100 * found["accuracy"]), spread(100 * found["sampled_accuracy"]), same]
            row += [spread(found["sampled_entropy"], 3)]
            row += [f"{found['grad_norm_median'].mean():.3f}, {found['grad_norm_largest'].max():.2f}"]
            row += [f"{1e4 * found['policy_kl_median'].mean():.2f}, {1e4 * found['policy_kl_largest'].max():.0f}"]
            rows.append(row)
    return markdown(header, rows)


def added(table: pd.DataFrame) -> str:
    """What each part changes, by what it is added to."""
    title_of = {**PARTS, ("full_context", ""): "none", ("fire", ""): "routing, attribution, projection"}
    parts_of = {variant: set(title.split(", ")) - {"none"} for variant, title in title_of.items()}
    rows = []
    for part in ("attribution", "projection", "routing"):
        for without, to in parts_of.items():
            if part not in to:
                (with_part,) = (variant for variant, parts in parts_of.items() if parts == to | {part})
                pairs = ([select(table, rate=rate, method=m, variant=v) for m, v in (with_part, without)] for rate in (1, 4))
                rows.append([part, title_of[without], *(apart(*pair, "sampled") for pair in pairs)])
    return markdown(["adding", "to", "at the recipe's rate", "at four times the rate"], rows)


def unbounded(table: pd.DataFrame) -> str:
    """Methods with routing whose right answers are trained with the weight 1 in place of beta."""
    header = ["method with weight 1", "rate", "seeds", "greedy, %", "sampled, %", "greedy, minus that with beta (95 %)"]
    header += ["sampled, minus that with beta (95 %)", "sampled, minus Full Context's (95 %)", "entropy, nats"]
    header += ["gradient norm: median, largest", "policy KL of every fifth step, 1e-4 nats: median, largest"]
    rows = []
    for method, rate in itertools.product(("routing", "fire"), (1, 4)):
        found = select(table, method=method, variant="unbounded", rate=rate)
        bounded, full = (select(table, method=name, variant="", rate=rate) for name in (method, "full_context"))
        row = [METHODS[method], f"{rate}×", str(len(found)), spread(100 * found["accuracy"])]
        row += [spread(100 * found["sampled_accuracy"]), *(apart(found, bounded, kind) for kind in ("greedy", "sampled"))]
        row += [apart(found, full, "sampled"), spread(found["sampled_entropy"], 3)]
        row += [f"{found['grad_norm_median'].mean():.3f}, {found['grad_norm_largest'].max():.2f}"]
        rows.append([*row, f"{1e4 * found['policy_kl_median'].mean():.2f}, {1e4 * found['policy_kl_largest'].max():.0f}"])
    return markdown(header, rows)


def noise(table: pd.DataFrame, place: str) -> str:
    header = ["share r of wrong feedback", "seeds", "FIRE: sampled, %", "No Attribution: sampled, %", "difference (95 %)"]
    header += ["weight of the view without the noisy field", "sum of the other views' weights"]
    field, rows = f"alpha_{NOISY[place]}", []
    others = [key for key in WEIGHTS if key != field and key in table]
    for share, fire, plain in by_share(table, place):
        row = [share, str(len(fire)), spread(100 * fire["sampled_accuracy"]), spread(100 * plain["sampled_accuracy"])]
        row += [apart(fire, plain, "sampled"), spread(fire[field], 3), spread(fire[others].sum(axis=1), 3)]
        rows.append(row)
    return markdown(header, rows)


def by_share(table: pd.DataFrame, place: str) -> list[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Shares of wrong feedback in this field, from 0, with the runs of FIRE and of FIRE without attribution."""
    shares = [variant.rpartition("-")[2] for variant in set(table["variant"]) if variant.startswith(place)]
    methods = ("fire", "no_attribution")
    found = [(r, *(select(table, variant=f"{place}-{r}", method=m) for m in methods)) for r in sorted(shares, key=float)]
    return [(share, fire, plain) for share, fire, plain in found if len(fire) and len(plain)]


def noise_costs(table: pd.DataFrame) -> str:
    """What a share of wrong feedback changes, without and with attribution, and what attribution changes about it."""
    rows = []
    for place, title in {"answer": "expected answers", "hint": "answers in `hint`"}.items():
        (_, *clean), *noisy = by_share(table, place)
        for share, *runs in noisy:
            fire, plain = (paired(found, before, "sampled") for found, before in zip(runs, clean, strict=True))
            rows.append([title, share, points(plain), points(fire), points((fire - plain).dropna())])
    return markdown(["wrong", "share r", "No Attribution", "FIRE", "difference"], rows)


def noise_weights(table: pd.DataFrame) -> str:
    """The weight of the view without the noisy field in answers to the same problems, in runs where it is right and where it is wrong.

    The field is right in the runs with r = 0, and wrong about these problems in those with r = 0.5.
    """
    header = ["field", "training", "answers", "weight, field right", "weight, field wrong", "difference (95 %)"]
    rows = []
    for place, field in NOISY.items():
        for title, saved in {"before": table[table["step"] == 0], "after": table[table["step"] > 0]}.items():
            clean, noisy = (select(saved, variant=f"{place}-{share}") for share in ("0", "0.5"))
            pairs = select(noisy, wrong=1).merge(clean, on=["seed", "uid"], suffixes=("_wrong", "_right"), validate="1:1")
            weights = pairs.groupby("seed")[["weight_right", "weight_wrong"]].mean().mean()
            mean, low, high = interval_of_answers(pairs["weight_wrong"] - pairs["weight_right"], pairs["seed"])
            row = [f"`{field}`", title, str(len(pairs)), *(f"{weight:.4f}" for weight in weights)]
            rows.append([*row, f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"])
    return markdown(header, rows)


def interval_of_answers(values: pd.Series, seeds: pd.Series) -> tuple[float, float, float]:
    """Mean over seeds of the means of their answers, and the ends of a 95 % interval that draws seeds, and answers of each."""
    generator = np.random.default_rng(0)
    by_seed = [found.to_numpy() for _, found in values.groupby(seeds)]
    shape = (RESAMPLES, len(by_seed))  # a seed may be drawn for each place
    means = [found[generator.integers(0, len(found), (*shape, len(found)))].mean(axis=-1) for found in by_seed]
    low, high = np.quantile(np.choose(generator.integers(0, len(by_seed), shape), means).mean(axis=1), [0.025, 0.975])
    return float(np.mean([found.mean() for found in by_seed])), float(low), float(high)


OPTIMIZERS = {
    "": "AdamW",
    "scale-1": "AdamW, step scale 1",
    "scale-peak": "AdamW, step scale at its peak",
    "fixed": "AdamW, constant rate",
    "epsilon": "AdamW, larger epsilon",
    "epsilon-fixed": "AdamW, larger epsilon, constant rate",
    "sgd": "SGD",
    "sgd-fixed": "SGD, constant rate",
    "radius": "AdamW, shortened",
    "sgd-radius": "SGD, shortened",
}


def steps(table: pd.DataFrame, rate: float) -> str:
    header = ["optimizer", "method", "seeds", "greedy, %", "sampled, %", "sampled, minus AdamW's (95 %)"]
    header += ["sampled, FIRE minus Full Context (95 %)"]
    header += ["gradient norm: median, largest", "policy KL per step, 1e-4 nats: median, largest"]
    rows = []
    for variant, title in OPTIMIZERS.items():
        for method in ("fire", "full_context"):
            found, plain = (select(table, rate=rate, method=method, variant=v) for v in (variant, ""))
            same = "" if variant.startswith("scale") else variant  # Full Context has no step scale
            other = select(table, rate=rate, method="full_context", variant=same)
            if len(found):
                row = [
                    title,
                    f"`{method}`",
                    str(len(found)),
                    spread(100 * found["accuracy"]),
                    spread(100 * found["sampled_accuracy"]),
                ]
                row += [apart(found, plain, "sampled") if variant else ""]
                row += [apart(found, other, "sampled") if method == "fire" else ""]
                row += [f"{found['grad_norm_median'].mean():.3f}, {found['grad_norm_largest'].max():.2f}"]
                row += [f"{1e4 * found['policy_kl_median'].mean():.3f}, {1e4 * found['policy_kl_largest'].max():,.0f}"]
                rows.append(row)
    return markdown(header, rows)


def beside_fire(table: pd.DataFrame) -> str:
    harder = "also_arithmetic:hard"
    header = ["method", "seeds", "greedy, %", "sampled, %", "sampled, minus FIRE's (95 %)"]
    header += ["greedy on `arithmetic:hard`, %"] * (harder in table) + ["well-formed, %", "entropy, nats", "generated tokens"]
    rows, fire = [], select(table, method="fire", variant="")
    for (method, variant), found in table.groupby(["method", "variant"], sort=False):
        reference = select(table, method="fire", variant=variant if variant == "law" else "")
        same = apart(found, reference, "sampled") if method != "fire" else ""
        row = [f"`{method}`{f' ({variant})' if variant else ''}", str(len(found)), spread(100 * found["accuracy"])]
        row += [spread(100 * found["sampled_accuracy"]), same]
        row += [spread(100 * found[harder])] if harder in table else []
        row += [spread(100 * found["well_formed_rate"])]
        rows.append([*row, spread(found["sampled_entropy"], 3), f"{found['generated_tokens'].mean():,.0f}"])
    return markdown(header, rows) if len(fire) else ""


RATES = (0.25, 1, 4, 16)


def at_rates(table: pd.DataFrame) -> pd.DataFrame:
    """The runs of study-rates and of TrOPD, and those of their methods in studies that only measure more, in the order of METHODS."""
    table = pd.concat([table, read_rows("study-tropd")])
    found = pd.concat([table, read_rows("study-parts"), read_rows("study-controls")])
    found = found[found["method"].isin(table["method"]) & (found["variant"] == "")].drop_duplicates(KEYS)
    return found.sort_values("method", key=lambda names: names.map(list(METHODS).index), kind="stable")


def rates(table: pd.DataFrame, cell: Callable[[pd.DataFrame, pd.DataFrame], str]) -> str:
    """A row per method, a column per learning rate."""
    rows, table = [], at_rates(table)
    for method in table["method"].unique():
        cells = ((select(table, rate=rate, method=method), select(table, rate=rate, method="fire")) for rate in RATES)
        rows.append([METHODS[method], *(cell(found, fire) if len(found) else "" for found, fire in cells)])
    return markdown(["method", *(f"{rate}×" for rate in RATES)], rows)


def training(table: pd.DataFrame) -> str:
    """Every method's training at the recipe's rate."""
    header = ["method", "seeds", "samples of the last 15 steps right, %", "gradient norm: median, largest", "generated tokens"]
    rows, table = [], select(at_rates(table), rate=1)
    for method, found in table.groupby("method", sort=False):
        marks = Counter(mark for text in found["marked"] for mark in text.split("; ") if mark)
        row = [METHODS[method], str(len(found)), spread(100 * found["sampled_right_last_tenth"])]
        row += [f"{found['grad_norm_median'].mean():.3g}, {found['grad_norm_largest'].max():.3g}"]
        row += [f"{found['generated_tokens'].mean():,.0f}", ", ".join(f"{mark} in {n}" for mark, n in marks.items())]
        rows.append(row)
    return markdown([*header, "marked by the report, in how many runs"], rows)


def accuracies(found: pd.DataFrame, fire: pd.DataFrame) -> str:
    return f"{spread(100 * found['accuracy'])}; {spread(100 * found['sampled_accuracy'])} ({len(found)})"


def behind_fire(found: pd.DataFrame, fire: pd.DataFrame) -> str:
    return "" if found["method"].iloc[0] == "fire" else apart(found, fire, "sampled")


def evaluated(table: pd.DataFrame, rate: float) -> str:
    """A row per evaluation and method: the steps since the evaluation before it, and the held-out answers."""
    header = ["steps", "method", "sampled answers right, %", "gradient norm: median, largest"]
    header += [
        "policy KL of every fifth step, 1e-4 nats: median, largest",
        "tokens outside of the radius, %",
        "held-out right, %",
    ]
    header += ["minus Full Context's (95 %)", "lenient, %", "well-formed, %", "tokens per held-out answer"]
    rows, table, before = [], select(table, rate=rate), 0
    for step in sorted(table.loc[table["accuracy"].notna(), "step"].unique()):
        for method in ("fire", "full_context"):
            steps = select(table, method=method)
            last, other = select(steps, step=step), select(table, method="full_context", step=step)
            steps = steps[(steps["step"] > before) & (steps["step"] <= step)]
            if last.empty or last["accuracy"].isna().all():
                continue
            row = [f"{before + 1} to {step}" if step else "before", f"`{method}`"]
            trained = [
                f"{100 * steps['correct_rate'].mean():.1f}",
                f"{steps['grad_norm'].median():.2f}, {steps['grad_norm'].max():.2f}",
                f"{1e4 * steps['policy_kl'].median():.1f}, {1e4 * steps['policy_kl'].max():.1f}",
                f"{100 * steps['chi_active'].mean():.1f}",
            ]
            row += trained if step else [""] * len(trained)
            row += [f"{100 * last['accuracy'].item():.1f} ± {100 * last['stderr'].item():.1f}"]
            row += [apart(last, other, "greedy") if method == "fire" and step and other["accuracy"].notna().any() else ""]
            row += [f"{100 * last[key].item():.1f}" for key in ("lenient_accuracy", "well_formed_rate")]
            rows.append([*row, f"{last['response_length'].item():.0f}"])
        before = step
    return markdown(header, rows)


TABLES: dict[str, tuple[str, Callable[[pd.DataFrame], str]]] = {
    "parts-1": ("study-parts", lambda table: parts(table, 1)),
    "parts-4": ("study-parts", lambda table: parts(table, 4)),
    "parts-added": ("study-parts", added),
    "parts-unbounded": ("study-parts", unbounded),
    "noise-answer": ("study-noise", lambda table: noise(table, "answer")),
    "noise-hint": ("study-noise", lambda table: noise(table, "hint")),
    "noise-costs": ("study-noise", noise_costs),
    "noise-weights": ("study-noise-weights", noise_weights),
    "steps-1": ("study-steps", lambda table: steps(table, 1)),
    "steps-4": ("study-steps", lambda table: steps(table, 4)),
    "steps-16": ("study-steps", lambda table: steps(table, 16)),
    "asdiv": ("study-asdiv", lambda table: evaluated(table, 4)),
    "asdiv-1": ("study-asdiv", lambda table: evaluated(table, 1)),
    "controls": ("study-controls", beside_fire),
    "tropd": ("study-tropd", beside_fire),
    "rates": ("study-rates", lambda table: rates(table, accuracies)),
    "training": ("study-rates", training),
    "rates-apart": ("study-rates", lambda table: rates(table, behind_fire)),
}


def with_tables(text: str) -> str:
    """A page with its tables computed from the files of the studies."""

    def table(found: re.Match[str]) -> str:
        study, function = TABLES[found["name"]]
        return f"<!-- table {found['name']} -->\n\n{function(read_rows(study))}\n\n<!-- end -->"

    return re.sub(r"<!-- table (?P<name>[\w-]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["collect" | "collect_steps" as command, *suites] if suites:
            STUDIES.mkdir(exist_ok=True)
            function, keys = {"collect": (collect, KEYS), "collect_steps": (collect_steps, KEYS_OF_STEP)}[command]
            for name in dict.fromkeys(Path(suite).name for suite in suites):
                before = [read_rows(name)] if (STUDIES / f"{name}.csv").is_file() else []
                rows = pd.concat([*before, *(function(Path(suite)) for suite in suites if Path(suite).name == name)])
                rows = rows.drop_duplicates(keys, keep="last").sort_values(keys, kind="stable")
                rows.to_csv(STUDIES / f"{name}.csv", index=False, float_format="%.6g")
                print(f"{STUDIES / name}.csv: {len(rows)} rows")
        case ["collect_weights", suite]:
            path = STUDIES / f"{Path(suite).name}-weights.csv"
            collect_weights(Path(suite)).to_csv(path, index=False, float_format="%.6g")
            print(f"{path}: written")
        case ["tables"]:
            for page in PAGES:
                page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
