"""The layout is the architecture: a module imports only what stands below it in `LAYERS`."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import pytest

from nblaunch.options.launch import OPTIONS, LaunchOptions
from nblaunch.options.table import Scope, Torchrun

PACKAGE = Path(__file__).parents[2] / "nblaunch"

LAYERS = (
    *("data", "options", "protocol", "insight", "results", "capture", "probes", "rank"),
    *("diagnose", "host", "group", "nodes", "runtime", "client"),
    *("view", "export", "checks", "magic", "testing", "door"),
)
"""Lowest first. `data` is every top-level module but `_results` and the doors; the others are folders."""

DOORS = {
    *("nblaunch", "nblaunch.__main__", "nblaunch._api", "nblaunch._demo", "nblaunch._insight"),
    "nblaunch._pytest",
}
"""Where users come in; these may import anything, `nblaunch` itself only inside functions."""

RUNTIME = {"probes", "rank", "host", "group", "nodes", "runtime"}
"""What runs in a runtime's process, in those that it has forked, and on nodes that join."""

CLIENTS = {"client", "view", "export", "magic", "testing", "door"}
"""What runs in a kernel, a script or a command line; `checks` looks at both sides."""

MAY_BE_A_NODE = {"nblaunch.__main__"}
"""`python -m nblaunch join` has a runtime of its own."""

THIRD_PARTY = {
    "data": {"msgspec", "psutil"},
    "options": set(),
    "protocol": set(),
    "insight": {"msgspec", "pandas"},
    "capture": {"cloudpickle", "numpy", "psutil", "safetensors", "torch"},
    "probes": {"msgspec", "torch"},
    "rank": {"IPython", "msgspec", "torch", "traitlets", "zmq"},
}
"""What the lowest layers may import from outside, over and above the layers below them."""

OUTSIDE_A_CLIENT = {"msgspec", "psutil"}
"""What a client may import from outside: it starts in a moment, beside the runtime that loads torch."""

TORCH_IN_A_KERNEL = {"nblaunch.capture.recipes", "nblaunch.capture.tensors", "nblaunch.export.files"}
"""Where a kernel may load torch: for a value that is torch's, which is sent, or written for a script."""

A_LIST = 3
"""So many names of options in one literal are a list of options."""

STATE_OF_THE_KERNEL = {"nblaunch.client.local", "nblaunch.magic.sessions", "nblaunch.magic.auto"}
"""What a client has once, a notebook's sessions, and its switch: the modules that keep what changes."""

OTHER_STATE = {
    "nblaunch.capture.arrays": "what stands for the memory of an array, while the array is there",
    "nblaunch.capture.recipes": "which recipe a class has, looked for once",
    "nblaunch.capture.pickling": "which class is which in pickles: ranks and kernel know them for their life",
    "nblaunch.capture.walk": "which attributes of a class only cache what it has computed, looked for once",
    "nblaunch.capture.tensors": "by thread: pickle hands its reducers nothing but the object",
    "nblaunch.host.forkserver": "by thread: multiprocessing hands what starts a process nothing but it",
    "nblaunch.host.keeper": "a program of its own: the queues that it waits on",
    "nblaunch.view.panel": "how many pages came to this kernel, and the last panels for those that come back",
    "nblaunch.magic.export": "the cells that this notebook has run, by number",
}
"""Other modules that keep what changes, and why."""

WITHOUT_STATE = {
    *("ParamSpec", "TypeVar", "Path", "Path(__file__).with_name", "ctypes.CDLL", "frozenset", "tuple"),
    *("type", "functools.reduce", "logging.getLogger", "re.compile"),
    *("msgspec.msgpack.Decoder", "msgspec.msgpack.Encoder"),
}
"""Calls whose results nobody changes, whatever name they have."""

CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "put"),
    *("remove", "reverse", "setdefault", "sort", "update", "__setitem__"),
}
"""Methods that change what they are called on."""

MOST_LINES = 60
"""Of a function; how many branches it may have is C901's, in pyproject.toml."""


