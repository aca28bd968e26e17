"""The parts of an export that need no kernel: literals, import statements, the torchrun command."""

from __future__ import annotations

import ast
import contextlib
import linecache
import math
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch._errors import NblaunchError
from nblaunch.export.expressions import UnknownError, evaluates_to
from nblaunch.export.files import how_to_load
from nblaunch.export.imports import Import, as_statements
from nblaunch.export.literals import LiteralWriter, NoLiteralError
from nblaunch.export.source import NotebookSource, indented
from nblaunch.export.writer import Cell, Setting, export
from nblaunch.options.command_line import torchrun_command
from nblaunch.options.launch import OPTIONS, LaunchOptions

_atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(...)
_values = st.recursive(
    _atoms,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.text())
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.from_regex("[a-z]+_", fullmatch=True), inner).map(lambda d: SimpleNamespace(**d))
    ),
    max_leaves=30,
)


def same(first: object, second: object) -> bool:
    """Compare as `==` does, but a NaN is a NaN and 1 is not True."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float) and isinstance(second, float):
        return repr(first) == repr(second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, SimpleNamespace) and isinstance(second, SimpleNamespace):
        return same(vars(first), vars(second))
    return first == second


def evaluated(value: object) -> object:
    """Write a value, run what was written, and return what it makes."""
    writer = LiteralWriter()
    text = writer.assignment("name", value)
    namespace: dict[str, Any] = {}
    exec(f"{as_statements(writer.imports)}\n{text}", namespace)  # noqa: S102 - that it runs is what is tested
    return namespace["name"]


@given(_values)
def test_a_literal_means_the_value_that_it_was_written_for(value: object) -> None:
    try:
        made = evaluated(value)
    except NoLiteralError:
        assert len(repr(value)) > 300, "only what is large is not written out"
    else:
        assert same(made, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "name = [1, 2]"),
        ("it's", 'name = "it\'s"'),
        ({"lr": 0.1, "steps": (1,)}, 'name = {"lr": 0.1, "steps": (1,)}'),
        (math.inf, 'name = float("inf")'),
        (Path("data/x"), 'name = Path("data/x")'),
        (set(), "name = set()"),
        (range(3), "name = range(0, 3)"),
        (int, "name = int"),
        ("one\ntwo\n", 'name = """\\\none\ntwo\n"""'),
        ({"a" * 100: []}, f'name = {{\n    "{"a" * 100}": [],\n}}'),
        (["a" * 40, "b" * 40], f'name = [\n    "{"a" * 40}",\n    "{"b" * 40}",\n]'),
    ],
)
def test_a_value_is_written_as_a_person_would(value: object, text: str) -> None:
    assert LiteralWriter().assignment("name", value) == text
    assert evaluated(value) == value


def test_an_object_with_a_field_that_its_class_does_not_take_is_no_literal() -> None:
    @dataclass
    class Config:
        rate: float
        cache: dict[str, int] = field(init=False)

    with pytest.raises(NoLiteralError):
        LiteralWriter(lambda _: "Config").assignment("config", Config(0.1))


def test_what_holds_itself_is_no_literal() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NoLiteralError):
        LiteralWriter().assignment("loop", loop)


def test_small_tensors_and_arrays_are_written_out_exactly() -> None:
    import numpy as np
    import torch

    assert LiteralWriter().assignment("t", torch.tensor([0.1, 2])) == "t = torch.tensor([0.1, 2.0])"
    for tensor in (torch.randn(4, 3), torch.arange(5), torch.tensor(1.5, dtype=torch.float64)):
        made = evaluated(tensor)
        assert isinstance(made, torch.Tensor)
        assert (made.dtype, made.tolist()) == (tensor.dtype, tensor.tolist())
    assert LiteralWriter().assignment("a", np.array([1, 2])) == "a = np.array([1, 2])"
    others = [torch.ones(2, requires_grad=True), torch.ones(4)[1:], torch.ones(100), torch.tensor(math.nan)]
    for other in others:
        with pytest.raises(NoLiteralError):
            LiteralWriter().assignment("t", other)


def test_imports_are_written_in_the_usual_order(tmp_path: Path) -> None:
    imports = [
        Import("torch"), Import("torch.nn.functional", alias="F"), Import("torch", "nn"), Import("os"),
        Import("collections", "OrderedDict"), Import("collections", "deque"), Import("abc", "ABC", "Base"),
        Import("numpy", alias="np"), Import("__future__", "annotations"), Import("xml"),
        Import("xml.etree.ElementTree"), Import("os.path", alias="osp"), Import("math", "pi"),
        Import("math", "e", "EULER"),
        *(Import("torch.distributed", name) for name in ("all_reduce", "all_gather", "barrier", "broadcast")),
        Import("torch.distributed", "ReduceOp"), Import("torch.distributed", "reduce_scatter_tensor"),
    ]  # fmt: skip
    path = tmp_path / "imports.py"
    path.write_text(as_statements(imports) + "\n")
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I,E", str(path)]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"{checked.stdout}\n{path.read_text()}"
    assert "import xml\n" not in path.read_text()
    assert "import os\nimport os.path as osp\n" in path.read_text()


_PIECES = [
    *('x = """', '"""', "y = '''", "'''", "x", "\n", "\n", "    "),
    *('z = f"""', "{x}", "#", '"', "\\", "(", ")"),
]


