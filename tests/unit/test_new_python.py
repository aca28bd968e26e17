"""Which variables a fork of a server that has loaded torch cannot follow."""

from __future__ import annotations

import pytest

from nblaunch._keeper import environment
from nblaunch.host.process_options import needs_new_python

ASYNC = "backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("environ", "loaded_under", "needed"),
    [
        ({}, {}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": ASYNC}, {}, True),
        ({"PYTORCH_ALLOC_CONF": f"max_split_size_mb:64, {ASYNC}"}, {}, True),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": ASYNC}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": ASYNC}, {"PYTORCH_CUDA_ALLOC_CONF": ASYNC}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}, False),
        ({"KINETO_USE_DAEMON": "1"}, {}, True),
    ],
)
def test_ranks_are_new_pythons_where_torch_must_be_loaded_under_their_environment(
    environ, loaded_under, needed
):
    assert needs_new_python(environ, loaded_under) is needed


def test_the_fork_server_is_started_without_what_has_torch_initialise_cuda(monkeypatch):
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    assert "KINETO_USE_DAEMON" not in environment()
