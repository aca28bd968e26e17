"""The elements of drawings: escaped, finite, short, and legible in either theme."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nblaunch.insight import svg

numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


def test_a_drawing_is_well_formed_and_says_what_it_is():
    parts = [
        svg.text(1, 2, "<loss> & lr"),
        svg.rectangle(0, 0, 5, 5, svg.COLOURS[0]),
        svg.line(0, 0, 1, 1, faint=True),
        svg.polyline([(0, 0), (1, math.nan), (2, 2), (3, 3)], svg.COLOURS[1]),
        svg.area([(0, 1), (1, 1)], [(0, 0), (1, 0)], svg.COLOURS[2]),
    ]
    drawn = ET.fromstring(svg.document(100, 50, parts, label='the "loss" of <8> ranks'))  # noqa: S314 - our own
    assert drawn.get("aria-label") == 'the "loss" of <8> ranks'
    assert drawn[0].text == "<loss> & lr"
    assert "script" not in svg.document(1, 1, parts, label="")


def test_a_line_is_interrupted_where_a_value_is_not_finite():
    assert svg.path_data([(0, 0), (1, math.inf), (2, 2), (3, 3)]) == "M0 0M2 2L3 3"
    assert svg.polyline([(0, math.nan)], "red") == ""
    assert svg.area([], [], "red") == ""


@given(numbers, numbers)
@example(0.0, 5e-324)
@example(1e-320, 3e-320)
def test_ticks_are_few_round_and_within(low, high):
    low, high = sorted((low, high))
    found = svg.ticks(low, high)
    assert len(found) <= 6
    room = 1e-6 * max(high - low, abs(low), abs(high), 1e-9)
    assert all(low - room <= each <= high + room for each in found)


def test_powers_of_ten_are_thinned_out():
    assert svg.log_ticks(1e-9, 1e9) == [1e-9, 1e-5, 1e-1, 1e3, 1e7]
    assert svg.log_ticks(1, 10) == [1, 10]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (123456.0, "123456"),
        (2e6, "2e+06"),
        (math.inf, "inf"),
        (1e-5, "1e-05"),
    ],
)
def test_a_number_is_short(value, shown):
    assert svg.number(value) == shown


@pytest.mark.parametrize("page", [1.0, 0.0])
@pytest.mark.parametrize("colour", svg.COLOURS)
def test_colours_stand_out_on_a_white_and_on_a_dark_page(colour, page):
    parts = [int(each, 16) / 255 for each in re.findall("..", colour[1:])]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    luminance = sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    dark = 0.0065  # of JupyterLab's #111
    background = page or dark
    lighter, darker = max(luminance, background), min(luminance, background)
    assert (lighter + 0.05) / (darker + 0.05) >= 3
