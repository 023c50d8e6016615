"""The pictures of the documentation, from runs; each in a light and a dark version, in full colour, to docs/images/.

python docs/figures.py [RUN]              those of docs/concepts.md; without a run it trains the lab model for two steps
python docs/figures.py curves NAME RUNS   the curves of runs and suites: NAME-light.svg, NAME-dark.svg
python docs/figures.py page RUNS          the report's first screen and its attribution view; needs chromium
python docs/figures.py attribution NAME RUN  the attribution view of a run: NAME-light.png, NAME-dark.png; needs chromium
python docs/figures.py studies            those of docs/results.md, from docs/studies
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402
from studies import OPTIMIZERS, PARTS, RATES, at_rates, by_share, interval, paired, read_rows, select  # noqa: E402

from firedistill.report.curves import plot_runs  # noqa: E402
from firedistill.report.groups import METHODS, read_study  # noqa: E402
from firedistill.report.page import write_page  # noqa: E402
from firedistill.report.paired import paired_differences  # noqa: E402
from firedistill.report.palette import LINES  # noqa: E402
from firedistill.report.tables import accuracy_tables  # noqa: E402

IMAGES = Path(__file__).parent / "images"
# Okabe and Ito's colours, which colour-blind readers tell apart, and a grey for what is not at issue.
FIELDS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"]
REST, OVER = "#8a8a8a", "#d55e00"
THEMES = {"light": ("#222222", "#ffffff"), "dark": ("#dddddd", "#131416")}


def wrong_answer(run: Path) -> dict[str, Any]:
    """The first wrong answer whose attribution the run has saved before its first step."""
    saved = json.loads((run / "attribution" / "step_000000.json").read_text(encoding="utf-8"))
    return saved["examples"][0]


def shown(token: str) -> str:
    return token.replace("\n", "\\n").replace("$", r"\$").replace("<|im_end|>", "end") or " "


def axes(title: str, tokens: list[str], colour: str, background: str) -> Any:
    figure, ax = plt.subplots(figsize=(8, 3), facecolor=background, layout="constrained")
    ax.set_facecolor(background)
    ax.set_title(title, color=colour, loc="left", fontsize=10)
    ax.set_xticks(range(len(tokens)), [shown(token) for token in tokens], family="monospace", color=colour)
    ax.tick_params(colors=colour)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colour)
    return figure, ax


def legend(ax: Any, colour: str, columns: int = 2) -> None:
    ax.legend(frameon=False, labelcolor=colour, fontsize=8, ncols=columns, loc="upper left")


def radius(example: dict[str, Any], colour: str, background: str) -> Any:
    figure, ax = axes("Gradient that the full feedback asks for, and the radius", example["tokens"], colour, background)
    over = [OVER if norm > rho else REST for norm, rho in zip(example["gradient_norm"], example["rho"], strict=True)]
    ax.bar(range(len(over)), example["gradient_norm"], color=over, width=0.6, label="norm of the gradient g_c")
    for position, rho in enumerate(example["rho"]):
        ax.plot(
            [position - 0.42, position + 0.42],
            [rho, rho],
            color=FIELDS[0],
            linewidth=2,
            label="radius ρ" if not position else None,
        )
    ax.set_ylim(0, max(*example["gradient_norm"], *example["rho"]) * 1.3)
    legend(ax, colour)
    return figure


def attribution(example: dict[str, Any], colour: str, background: str) -> Any:
    figure, ax = axes("Weights of the mixed target, per token", example["tokens"], colour, background)
    bottom = list(example["alpha_full"])
    ax.bar(range(len(bottom)), bottom, color=REST, width=0.7, label="α₀ full feedback")
    for field, weights, hue in zip(example["fields"], example["alpha"], FIELDS, strict=False):
        ax.bar(range(len(bottom)), weights, bottom=bottom, color=hue, width=0.7, label=f"α without {field['name']}")
        bottom = [low + weight for low, weight in zip(bottom, weights, strict=True)]
    ax.set_ylim(0, 1.45)
    ax.set_yticks([0, 0.5, 1])
    legend(ax, colour, columns=3)
    return figure


def contraction(example: dict[str, Any], colour: str, background: str) -> Any:
    figure, ax = axes("Share η of the mixed target that the radius allows", example["tokens"], colour, background)
    cut = [OVER if eta < 1 else REST for eta in example["eta"]]
    ax.bar(range(len(cut)), example["eta"], color=cut, width=0.6)
    ax.axhline(1, color=colour, linewidth=0.8, linestyle=":")
    ax.set_ylim(0, 1.15)
    return figure


def curves(name: str, runs: list[str]) -> None:
    for theme in THEMES:
        print(plot_runs(runs, IMAGES / f"{name}-{theme}.svg", theme=theme))


def parts(theme: str) -> Any:
    """Every combination of FIRE's parts at both rates, in two colours: without and with routing."""
    rows = [
        (title.partition(" (")[0], {"method": method, "variant": variant}, method if method == "full_context" else "fire")
        for (method, variant), title in PARTS.items()
    ]
    return dots(read_rows("study-parts"), rows, (1.0, 4.0), 3, theme)


