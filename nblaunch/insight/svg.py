"""Elements of SVG drawings, for HTML without scripts: the saved notebook's.

Coordinates are pixels, y downwards. Text takes the page's own colour, so a drawing can be read in a light and
in a dark theme. What is given as text is escaped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

from nblaunch.insight.markup import escaped

COLOURS = ("#3b7dd8", "#d9792b", "#3f9a54", "#c7483f", "#8a64c8", "#8f6a53", "#c862a4", "#6f7780")
"""For series and kinds of work: at least 3:1 against a white and against a dark page."""

_STEPS = (1.0, 2.0, 5.0, 10.0)
_SCIENTIFIC_BELOW, _SCIENTIFIC_FROM = 1e-4, 1e6


def document(width: float, height: float, parts: Iterable[str], *, label: str) -> str:
    """Return an `<svg>` element of these parts; screen readers say `label`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escaped(label)}" '
        f'width="{coordinate(width)}" height="{coordinate(height)}" '
        f'viewBox="0 0 {coordinate(width)} {coordinate(height)}" '
        f'style="max-width:100%;height:auto;display:block" font-family="inherit" fill="currentColor">'
        f"{''.join(parts)}</svg>"
    )


def text(  # noqa: PLR0913 - a place, and how it looks
    x: float, y: float, words: str, *, anchor: str = "start", size: float = 11, more: str = ""
) -> str:
    """Return a text whose base line is at y; `anchor` is start, middle or end, `more` other attributes."""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    extra = f" {more}" if more else ""
    return (
        f'<text x="{coordinate(x)}" y="{coordinate(y)}" font-size="{coordinate(size)}"{place}{extra}>'
        f"{escaped(words)}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{coordinate(x)}" y="{coordinate(y)}" '
        f'width="{coordinate(width)}" height="{coordinate(height)}" fill="{colour}"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, *, faint: bool = False) -> str:
    """Return a straight line; a `faint` one is part of a grid."""
    opacity = ' stroke-opacity="0.15"' if faint else ""
    place = f'x1="{coordinate(x1)}" y1="{coordinate(y1)}" x2="{coordinate(x2)}" y2="{coordinate(y2)}"'
    return f'<line {place} stroke="currentColor"{opacity}/>'


def polyline(points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5) -> str:
    """Return a line through points; it is interrupted where y is not finite."""
    drawn = path_data(points)
    return (
        f'<path d="{drawn}" fill="none" stroke="{colour}" stroke-width="{coordinate(width)}" '
        'stroke-linejoin="round"/>'
        if drawn
        else ""
    )


def area(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], colour: str) -> str:
    around = [*upper, *reversed(lower)]
    drawn = path_data(around)
    return f'<path d="{drawn}Z" fill="{colour}" fill-opacity="0.22" stroke="none"/>' if drawn else ""


def path_data(points: Iterable[tuple[float, float]]) -> str:
    """Return points as the `d` of a path.

    >>> path_data([(0, 1), (2, 3.14159), (4, float("nan")), (5, 6)])
    'M0 1L2 3.1M5 6'
    """
    drawn, pen = [], "M"
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        drawn.append(f"{pen}{coordinate(x)} {coordinate(y)}")
        pen = "L"
    return "".join(drawn)


def coordinate(value: float) -> str:
    """Return a coordinate to a tenth of a pixel.

    >>> coordinate(3.0), coordinate(2.04999), coordinate(-0.01)
    ('3', '2', '0')
    """
    rounded = round(value, 1) + 0.0
    return str(int(rounded)) if rounded == int(rounded) else f"{rounded:.1f}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most `most` round numbers from low to high, both included if they are round.

    >>> ticks(0, 1.03)
    [0.0, 0.5, 1.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(most - 1, 1)
    if rough < sys.float_info.min:  # between such numbers there is no room for a round one
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in _STEPS if power * each >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return powers of ten from low to high, both above 0; every second or third one of many.

    >>> log_ticks(0.005, 200)
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    apart = max(1, -(-(last - first + 1) // most))
    return [10.0**power for power in range(first, last + 1, apart)]


def number(value: float) -> str:
    """Return a number for a label: at most four digits that count.

    >>> number(0.25), number(1500.0), number(1.5e-7), number(float("nan"))
    ('0.25', '1500', '1.5e-07', 'nan')
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if _SCIENTIFIC_BELOW <= abs(value) < _SCIENTIFIC_FROM:
        shown = f"{value:.4g}"
        return f"{value:.0f}" if "e" in shown else shown
    return f"{value:.3g}"
