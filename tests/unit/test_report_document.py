"""The report of a run: bounded, without secrets, root cause first, and safe as Markdown."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest

from nblaunch.insight.run_report import Redactor, Tails, code, fenced, make

NO_SECRETS = Redactor({})
CHARACTERS = 4 * 4_000
ROOT = {
    "rank": 5000,
    "ranks": "rank 5000 on h5",
    "type": "builtins.ValueError",
    "message": "why",
    "reason": "ValueError: why (cell line 14 in train)",
    "file": "Cell In[3]",
    "line": 14,
    "function": "train",
    "source": "raise ValueError('why')",
    "frames": [
        {"file": "Cell In[3]", "line": number, "function": f"f{number}", "source": "x" * 500}
        for number in range(100)
    ],
    "exitcode": 1,
}


def facts(**more):
    return {"outcome": "failed", "ran": "cell", "world_size": 8192, "root_cause": ROOT, **more}


def many(count, text="a line of output"):
    return {rank: tuple(f"{text} {rank} {number}" for number in range(50)) for rank in range(count)}


LARGE = {
    "output of 64 of 8192 ranks": (facts(), many(64)),
    "long lines of 64 of 8192 ranks": (facts(), many(64, "x" * 5000)),
    "output of 8192 ranks": (facts(), many(8192)),
    "consequences": (
        facts(
            consequences=[{"ranks": f"rank {rank}", "reason": "gone " * 200} for rank in range(500)],
            also_failed=[{"ranks": f"rank {rank}", "reason": "too " * 200} for rank in range(500)],
        ),
        many(64),
    ),
    "hang": (
        facts(
            hang={
                "findings": ["found " * 100] * 50,
                "places": [
                    {"ranks": f"rank {rank}", "doing": "waits " * 50, "frames": ROOT["frames"]}
                    for rank in range(64)
                ],
            }
        ),
        many(64),
    ),
    "everything": (
        facts(
            root_cause=ROOT
            | {"message": "m" * 60_000, "traceback": "\n" * 60_000, "held": [{"size": 1, "what": "bytes"}]},
            attempts=[
                {"number": number, "world_size": 2, "reason": "failure", "cause": "c" * 5000}
                for number in range(100)
            ],
            warnings=["w" * 5000] * 100,
            options={"line": "--role=" + "r" * 9000},
            metrics={f"metric {number}" * 20: {"rank 0": 1.5} for number in range(1000)},
            hosts=[{"host": f"h{number}" * 100, "ranks": f"rank {number}"} for number in range(500)],
            states={f"s{number}": "ranks" for number in range(500)},
        ),
        many(64, '"\\\x00`'),
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_report_is_at_most_4000_tokens_and_names_rank_line_and_cause_whatever_there_was(case):
    given, lines = LARGE[case]
    report = make(given, Tails(lines, frozenset({5000})), NO_SECRETS)
    assert len(str(report)) <= CHARACTERS
    assert len(report.to_markdown()) <= CHARACTERS
    told = json.loads(str(report))
    assert told == report.to_dict()
    root = told["root_cause"]
    assert (root["rank"], root["line"], root["reason"]) == (5000, 14, ROOT["reason"])
    assert root["frames"][-1]["line"] == 99
    assert told["left_out"]
    assert list(told)[:3] == ["schema", "outcome", "ran"]
    assert list(told)[-1] == "left_out"
    assert "rank 5000" in report.to_markdown()


def test_the_ranks_of_the_root_cause_have_room_for_their_output_before_all_others():
    lines = many(64)
    told = make(facts(), Tails(lines, frozenset({40})), NO_SECRETS).to_dict()
    assert told["output"][0]["ranks"] == "rank 40"
    first, *others = told["output"]
    assert len(first["lines"]) > max(len(block["lines"]) for block in others)
    assert first["lines"][-1] == lines[40][-1]


def test_each_of_the_others_has_an_equal_share():
    told = make(facts(root_cause={}), Tails(many(32)), NO_SECRETS).to_dict()
    assert len(told["output"]) == 32
    assert len({len(block["lines"]) for block in told["output"]}) == 1
    assert "all but the last" in told["left_out"][-1]


def test_equal_lines_of_several_ranks_stand_once():
    lines = {rank: ("begin", f"loss of {rank % 2}", "end") for rank in range(4)}
    told = make(facts(root_cause={}), Tails(lines), NO_SECRETS).to_dict()
    (block,) = told["output"]
    assert block["ranks"] == "ranks 0-3"
    assert block["lines"][0] == "begin"
    assert sorted(block["lines"][1:3]) == ["[ranks 0,2] loss of 0", "[ranks 1,3] loss of 1"]
    assert block["lines"][3] == "end"


def test_the_same_run_has_the_same_report():
    given, lines = LARGE["everything"]
    backwards = dict(reversed(lines.items()))
    one, other = (make(given, Tails(each), NO_SECRETS) for each in (lines, backwards))
    assert str(one) == str(other)
    assert one.to_markdown() == other.to_markdown()


def test_a_report_can_be_changed_by_its_reader_without_changing():
    report = make(facts(), Tails({}), NO_SECRETS)
    report.to_dict()["root_cause"]["rank"] = 7
    assert report.to_dict()["root_cause"]["rank"] == 5000


SECRETS = {
    "plain": "hunter2hunter2",
    "quotes": 'it\'s "secret"\\n',
    "lines": "-----BEGIN KEY-----\nabcdefgh\nijklmnop",
    "url": "p@ss/w:rd?",
    "umlaut": "schlüssel",
    "part": "hunter2hunter2hunter3",
}


@pytest.mark.parametrize("name", SECRETS)
def test_no_value_of_an_environment_variable_is_in_the_report_in_any_form(name):
    value = SECRETS[name]
    forms = [value, repr(value), json.dumps(value), quote(value), quote(value, ""), *value.splitlines()]
    redactor = Redactor(SECRETS)
    given = facts(
        root_cause=ROOT | {"message": "\n".join(forms), "file": f"/data/{value}/x.py", "source": forms[1]},
        options={"line": forms[2]},
        metrics={value: {value: 1.0}},
        warnings=forms,
        hang={"findings": forms},
    )
    report = make(given, Tails({0: tuple(map(redactor.text, forms))}), redactor)
    for text in (str(report), report.to_markdown(), str(report.to_dict())):
        assert not [form for form in forms if form in text]
        assert f"[value of {name}]" in text


def test_values_of_fewer_than_four_characters_are_in_too_many_words():
    report = make(facts(), Tails({}), Redactor({"OMP_NUM_THREADS": "1", "A": "", "B": "fai"}))
    assert report.to_dict()["outcome"] == "failed"
    assert report.to_dict()["root_cause"]["line"] == 14


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "```\n# title", "`a` ``b``", "a | b", "![x](y)"]
)
def test_what_ranks_say_is_code_in_markdown(text):
    given = facts(root_cause=ROOT | {"reason": text, "message": text, "source": text}, warnings=[text])
    drawn = make(given, Tails({0: tuple(text.split("\n"))}), NO_SECRETS).to_markdown()
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", drawn)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    for part in ("<script>", "alert", "title", "![x]", "a | b"):
        assert part not in outside


def test_code_and_blocks_are_longer_than_what_they_quote():
    assert code("a ``b``") == "``` a ``b`` ```"
    assert fenced(["````"]) == ["`````text", "````", "`````"]
