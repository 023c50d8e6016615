"""Colours of lines: contrast (WCAG 2) and CIE76 differences, as everyone sees them and as people with a colour-vision deficiency do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from firedistill.objectives import registered_objectives
from firedistill.report.figures import LINE_STYLES, rate_colours
from firedistill.report.groups import Group, assign_lines
from firedistill.report.palette import GROUND, LINES, REST, SPARE, shades

THEMES = ("light", "dark")
# Machado, Oliveira and Fernandes (2009), table 1 at severity 1.0, for linear RGB.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
}
# sRGB to XYZ (IEC 61966-2-1), and the white point D65.
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = XYZ.sum(axis=1)


def linear(colour):
    values = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour, vision="normal"):
    """CIELAB of a colour as someone sees it."""
    relative = XYZ @ np.clip(VISION[vision] @ linear(colour), 0, 1) / WHITE
    x, y, z = np.where(relative > (6 / 29) ** 3, np.cbrt(relative), relative / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one, other, vision="normal"):
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def contrast(colour, ground):
    one, other = sorted([XYZ[1] @ linear(colour), XYZ[1] @ linear(ground)])
    return (other + 0.05) / (one + 0.05)


def test_the_formulas_on_known_colours():
    assert lab("#ffffff") == pytest.approx([100, 0, 0], abs=1e-4) and lab("#000000") == pytest.approx([0, 0, 0], abs=1e-9)
    assert lab("#ff0000") == pytest.approx([53.24, 80.09, 67.20], abs=0.02), "sRGB red in CIELAB"
    assert contrast("#ffffff", "#000000") == pytest.approx(21) and contrast("#777777", "#ffffff") == pytest.approx(
        4.48, abs=0.01
    )
    # Red and green of like lightness are close to a deuteranope and far apart to others.
    assert difference("#c04000", "#6b7800", "deuteranopia") < 12 < 60 < difference("#c04000", "#6b7800")


@pytest.mark.parametrize("theme", THEMES)
def test_every_line_stands_out_from_the_page(theme):
    side = THEMES.index(theme)
    colours = [hue[side] for hue in [*SPARE, REST]]
    for line in LINES.values():
        colours += [getattr(shade, theme) for shade in shades(line, [0.25, 0.5, 1, 2, 4, 8, 16]).values()]
    assert min(contrast(colour, GROUND[side]) for colour in colours) >= 3


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", THEMES)
def test_no_two_methods_look_the_same(theme, vision):
    side = THEMES.index(theme)
    colours = [*(getattr(line, theme) for line in LINES.values()), *(hue[side] for hue in [*SPARE, REST])]
    closest = min(difference(one, other, vision) for one, other in itertools.combinations(colours, 2))
    assert closest >= (15 if vision == "normal" else 10)


def test_lines_are_those_of_methods():
    assert set(LINES) <= {"supervised", *registered_objectives()}


def groups(*of):
    """Groups as (method, factor, what sets it apart)."""
    found = [Group(method, [], factor * 1e-3, factor, apart) for method, factor, apart in of]
    assign_lines(found)
    return [group.line for group in found]


@pytest.mark.parametrize("theme", THEMES)
def test_learning_rates_are_shades_of_the_methods_hue(theme):
    lines = groups(*(("fire", factor, "") for factor in (0.25, 0.5, 1, 2, 4)))
    assert lines[2] == LINES["fire"]
    lightness = [lab(getattr(line, theme))[0] for line in lines]
    distance = [abs(lab(GROUND[THEMES.index(theme)])[0] - value) for value in lightness]
    assert distance[2:] == sorted(distance[2:]), "higher rates are stronger"
    assert min(difference(getattr(one, theme), getattr(other, theme)) for one, other in itertools.combinations(lines, 2)) > 5
    assert [line.style for line in lines] == ["dot", "dot", "solid", "longdash", "longdash"]


def test_a_line_belongs_to_one_group_where_hues_run_out():
    of = (
        [(method, 1, "") for method in LINES]
        + [(f"own{i}", 1, "") for i in range(6)]
        + [("fire", 1, f"x {i}") for i in range(6)]
    )
    lines = groups(*of)
    assert len(set(lines)) == len(lines) and {line.style for line in lines} <= set(LINE_STYLES)
    assert lines[: len(LINES)] == list(LINES.values())


def test_the_rates_of_a_figure_are_shades_of_one_hue():
    colours = [line.light for line in rate_colours([0.25, 0.5, 1, 2, 4, 8, 16]).values()]
    lightness = [lab(colour)[0] for colour in colours]
    assert lightness == sorted(lightness, reverse=True) and min(contrast(colour, "#ffffff") for colour in colours) >= 3
