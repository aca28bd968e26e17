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
const whole = { sequence: 0, age: 0, parts: { head: "" }, log: { rows: [], gone: [], clear: true } };
const made = () => new Store(structuredClone(whole));
// Tells a store rows of the log, and parts.
function tell(store, rows, parts = {}, more = {}) {
  store.take({ sequence: store.sequence + 1, parts, log: { rows, gone: [], ...more } });
}
const shown = (store) => store.log.rows.map(lineOf);
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


def test_rows_come_to_their_place_change_and_go():
    code = """
const store = made();
tell(store, [[1, "0-1", "hello", null], [2, "0", "a - b", null], [4, "0-1", "bye", null]]);
tell(store, [[3, "1", "between", 2], [2, "0,2-4", null, null], [4, null, "bye!", null]]);
const before = shown(store);
tell(store, [], {}, { gone: [2] });
const after = shown(store);
tell(store, [[1, "0", "anew", null]], {}, { clear: true });
say([before, after, shown(store)]);
"""
    assert run(code) == [
        ["[ranks 0-1] hello", "[ranks 0,2-4] a - b", "[rank 1] between", "[ranks 0-1] bye!"],
        ["[ranks 0-1] hello", "[rank 1] between", "[ranks 0-1] bye!"],
        ["[rank 0] anew"],
    ]


def test_a_rank_has_its_own_lines_and_a_card_the_last_one_and_the_bar_above():
    code = """
const store = made();
tell(store, [[1, "0", "0%", null], [2, "0-2", "all", null], [3, "1", "…", null, 1], [4, "1", "of 1", null]]);
tell(store, [[1, null, "7%", null]]);
say([
  store.log.rows.filter((row) => isOf(row, 1)).map(lineOf),
  [0, 1, 2, 3].map((rank) => store.log.lastOf(rank)),
]);
"""
    assert run(code) == [
        ["[ranks 0-2] all", "…", "[rank 1] of 1"],
        [["7%", "all"], ["", "of 1"], ["", "all"], ["", ""]],
    ]


def test_who_has_missed_something_takes_everything_and_who_has_not_keeps_what_it_has():
    code = """
const all = (sequence, text) => ({ ...structuredClone(whole), sequence, parts: { head: text },
  log: { rows: [[1, "0", text, null]], gone: [], clear: true } });
const store = made();
tell(store, [[1, "0", "a", null]]);
store.begin(all(1, "the same"));
const kept = shown(store);
store.sequence += 1;
store.missed = true;
store.begin(all(2, "b"));
say([kept, shown(store), store.parts, store.missed]);
"""
    assert run(code) == [["[rank 0] a"], ["[rank 0] b"], {"head": "b"}, False]


def test_parts_come_and_go():
    code = """
const store = made(), heard = [];
store.listeners.add((keys) => heard.push([...keys]));
tell(store, [], { r0: "one", u0: "CPU", r10: "two" });
tell(store, [], { r0: null, r2: "three" });
say([store.ranks, heard]);
"""
    assert run(code) == [[2, 10], [["r0", "u0", "r10"], ["r0", "r2"]]]


def test_time_and_ranks_are_written_for_people():
    assert run("say([0, 61.9, 3725].map(formatSeconds))") == ["0:00", "1:01", "1:02:05"]
    assert run('say(["3", "0,2-4", ""].map(numbersOf))') == [[3], [0, 2, 3, 4], []]
    odd = ",".join(str(2 * number) for number in range(100))
    assert run(f"""
say(["3", "0-7", "{odd}"].map((ranks) => prefixOf({{ ranks }})));
""") == ["[rank 3]", "[ranks 0-7]", "[100 ranks]"]


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
tell(store, [[1, "0", "a", null]]);
const second = modelOf({{ name: "ours", whole: {{ ...whole, heard: [PAGE] }}, delta: {{}} }});
const closeSecond = initialize({{ model: second }});
const same = shared.stores.get("ours") === store && store.model === second;
closeFirst();
const kept = shared.stores.has("ours");
closeSecond();
say([same, shown(store), store.heard, kept, shared.stores.has("ours")]);
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
