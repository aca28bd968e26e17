"""What the ranks have is compared with what the notebook has, also at a third look: a short way."""

from __future__ import annotations

import pytest
import torch

from nblaunch.capture.capture import capture_cell
from nblaunch.client.knowledge import Knowledge
from nblaunch.protocol.messages import Names


class Notebook:
    """A namespace whose variables one rank has got."""

    def __init__(self, source: str) -> None:
        self.variables: dict[str, object] = {"__name__": "__main__", "torch": torch}
        self.run(source)
        self.knowledge = Knowledge()
        self.knowledge.begin(0, 1)
        self.names: dict[int, Names] = {}

    def run(self, source: str) -> None:
        exec(source, self.variables)  # noqa: S102 - a cell of the test's own

    def changed(self, cell: str) -> set[str]:
        """Send what a cell uses; return the variables that were changed since they were sent."""
        [view] = self.knowledge.views([0], self.names, self.variables)
        captured = capture_cell(cell, self.variables, known=view)
        self.knowledge.remember(view, view.delivery(captured))
        view.look_for_changes()
        had = self.names[0].names if 0 in self.names else ()
        self.names[0] = Names(rank=0, names=(*had, *captured.names, *captured.packed.carried))
        return view.changed


MODEL = """
class Block(torch.nn.Module):
    scale = 2
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.options = {"rates": [0.1, 0.2], "names": {"first": "a"}, "none": {}}
        self.steps = []
        self.made = torch.ones(2) * 1
class Tied:
    __slots__ = ("__dict__",)
net = torch.nn.ModuleList(Block() for _ in range(3))
tied = Tied()
tied.net = net
"""

CHANGES = [
    "net[1].new = 1",
    "net[1].training = False",
    "net[1].training = 1",
    "del net[1].steps",
    "net[1].steps.append(1)",
    "net[1].steps = None",
    "net[1].steps = ()",
    "net[1].options['rates'][0] = 0.3",
    "net[1].options['rates'] = [0.1, 0.3]",
    "net[1].options['names']['first'] = 'b'",
    "net[1].options['names']['second'] = 'b'",
    "net[1].options['none']['first'] = 'b'",
    "net[1].made += 1",
    "net[1].made = net[0].made",
    "net[1].linear.weight.data = torch.ones(2, 2)",
    "net[1].linear.weight.requires_grad_(False)",
    "net[1].linear.weight.grad = torch.ones(2, 2)",
    "net[1].linear.weight.register_hook(print)",
    "net[1].linear.weight = torch.nn.Parameter(torch.ones(2, 2))",
    "net[1].linear = net[0].linear",
    "net[1].register_forward_hook(print)",
    "net.append(Block())",
    "Block.scale = 3",
    "Block.forward = lambda self, x: x",
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("looks", [1, 3])
def test_a_change_of_a_model_is_seen_and_nothing_else_is(change, looks):
    notebook = Notebook(MODEL)
    assert [notebook.changed("net, tied") for _ in range(looks)] == [set()] * looks
    notebook.run(change)
    assert notebook.changed("net, tied") == {"net", "tied"}


@pytest.mark.parametrize(
    "change",
    ["words['w50000'] = -2", "words['w3'] = 0.5", "words['new'] = words.pop('w3')", "del words['w7']"],
)
def test_a_change_anywhere_in_a_large_dictionary_is_seen(change):
    notebook = Notebook("words = {f'w{i}': -1 for i in range(100_000)}")
    assert [notebook.changed("words") for _ in range(3)] == [set()] * 3
    notebook.run(change)
    assert notebook.changed("words") == {"words"}


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("found = [1j]", "found.append(2j)"),
        ("found = {'a': 1j}", "found['a'] = 2j"),
        ("found = ['text' * 5_000_000]", "found.append('more')"),
        ("found = ['a', 'text' * 5_000_000]", "found[0] = 'b'"),
    ],
)
def test_a_change_in_a_container_of_numbers_and_texts_is_seen(source, change):
    notebook = Notebook(source)
    assert [notebook.changed("found") for _ in range(3)] == [set()] * 3
    notebook.run(change)
    assert notebook.changed("found") == {"found"}


def test_what_is_kept_to_compare_a_large_dictionary_goes_with_it():
    notebook = Notebook("words = {f'w{i}': -1 for i in range(20_000)}")
    for _ in range(3):
        notebook.changed("words")
    table = notebook.knowledge._table
    assert table.attached
    notebook.run("del words")
    notebook.knowledge.sweep()
    assert not table.attached
