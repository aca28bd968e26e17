"""What a rank's environment means to torch."""

import psutil
import pytest
import torch

from nblaunch.rank import environment

_HANDLES, _RETHROWS, _TEARDOWN = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT",
)


@pytest.mark.parametrize(
    ("version", "values", "warns"),
    [
        ("2.15.0", {_RETHROWS: "False"}, True),
        ("2.15.0", {_RETHROWS: "yes"}, False),
        ("2.15.0", {}, False),
        ("2.15.0", {_RETHROWS: "0", _HANDLES: "0"}, False),
        ("2.15.0", {_RETHROWS: "n", _TEARDOWN: "True"}, False),
        ("2.13.0", {_RETHROWS: "n", _TEARDOWN: "1"}, True),
    ],
)
def test_wrong_values_are_warned_of_in_all_words_of_torch(
    monkeypatch: pytest.MonkeyPatch, *, version: str, values: dict[str, str], warns: bool
) -> None:
    for name in (_HANDLES, _RETHROWS, _TEARDOWN):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert bool(environment.unheard_timeouts()) == warns


@pytest.mark.parametrize(("value", "times"), [(str(torch.get_num_threads()), 0), (None, 1)])
def test_cores_are_counted_once_for_a_rank_that_has_all_of_them_and_else_never(
    monkeypatch: pytest.MonkeyPatch, value: str | None, times: int
) -> None:
    counted = []

    def count(*, logical: bool) -> int:
        counted.append(logical)
        return torch.get_num_threads()

    monkeypatch.setattr(psutil, "cpu_count", count)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    environment._set_threads(value)
    assert len(counted) == times