def rates(theme: str) -> Any:
    """Every method at the rates that all have."""
    table = at_rates(read_rows("study-rates"))
    rows = [(METHODS[method], {"method": method}, method) for method in table["method"].unique()]
    return dots(table, rows, RATES, 5.5, theme)


def steps(theme: str) -> Any:
    """Both methods with every optimizer, in two colours; Full Context has no step scale."""
    pairs = [(title, variant, method) for variant, title in OPTIMIZERS.items() for method in ("fire", "full_context")]
    rows = [
        (title if method == "fire" else "", {"method": method, "variant": variant}, method)
        for title, variant, method in pairs
        if method == "fire" or not variant.startswith("scale")
    ]
    return dots(read_rows("study-steps"), rows, (1.0, 4.0, 16.0), 5, theme)


def noise(theme: str) -> Any:
    """What attribution adds to sampled accuracy, with its 95 % interval, by the share of wrong feedback."""
    figure, panels = panels_of(2, 2.2, "Sampled answers right: FIRE minus No Attribution, points", theme)
    for ax, (place, title) in zip(panels, {"answer": "wrong expected answers", "hint": "wrong hints"}.items(), strict=True):
        ax.set_title(title, color=THEMES[theme][0], loc="left", fontsize=10)
        cells = by_share(read_rows("study-noise"), place)
        for row, (_, fire, plain) in enumerate(reversed(cells)):
            mean, low, high = interval(paired(fire, plain, "sampled"))
            hue = getattr(LINES["fire"], theme)
            ax.plot([low, high], [row, row], color=hue, linewidth=2.5, alpha=0.6)
            ax.scatter([mean], [row], s=36, color=hue)
        ax.axvline(0, color=REST, linewidth=1)
        ax.set_yticks(range(len(cells)), [f"r = {share}" for share, _, _ in reversed(cells)])
    return figure


def panels_of(number: int, height: float, title: str, theme: str) -> tuple[Any, Any]:
    """A figure with panels side by side that share their axes."""
    colour, background = THEMES[theme]
    style = {"facecolor": background, "layout": "constrained"}
    figure, panels = plt.subplots(1, number, figsize=(9, height), sharex=True, sharey=True, **style)
    figure.suptitle(title, color=colour, fontsize=10, x=0.01, ha="left")
    for ax in panels:
        ax.set_facecolor(background)
        ax.tick_params(colors=colour)
        ax.grid(axis="x", color=REST, alpha=0.3)
        for spine in ax.spines.values():
            spine.set_visible(False)
    return figure, panels


