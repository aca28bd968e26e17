"""What the panel's script does with what it is sent, without a browser; needs node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from nblaunch.view import panel

SCRIPT = Path(panel.__file__).with_name("panel.js")
NODE = shutil.which("node")

pytestmark = [pytest.mark.quick, pytest.mark.skipif(NODE is None, reason="node is missing")]

HARNESS = """
const whole = { sequence: 0, age: 0, header: {}, rows: {}, values: {}, report: null,
  output: { attempt: 0, pieces: [], tails: {} } };
const made = () => new Store(structuredClone(whole));
// Tells a store `{rank: [[number, piece], ...]}`.
function tell(store, lines, attempt = 0) {
  const pieces = [], tails = {};
  for (const [rank, told] of Object.entries(lines)) {
    tails[rank] = { sent: told.flatMap(([number, piece]) => [number, pieces.push(piece) - 1]) };
  }
  store.take({ sequence: store.sequence + 1, ranks: null, report: null,
    output: { attempt, pieces, tails } });
}
const folded = (store) =>
  store.fold.rows.map((row) => [prefixOf(row), textOf(row.piece)].filter(Boolean).join(" "));
const shown = (store, rank) => store.entries(rank).map((entry) => textOf(entry.piece));
"""


def run(code):
    """Run JavaScript beside the panel's script; return what it hands to `say`."""
    script = SCRIPT.read_text(encoding="utf-8").replace("export default", "const theWidget =")
    program = f"{script}\n{HARNESS}\nconst say = (value) => console.log(JSON.stringify(value));\n{code}"
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module"], input=program, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lines_that_several_ranks_print_are_one_line():
    assert run("""
const store = made();
tell(store, { 0: [[0, "hello"], [1, "only 0"], [2, "bye"]], 1: [[0, "hello"]] });
tell(store, { 1: [[1, "only 1"], [2, "bye"]] });
say(folded(store));
""") == ["[ranks 0-1] hello", "[rank 0] only 0", "[rank 1] only 1", "[ranks 0-1] bye"]


def test_a_line_that_is_printed_twice_is_there_twice():
    assert run("""
const store = made();
tell(store, { 0: [[0, "a"], [1, "a"]], 1: [[0, "a"]] });
say(folded(store));
""") == ["[ranks 0-1] a", "[rank 0] a"]


def test_bars_part_where_they_differ_and_join_where_they_are_equal_again():
    code = """
const store = made();
tell(store, { 0: [[0, "0%"], [1, "x"]], 1: [[0, "0%"], [1, "x"]] });
tell(store, { 0: [[0, "7%"]], 1: [[0, "9%"]] });
const parted = folded(store);
tell(store, { 0: [[0, "100%"]], 1: [[0, "100%"]] });
say([parted, folded(store)]);
"""
    assert run(code) == [
        ["[rank 0] 7%", "[rank 1] 9%", "[ranks 0-1] x"],
        ["[ranks 0-1] 100%", "[ranks 0-1] x"],
    ]


def test_what_is_left_out_is_counted_once_a_tick():
    code = """
const store = made();
tell(store, { 0: [[0, "a"]], 1: [[0, "a"]] });
tell(store, { 0: [[10, "b"]], 1: [[12, "b"]] });
say([folded(store), shown(store, 1)]);
"""
    assert run(code) == [
        ["[ranks 0-1] a", "… 20 lines of ranks 0-1 left out …", "[ranks 0-1] b"],
        ["a", "… 11 lines left out …", "b"],
    ]


def test_a_new_attempt_begins_with_an_empty_page():
    assert run("""
const store = made();
tell(store, { 0: [[0, "a"]] });
tell(store, { 0: [[0, "b"]] }, 1);
say([folded(store), shown(store, 0)]);
""") == [["[rank 0] b"], ["b"]]


def test_who_has_missed_something_takes_everything_and_who_has_not_keeps_what_it_has():
    code = """
const all = (sequence, text) => ({ ...structuredClone(whole), sequence,
  output: { attempt: 0, pieces: [text], tails: { 0: { sent: [0, 0], clear: 0 } } } });
const store = made();
tell(store, { 0: [[0, "a"]] });
store.begin(all(1, "the same"));
const kept = shown(store, 0);
store.sequence += 1;
store.missed = true;
store.begin(all(2, "b"));
say([kept, shown(store, 0), store.missed]);
"""
    assert run(code) == [["a"], ["b"], False]


