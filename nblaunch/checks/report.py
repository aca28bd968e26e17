"""What the doctor found: findings of one line each, and how a report is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nblaunch.insight import markup

_COLORS = {"ok": markup.GREEN, "warning": markup.YELLOW, "problem": markup.RED}
_CELL = "padding:2px 8px;text-align:left;vertical-align:top"


class Level(StrEnum):
    """How bad a finding is: a problem makes runs fail, a warning some of them, or slows them down."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the check `name` found, and of which `level` it is.

    `summary` is one line, `advice` what to do, empty where there is nothing.
    """

    name: str
    level: Level
    summary: str
    advice: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport:
    """What `nblaunch.doctor()` found on this machine, in this process, within `seconds`: its `findings`.

    >>> report = DoctorReport((ok("torch", "2.13.0"), problem("network", "no loopback", "Bring up lo.")))
    >>> report.ok
    False
    >>> print(report)
    nblaunch doctor: 1 problem, 0 warnings
    ok       torch    2.13.0
    problem  network  no loopback
                      -> Bring up lo.
    """

    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no problem; there may be warnings."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that make runs fail."""
        return tuple(each for each in self.findings if each.level is Level.PROBLEM)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that make some runs fail, or slow them down."""
        return tuple(each for each in self.findings if each.level is Level.WARNING)

    @property
    def summary(self) -> str:
        """The report in one line."""
        return f"{count_of(len(self.problems), 'problem')}, {count_of(len(self.warnings), 'warning')}"

    def __str__(self) -> str:
        """Return one line per finding, in columns, with the advice below."""
        level_width = max(map(len, Level))
        name_width = max((len(each.name) for each in self.findings), default=0)
        indent = " " * (level_width + name_width + 4)
        lines = [f"nblaunch doctor: {self.summary}"]
        for each in self.findings:
            lines.append(f"{each.level:<{level_width}}  {each.name:<{name_width}}  {each.summary}")
            if each.advice:
                lines.append(f"{indent}-> {each.advice}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the same text: a prompt shows it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Show a table in a notebook (an IPython protocol); no script, no style sheet."""
        rows = "".join(_row(each) for each in self.findings)
        return f"<div><strong>nblaunch doctor</strong>: {self.summary}</div><table>{rows}</table>"


def ok(name: str, summary: str, advice: str = "") -> Finding:
    return Finding(name, Level.OK, on_one_line(summary), advice)


def warning(name: str, summary: str, advice: str = "") -> Finding:
    return Finding(name, Level.WARNING, on_one_line(summary), advice)


def problem(name: str, summary: str, advice: str = "") -> Finding:
    return Finding(name, Level.PROBLEM, on_one_line(summary), advice)


def by_room(  # noqa: PLR0913 - three figures, and what they mean
    name: str, room: float, summary: str, advice: str, *, needed: float, wanted: float
) -> Finding:
    """Return a problem where `room` is less than what is needed, a warning where it is less than wanted."""
    if room < needed:
        return problem(name, summary, advice)
    return warning(name, summary, advice) if room < wanted else ok(name, summary)


def on_one_line(text: str, limit: int = 300) -> str:
    r"""Return `text`, which may be a library's, in one line of at most `limit` characters.

    >>> on_one_line("first\n  second")
    'first second'
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(finding: Finding) -> str:
    style = markup.color(_COLORS[finding.level])
    text = markup.escaped(finding.summary)
    if finding.advice:
        text += f"<br><em>{markup.escaped(finding.advice)}</em>"
    cells = (f'<span style="{style}">{finding.level}</span>', markup.escaped(finding.name), text)
    return markup.row("td", ((_CELL, cell) for cell in cells))