@dataclass(frozen=True)
class Import:
    """One import statement: `importer` loads `imported` at `line`."""

    importer: str
    imported: str
    line: int
    lazy: bool
    only_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    if module in DOORS:
        return "door"
    name = module.split(".")[1]
    if name == "_results":
        return "results"
    return "data" if name.startswith("_") else name


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(path: Path) -> Iterator[Import]:
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, *, lazy: bool, only_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, lazy, only_types)
        elif isinstance(node, ast.ImportFrom):
            for name in imported_by(node, package):
                yield Import(module, name, node.lineno, lazy, only_types)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        only_types = only_types or is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy=lazy, only_types=only_types)

    yield from visit(tree_of(path), lazy=False, only_types=False)


def imported_by(node: ast.ImportFrom, package: str) -> Iterator[str]:
    """Return the modules; `from nblaunch import rank` and `from . import rank` name `nblaunch.rank`."""
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if base.split(".")[0] == "nblaunch" and exists(inner) else base


def exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imports() -> list[Import]:
    return [each for path in MODULES for each in imports_of(path)]


@functools.cache
def ours() -> list[Import]:
    return [each for each in imports() if each.imported.split(".")[0] == "nblaunch"]


def importers_of(*packages: str) -> set[str]:
    """Return the modules that import something of these packages."""
    return {each.importer for each in imports() if each.imported.split(".")[0] in packages}


def between(importers: set[str], imported: set[str]) -> list[Import]:
    """Return the imports of modules in some layers that lead to others."""
    return [
        each
        for each in ours()
        if layer_of(each.importer) in importers and layer_of(each.imported) in imported
    ]


def test_every_module_stands_in_a_layer():
    assert {layer_of(module_name(path)) for path in MODULES} <= set(LAYERS)


def test_no_module_imports_upwards():
    """Imports for annotations alone count too: a type is knowledge."""
    upwards = [
        str(each)
        for each in ours()
        if LAYERS.index(layer_of(each.imported)) > LAYERS.index(layer_of(each.importer))
    ]
    assert upwards == []


def test_no_modules_import_one_another():
    """So every folder has an order, too, in which its modules can be read; a type or a late import counts."""
    loads: dict[str, set[str]] = {}
    for each in ours():
        if each.imported != each.importer:
            loads.setdefault(each.importer, set()).add(each.imported)
    graphlib.TopologicalSorter(loads).prepare()  # raises CycleError, which names the circle


def test_a_client_knows_nothing_of_what_runs_in_the_runtime():
    """Nor does that know its clients; between the two is the protocol."""
    sides = between(CLIENTS, RUNTIME) + between(RUNTIME, CLIENTS)
    across = {each.importer for each in sides if each.imported != "nblaunch"}
    assert across == MAY_BE_A_NODE


def loaded_by(module: str) -> set[str]:
    """Return our modules that `module` loads, at once or later, and those that they load.

    But for the checks that a user starts: these look at what the runtime is made of.
    """
    found, new = set(), {module}
    while new:
        found |= new
        loads = [each for each in ours() if each.importer in new and not each.only_types]
        new = {
            each.imported for each in loads if not (each.lazy and layer_of(each.imported) == "checks")
        } - found
    return found


def test_a_kernel_loads_no_zmq_of_ours_and_torch_only_for_values_that_are_torchs():
    loaded = loaded_by("nblaunch.magic.magics") | loaded_by("nblaunch._api")
    users = [each for each in imports() if each.importer in loaded and not each.only_types]
    assert {each.importer for each in users if each.imported.split(".")[0] == "zmq"} == set()
    torch = [each for each in users if each.imported.split(".")[0] == "torch"]
    assert {each.importer for each in torch} == TORCH_IN_A_KERNEL
    assert all(each.lazy for each in torch)


MAKES_HOSTS = {"nblaunch.runtime.worker_groups"}
"""What starts worker groups hands each of them the function that makes its hosts."""

ASKS_FOR_NODES = {"nblaunch.runtime.place"}
"""What judges a request before anything is started."""

KEEPS_NODES = {"nblaunch.runtime.requests", "nblaunch.runtime.runtime_session"}
"""What may have nodes that outlive a group: a session's, and those that the doctor asks for."""


