"""What a rank runs in: packages, variables, versions, flags, seeds; to be compared between ranks.

Left out is what differs between ranks by design: their numbers, hosts, paths of their own. The value of a
variable that looks like a secret is never shown: ranks send its digest, and the report says that it differs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nblaunch import _devices
from nblaunch._version import __version__
from nblaunch.probes.blocks import digest
from nblaunch.probes.contents import Contents

_SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASS|_PWD|CREDENTIAL|AUTH|COOKIE|PRIVATE|_PAT$|_SAS|WEBHOOK|DSN", re.IGNORECASE
)
_IN_URL = re.compile(r"://[^/@\s]*@")
_BY_DESIGN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(GROUP_|LOCAL_)?WORLD_SIZE|ROLE_(NAME|WORLD_SIZE)|TORCHELASTIC_.*|MASTER_(ADDR|PORT)"
    r"|TORCH_.*FILE.*|(CUDA|HIP|ROCR|ASCEND_RT)_VISIBLE_DEVICES|NBLAUNCH_.*|HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_"
    r"|SLURM.*|PMI.*|OMPI_.*|PBS_.*|LSB_.*|RAY_.*|FAKE_.*|SSH_.*|XDG_.*|TMPDIR|JPY_.*|INVOCATION_ID|JOURNAL_STREAM"
    r"|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|DBUS_.*|DISPLAY|WINDOWID|TERM_SESSION_ID|PYTEST_.*|COV_CORE_.*|COLUMNS|LINES"
)
_SHOWN = 120


def variable_shown(name: str, value: str) -> str:
    """Return the value of an environment variable, unless it looks like a secret.

    >>> variable_shown("HF_TOKEN", "hf_x"), variable_shown("LANG", "C")
    ('(looks like a secret, not shown)', 'C')
    """
    return (
        "(looks like a secret, not shown)"
        if _SECRET.search(name) or _IN_URL.search(value)
        else value[:_SHOWN]
    )


def may_be_kept(name: str, value: str) -> bool:
    """Return whether an environment variable is the program's, and does not look like a secret."""
    secret = _SECRET.search(name) or _IN_URL.search(value)
    return not secret and not _BY_DESIGN.fullmatch(name)


def parts() -> Iterator[tuple[str, bytes, str]]:
    """Yield each part of the surroundings: what it is, its content, and what may be shown of it."""
    for name, value in _plain_parts():
        yield name, str(value).encode("utf-8", "replace"), str(value)[:_SHOWN]
    for name, value in sorted(os.environ.items()):
        if not _BY_DESIGN.fullmatch(name):
            shown = variable_shown(name, value)
            yield f"variable {name}", value.encode("utf-8", "surrogateescape"), shown
    for name, state in _random_states():
        known = digest(*(each.digest for each in Contents(name, state, {}).entries))
        yield f"random state of {name}", known, f"state {known.hex()[:8]}"


def _plain_parts() -> Iterator[tuple[str, object]]:
    yield "version of Python", sys.version.split()[0]
    yield "version of nblaunch", __version__
    yield "version of torch", torch.__version__
    yield "version of torch's CUDA", torch.version.cuda
    yield "machine", f"{platform.system()} {platform.machine()}"
    if torch.version.cuda is not None and torch.cuda.is_initialized():
        yield "GPU", torch.cuda.get_device_name()
        yield "version of cuDNN", torch.backends.cudnn.version()
        yield "version of NCCL", _devices.nccl_version()
    for name, version in sorted(_packages().items()):
        yield f"package {name}", version
    for name, value in _flags().items():
        yield f"flag {name}", value
    yield "seed torch.initial_seed()", torch.initial_seed()


def _packages() -> Mapping[str, str]:
    """Return the packages that an import finds, with their versions."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), each.version or "?")
    return found


def _flags() -> dict[str, object]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.enabled": cudnn.enabled,
        "reduced precision of float16": matmul.allow_fp16_reduced_precision_reduction,
        "reduced precision of bfloat16": matmul.allow_bf16_reduced_precision_reduction,
        "optimize (python -O)": sys.flags.optimize,
    }


def _random_states() -> Iterator[tuple[str, Any]]:
    yield "Python", random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        yield "NumPy", (kind, keys.tolist(), rest)
    yield "torch (CPU)", torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "torch (CUDA)", torch.cuda.get_rng_state()
