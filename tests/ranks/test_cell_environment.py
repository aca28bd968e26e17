"""Ranks find torchrun's environment, and programs written for torchrun run as they are."""

from __future__ import annotations

import psutil
import pytest
from lanes import sampled
from sources import STARTER, STARTER_WITH_MAIN

pytestmark = pytest.mark.oldest

# TORCHRUN.md, "A rank's environment is torchrun's".
AGENT_VARIABLES = [
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS",
]  # fmt: skip


def printed_by(world_size):
    return [f"rank {rank} of {world_size}\nsum {world_size}\ndone\n" for rank in range(world_size)]


# --- the programs that everyone starts from ----------------------------------------------------------


@pytest.mark.parametrize("world_size", sampled([2, 4]))
@pytest.mark.parametrize("program", [STARTER, STARTER_WITH_MAIN], ids=["script", "main"])
def test_a_starter_program_pasted_into_a_cell_runs_as_it_is(kernel, program, world_size):
    kernel.ok(f"%%distributed -n {world_size} --out res{program}")
    assert kernel.value("[each.stdout for each in res.ranks]") == printed_by(world_size)


@pytest.mark.parametrize("program", sampled([STARTER, STARTER_WITH_MAIN]), ids=["script", "main"])
def test_a_starter_program_runs_as_a_function(kernel, program):
    if "def main" in program:
        kernel.ok(program.replace('if __name__ == "__main__":\n    main()', ""))
    else:
        kernel.ok("def main():" + program.replace("\n", "\n    "))
    kernel.ok("import nblaunch\nres = nblaunch.run(main, nproc=2)")
    assert kernel.value("[each.stdout for each in res.ranks]") == printed_by(2)


# --- the user's own process group ------------------------------------------------------------------


CALLS = {
    "nothing": "dist.init_process_group()",
    "the usual address": """
os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("gloo", rank=rank, world_size=world_size)
""",
    "tcp": "dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', **me)",
    "file": "dist.init_process_group('gloo', init_method=f'file://{where}/file', **me)",
    "tcp store": """
store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
dist.init_process_group("gloo", store=store, **me)
""",
    "imported by name": "from torch.distributed import init_process_group as init\ninit('gloo')",
}


# With a group of ours in their place, and without, these differ from each other.
WAYS = [*((name, "") for name in CALLS), ("the usual address", "--no-init"), ("nothing", "--no-init")]


@pytest.mark.parametrize(("name", "no_init"), WAYS)
def test_a_users_own_init_process_group_works(kernel, tmp_path, name, no_init):
    kernel.ok(f"""
    import os, socket, torch, torch.distributed as dist
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {str(tmp_path)!r}
    """)
    kernel.ok(
        f"%%distributed -n 2 --out res {no_init}\n"
        f"me = dict(rank=rank, world_size=world_size)\n{CALLS[name]}\n"
        "total = torch.tensor([rank + 1])\ndist.all_reduce(total)\ntotal.item(), dist.get_world_size()"
    )
    assert kernel.value("res.values") == [[3, 2]] * 2


def test_a_process_group_may_be_made_twice_in_a_cell(kernel):
    kernel.ok("""
    %%distributed -n 2 --out res
    import os, torch, torch.distributed as dist
    totals = []
    for turn in range(3):
        dist.init_process_group("gloo")
        total = torch.tensor([turn])
        dist.all_reduce(total)
        totals.append(total.item())
        dist.destroy_process_group()
    totals
    """)
    assert kernel.value("res.values") == [[0, 2, 4]] * 2


def test_a_second_init_without_destroy_is_an_error_as_under_torchrun(kernel):
    error = kernel.fails("""
    %%distributed -n 2
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")
    """)
    assert "twice" in error.evalue


def test_subgroups_of_the_default_group_work(kernel):
    kernel.ok("""
    %%distributed -n 4 --out res
    import torch, torch.distributed as dist
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=pairs[rank // 2])
    total.item()
    """)
    assert kernel.value("res.values") == [1, 1, 5, 5]