def test_in_the_folded_list_every_rank_has_all_of_its_lines_in_its_own_order():
    code = """
let seed = 1;
const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
const wrong = [];
for (let round = 0; round < 200 && !wrong.length; round += 1) {
  const store = made();
  const ranks = 1 + random(5);
  const next = Array(ranks).fill(0);
  for (let tick = 0; tick < 12; tick += 1) {
    const lines = {};
    for (let rank = 0; rank < ranks; rank += 1) {
      const told = new Map();
      if (next[rank] && random(3) === 0) told.set(random(next[rank]), `bar ${random(3)}`);
      for (let count = random(5); count > 0; count -= 1) told.set(next[rank]++, `line ${random(6)}`);
      if (told.size) lines[rank] = [...told].sort(([one], [other]) => one - other);
    }
    if (Object.keys(lines).length) tell(store, lines);
  }
  for (let rank = 0; rank < ranks; rank += 1) {
    const rows = store.fold.rows.filter((row) => row.members.has(rank)).map((row) => row.piece);
    const own = shown(store, rank);
    if (JSON.stringify(rows) !== JSON.stringify(own)) wrong.push([round, rank, rows, own]);
  }
  if (store.fold.rows.some((row) => !row.members.size)) wrong.push([round, "a row of nobody"]);
}
say(wrong);
"""
    assert run(code) == []


def test_memory_and_time_are_written_for_people():
    assert run("say([0, 1536, 3 * 2 ** 20, 1.25 * 2 ** 30].map(formatBytes))") == [
        "0 B",
        "2 KiB",
        "3 MiB",
        "1.3 GiB",
    ]
    assert run("say([0, 61.9, 3725].map(formatSeconds))") == ["0:00", "1:01", "1:02:05"]
    assert run("say([[3], [0, 2, 3, 4], [1, 0]].map(formatRanks))") == ["rank 3", "ranks 0,2-4", "ranks 0-1"]


NOTEBOOK = """
const output = (data) => ({ data });
const widget = (name) => output({ "application/vnd.jupyter.widget-view+json": { model_id: name } });
const listOf = (...items) => ({
  items, get length() { return items.length; }, get: (at) => items[at], set: (at, item) => (items[at] = item),
});
const cells = [{ outputs: undefined }, { outputs: listOf(output({}), widget("ours"), widget("another")) }];
const modelOf = (values) => ({ get: (name) => values[name], on() {}, off() {}, send() {},
  widget_manager: { context: { model: { cells } } } });
"""


def test_the_result_takes_the_panels_place_in_the_notebook_and_no_other():
    code = f"""{NOTEBOOK}
const ended = (model) => settle(model, () => result(model));
ended(modelOf({{ name: "ours", final: {{}} }}));
const before = cells[1].outputs.items.filter((each) => each.output_type).length;
ended(modelOf({{ name: "ours", final: {{ "text/plain": "done" }} }}));
ended({{ get: () => ({{ "text/plain": "no notebook" }}) }});
say([before, cells[1].outputs.items.map((each) => each.data["text/plain"] ?? null)]);
"""
    assert run(code) == [0, [None, "done", None]]


def test_a_panel_that_is_opened_once_more_goes_on_where_it_was():
    code = f"""{NOTEBOOK}
const first = modelOf({{ name: "ours", whole, delta: {{}} }});
const closeFirst = initialize({{ model: first }});
const store = shared.stores.get("ours");
tell(store, {{ 0: [[0, "a"]] }});
const second = modelOf({{ name: "ours", whole: {{ ...whole, heard: [PAGE] }}, delta: {{}} }});
const closeSecond = initialize({{ model: second }});
const same = shared.stores.get("ours") === store && store.model === second;
closeFirst();
const kept = shared.stores.has("ours");
closeSecond();
say([same, folded(store), store.heard, kept, shared.stores.has("ours")]);
"""
    assert run(code) == [True, ["[rank 0] a"], True, True, False]


