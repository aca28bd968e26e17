"""`--watch` takes what to watch, and says what is wrong with it before anything starts."""

from __future__ import annotations

import pytest

from nblaunch import LaunchOptions, OptionError, run
from nblaunch.options.command_line import parse_line


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("nan", ("nan",)),
        ("nan,desync", ("nan", "desync")),
        ("desync, nan:warn", ("nan:warn", "desync")),
        (("desync:warn",), ("desync:warn",)),
        (["nan", "desync"], ("nan", "desync")),
        ((), ()),
    ],
)
def test_what_is_watched_is_a_text_or_several(given, kept):
    assert LaunchOptions(watch=given).watch == kept


def test_a_line_takes_it_and_gives_it_back():
    options = parse_line("--watch nan,desync:warn").options
    assert options.watch == ("nan", "desync:warn")
    assert parse_line(options.to_line()).options == options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nann", r"watch='nann'.* Did you mean nan\?"),
        ("desinc", r"Did you mean desync\?"),
        ("hang", r"'hang' is nothing that can be watched\. Write nan, desync or nan,desync\."),
        ("nan:stop", r"behind nan comes :warn or nothing, not 'stop'\. Write nan:warn\."),
        ("nan,nan:warn", r"it names nan twice"),
        ("", r"nothing that can be watched"),
        (3, r"watch=3"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_a_process_starts(given, said):
    with pytest.raises(OptionError, match=said):
        run(print, watch=given)
