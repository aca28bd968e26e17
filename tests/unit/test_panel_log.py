"""The panel's output of all ranks: equal lines stand once, each rank's own order is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.view import panel_log
from nblaunch.view.panel_log import PanelLog
from nblaunch.view.panel_output import RankNews


class Page:
    """What a page has that takes all that a log tells it."""

    def __init__(self):
        self.rows: list[list[object]] = []

    def take(self, news):
        if news is None:
            return self
        if news.get("clear"):
            self.rows = []
        for number, ranks, content, *more in news["rows"]:
            known = next((row for row in self.rows if row[0] == number), None)
            if known is None:
                known = [number, ranks, content]
                if more[0] is None:
                    self.rows.append(known)
                else:
                    place = [row[0] for row in self.rows].index(more[0]) + 1 if more[0] else 0
                    self.rows.insert(place, known)
            known[1:] = known[1] if ranks is None else ranks, known[2] if content is None else content
        self.rows = [row for row in self.rows if row[0] not in news["gone"]]
        return self

    @property
    def lines(self):
        return [(ranks, content) for _, ranks, content in self.rows]

    def of(self, rank):
        return [content for ranks, content in self.lines if rank in numbers(ranks)]


def numbers(ranks):
    spans = (span.split("-") for span in ranks.split(","))
    return [number for first, *last in spans for number in range(int(first), int((last or [first])[0]) + 1)]


class Told:
    """A log and the page that it fills."""

    def __init__(self):
        self.log, self.page = PanelLog(), Page()

    def tell(self, lines, attempt=0):
        self.page.take(self.log.take(attempt, {rank: RankNews(list(told)) for rank, told in lines.items()}))
        return self.page.lines


def numbered(lines, start=0):
    return list(enumerate(lines, start))


def test_lines_that_several_ranks_print_are_one_line():
    told = Told()
    told.tell({0: numbered(["hello", "only 0", "bye"]), 1: numbered(["hello"])})
    shown = told.tell({1: numbered(["only 1", "bye"], 1)})
    assert shown == [("0-1", "hello"), ("0", "only 0"), ("1", "only 1"), ("0-1", "bye")]


def test_a_line_that_is_printed_twice_is_there_twice():
    assert Told().tell({0: numbered(["a", "a"]), 1: numbered(["a"])}) == [("0-1", "a"), ("0", "a")]


@pytest.mark.parametrize("after", [["x"], []], ids=["a line below", "nothing below"])
def test_bars_part_where_they_differ_and_join_where_they_are_equal_again(after):
    told, below = Told(), [("0-1", each) for each in after]
    told.tell({rank: numbered(["0%", *after]) for rank in range(2)})
    assert sorted(told.tell({0: [(0, "7%")], 1: [(0, "9%")]})) == sorted([("0", "7%"), ("1", "9%"), *below])
    assert told.tell({0: [(0, "100%")], 1: [(0, "100%")]}) == [("0-1", "100%"), *below]


def test_what_is_left_out_is_counted_once_a_tick():
    told = Told()
    told.tell({0: [(0, "a")], 1: [(0, "a")]})
    assert told.tell({0: [(10, "b")], 1: [(12, "b")]}) == [
        ("0-1", "a"),
        ("0-1", "… 20 lines of ranks 0-1 left out …"),
        ("0-1", "b"),
    ]


def test_a_new_attempt_begins_with_an_empty_page():
    told = Told()
    told.tell({0: [(0, "a")]})
    assert told.tell({0: [(0, "b")]}, attempt=1) == [("0", "b")]


@given(st.randoms(use_true_random=False))
def test_in_the_folded_list_every_rank_has_all_of_its_lines_in_its_own_order(chance):
    """Some of them are drawn anew, as progress bars are."""
    told, count = Told(), chance.randint(1, 5)
    own: list[dict[int, str]] = [{} for _ in range(count)]
    for _ in range(12):
        tick: dict[int, list[tuple[int, str]]] = {}
        for rank, known in enumerate(own):
            news = {}
            if known and chance.random() < 0.3:
                news[chance.randrange(len(known))] = f"bar {chance.randrange(3)}"
            for _ in range(chance.randrange(5)):
                news[len(known.keys() | news.keys())] = f"line {chance.randrange(6)}"
            known.update(news)
            tick[rank] = sorted(news.items())
        told.tell({rank: news for rank, news in tick.items() if news})
    for rank, known in enumerate(own):
        assert told.page.of(rank) == [known[number] for number in sorted(known)]
    assert all(ranks for ranks, _ in told.page.lines), "no row is of nobody"
    assert Page().take(told.log.whole()).rows == told.page.rows, "a page that comes now has the same"


def test_lines_of_all_ranks_stand_between_lines_of_single_ranks_also_when_one_is_late():
    first = numbered(["epoch 1", "loss 0.1", "epoch 2", "loss 0.2"])
    second = numbered(["epoch 1", "loss 1.1", "epoch 2", "loss 1.2"])
    late = Told()
    late.tell({0: first})
    late.tell({1: second})
    assert late.page.lines == Told().tell({0: first, 1: second})
    assert late.page.lines == [
        ("0-1", "epoch 1"),
        ("0", "loss 0.1"),
        ("1", "loss 1.1"),
        ("0-1", "epoch 2"),
        ("0", "loss 0.2"),
        ("1", "loss 1.2"),
    ]


@pytest.mark.parametrize("blank", ["", '<em title="stderr" style="x">  </em>', '<span style="x"> </span>'])
def test_a_blank_line_does_not_keep_the_lines_after_it_from_being_shared(blank):
    """Rank 1 has a blank line early; the next one of rank 0 is far below."""
    told = Told()
    told.tell({0: numbered(["a", "b", "c", blank, "d"])})
    shown = told.tell({1: numbered(["a", blank, "b", "c", "d"])})
    assert [line for ranks, line in shown if ranks == "0-1"] == ["a", "b", "c", "d"]


def test_many_lines_before_a_shared_one_keep_their_order():
    """Between two rows there is room for only so many others before all are numbered anew."""
    told, count = Told(), 300
    told.tell({0: numbered(["first", "last"])})
    lines = ["first", *(f"{number}" for number in range(count))]
    for number, line in enumerate(lines):
        told.tell({1: [(number, line)]})
    told.tell({1: [(count + 1, "last")]})
    assert told.page.of(1) == [*lines, "last"]
    assert told.page.of(0) == ["first", "last"]


def test_a_page_has_no_more_rows_than_it_can_take(monkeypatch):
    monkeypatch.setattr(panel_log, "ROWS", 100)
    told = Told()
    for tick in range(30):
        told.tell({rank: [(tick, f"{rank} {tick}")] for rank in range(20)})
    assert len(told.page.rows) <= 100
    assert told.page.lines[-1] == ("19", "19 29")
    monkeypatch.setattr(panel_log, "WHOLE_CHARACTERS", 80)
    assert 5 < len(Page().take(told.log.whole()).rows) < 20