def test_a_default_process_group_is_there_unless_it_is_not_wanted(kernel):
    body = "import torch.distributed as dist\ndist.is_initialized(), rank, world_size"
    kernel.ok(f"%%distributed -n 2 --out res\n{body}")
    kernel.ok(f"%%distributed -n 2 --no-init --out res2\n{body}")
    assert kernel.value("[res.values, res2.values]") == [
        [[True, 0, 2], [True, 1, 2]],
        [[False, 0, 2], [False, 1, 2]],
    ]


def test_a_run_without_a_process_group_is_shown_without_a_backend(kernel):
    kernel.ok("import os; os.environ['NBLAUNCH_DISPLAY'] = 'html'")
    for line, named in (("%%distributed -n 2", True), ("%%distributed -n 2 --no-init", False)):
        (shown,) = kernel.ok(f"{line}\nrank").displays
        assert ("gloo" in shown["text/html"]) is named
    kernel.ok("os.environ['NBLAUNCH_DISPLAY'] = 'text'")


def test_the_backend_that_is_asked_for_is_the_groups(kernel):
    body = "import torch.distributed as dist\ndist.get_backend(), str(device)"
    kernel.ok(f"%%distributed -n 2 --backend gloo --out res\n{body}")
    assert kernel.value("[res.values, res.backend, res.devices]") == [
        [["gloo", "cpu"]] * 2,
        "gloo",
        {"0": "cpu", "1": "cpu"},
    ]


# --- the environment -------------------------------------------------------------------------------


def test_torchruns_variables_are_there(kernel):
    kernel.ok(
        "%%distributed -n 2 --out res --max-restarts 2 --role trainer\n"
        f"import os\n{{name: os.environ.get(name) for name in {AGENT_VARIABLES}}}"
    )
    for rank, found in enumerate(kernel.value("res.values")):
        assert [name for name, value in found.items() if value is None] == []
        port, run_id, errors = (
            found.pop(name) for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
        )
        assert int(port) > 0
        assert run_id
        assert errors.endswith("error.json")
        assert found == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "trainer",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": "1",
        }


def test_variables_for_the_ranks_only_reach_the_ranks_only(kernel):
    kernel.ok("""
    %%distributed -n 2 --out res --env NBTEST_A=1 --env "NBTEST_B=two words = 3" --env NBTEST_C=
    import os
    [os.environ.get(f"NBTEST_{each}") for each in "ABCD"]
    """)
    assert kernel.value("res.values") == [["1", "two words = 3", "", None]] * 2
    assert kernel.value("[name for name in __import__('os').environ if name.startswith('NBTEST_')]") == []


def test_the_environment_is_that_of_now_not_of_the_fork_servers_start(kernel):
    kernel.ok("%%distributed -n 2 --out first\n1")
    kernel.ok("import os\nos.environ['NBTEST_NEW'] = 'é ü'\nkept = os.environ.pop('HOME')")
    kernel.ok("%%distributed -n 2 --out res\nimport os\nos.environ.get('NBTEST_NEW'), os.environ.get('HOME')")
    kernel.ok("del os.environ['NBTEST_NEW']; os.environ['HOME'] = kept")
    kernel.ok(
        "%%distributed -n 2 --out res2\nimport os\nos.environ.get('NBTEST_NEW'), os.environ['HOME'] == kept"
    )
    assert kernel.value("[res.values, res2.values]") == [[["é ü", None]] * 2, [[None, True]] * 2]


def test_what_a_rank_sets_in_its_environment_stays_there(kernel):
    kernel.ok("import os\nbefore = dict(os.environ)")
    kernel.ok("%%distributed -n 2\nimport os\nos.environ['NBTEST_RANK'] = '1'\nos.chdir('/')")
    assert kernel.value("dict(os.environ) == before and os.getcwd() != '/'")


def test_the_kernels_own_variables_of_a_launcher_do_not_reach_the_ranks(kernel):
    """As when the notebook itself was started by torchrun, or a cell has set them for a trial."""
    kernel.ok(
        "import os\nos.environ.update(RANK='7', WORLD_SIZE='9', MASTER_ADDR='nowhere', MASTER_PORT='1')"
    )
    kernel.ok("%%distributed -n 2 --out res\nimport os\nos.environ['RANK'], os.environ['WORLD_SIZE']")
    assert kernel.value("os.environ['RANK']") == "7"
    kernel.ok("for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): del os.environ[name]")
    assert kernel.value("res.values") == [["0", "2"], ["1", "2"]]


