"""Names that are not public, of torch and of Python, that nblaunch uses: each is still there.

When a new torch breaks one, the failure says which; nothing else here says it as early or as plainly.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import importlib
import inspect
import json
import re
import sys
import tempfile
import threading
from dataclasses import replace
from multiprocessing import context, forkserver, popen_forkserver, process, resource_tracker, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch.distributed import HashStore, _composable_state, device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic import events as torch_events
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.timer import FileTimerServer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import _utils as dtensor_utils

from nblaunch._errors import OptionError
from nblaunch._runtime_dir import RuntimeDirectory
from nblaunch.host import agent as our_agent
from nblaunch.host import forkserver as our_forkserver
from nblaunch.host import rendezvous as our_rendezvous
from nblaunch.options.launch import LaunchOptions
from nblaunch.probes import collectives
from nblaunch.rank import in_place

ELASTIC = Path(our_agent.__file__)
AGENT_FILES = (ELASTIC, Path(our_rendezvous.__file__))

AGENT = {
    *("_start_workers", "_monitor_workers", "_restart_workers", "_assign_worker_ranks", "_exit_barrier"),
    *("_shutdown", "_pcontext", "_worker_group", "_remaining_restarts"),
    *("_setup_local_watchdog", "_setup_healthcheck", "_worker_watchdog", "_log_watchdog_event"),
}
CONTEXT = {"_pc", "_ret_vals"}
RENDEZVOUS = {
    *("_create_tcp_store_server", "_state_holder", "_shared_tcp_store_server", "_bootstrap_store_info"),
    *("_this_node", "_stop_heartbeats", "_op_executor"),
}
STATIC = {"_store"}
USED = AGENT | CONTEXT | RENDEZVOUS | STATIC
ROOT_OF_A_MESH = (
    (DeviceMesh, "_get_root_mesh")
    if torch.__version__ >= "2.13"
    else (device_mesh._mesh_resources, "get_root_mesh")
)


def broken(owner: object, name: str) -> str:
    kind = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
    versions = f"torch {torch.__version__} or Python {sys.version.split()[0]}"
    return f"{versions} broke {kind.__name__}.{name}, which nblaunch uses; it worked with torch 2.8 to 2.15"


@pytest.fixture
def rendezvous():
    """Make torch's own rendezvous handler, as nblaunch makes it."""
    store = HashStore()
    return DynamicRendezvousHandler.from_backend("names", store, C10dRendezvousBackend(store, "names"), 1, 1)


@pytest.fixture
def static_rendezvous():
    """Make torch's own static rendezvous handler; it meets nobody."""
    return StaticTCPRendezvous("127.0.0.1", 1, 0, 1, "names", 1)


@pytest.fixture
def agent(rendezvous, tmp_path):
    """Make torch's own agent; it starts nothing."""
    spec = WorkerSpec(role="names", local_world_size=1, entrypoint=print, rdzv_handler=rendezvous)
    return local_elastic_agent.LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))


@pytest.fixture
def process_context(tmp_path):
    """Make torch's own context of ranks; it starts nothing."""
    return MultiprocessContext(
        name="names",
        entrypoint=print,
        args={0: ()},
        envs={0: {}},
        start_method=our_forkserver.register(),
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )


def test_the_agents_of_torch_still_have_what_ours_use(agent, process_context, rendezvous, static_rendezvous):
    owners = {agent: AGENT, process_context: CONTEXT, rendezvous: RENDEZVOUS, static_rendezvous: STATIC}
    gone = [
        broken(owner, name) for owner, names in owners.items() for name in names if not hasattr(owner, name)
    ]
    assert gone == []


def test_torch_names_an_event_of_a_rendezvous_by_the_function_that_takes_the_place_of_its_own(
    rendezvous, monkeypatch
):
    recorded = []
    monkeypatch.setattr(
        dynamic_rendezvous, "construct_and_record_rdzv_event", lambda **event: recorded.append(event["name"])
    )
    rendezvous._record(message="joined")
    assert recorded == [f"DynamicRendezvousHandler.{sys._getframe().f_code.co_name}"]
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda: "any")
    rendezvous._record(message="joined")
    assert recorded[1] == "DynamicRendezvousHandler.any", broken(dynamic_rendezvous, "get_method_name")


