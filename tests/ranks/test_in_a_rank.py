"""A rank is an ordinary Python program: what its code may use.

The tests themselves run on ranks: with the mark that users have for theirs.
"""

from __future__ import annotations

import multiprocessing
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from lanes import sampled
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pytestmark = pytest.mark.distributed(nproc=2)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_the_module(leaves_nothing_after):
    """Check what the ranks that the tests share leave behind."""
    with leaves_nothing_after():
        yield


def test_a_seed_gives_the_same_numbers_everywhere():
    torch.manual_seed(3)
    drawn = torch.rand(3)
    everywhere = [torch.empty(3) for _ in range(2)]
    dist.all_gather(everywhere, drawn)
    assert torch.equal(everywhere[1 - dist.get_rank()], drawn)


@pytest.mark.parametrize("method", sampled(["fork", "spawn", "forkserver"]))
def test_a_rank_may_have_processes_of_its_own(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(abs, [-1, 2, -3]) == [1, 2, 3]


def test_the_workers_of_a_data_loader_work():
    data = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=2)
    expected = torch.arange(dist.get_rank(), 8, 2).split(2)
    assert [batch.tolist() for (batch,) in loader] == [each.tolist() for each in expected]


def test_threads_and_executors_work():
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(abs, range(-4, 0))) == 10


def test_programs_that_a_rank_starts_work():
    done = subprocess.run(["printf", "hello"], capture_output=True, text=True, check=True)
    assert done.stdout == "hello"
