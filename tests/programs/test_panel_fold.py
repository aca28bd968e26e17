"""The live view of all ranks: equal lines stand once, each rank's own order is kept; needs node."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from nblaunch.view import panel

SCRIPT = Path(panel.__file__).with_name("panel.js")
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is missing")

HARNESS = """
const whole = { sequence: 0, stop: false, age: 0, header: {}, rows: {}, values: {}, report: null,
  output: { attempt: 0, pieces: [], tails: {} } };
// Each tick is `{rank: [line, ...]}`; returns `[[ranks, line], ...]` as it stands after the last one.
function folded(ticks) {
  const store = new Store(structuredClone(whole)), numbers = {};
  for (const tick of ticks) {
    const pieces = [], tails = {};
    for (const [rank, lines] of Object.entries(tick)) {
      numbers[rank] ??= 0;
      tails[rank] = { sent: lines.flatMap((line) => [numbers[rank]++, pieces.push(line) - 1]) };
    }
    store.take({ sequence: store.sequence + 1, stop: false, ranks: null, report: null,
      output: { attempt: 0, pieces, tails } });
  }
  return store.fold.rows.map((row) => [[...row.members].sort((a, b) => a - b), textOf(row.piece)]);
}
"""


def folded(*runs):
    """Return the fold that the panel's script makes of each run, which is a list of ticks."""
    script = SCRIPT.read_text(encoding="utf-8").replace("export default", "const theWidget =")
    program = f"{script}\n{HARNESS}\nconsole.log(JSON.stringify({json.dumps(runs)}.map(folded)));"
    assert NODE is not None
    command = [NODE, "--input-type=module"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_whatever_arrives_when_each_rank_has_its_lines_in_order():
    chance = random.Random(7)
    said, runs = [], []
    for _ in range(200):
        ranks = [[chance.choice(["a", "b", "c", "", f"{rank}"]) for _ in range(12)] for rank in range(4)]
        left = [list(lines) for lines in ranks]
        ticks = []
        while any(left):
            cuts = [chance.randint(0, 4) for _ in left]
            ticks.append(
                {str(rank): lines[:cut] for rank, (lines, cut) in enumerate(zip(left, cuts, strict=True))}
            )
            left = [lines[cut:] for lines, cut in zip(left, cuts, strict=True)]
        said.append(ranks)
        runs.append(ticks)
    for ranks, rows in zip(said, folded(*runs), strict=True):
        for rank, lines in enumerate(ranks):
            assert [line for members, line in rows if rank in members] == lines


def test_lines_of_all_ranks_stand_between_lines_of_single_ranks_also_when_one_is_late():
    first = ["epoch 1", "loss 0.1", "epoch 2", "loss 0.2"]
    second = ["epoch 1", "loss 1.1", "epoch 2", "loss 1.2"]
    (together, late) = folded([{"0": first, "1": second}], [{"0": first}, {"1": second}])
    assert together == late
    assert late == [
        [[0, 1], "epoch 1"],
        [[0], "loss 0.1"],
        [[1], "loss 1.1"],
        [[0, 1], "epoch 2"],
        [[0], "loss 0.2"],
        [[1], "loss 1.2"],
    ]


def test_a_blank_line_does_not_keep_the_lines_after_it_from_being_shared():
    """Rank 1 has a blank line early; the next one of rank 0 is far below."""
    ((rows),) = folded([{"0": ["a", "b", "c", "", "d"]}, {"1": ["a", "", "b", "c", "d"]}])
    assert [line for members, line in rows if members == [0, 1]] == ["a", "b", "c", "d"]
