"""Tensors on GPUs are compared where they are; each rank has a GPU of its own."""

from __future__ import annotations

import pytest

import nblaunch

pytestmark = pytest.mark.gpu(2, shared=True)


def test_tensors_on_gpus_are_compared_without_a_copy_of_them():
    with nblaunch.Session(nproc=2) as session:
        session.cell(
            "import torch, nblaunch\n"
            "w = torch.zeros(1_000_000, device=device)\n"
            "same = torch.ones(1000, dtype=torch.bfloat16, device=device)\n"
            "w[777_777] = rank\n"
            "copied = []\n"
            "real = torch.Tensor.cpu\n"
            "torch.Tensor.cpu = lambda self, *more: (copied.append(self.nbytes), real(self, *more))[1]\n",
            namespace={},
        )
        assert session.diff("same").equal
        row = session.diff("w").first
        assert (row.path, row.largest, row.groups) == ("w[777777]", 1.0, ((0,), (1,)))
        assert max(session.pull("copied")["copied"][0]) < 1_000_000
        told = session.cell("str(nblaunch.diff(w, 'w'))", namespace={}).values
        assert told[0] == told[1]
        assert "w[777777]: values differ" in told[0]