@given(st.lists(st.sampled_from(_PIECES)))
def test_indenting_changes_no_text_within_quotes(parts: list[str]) -> None:
    source = "".join(parts)
    try:
        before = ast.parse(source)
    except SyntaxError:
        return
    if before.body:
        after = ast.parse(f"if 1:\n{indented(source)}\n")
        assert ast.dump(ast.Module(after.body[0].body, [])) == ast.dump(before)  # type: ignore[attr-defined]


# Values in files


def loaded(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Save values, run the statements that load them, and return what these make."""
    directory.mkdir()
    found = how_to_load(values, lambda _: None, "DATA", device=False)
    for load in found:
        load.write(directory / load.file)
    imports = as_statements({each for load in found for each in load.imports})
    namespace: dict[str, Any] = {"DATA": directory}
    exec("\n".join([imports, *(load.text for load in found)]), namespace)  # noqa: S102 - as a script does
    return {name: namespace[name] for name in values}


def test_tensors_are_saved_with_safetensors_where_that_gives_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    base = torch.arange(12.0)
    values: dict[str, Any] = {
        "plain": torch.randn(3, 4),
        "weights": {"z": torch.ones(2, dtype=torch.bfloat16), "a": torch.zeros(1, dtype=torch.int16)},
        "view": base[3:],
        "base": base,
        "turned": torch.randn(3, 4).t(),
        "learned": torch.ones(2, requires_grad=True),
        "complex": torch.ones(2, dtype=torch.complex64),
        "nothing": torch.ones(0, 3),
    }
    for place, files in (
        ("with", {"plain.safetensors", "weights.safetensors", "objects.pt"}),
        ("without", {"objects.pt"}),
    ):
        made = loaded(values, tmp_path / place)
        assert {path.name for path in (tmp_path / place).iterdir()} == files
        assert list(made["weights"]) == ["z", "a"]
        flat = {**made, **made["weights"]}
        for name, value in {**values, **values["weights"]}.items():
            if name != "weights":
                assert torch.equal(flat[name], value)
                assert flat[name].dtype == value.dtype
        assert made["learned"].requires_grad
        made["base"][3] = 100
        assert made["view"][0] == 100, "they share their memory as they did in the notebook"
        monkeypatch.setitem(sys.modules, "safetensors", None)


def test_what_is_saved_together_is_one_object_again(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    inner = [1]
    values = {"model": model, "weight": model.weight, "one": {"inner": inner}, "two": (inner,)}
    made = loaded(values, tmp_path / "data")
    assert made["model"].weight is made["weight"]
    assert made["one"]["inner"] is made["two"][0]


def script(source: str, namespace: dict[str, Any] | None = None, *, device: str = "cpu") -> str:
    setting = Setting("gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl", device)
    cells = [Cell(source, "In[3]")]
    return export(cells, namespace or {}, {}, setting, command="torchrun x.py", directory="x_data").text


def test_on_gpus_each_rank_has_its_own() -> None:
    text = script("x = 1\nx", device="cuda")
    assert 'device = torch.device("cuda", local_rank)\n' in text
    assert (
        "    torch.cuda.set_device(device)\n"
        '    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)\n\n    x = 1\n'
    ) in text


def test_a_variable_called_dist_is_left_alone() -> None:
    text = script("dist = 3.5\ndist")
    assert "from torch.distributed import barrier, destroy_process_group, init_process_group\n" in text
    assert "    init_process_group(" in text
    assert "as dist" not in text


def test_a_name_that_only_ranks_have_is_told() -> None:
    with pytest.raises(NblaunchError, match=r"x \(made in In\[2\]\).* --cells 2,3$"):
        export(
            [Cell("x + 1", "In[3]")],
            {"x": 1},
            {},
            Setting(None, "cpu"),
            command="",
            directory="",
            elsewhere={"x": 2, "y": 1},
        )


def test_a_class_whose_property_got_its_setter_later_is_not_what_its_statement_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = {
        1: "class Box:\n    @property\n    def size(self):\n        return 1",
        2: "def put(self, value):\n    pass\nBox.size = Box.size.setter(put)",
    }
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, text in cells.items():
        name = f"<cell {number}>"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), namespace)  # noqa: S102 - as a notebook does
        source = NotebookSource(dict(list(cells.items())[:number]))
        assert (source.definition("Box", namespace["Box"]) is None) == (number > 1)


# torchrun's command


PLAIN = "torchrun --standalone --nproc-per-node 2 train.py"


def parsed(command: str) -> Any:
    from torch.distributed.run import get_args_parser

    words = shlex.split(command.splitlines()[-1])
    return get_args_parser().parse_args(words[words.index("torchrun") + 1 :])


def test_the_defaults_that_are_not_torchruns_are_known() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {action.dest: action.default for action in get_args_parser()._actions}
    same_meaning = {
        "nnodes": "1",
        "nproc_per_node": 1,
        "local_ranks_filter": None,
        "duplicate_stdout_filters": (),
        "duplicate_stderr_filters": (),
    }
    told = {option.name: option.torchrun_default for option in OPTIONS if option.name in theirs}
    assert told == {name: same_meaning.get(name, theirs[name]) for name in told}


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({}, PLAIN),
        ({"nproc_per_node": "gpu"}, "torchrun --standalone --nproc-per-node gpu train.py"),
        ({"max_restarts": 3}, "torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py"),
        ({"role": "default", "monitor_interval": 0.1, "start_method": "spawn"},
         PLAIN),
        ({"role": "my trainer"}, "torchrun --standalone --nproc-per-node 2 --role 'my trainer' train.py"),
        ({"role": "-x"}, "torchrun --standalone --nproc-per-node 2 --role=-x train.py"),
        ({"role": "-x;y"}, "torchrun --standalone --nproc-per-node 2 --role='-x;y' train.py"),
        ({"nnodes": "1:2", "rdzv_endpoint": "node0:29400"},
         "torchrun --nproc-per-node 2 --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py"),
        ({"env": {"A": "b c", "HF_TOKEN": "hush"}},
         """A='b c' HF_TOKEN="$HF_TOKEN" torchrun --standalone --nproc-per-node 2 train.py"""),
        ({"redirects": "3", "local_ranks_filter": (0, 1), "virtual_local_rank": True},
         PLAIN.replace(" t", " --virtual-local-rank --redirects 3 --local-ranks-filter 0,1 t")),
        ({"timeout": 60, "grace": 1},
         "# torchrun has no --timeout (60.0)\n# torchrun has no --grace (1.0)\n" + PLAIN),
        ({"backend": "gloo", "init_process_group": False, "fresh": True, "out": "res", "export": "train.py"},
         PLAIN),
    ],
)  # fmt: skip
def test_the_command_has_what_was_asked_for_and_torchrun_has(options: dict[str, Any], command: str) -> None:
    assert torchrun_command(LaunchOptions(**options), "train.py", 2) == command
    read = parsed(command)
    assert read.training_script == "train.py"
    for name, value in options.items():
        if hasattr(read, name):
            taken = getattr(read, name)
            expected = ",".join(map(str, value)) if isinstance(value, tuple) else value
            assert str(taken) == str(expected)


# Expressions


_constants = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3)
_operators = st.sampled_from([" + ", " - ", " * ", " / ", " // ", " % ", " ** ", " << "])
_expressions = st.recursive(
    _constants.map(repr)
    | st.sampled_from(["x", "pair", "table", "math.pi", "table['a']", "pair[0]", "[]", "{}"]),
    lambda inner: (
        st.tuples(inner, _operators, inner).map(lambda parts: f"({''.join(parts)})")
        | st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.lists(inner, max_size=3).map(lambda parts: f"({''.join(part + ', ' for part in parts)})")
        | inner.map(lambda part: f"{{'k': {part}}}")
        | inner.map(lambda part: f"float({part})")
        | inner.map(lambda part: f"-{part}")
    ),
    max_leaves=8,
)


@given(_expressions)
def test_what_an_expression_gives_is_told_without_running_it(text: str) -> None:
    scope: dict[str, Any] = {"x": 3, "pair": (1, [2]), "table": {"a": 1}, "math": math}
    node = ast.parse(text, mode="eval").body
    try:
        value = eval(text, dict(scope))  # noqa: S307 - made here
    except Exception:  # noqa: BLE001 - then there is no value to be compared
        return
    with contextlib.suppress(UnknownError):
        assert evaluates_to(node, value, scope)
        assert not evaluates_to(node, object(), scope)


def test_equal_objects_that_others_refer_to_are_not_the_same() -> None:
    shared = [1]
    name = ast.parse("shared", mode="eval").body
    assert evaluates_to(name, shared, {"shared": shared})
    assert not evaluates_to(name, [1], {"shared": shared})
    for text, value in (("0.0", -0.0), ("1", True), ("(1,)", [1]), ("{'a': 1}", {"a": 1, "b": 2})):
        assert not evaluates_to(ast.parse(text, mode="eval").body, value, {})
    with pytest.raises(UnknownError):
        evaluates_to(ast.parse("f(1)", mode="eval").body, 1, {"f": int.__add__})
