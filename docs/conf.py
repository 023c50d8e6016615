"""The documentation site: `make site` builds it into docs/_build."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

import firedistill

project = "firedistill"
author = "firedistill contributors"
copyright = "firedistill contributors"
release = version = firedistill.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "README.md"]  # README.md is the index on a code host
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
default_role = "code"  # single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
smartquotes = False  # `--option` stays as it is

html_theme = "furo"
html_title = f"firedistill {version}"
html_static_path = ["_static"]
html_js_files = ["filter.js"]
html_math_renderer = "mathml"  # browsers draw it without a script from the network

HERE = Path(__file__).parent
ON_THE_SITE = {  # links that a code host can follow, and the generated pages that replace them on the site
    "../README.md#methods": "reference/methods.md",
    "../src/firedistill/objectives": "reference/methods.md",
    "../src/firedistill/config.py": "reference/options.md",
    "../src/firedistill/functional.py": "reference/api.md#the-equations",
}
PICTURE = re.compile(  # an image per colour scheme, as a code host shows it
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>\n'
)


def options_page() -> str:
    """All options of a run by group, from their declarations."""
    from firedistill.config import UNUSED, SelfDistillConfig, WarmStartConfig, default_of
    from firedistill.recipes import option_groups

    lines = [
        "# Options",
        "",
        "Options of `firedistill train`, fields of `SelfDistillConfig`, and keys of a YAML recipe have the same names. Options of",
        "`transformers.TrainingArguments` are accepted as well. Those at the end of this page are refused, and so are `fsdp`, `bf16`,",
        "`fp16`, `torch_compile`, `full_determinism`, `save_only_model` and `load_best_model_at_end`; the error names the",
        "alternative if there is one.",
    ]
    for group, options in option_groups(SelfDistillConfig).items():
        lines += ["", f"## {group}", "", "| option | default | |", "|---|---|---|"]
        for option in options:
            lines.append(f"| `{option.name}` | {_code(default_of(option))} | {_cell(option.metadata['help'])} |")
    ours = {option.name for options in option_groups(SelfDistillConfig).values() for option in options}
    lines += ["", "## Warm starts", "", "`firedistill warmstart` has these defaults and options of its own.", ""]
    lines += ["| option | default | |", "|---|---|---|"]
    defaults = {option.name: default_of(option) for options in option_groups(SelfDistillConfig).values() for option in options}
    for options in option_groups(WarmStartConfig).values():
        for option in options:
            if option.name not in ours or default_of(option) != defaults[option.name]:
                lines.append(f"| `{option.name}` | {_code(default_of(option))} | {_cell(option.metadata['help'])} |")
    lines += ["", "## Options of TrainingArguments without effect", "", "Setting one of these is an error.", ""]
    lines += ["| option | |", "|---|---|", *(f"| `{name}` | {hint} |" for name, hint in sorted(UNUSED.items()))]
    return "\n".join(lines) + "\n"


def methods_page() -> str:
    """All methods with their settings."""
    from dataclasses import fields

    from firedistill.objectives import registered_objectives

    lines = [
        "# Methods",
        "",
        "`--method NAME` selects a method, `--method_settings.SETTING VALUE` changes one of its settings.",
    ]
    for name, method in registered_objectives().items():
        summary = next((line for line in (method.__doc__ or "").splitlines() if line.strip()), "")
        lines += ["", f"## {name}", "", summary.strip()]
        if settings := fields(method):
            lines += ["", "| setting | default | |", "|---|---|---|"]
            lines += [f"| `{f.name}` | {_code(f.default)} | {_cell(f.metadata.get('help', ''))} |" for f in settings]
    return "\n".join(lines) + "\n"


def _code(value: object) -> str:
    return f"`{value}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return re.sub(r"([|{}<>*_])", r"\\\1", text)


def write_generated(app: object) -> None:
    for name, page in (("options.md", options_page), ("methods.md", methods_page)):
        target, text = HERE / "reference" / name, page()
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def outside_links(app: object, page: str, source: list[str]) -> None:
    """Link generated pages; files of the repository that are not pages are named, not linked."""
    for link, generated in ON_THE_SITE.items():
        source[0] = source[0].replace(f"]({link})", f"]({generated})")
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+?)(?:#[^)]*)?\)", r"\1 (`\2` in the repository)", source[0])


def pictures(app: object, page: str, source: list[str]) -> None:
    """A figure per colour scheme, which follows the site's switch between them."""

    def figures(found: re.Match[str]) -> str:
        blocks = (
            f"```{{figure}} {found[scheme]}\n:alt: {found['alt']}\n:figclass: only-{scheme}\n```\n"
            for scheme in ("light", "dark")
        )
        return "\n".join(blocks)

    source[0] = PICTURE.sub(figures, source[0])
    if "<picture" in source[0]:
        raise ValueError(f"{page}: a picture is not of the form that PICTURE in docs/conf.py describes")


def inline_formula(translator, node: nodes.Element) -> None:  # type: ignore[no-untyped-def]
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def formula(translator, node: nodes.Element) -> None:  # type: ignore[no-untyped-def]
    translator.body.append(f'<p class="formula">{convert(node.astext(), display="block")}</p>')
    raise nodes.SkipNode


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("builder-inited", write_generated)
    app.connect("source-read", outside_links)
    app.connect("source-read", pictures)
    app.add_html_math_renderer("mathml", inline_renderers=(inline_formula, None), block_renderers=(formula, None))