def test_a_worker_group_knows_its_ranks_only_as_those_of_hosts():
    importers = {each.importer for each in ours() if each.imported.startswith("nblaunch.nodes")}
    others = {each for each in importers if layer_of(each) != "nodes"} - KEEPS_NODES
    assert others == MAKES_HOSTS | ASKS_FOR_NODES
    of_group = {each.imported for each in ours() if each.importer == "nblaunch.group.group"}
    of_hosts = {each for each in of_group if each.startswith("nblaunch.host")}
    assert of_hosts == {"nblaunch.host.local_host", "nblaunch.host.rank_host", "nblaunch.host.settings"}


def test_a_worker_group_does_not_know_whether_a_notebook_runs_it():
    notebook = {"IPython", "ipykernel", "nblaunch._notebook"}
    users = {each.importer for each in imports() if each.imported in notebook}
    assert {layer_of(each) for each in users} & {"host", "group", "nodes", "runtime"} == set()


def test_the_lowest_layers_import_little_from_outside():
    allowed = {"nblaunch", *sys.stdlib_module_names}
    outside = []
    for layer, more in THIRD_PARTY.items():
        allowed |= more
        outside += [
            str(each)
            for each in imports()
            if layer_of(each.importer) == layer and each.imported.split(".")[0] not in allowed
        ]
    assert outside == []


def test_a_client_knows_the_runtime_by_the_protocol_alone():
    """What it is made of, and what that needs, is loaded in the runtime's process and not in the kernel."""
    of_client = [each for each in imports() if layer_of(each.importer) == "client"]
    allowed = {"nblaunch", *OUTSIDE_A_CLIENT, *sys.stdlib_module_names} - {"asyncio"}
    assert [str(each) for each in of_client if each.imported.split(".")[0] not in allowed] == []
    assert [str(each) for each in of_client if each.imported == "psutil" and not each.lazy] == []


def test_what_is_a_callers_comes_with_its_requests():
    """A runtime has another environment and directory than the process that it works for."""
    own = {"os.environ", "os.getcwd", "os.getpid", "sys.argv", "Path.cwd"}
    used = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name in ("place", "worker_groups")
        for node in nodes_of(PACKAGE / "runtime" / f"{name}.py")
        if isinstance(node, ast.Attribute)
        and (ast.unparse(node) in own or node.attr in {"absolute", "resolve"})
    ]
    assert used == []


def test_what_decides_on_the_life_of_a_group_has_no_clock_no_thread_and_no_io():
    names = ("ending", "fitness", "lifecycle", "locating", "machine", "recovery")
    machines = {f"nblaunch.group.{each}" for each in names}
    pure = {
        "__future__",
        "collections.abc",
        "dataclasses",
        "enum",
        "functools",
        "msgspec",
        "msgspec.structs",
        "typing",
    }
    ours = ("nblaunch.options", "nblaunch.protocol", "nblaunch.diagnose", *machines)
    others = [str(each) for each in imports() if each.importer in machines and each.imported not in pure]
    assert [each for each in others if not each.split(" imports ")[1].startswith(ours)] == []


def test_only_the_view_draws_with_widgets():
    assert {layer_of(module) for module in importers_of("anywidget", "ipywidgets")} <= {"view"}


def test_a_view_knows_states_and_nothing_of_the_group_that_it_shows():
    """`View` is a protocol's: the group draws on one that it has been given."""
    below = {"group", "host", "nodes", "capture", "rank"}
    assert list(map(str, between({"view"}, below))) == []


def test_the_front_door_imports_upper_layers_only_when_they_are_used():
    eager = [
        str(each)
        for each in ours()
        if each.importer == "nblaunch"
        and not (each.lazy or each.only_types)
        and layer_of(each.imported) != "data"
    ]
    assert eager == []


BLAME = "nblaunch.diagnose.failures"
DERIVED = {"Alike", "Blame", "Reason", "blame", "without_ports"}
"""What views may take from there: what it has found, and its words."""