def test_a_page_says_hello_until_the_kernel_has_heard_it_however_long_that_takes():
    code = f"""{NOTEBOOK}
const sent = [], waiting = [];
globalThis.setTimeout = (call, milliseconds) => waiting.push([call, milliseconds]);
globalThis.setInterval = globalThis.clearInterval = () => null;
const model = {{ ...modelOf({{ name: "ours", whole, delta: {{}} }}), send: (text) => sent.push(text) }};
initialize({{ model }});
let seconds = 0;
while (seconds < 60) {{
  const [call, milliseconds] = waiting.shift();
  seconds += milliseconds / 1000;
  call();
}}
const hellos = sent.length;
shared.stores.get("ours").heard = true;
waiting.shift()[0]();
say([new Set(sent).size, hellos, sent.length, waiting.length]);
"""
    assert run(code) == [1, 9, 9, 0]


ALIKE = """
const rowOf = (rank, more) =>
  ({ rank, state: "RUNNING", icon: "►", cpu: 80 + rank, memory: (231 + rank) * 2 ** 20, ...more });
const numbered = (count) => [...Array(count).keys()];
const rowsOf = (count, more = {}) => new Map(numbered(count).map((rank) => [rank, rowOf(rank, more[rank])]));
const groups = (rows) =>
  [...groupsOf(rows).values()].map((some) => [shortRanks(some.map((row) => row.rank)), some[0].state]);
"""


def test_ranks_that_are_alike_are_one_row_and_what_differs_comes_first():
    code = f"""{ALIKE}
const failed = {{ state: "FAILED", failure: "ValueError: boom" }};
const caused = {{ state: "FAILED", failure: "consequence of rank 5: closed" }};
const late = {{ mark: "3 collectives behind the others" }};
say([
  groups(rowsOf(8)),
  groups(rowsOf(8, {{ 3: {{ state: "SUCCEEDED" }} }})),
  groups(rowsOf(8, {{ 1: caused, 2: caused, 5: failed }})),
  groups(rowsOf(1024, {{ 9: late, 10: {{ mark: "4 collectives behind the others" }} }})),
  [usageOfAll([...rowsOf(8).values()]), usageOfAll([rowOf(0)]), usageOfAll([{{ rank: 0 }}])],
]);
"""
    assert run(code) == [
        [["0-7", "RUNNING"]],
        [["0-2,4-7", "RUNNING"], ["3", "SUCCEEDED"]],
        [["5", "FAILED"], ["1-2", "FAILED"], ["0,3-4,6-7", "RUNNING"]],
        [["0-8,11-1023", "RUNNING"], ["9-10", "RUNNING"]],
        ["CPU 80-87 % · 231-238 MiB", "CPU 80 % · 231 MiB", ""],
    ]


def test_whatever_states_ranks_are_in_each_stands_in_exactly_one_row():
    code = f"""{ALIKE}
let seed = 1;
const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
const wrong = [];
for (let round = 0; round < 200; round += 1) {{
  const rows = rowsOf(1 + random(70));
  for (const row of rows.values()) {{
    row.state = STATES[random(STATES.length)];
    row.failure = [undefined, "a", "b"][random(3)];
  }}
  const found = [...groupsOf(rows).values()];
  const ranks = found.flat().map((row) => row.rank);
  const isAfter = (row, place, some) => !place || some[place - 1].rank < row.rank;
  const isRising = found.every((some) => some.every(isAfter));
  if (!isRising || ranks.length !== rows.size || new Set(ranks).size !== rows.size) wrong.push(round);
}}
say(wrong);
"""
    assert run(code) == []


def test_a_screen_reader_hears_ranks_as_words():
    code = "say([[0, 1, 2], [5], [0, 1, 2, 4, 5]].map(spokenRanks))"
    assert run(code) == ["ranks 0 to 2", "rank 5", "ranks 0 to 2, 4 to 5"]
    odd = (
        "say([shortRanks, spokenRanks].map((named) => named([...Array(100).keys()].map((rank) => 2 * rank))))"
    )
    assert run(odd) == ["100 ranks (0,2,4,6,8,10,12,14,16,18,20,…)", "100 ranks"]
