"""What torch 2.8, the oldest that is allowed, does not have, or does differently: found by feature."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch.distributed
from torch.distributed.elastic.multiprocessing.tail_log import tail_logfile

names_reductions = hasattr(torch.classes.c10d.ReduceOp(), "op")
SUM = "(sum)" if names_reductions else ""
"""How a collective that sums is named."""

needs_reductions = pytest.mark.skipif(not names_reductions, reason="this torch names no reductions")
needs_line_filters = pytest.mark.skipif(
    "log_line_filter" not in inspect.signature(tail_logfile).parameters,
    reason="this torch cannot filter lines of logs",
)
needs_binding = pytest.mark.skipif(
    importlib.util.find_spec("torch.numa") is None, reason="this torch cannot bind ranks to CPUs"
)


_splits_several = "Unknown c10d backend type" not in inspect.getsource(torch.distributed.split_group)
SPLITTABLE = "cpu:gloo,cuda:nccl" if _splits_several else "nccl"
"""The backend of a group on GPUs that a mesh of several dimensions can split."""


def without_gloos_own(text: str) -> str:
    """Return what a rank printed without what gloo prints on its standard output when it connects."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] "))