def dots(table: Any, rows: list[tuple[str, dict[str, str], str]], rates: Sequence[float], height: float, theme: str) -> Any:
    """Sampled accuracy, a panel per learning rate: a dot per seed, a line at the mean. Rows: title, selection, method with the hue."""
    figure, panels = panels_of(len(rates), height, "Sampled answers right, %", theme)
    for ax, rate in zip(panels, rates, strict=True):
        title = "the recipe's rate" if rate == 1 else f"{rate:g} times the rate"
        ax.set_title(title, color=THEMES[theme][0], loc="left", fontsize=10)
        for place, (_, chosen, method) in enumerate(reversed(rows)):
            found = 100 * select(table, rate=rate, **chosen)["sampled_accuracy"]
            hue = getattr(LINES[method], theme)
            if len(found):
                ax.scatter(found, [place] * len(found), s=24, color=hue, alpha=0.6, linewidths=0)
                ax.plot([found.mean()] * 2, [place - 0.3, place + 0.3], color=hue, linewidth=2.5)
        ax.set_yticks(range(len(rows)), [title for title, _, _ in reversed(rows)])
    return figure


def save(figure: Any, name: str, theme: str, background: str) -> None:
    figure.savefig(IMAGES / f"{name}-{theme}.svg", metadata={"Date": None}, facecolor=background)
    plt.close(figure)


# Pictures of the report's page: what the page shows, its address, and the size of the window.
SCREENS = {
    "report-answer": ("#answer, #accuracy", "", "1240,1400"),
    "report-dynamics": ("#dynamics", "", "1240,880"),
    "report-attribution": ("#attribution", "uid=arithmetic/eval/0-5", "1240,1000"),
}


def page(runs: list[str], screens: dict[str, tuple[str, str, str]]) -> None:
    """Pictures of parts of the report's page."""
    with tempfile.TemporaryDirectory() as folder:
        study = read_study(runs)
        report = write_page(study, accuracy_tables(study), Path(folder) / "index.html", paired_differences(study))
        whole = report.read_text(encoding="utf-8")
        for name, (shown, address, size) in screens.items():
            hidden = f"<style>header, section:not({shown}) {{ display: none }}</style></head>"
            report.write_text(whole.replace("</head>", hidden, 1), encoding="utf-8")
            for number, theme in enumerate(("dark", "light")):
                path = IMAGES / f"{name}-{theme}.png"
                options = [
                    "--headless=new",
                    "--no-sandbox",
                    "--hide-scrollbars",
                    f"--window-size={size}",
                    f"--screenshot={path}",
                ]
                options += [f"--blink-settings=preferredColorScheme={number}", f"--user-data-dir={folder}/profile"]
                command = ["chromium", *options, "--virtual-time-budget=30000", f"{report.as_uri()}#{address}"]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
                print(path)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["curves"]:
        return curves(arguments[1], arguments[2:])
    if arguments[:1] == ["page"]:
        return page(arguments[1:], SCREENS)
    if arguments[:1] == ["attribution"]:
        return page(arguments[2:], {arguments[1]: ("#attribution", "", "1240,1440")})
    plt.rcParams["svg.hashsalt"] = "firedistill"
    if arguments == ["studies"]:
        for theme, (_, background) in THEMES.items():
            for draw in (parts, noise, steps, rates):
                save(draw(theme), f"study-{draw.__name__}", theme, background)
        return None
    with tempfile.TemporaryDirectory() as folder:
        run = Path(arguments[0] if arguments else folder)
        if not arguments:
            command = ["train", "lab", "--max_steps", "2", "--eval_size", "0", "--output_dir", str(run), "--overwrite"]
            subprocess.run([sys.executable, "-m", "firedistill", *command], check=True)
        example = wrong_answer(run)
    for draw in (radius, attribution, contraction):
        for theme, (colour, background) in THEMES.items():
            save(draw(example, colour, background), f"concepts-{draw.__name__}", theme, background)
    print(json.dumps({name: example[name] for name in ("uid", "submitted", "expected")}))


if __name__ == "__main__":
    main(sys.argv[1:])