def test_one_module_decides_who_is_to_blame():
    """Others pass on what it has found: they neither look for causes nor group failures."""
    elsewhere = []
    for path in MODULES:
        module = module_name(path)
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module in {BLAME, BLAME.rpartition(".")[0]}:
                names = {alias.name for alias in node.names}
                allowed = DERIVED if layer_of(module) == "view" else names - {"explain"}
                elsewhere += [f"{module} imports {name}" for name in sorted(names - allowed)]
            elif isinstance(node, ast.Compare) and module != BLAME and "consequence_of" in ast.unparse(node):
                elsewhere.append(f"{module}:{node.lineno} compares consequence_of")
    assert elsewhere == []


def test_no_list_of_options_is_kept_beside_the_table():
    """What such a list would say of options is a column of `LaunchOptions`."""
    options = {each.name for each in fields(LaunchOptions)}
    lists = {}
    for path in MODULES:
        for node in nodes_of(path):
            if not isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                continue
            words = node.keys if isinstance(node, ast.Dict) else node.elts
            texts = [each.value for each in words if isinstance(each, ast.Constant)]
            names = {str(text).lstrip("-").replace("-", "_") for text in texts} & options
            if len(names) >= A_LIST:
                lists[f"{module_name(path)}:{node.lineno}"] = names
    assert lists == {}


def test_every_option_has_every_column():
    table = {each.name: each for each in OPTIONS}
    assert list(table) == [each.name for each in fields(LaunchOptions)]
    assert {each.scope for each in OPTIONS} == set(get_args(Scope))
    assert {each.torchrun for each in OPTIONS} == set(get_args(Torchrun))