def test_each_rank_has_one_thread_unless_the_user_says_otherwise(kernel):
    body = "import os, torch\nos.environ['OMP_NUM_THREADS'], torch.get_num_threads()"
    kernel.ok("import os\nos.environ.pop('OMP_NUM_THREADS', None)")
    kernel.ok(f"%%distributed -n 2 --out res\n{body}")
    kernel.ok(f"%%distributed -n 2 --out res2 --env OMP_NUM_THREADS=2\n{body}")
    kernel.ok("os.environ['OMP_NUM_THREADS'] = '2'")
    kernel.ok(f"%%distributed -n 2 --out res3\n{body}")
    kernel.ok("del os.environ['OMP_NUM_THREADS']")
    kernel.ok(f"%%distributed -n 2 --out res4\n{body}")
    one, two = [["1", 1]] * 2, [["2", 2]] * 2
    assert kernel.value("[each.values for each in (res, res2, res3, res4)]") == [one, two, two, one]


def test_a_rank_is_no_prompt_although_the_notebook_is_one(kernel):
    kernel.ok("%%distributed -n 2 --out res\nimport sys\nhasattr(sys, 'ps1')")
    assert kernel.value("[hasattr(__import__('sys'), 'ps1'), *res.values]") == [True, False, False]


# --- the kernel's own state ------------------------------------------------------------------------


def test_the_kernel_is_as_it_was_after_a_run(kernel):
    kernel.ok("""
    import multiprocessing, os, signal, sys, threading, time
    def settled():
        # Ranks that have succeeded leave while the notebook goes on.
        deadline = time.monotonic() + 30
        leaving = ("nblaunch-agent", "RendezvousKeepAlive")
        while any(each.name.startswith(leaving) for each in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return sorted(each.name for each in threading.enumerate())
    def world():
        return (
            {each: signal.getsignal(each) for each in signal.Signals},
            dict(os.environ), os.getcwd(), list(sys.path), sys.argv[:],
            multiprocessing.get_start_method(allow_none=True),
            sys.stdout, sys.stderr, sys.modules["__main__"],
            settled(),
            signal.pthread_sigmask(signal.SIG_BLOCK, []), os.umask(0o22),
        )
    get_ipython().run_cell_magic("distributed", "-n 2", "rank")
    before = world()
    """)
    kernel.ok("%%distributed -n 2\nrank")
    kernel.fails("%%distributed -n 2\n1 / rank")
    kernel.ok("after = world()")
    assert kernel.value("[repr(each) for each in zip(before, after) if each[0] != each[1]]") == []


def test_the_user_may_still_choose_a_start_method_after_the_first_run(kernel):
    kernel.ok("%%distributed -n 2\nrank")
    kernel.ok("import multiprocessing\nmultiprocessing.set_start_method('spawn')")
    kernel.ok("%%distributed -n 2 --out res\nrank")
    assert kernel.value("[res.values, multiprocessing.get_start_method()]") == [[0, 1], "spawn"]
    kernel.ok("multiprocessing.set_start_method(None, force=True)")


# --- what ranks start ------------------------------------------------------------------------------


def test_workers_that_are_left_alive_go_with_their_rank(kernel, eventually):
    """`persistent_workers` outlive the loop; a loader that the rank still holds must not hold the rank."""
    kernel.ok("""
    %%distributed -n 2 --out res
    import torch, psutil
    from torch.utils.data import DataLoader
    loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
    total = sum(batch.item() for batch in loader)
    total, [each.pid for each in psutil.Process().children(recursive=True)]
    """)
    assert kernel.value("[value[0] for value in res]") == [28, 28]
    assert kernel.value("[len(value[1]) >= 2 for value in res]") == [True, True]
    # Ranks that have succeeded leave while the notebook goes on.
    left = kernel.value("[pid for value in res for pid in value[1]]")
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in left), "the workers are gone")
