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
HUES = {
    "supervised": ("#00465e", "#2cc4ff"),
    "full_context": ("#0070ad", "#3cadff"),
    "on_policy_sft": ("#ff4590", "#ff5796"),
    "veto": ("#7b0033", "#ffacbb"),
    "top_d": ("#766a00", "#fee713"),
    "tropd": ("#c048ba", "#e36adc"),
    "srpo": ("#2f87ff", "#c5d0ff"),
    "demopsd": ("#006670", "#52c2d1"),
    "scope": ("#2320bb", "#8b6aff"),
    "negative_advantage": ("#8d117f", "#ffdbf7"),
    "rlcsd": ("#98643e", "#e5aa80"),
    "sdpg": ("#009e68", "#00eb9c"),
    "routing": ("#0099d3", "#0090c6"),
    "no_attribution": ("#759a4d", "#80a658"),
    "no_projection": ("#1da628", "#0e9f21"),
    "hard_gradient_excision": ("#672900", "#dc5c00"),
    "fire": ("#e32e20", "#ff775d"),
}
# For methods that are not in the list, and for variants of a method.
SPARE = [
    ("#007464", "#01d8bb"),
    ("#760050", "#f800ac"),
    ("#974141", "#c56966"),
]
ABLATIONS = ("no_attribution", "no_projection", "hard_gradient_excision")
CONTROLS = ("negative_advantage", "rlcsd", "sdpg", "routing")
LOWER_RATE, HIGHER_RATE = "dot", "longdash"


@dataclass(frozen=True)
class Line:
    """Colours on light and on dark pages, and a style: a key of `figures.LINE_STYLES`."""

    light: str = REST[0]
    dark: str = REST[1]
    style: str = "solid"


def line_of(method: str) -> Line:
    """The line of a method in HUES."""
    style = "dash" if method in ABLATIONS else "dot" if method in CONTROLS else "dashdot" if method == "supervised" else "solid"
    return Line(*HUES[method], style)


def spare_lines(used: Sequence[str]) -> list[Line]:
    """Lines for what has no hue of its own: the spare hues and those of methods that are not used, in one style after the other."""
    hues = [*SPARE, *(hue for method, hue in HUES.items() if method not in used)]
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