def test_no_two_types_share_a_name():
    """A leading underscore makes no difference: a reader meets both in the same package."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for name in types_of(tree_of(path)):
            places.setdefault(name.lstrip("_"), []).append(module_name(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def types_of(tree: ast.Module) -> Iterator[str]:
    """Return the classes of a module and its names for types, but no type variables."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            variable = node.value is not None and ast.unparse(node.value).startswith("TypeVar(")
            if re.fullmatch(r"_?[A-Z]+[a-z]\w*", name) and not variable:
                yield name


def test_no_two_modules_share_a_name():
    names = [path.stem for path in MODULES if not path.stem.startswith("__")]
    assert sorted(names) == sorted(set(names))


OTHER_WORDS = {"give", "gives", "giver", "meet", "meets", "wish", "fate", "said", "look", "looks", "remark"}
"""The field says submit, owner, rendezvous, request, status, reported, query, and notice."""


def test_names_are_the_words_of_the_field():
    found = {
        f"{module_name(path)}: {name}"
        for path in MODULES
        for name in names_given_by(tree_of(path))
        if OTHER_WORDS & {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
    }
    assert found == set()


def names_given_by(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module gives to something."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name
            case _:
                pass


def test_no_function_is_too_long_to_read():
    functions = {
        f"{module_name(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in functions.items() if lines > MOST_LINES} == {}


# What each layer may touch; who else may has the reason beside it.

RANKS_DOORS = {
    "nblaunch.host.preload",  # the fork server
}

SOCKETS = {
    "nblaunch.rank.control",
    "nblaunch.host.hub",
    "nblaunch.host.link",
    "nblaunch.host.relay",
    "nblaunch.host.node_main",
}

SPEAKERS = {
    "nblaunch.__main__",
    "nblaunch._demo",
    "nblaunch.host.join",
    "nblaunch.testing.module_sessions",  # pytest -s
    "nblaunch.host.node_main",
    "nblaunch.client.preparation",  # notices: other nodes join while the run waits
    "nblaunch.client.run",  # what ranks ask is answered while the run waits
}

TORCHS_PRIVATE = {
    "nblaunch._devices": "which CPUs are near a GPU",
    "nblaunch.capture.recipes": "what torch.compile, parametrize and custom_op have made of objects",
    "nblaunch.capture.tensors": "storages that are shared, how tensors are rebuilt, hooks, counts of changes",
    "nblaunch.host.agent": "the steps of the agent, and its processes",
    "nblaunch.host.hooks": "the watchdog's and the event log's own steps",
    "nblaunch.host.placement": "devices as NVML counts them, without CUDA",
    "nblaunch.host.rendezvous": "a rendezvous that can be left and repeated from another thread",
    "nblaunch.probes.collectives": "a kernel before each collective",
    "nblaunch.probes.profiling": "gloo's flight recorder",
    "nblaunch.rank.environment": "TORCH_LOGS, which torch reads once",
    "nblaunch.rank.failure": "the repr of a tensor whose device is busy",
    "nblaunch.rank.namespace": "hooks of a DDP whose group is gone",
    "nblaunch.rank.in_place": "how torch makes a group, and forms it again; steps of models that did not end",
    "nblaunch.rank.process_group": "groups and their ranks; an abort from another thread",
    "nblaunch.rank.flight_recorder": "the flight recorders",
    "nblaunch.rank.sharded": "meshes within meshes, shapes of shards; what FSDP2 keeps of a model",
    "nblaunch.rank.stacks": "the sequence number of the default group",
}

PURE = {path for path in MODULES if layer_of(module_name(path)) == "protocol"} | {
    PACKAGE / "diagnose" / "failures.py",
    PACKAGE / "nodes" / "director.py",
    PACKAGE / "nodes" / "versions.py",
}
WORLD = {"asyncio", "datetime", "queue", "selectors", "socket", "subprocess", "threading", "time", "zmq"}


def calls_of(path: Path, names: set[str]) -> list[str]:
    """Return where a module calls one of these functions by its bare name."""
    return [
        f"{module_name(path)}:{node.lineno} {node.func.id}"
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def private_names_of(path: Path) -> set[str]:
    """Return the private names that a module takes from others than itself and the standard library."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            owner, names = ast.unparse(node.value), [node.attr]
        elif isinstance(node, ast.ImportFrom):
            owner, names = node.module or "", [*(node.module or "").split("."), *(a.name for a in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, names = ast.unparse(node.args[0]), [ast.unparse(node.args[1]).strip("'")]
        else:
            continue
        if owner.split(".")[0] not in {*sys.stdlib_module_names, "self", "cls", "nblaunch"}:
            found |= {name for name in names if re.fullmatch(r"_[a-zA-Z]\w*", name)}
    return found


def test_the_kernel_imports_nothing_of_what_runs_in_a_rank():
    outside = {each.importer for each in ours() if layer_of(each.importer) not in {"probes", "rank"}}
    importers = {each.importer for each in ours() if each.imported.startswith("nblaunch.rank")}
    assert importers & outside == RANKS_DOORS


def test_only_the_hub_the_listener_nodes_and_ranks_have_zmq_sockets():
    assert importers_of("zmq") == SOCKETS


def test_torchs_private_names_are_used_only_where_the_reason_is_given():
    users = importers_of("torch")
    private = {module_name(path): private_names_of(path) for path in MODULES}
    assert {name for name in users | set(TORCHS_PRIVATE) if private[name]} == set(TORCHS_PRIVATE)


def test_only_views_magics_and_command_lines_print_and_read():
    others = [
        path
        for path in MODULES
        if layer_of(module_name(path)) not in {"view", "magic"} and module_name(path) not in SPEAKERS
    ]
    assert [call for path in others for call in calls_of(path, {"print", "input"})] == []


def test_the_protocol_the_root_cause_and_who_meets_need_no_clock_thread_or_file():
    """So each is a function of what it is given, and a test needs no process."""
    names = {module_name(path) for path in PURE}
    imported = {str(each) for each in imports() if each.importer in names and each.imported in WORLD}
    opened = [call for path in PURE for call in calls_of(path, {"open", "print", "input"})]
    assert (imported, opened) == (set(), [])


KERNEL = {
    module_name(path): path for path in MODULES if layer_of(module_name(path)) not in {"probes", "rank"}
}
"""The modules that a kernel may load: those of `probes` and `rank` run in processes of their own."""


def test_modules_keep_state_in_few_places_and_for_a_reason():
    keeping = {module for module, path in KERNEL.items() if set(state_of(tree_of(path)))}
    assert keeping == STATE_OF_THE_KERNEL | OTHER_STATE.keys()


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("_known = {}", {"_known"}),
        ("_lock = threading.Lock()", {"_lock"}),
        ("if sys:\n    LIMITS: dict = {}\ndef f():\n    LIMITS['a'] = 1", {"LIMITS"}),
        ("KNOWN = []\ndef f():\n    KNOWN.append(1)", {"KNOWN"}),
        ("count = 0\ndef f():\n    global count\n    count += 1", {"count"}),
        ("LIMITS = {'a': 1}\n_name = re.compile('a')\ndef f():\n    known = {}\n    known['a'] = 1", set()),
    ],
)
def test_what_a_module_keeps_is_found(source, state):
    assert set(state_of(ast.parse(source))) == state


def test_no_module_changes_what_another_one_keeps():
    """But for the fork server's own process, which says so to the ranks that are its forks."""
    changing = {
        module
        for module, path in KERNEL.items()
        for names in [of_ours(tree_of(path))]
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if isinstance(node.value, ast.Name) and node.value.id in names
    }
    assert changing == {"nblaunch.host.preload"}


def of_ours(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from the package, under the names that it gives them."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nblaunch"
        for alias in node.names
    }


def state_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module that are not constants.

    A constant has a name in capitals, which nothing in the module changes, or a value that cannot change.
    """
    bound = dict(bound_by(tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id in bound:
                yield node.value.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value
            if node.func.attr in CHANGES and isinstance(changed, ast.Name) and changed.id in bound:
                yield changed.id
    for name, value in bound.items():
        if not (name.isupper() or name.startswith("__")) and may_change(value):
            yield name


def bound_by(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module binds to values of its own, and these."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from bound_by([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value


def may_change(value: ast.expr) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, displays) or (
        isinstance(value, ast.Call) and ast.unparse(value.func) not in WITHOUT_STATE
    )


def test_one_module_acts_at_the_end_of_the_process_and_in_its_forks():
    """There the order is decided in which things end; a rank's own hook is in `rank`.

    The doctor waits for a check that is loading torch: Python would end while that is half loaded.
    """
    hooks = [
        (module, ast.unparse(node.func))
        for module, path in KERNEL.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"atexit.register", "os.register_at_fork"}
    ]
    assert sorted(hooks) == [
        ("nblaunch.checks.doctor", "atexit.register"),
        ("nblaunch.client.local", "atexit.register"),
        ("nblaunch.client.local", "os.register_at_fork"),
    ]


# --- The docstring of a package is its theory of operation, and the order in which to read its modules.

PACKAGES = {path.parent.name: path for path in PACKAGE.glob("*/__init__.py")}


def theory_of(package: str) -> str:
    return ast.get_docstring(ast.parse(PACKAGES[package].read_text())) or ""


def reading_order(package: str) -> list[str]:
    """Return the modules that the docstring lists, in its order."""
    _, _, listed = theory_of(package).partition("\nModules, each after those that it imports:\n")
    return re.findall(r"^ {4}(\w+) ", listed, flags=re.MULTILINE)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_says_in_ten_to_sixty_lines_how_it_works(package):
    assert 10 <= len(theory_of(package).splitlines()) <= 60


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_names_each_of_its_modules_once(package):
    modules = {path.stem for path in PACKAGES[package].parent.glob("*.py")} - {"__init__"}
    assert sorted(reading_order(package)) == sorted(modules)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_module_imports_only_those_that_its_package_names_before_it(package):
    place = {f"nblaunch.{package}.{module}": at for at, module in enumerate(reading_order(package))}
    too_early = [
        str(each)
        for each in ours()
        if not each.only_types
        and each.importer in place
        and place.get(each.imported, -1) > place[each.importer]
    ]
    assert too_early == []


def test_the_map_of_the_code_has_every_layer_and_names_modules_that_are_there():
    text = (PACKAGE.parent / "notebooks" / "docs" / "code-map.md").read_text()
    drawn = re.findall(r"^([a-z]+|_results)  +\S", text, flags=re.MULTILINE)
    assert [name.strip("_") for name in drawn] == [name for name in LAYERS if name not in {"data", "door"}]
    modules = {name for name in re.findall(r"`(\w+/[\w.]+)`", text) if name.split("/")[0] in PACKAGES}
    assert len(modules) > len(PACKAGES)
    assert [name for name in modules if not (PACKAGE / name).is_file()] == []
    tests = re.findall(r"`((?:unit|ranks|programs)/\w+\.py)`", text)
    assert [name for name in tests if not (PACKAGE.parent / "tests" / name).is_file()] == []
