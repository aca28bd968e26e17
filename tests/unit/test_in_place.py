"""Which groups are formed again in place: by torch and backends, and by what the ranks tell each other."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
import torch.cuda.nccl
from torch.distributed import distributed_c10d

from nblaunch import _devices
from nblaunch.rank import in_place

DEFAULT, PAIR = ([0, 1, 2], ["address"]), ([0, 2], ["address"])
BOTH = {"0": DEFAULT, "1": PAIR}


@pytest.mark.parametrize(
    ("backends", "able", "detail", "can"),
    [
        (["gloo"], {"gloo"}, False, True),
        (["gloo", "gloo"], {"gloo"}, False, True),
        (["gloo", "nccl"], {"gloo", "nccl"}, False, True),
        (["gloo", "nccl"], {"gloo"}, False, False),
        (["nccl2"], {"gloo", "nccl", "nccl2"}, False, True),
        (["nccl-lazy"], {"gloo", "nccl", "nccl2"}, False, False),
        (["gloo"], set(), False, False),
        (["gloo"], {"gloo"}, True, False),
        (["one_of_the_users"], {"gloo"}, False, False),
    ],
)
def test_a_group_is_made_for_it_where_all_of_its_backends_can(backends, able, detail, can):
    assert in_place.can(backends, able, detail=detail) is can


@pytest.mark.parametrize(
    ("told", "can"),
    [
        ([{"0": DEFAULT}] * 3, True),
        ([BOTH, {"0": DEFAULT}, BOTH], True),
        ([BOTH, {"0": DEFAULT}, {"0": DEFAULT}], False),
        ([{"0": DEFAULT}, {"0": DEFAULT}, {}], False),
        ([{}, {}, {}], False),
        ([{"0": DEFAULT}] * 2, False),
        ([BOTH, {"0": DEFAULT}, {"0": DEFAULT, "1": ([2, 0], ["address"])}], False),
    ],
    ids=[
        "the default group",
        "a group of two ranks",
        "a rank interrupted within new_group",
        "a rank that joins",
        "no groups",
        "a rank that has gone",
        "another order of ranks",
    ],
)
def test_groups_go_on_where_each_is_there_on_all_of_its_ranks(told, can):
    assert in_place.all_can(told) is can


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([[True, False], [True, True]], [True, True]),
        ([[True, False], [False, False]], [True, False]),
        ([[], []], []),
        ([[False, False], [True]], [True, True]),
        ([[False, False], [False]], [False, False]),
    ],
)
def test_a_model_forgets_a_step_in_which_some_rank_is(told, found):
    assert in_place.begun_on_some(told, len(told[0])) == found


@pytest.mark.parametrize(
    ("cuda", "version", "can"),
    [("13.0", (2, 30, 7), True), ("13.0", (2, 27, 5), False), (None, (2, 30, 7), False)],
    ids=["NCCL that revokes", "an older one", "AMD's"],
)
@pytest.mark.skipif(not in_place.torch_can(), reason="torch forms groups again in place from 2.14 on")
def test_nccl_forms_groups_again_where_it_can_revoke(monkeypatch, cuda, version, can):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_devices, "nccl_version", lambda: version)
    in_place._makers.cache_clear()
    assert ("_create_nccl2_process_group" in in_place._makers()) is can
    in_place._makers.cache_clear()


@pytest.mark.parametrize("broken", [False, True])
def test_where_nccl_cannot_revoke_a_group_all_are_aborted_in_torchs_own_way(monkeypatch, broken):
    class Backend:
        aborted = False

        def abort(self):
            self.aborted = True
            if broken:
                raise RuntimeError("NCCL Revoke failed")

    backends = Backend(), Backend()
    named = types.SimpleNamespace(pg_names=dict.fromkeys(backends, "ours"))
    monkeypatch.setattr(distributed_c10d, "_world", named)
    monkeypatch.setattr(in_place, "_names", {"ours"})
    monkeypatch.setattr(in_place, "_of_nccl", lambda group: [group])
    assert in_place.revoke() is not broken
    assert all(each.aborted for each in backends)


HALF_A_STEP = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from nblaunch import _devices
from nblaunch.rank import in_place

in_place.accept_groups()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(2, 2))
state = model._get_fsdp_state()
model(torch.ones(1, 2)).sum().backward()
found = [in_place._is_idle(state)]
loss = model(torch.ones(1, 2)).sum()
found += [in_place._is_idle(state), state in in_place._fsdp_roots()]
loss.backward()
found.append(in_place._is_idle(state))
told = lambda number: in_place.form_again(dist.HashStore(), number, 0, 1, usable=True)
found.append(told(1) == [])

def refuses():
    raise RuntimeError("another model has queued its reduction")

model(torch.ones(1, 2)).sum()
state._reset_iter_state = refuses
found.append(told(2) == [(model, "RuntimeError: another model has queued its reduction")])
found.append(in_place.form_again(dist.HashStore(), 3, 0, 1, usable=False) is None)
print(found)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not in_place.torch_can(), reason="torch forms groups again in place from 2.14 on")
def test_a_model_in_the_middle_of_a_step_is_known_and_one_that_cannot_forget_it_is_named():
    """With FSDP2's own names: where torch has moved one, the program says which."""
    ran = subprocess.run([sys.executable, "-c", HALF_A_STEP], capture_output=True, text=True, check=False)
    assert ran.stdout == f"{[True, False, True, True, True, True, True]}\n", ran.stderr


@pytest.mark.parametrize(
    ("told", "agreed"),
    [
        ([{"model": [[1], [0]]}, {"model": [[1], [0]]}], {"model": ((1,), (0,))}),
        # One was interrupted before it got the buckets of the first rank, and one was started again.
        ([{"model": [[1], [0]]}, {"model": []}, {}], {"model": ((1,), (0,))}),
        ([{"model": [[1], [0]]}, {"model": [[0], [1]]}], {}),
        ([{"model": []}, {"model": []}], {}),
        # A name may be that of another model where ranks have others: a place in a list.
        ([{"models[0]": [[0]], "models[1]": []}, {"models[0]": [[0]]}], {}),
        ([{"a": [[0]], "b": [[1]]}, {"b": [[0]], "a": [[1]]}], {}),
        ([{}, {}], {}),
    ],
)
def test_ranks_give_a_model_the_same_buckets_or_those_of_a_new_one(told, agreed):
    assert in_place.agree_on_buckets({}, lambda _: told) == agreed