def test_torch_makes_the_error_files_of_ranks_in_the_private_directory(monkeypatch, tmp_path):
    """A runtime that is killed just then would leave them in the temporary directory."""
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    started = []

    def process(**given):
        started.append(given)
        return SimpleNamespace(start=list, sentinel=0)

    monkeypatch.setattr(spawn, "tempfile", tempfile)
    monkeypatch.setattr(spawn.multiprocessing, "get_context", lambda _: SimpleNamespace(Process=process))
    agent: Any = SimpleNamespace(_server=SimpleNamespace(directory=RuntimeDirectory(tmp_path)))
    our_agent.RankAgent._keep_error_files(agent)
    spawn.start_processes(print, nprocs=1, join=False, start_method="any")
    *_, file = started[0]["args"]
    assert Path(file).parent == tmp_path, broken(spawn, "tempfile")


def test_the_names_still_mean_the_same(agent, process_context, rendezvous):
    assert agent._pcontext is None, broken(agent, "_pcontext")
    assert isinstance(agent._worker_group, WorkerGroup), broken(agent, "_worker_group")
    assert process_context._pc is None, broken(process_context, "_pc")
    assert list(process_context._ret_vals) == [0], broken(process_context, "_ret_vals")
    slot = process_context._ret_vals[0]
    assert type(slot) is our_forkserver.ReturnSlot, broken(process_context, "_ret_vals")
    assert rendezvous._state_holder.state.round == 0, broken(rendezvous, "_state_holder")
    assert rendezvous._shared_tcp_store_server is None, broken(rendezvous, "_shared_tcp_store_server")
    assert rendezvous._bootstrap_store_info is None, broken(rendezvous, "_bootstrap_store_info")


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (local_elastic_agent.LocalElasticAgent._start_workers, ["self", "worker_group"]),
        (local_elastic_agent.LocalElasticAgent._monitor_workers, ["self", "worker_group"]),
        (DynamicRendezvousHandler._create_tcp_store_server, ["self", "master_addr", "master_port"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_is_overridden_is_still_called_with(method, parameters):
    owner = sys.modules[method.__module__]
    assert list(inspect.signature(method).parameters)[: len(parameters)] == parameters, broken(
        owner, method.__name__
    )


def private_names(path: Path) -> tuple[set[str], set[str]]:
    touched, defined = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                touched.add(name)
                defined.add(name)
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                touched.add(name)
                if isinstance(node, ast.FunctionDef):
                    defined.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                touched.add(name)
            case _:
                pass
    return only_private(touched), only_private(defined)


def private_names_of_the_agent() -> tuple[set[str], set[str]]:
    found = [private_names(path) for path in AGENT_FILES]
    return set().union(*(touched for touched, _ in found)), set().union(*(defined for _, defined in found))


def only_private(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_this_file_lists_every_private_name_of_torch_that_the_agent_touches(
    agent, process_context, rendezvous, static_rendezvous
):
    touched, defined = private_names_of_the_agent()
    owners = (agent, process_context, rendezvous, static_rendezvous)
    of_torch = {name for name in touched if any(hasattr(each, name) for each in owners)}
    assert of_torch <= USED
    assert touched - defined <= USED
    assert touched >= USED - {"_remaining_restarts"}


def test_no_name_of_our_own_hides_one_of_torchs(agent, rendezvous):
    _, defined = private_names_of_the_agent()
    for name in defined - USED:
        assert not hasattr(agent, name), f"torch {torch.__version__} has a {name} of its own: rename ours"
        assert not hasattr(rendezvous, name), (
            f"torch {torch.__version__} has a {name} of its own: rename ours"
        )


def a_typed_storage():
    untyped = torch.UntypedStorage(4)
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=torch.float32, _internal=True)


C10D = torch._C._distributed_c10d
FSDP = _fsdp_param_group
SINCE_2_14 = pytest.mark.skipif(
    not in_place.torch_can(), reason="groups are formed again in place from 2.14 on"
)
SINCE_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.8 cannot end a step of FSDP2")
OTHERS = [
    (torch.cuda, "_raw_device_count_nvml _raw_device_uuid_nvml"),
    (torch.cuda, "_raw_device_count_amdsmi _raw_device_uuid_amdsmi"),
    (torch.storage, "_new_dtypes"),
    (torch.UntypedStorage, "data_ptr _cdata"),
    (torch.Tensor, "_use_count"),
    (torch._C, "_storage_Use_Count"),
    (torch._C.DispatchKey, "BackendSelect"),
    (torch._C.DispatchKeySet, "remove"),
    (torch._tensor_str, "_str"),
    (torch.library.Library, "_destroy"),
    (a_typed_storage(), "_untyped_storage"),
    (distributed_c10d, "_abort_process_group _new_process_group_helper _get_split_source"),
    (distributed_c10d.Backend, "_plugins"),
    (distributed_c10d.ProcessGroup, "_get_backend _device_types _get_sequence_number_for_group unbox"),
    (type(distributed_c10d._world), "group_count pg_group_ranks pg_names"),
    (C10D, "_dump_fr_trace_json"),
    (C10D.Backend, "_get_sequence_number_for_group"),
    (C10D.Reducer, "_remove_autograd_hooks _get_zeros_like_grad_buckets"),
    (_composable_state, "_module_state_mapping"),
    (
        torch.nn.parallel.DistributedDataParallel,
        "_ddp_init_helper _update_process_group _check_reducer_finalized",
    ),
    (torch.nn.parallel.DistributedDataParallel, "_build_params_for_reducer"),
    (torch_events, "_events_loggers"),
    (handlers, "_log_handlers"),
    (dynamic_rendezvous, "_RendezvousExitOp"),
    (FileTimerServer, "_reap_worker _watchdog_loop"),
    # What a save of sharded models needs.
    ROOT_OF_A_MESH,
    (dtensor_utils, "compute_local_shape_and_global_offset"),
    (FSDP.FSDPParamGroup, "reshard is_sharded"),
    (FSDP.FSDPParam, "reset_sharded_param"),
    pytest.param(distributed_c10d, "_reconfigure", marks=SINCE_2_14),
    pytest.param(C10D.Backend, "get_reconfigure_handle reconfigure set_timeout", marks=SINCE_2_14),
    pytest.param(_fsdp_state.FSDPState, "_reset_iter_state", marks=SINCE_2_13),
    (FSDP.HSDPMeshInfo, "__post_init__"),
    (FSDPModule, "_get_fsdp_state"),
    # Python, and cloudpickle.
    (atexit, "_run_exitfuncs"),
    (cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS _DYNAMIC_CLASS_TRACKER_BY_ID"),
    (cloudpickle.cloudpickle, "_make_skeleton_class"),
    (context, "_concrete_contexts"),
    (forkserver, "read_signed"),
    (forkserver._forkserver, "_forkserver_alive_fd _forkserver_address _forkserver_pid"),
    (forkserver._forkserver, "_inherited_fds _preload_modules"),
    (popen_forkserver.Popen, "_launch"),
    (process.current_process(), "_config"),
    (resource_tracker._resource_tracker, "_fd _pid"),
    (util, "_args_from_interpreter_flags close_fds"),
]
"""Who has which private names that nblaunch uses elsewhere."""


@pytest.mark.parametrize(("owner", "names"), OTHERS, ids=lambda each: each if isinstance(each, str) else "")
def test_torch_and_python_still_have(owner, names):
    assert [broken(owner, name) for name in names.split() if not hasattr(owner, name)] == []


@pytest.mark.parametrize("name", ["_has_rebuilt_buckets", "_static_graph_delay_allreduce_enqueued"])
def test_ddp_still_notes_that_its_reducer(name):
    owner = torch.nn.parallel.DistributedDataParallel
    assert f"self.{name} = False" in inspect.getsource(owner), broken(owner, name)


def test_ddp_still_begins_with_its_parameters_and_the_buckets_that_are_computed():
    begin = in_place._begin_ddp
    given = ["self", "parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]
    assert list(inspect.signature(begin).parameters) == given
    source = inspect.getsource(begin)
    for each in ("= dist._compute_bucket_assignment_by_size(", "list(reversed(bucket_indices)),"):
        assert each in source, broken(torch.nn.parallel.DistributedDataParallel, begin.__name__)


@pytest.mark.parametrize("name", collectives.FORMS)
def test_torchs_collectives_still_have_their_arguments_where_the_watch_reads_them(name):
    form = collectives.FORMS[name]
    arguments = [str(each.type) for each in getattr(torch.ops.c10d, name).default._schema.arguments]
    assert "ProcessGroup" in arguments[form.group]
    assert form.operation is None or "ReduceOp" in arguments[form.operation]
    assert form.root is None or arguments[form.root] == "int"
    for place in (form.sent, form.sized):
        assert place is None or "Tensor" in arguments[place]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.8 cannot be asked for a reduction")
def test_torch_can_still_be_asked_what_a_collective_reduces_with():
    boxed = torch.classes.c10d.ReduceOp()
    assert hasattr(boxed, "op"), f"torch {torch.__version__} broke ReduceOp.op, which nblaunch uses"
    assert collectives._OPERATIONS[boxed.op()] == "sum"


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (FSDP.FSDPParamGroup, "mesh_info post_forward_mesh_info fsdp_params offload_policy"),
        (FSDP.FSDPParam, "mp_policy _unsharded_param"),
        (_fsdp_state.FSDPState, "_mp_policy"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_fsdp2_still_keeps_how_a_model_was_wrapped(owner, names):
    source = inspect.getsource(owner)
    assert [broken(owner, name) for name in names.split() if f"self.{name} =" not in source] == []


def test_fsdp2_still_keeps_how_tensor_parallelism_had_placed_a_parameter():
    source = inspect.getsource(FSDP.FSDPParam)
    assert "self.is_dtensor =" in source, broken(FSDP.FSDPParam, "is_dtensor")
    names = "self._unsharded_dtensor_spec =", "self._tp_spec ="
    assert any(each in source for each in names), broken(FSDP.FSDPParam, names[0])


def test_a_mesh_still_finds_its_groups_by_name():
    source = inspect.getsource(DeviceMesh)
    assert "self._dim_group_names = " in source, broken(DeviceMesh, "_dim_group_names")
    assert "self._dim_group_names[" in inspect.getsource(DeviceMesh.get_group), broken(
        DeviceMesh, "get_group"
    )
    # It keeps them by name, too, from some release on.
    assert torch.__version__ < "2.13" or "self._pg_registry = " in source, broken(DeviceMesh, "_pg_registry")


@pytest.mark.skipif(sys.platform != "linux", reason="the library has another name")
def test_torchs_libraries_still_have_a_log_level():
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value
    assert 0 <= level <= 3, f"torch {torch.__version__} broke FLAGS_caffe2_log_level, which a node sets"


@pytest.mark.skipif(torch.__version__ < "2.15", reason="one recorder for each function")
def test_a_flight_recorder_can_still_be_asked_for_by_the_name_of_its_backend():
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json")  # noqa: B009 - mypy knows torch 2.13
    assert "backend" in dump.__doc__, f"torch {torch.__version__} broke backend= of _dump_fr_trace_json"
    assert json.loads(dump(backend="nccl2"))["pg_status"] == {}


@pytest.mark.skipif(torch.version.cuda is None, reason="a build without CUDA")
def test_a_build_with_cuda_still_has_the_flight_recorder_of_nccl():
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    assert dump is not None, f"torch {torch.__version__} broke _dump_nccl_trace_json, which nblaunch uses"
    assert "pg_status" in json.loads(dump(includeCollectives=False))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="ranks are bound to CPUs with torch 2.13 only")
def test_torch_can_still_be_asked_which_cpus_are_near_a_gpu():
    binding = importlib.import_module("torch.numa.binding")
    name = "_get_logical_cpus_to_bind_to"
    assert hasattr(binding, name), broken(binding, name)
    index, options = inspect.signature(getattr(binding, name)).parameters
    assert (index, options) in {("gpu_index", "numa_options"), ("device_index", "numa_options")}, broken(
        binding, name
    )


def test_torchs_timer_server_still_has_what_ends_its_thread(tmp_path):
    server = FileTimerServer(str(tmp_path / "timer"), "names")
    for name in ("_stop_signaled", "_file_path", "_watchdog_thread"):
        assert hasattr(server, name), f"torch {torch.__version__} broke FileTimerServer.{name}"
    server.stop()


def test_only_the_agents_layer_imports_torchelastic():
    """So a new torchelastic can break one folder only."""
    package = ELASTIC.parents[1]
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "elastic" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any("torch.distributed.elastic" in name for name in imported(node))
    }
    assert {user.partition("/")[0] for user in users} == {"host"}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


def test_torchs_rendezvous_backs_off_as_long_as_asked_or_the_setting_is_refused_by_name():
    options = LaunchOptions(
        nnodes="2", rdzv_endpoint="127.0.0.1", rdzv_conf="cas_backoff_max_seconds=0.5", local_addr="127.0.0.1"
    )
    if "cas_backoff_max_seconds" not in inspect.signature(DynamicRendezvousHandler.from_backend).parameters:
        with pytest.raises(OptionError, match=rf"torch {re.escape(torch.__version__)} has no such setting"):
            our_rendezvous.config_of(options)
        return
    config, store = our_rendezvous.config_of(options), HashStore()
    assert config is not None
    backend = our_rendezvous._SignedState(C10dRendezvousBackend(store, "run"), config.key, threading.Event())
    handler = our_rendezvous.NodesRendezvous.at(config, "run", store, backend)
    assert vars(handler._settings)["cas_backoff_max_seconds"] == 0.5
    with pytest.raises(OptionError, match="must be seconds"):
        our_rendezvous.config_of(replace(options, rdzv_conf="cas_backoff_max_seconds=inf"))
