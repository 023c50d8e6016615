"""Colours and styles of lines: a hue per method, shades of it per learning rate, and the style as a second channel.

Every colour has a contrast of at least 3:1 against its background. The colours of any two methods differ by at least 10 (CIE76), also
as people with deuteranopia or protanopia see them. `tests/test_palette.py` checks both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Pairs are for light and for dark pages.
GROUND = ("#ffffff", "#14171b")
# Lines that are not chosen.
REST = ("#8b8b8b", "#808080")
# For methods that are not in STYLES, and for variants of a method.
SPARE = [
    ("#007464", "#01d8bb"),
    ("#760050", "#f800ac"),
    ("#974141", "#c56966"),
]
LOWER_RATE, HIGHER_RATE = "dot", "longdash"


@dataclass(frozen=True)
class Line:
    """Colours on light and on dark pages, and a style: a key of `figures.LINE_STYLES`."""

    light: str = REST[0]
    dark: str = REST[1]
    style: str = "solid"


# Title and line of each method, in the order of the paper's tables. Ablations are dashed, controls dotted.
STYLES = {
    "supervised": ("Warm start", Line("#00465e", "#2cc4ff", "dashdot")),
    "full_context": ("Full Context", Line("#0070ad", "#3cadff")),
    "on_policy_sft": ("On-Policy SFT", Line("#ff4590", "#ff5796")),
    "veto": ("Veto", Line("#7b0033", "#ffacbb")),
    "top_d": ("TOP-D", Line("#766a00", "#fee713")),
    "tropd": ("TrOPD", Line("#c048ba", "#e36adc")),
    "srpo": ("SRPO", Line("#2f87ff", "#c5d0ff")),
    "demopsd": ("DemoPSD", Line("#006670", "#52c2d1")),
    "scope": ("SCOPE", Line("#2320bb", "#8b6aff")),
    "negative_advantage": ("Negative Advantage", Line("#8d117f", "#ffdbf7", "dot")),
    "rlcsd": ("RLCSD", Line("#98643e", "#e5aa80", "dot")),
    "sdpg": ("SDPG", Line("#009e68", "#00eb9c", "dot")),
    "routing": ("Routing Alone", Line("#0099d3", "#0090c6", "dot")),
    "no_attribution": ("No Attribution", Line("#759a4d", "#80a658", "dash")),
    "no_projection": ("No Projection", Line("#1da628", "#0e9f21", "dash")),
    "hard_gradient_excision": ("Hard Gradient Excision", Line("#672900", "#dc5c00", "dash")),
    "fire": ("FIRE", Line("#e32e20", "#ff775d")),
}
METHODS = {method: title for method, (title, _) in STYLES.items()}
LINES = {method: line for method, (_, line) in STYLES.items()}


def spare_lines(used: Sequence[str]) -> list[Line]:
    """Lines for what has no hue of its own: the spare hues and those of methods that are not used, in one style after the other."""
    hues = [*SPARE, *((line.light, line.dark) for method, line in LINES.items() if method not in used)]
    return [Line(*hue, style) for style in ("longdash", "dash", "dot", "dashdot", "solid") for hue in hues]


def shades(line: Line, factors: Sequence[float]) -> dict[float, Line]:
    """The line of each learning rate, as multiples of the comparison's: lower ones paler, higher ones stronger."""
    lower, higher = sorted({f for f in factors if f < 1}, reverse=True), sorted({f for f in factors if f > 1})
    found = {1.0: line}
    for rates, style, towards, most in ((lower, LOWER_RATE, REST, 0.6), (higher, HIGHER_RATE, ("#000000", "#ffffff"), 0.7)):
        for position, factor in enumerate(rates, start=1):
            light, dark = (
                mixed(own, other, most * position / len(rates))
                for own, other in zip((line.light, line.dark), towards, strict=True)
            )
            found[factor] = replace(line, light=light, dark=dark, style=style)
    return found


def mixed(colour: str, other: str, share: float) -> str:
    """A colour with a share of another one."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(a + share * (b - a)) for a, b in pairs).hex()
