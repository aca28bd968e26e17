"""The doctor says what of a GPU itself keeps ranks from computing, and is silent about what nobody tells."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from nblaunch.checks import gpu as health
from nblaunch.checks import nvml
from nblaunch.checks.report import Level, ok

FINE = {
    "uuid": "GPU-a",
    "name": "NVIDIA H100",
    "compute_mode": 0,
    "persistence": 1,
    "uncorrected": 0,
    "pages_pending": 0,
    "rows": [0, 0, 0, 0],
    "capability": [9, 0],
    "recovery": 0,
    "links": [1] * 18,
}


def only(findings):
    """Return the one finding of a check."""
    (finding,) = findings
    return finding


def gpus(*changes):
    """Return what NVML says of GPUs that are fine but for these changes."""
    return {str(index): {**FINE, **changed} for index, changed in enumerate(changes)}


# --- what is judged, and how -----------------------------------------------------------------------------


def test_gpus_that_are_fine_are_ok():
    two = gpus({}, {})
    assert list(health.compute_mode(two, cuda_here=True)) == [ok("compute mode", "processes may share a GPU")]
    assert only(health.memory_errors(two)).summary.startswith("no uncorrected ECC errors on 2 GPUs")
    assert list(health.driver_errors(two, [])) == []
    assert only(health.architecture(two, ["sm_80", "sm_90"])) == ok(
        "architecture", "sm_90, which this torch has code for"
    )
    assert list(health.persistence(two)) == [ok("persistence mode", "on")]
    assert only(health.nvlink(two, {"joined": 1, "pairs": 1})) == ok("NVLink", "joins 1 of 1 pairs of GPUs")


def test_what_the_driver_does_not_tell_is_not_judged():
    silent = {"0": {}, "1": {"uuid": "GPU-b"}}
    assert list(health.compute_mode(silent, cuda_here=True)) == []
    assert list(health.memory_errors(silent)) == []
    assert list(health.driver_errors(silent, [])) == []
    assert list(health.architecture(silent, ["sm_90"])) == []
    assert list(health.architecture(gpus({}), [])) == []
    assert list(health.persistence(silent)) == []
    assert list(health.nvlink(silent, {})) == []


def test_a_gpu_for_one_process_is_a_problem_once_the_kernel_has_cuda():
    exclusive = gpus({}, {"compute_mode": 3})
    found = only(health.compute_mode(exclusive, cuda_here=True))
    assert found.level is Level.PROBLEM
    assert found.summary.startswith("GPU 1 may be used by one process (EXCLUSIVE_PROCESS), and this kernel")
    assert "nvidia-smi -c DEFAULT" in found.advice
    assert only(health.compute_mode(exclusive, cuda_here=False)).level is Level.WARNING
    prohibited = only(health.compute_mode(gpus({"compute_mode": 2}), cuda_here=False))
    assert (prohibited.level, prohibited.summary) == (
        Level.PROBLEM,
        "GPU 0 may run no CUDA at all (PROHIBITED)",
    )


@pytest.mark.parametrize(
    ("said", "level", "words"),
    [
        ({"uncorrected": 1}, Level.WARNING, "GPU 1: 1 uncorrected ECC error since"),
        ({"uncorrected": 3, "rows": [0, 1, 1, 0]}, Level.WARNING, "GPU 1: 3 uncorrected ECC errors since"),
        ({"rows": [0, 1, 1, 0]}, Level.WARNING, "waits to be taken out of use"),
        ({"pages_pending": 1}, Level.WARNING, "waits to be taken out of use"),
        ({"rows": [0, 9, 0, 1]}, Level.PROBLEM, "could not be replaced by spare rows"),
    ],
)
def test_faulty_memory_names_its_gpu_and_what_to_do(said, level, words):
    found = only(health.memory_errors(gpus({}, said)))
    assert (found.level, words in found.summary) == (level, True)
    assert found.advice


def test_a_gpu_that_the_driver_has_given_up_is_a_problem():
    found = only(health.driver_errors(gpus({}, {"recovery": 1}), []))
    assert found.level is Level.PROBLEM
    assert found.summary == "GPU 1 has failed and must be reset before it is used again"


def test_errors_of_the_hardware_are_told_and_those_of_programs_are_not():
    log = (
        "4,1,2,-;NVRM: Xid (PCI:0000:0f:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        "4,2,3,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=4711, name=python, MMU Fault\n"
        "4,3,4,-;NVRM: Xid (PCI:0000:0f:00): 79, again\n"
    )
    found = only(health.driver_errors(gpus({}), nvml.xids(log)))
    assert found.level is Level.WARNING
    assert "Xid 79 (fell off the bus) of 0000:0f:00 2 times" in found.summary
    assert "31" not in found.summary


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((10, 0), ["sm_80", "sm_90"], False),
        ((10, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120"], True),
        ((6, 1), ["sm_75", "sm_120", "compute_120"], False),
        ((9, 0), ["gfx90a"], True),
    ],
)
def test_code_runs_on_its_architecture_and_on_what_it_promises(capability, built_for, runs):
    assert health.runs_on(capability, built_for) is runs


def test_a_gpu_that_this_torch_has_no_code_for_is_a_problem():
    found = only(health.architecture(gpus({"capability": [6, 1], "name": "Tesla P4"}), ["sm_75", "sm_90"]))
    assert found.level is Level.PROBLEM
    assert found.summary.startswith("GPU 0 (Tesla P4) is sm_61; this torch has code for sm_75, sm_90: ")


def test_a_driver_that_falls_asleep_is_no_warning():
    found = only(health.persistence(gpus({}, {"persistence": 0})))
    assert found.level is Level.OK
    assert found.advice == "nvidia-smi -pm 1 keeps the driver awake."


def test_links_that_are_down_on_one_gpu_only_are_a_warning():
    found = only(health.nvlink(gpus({}, {"links": [1] * 16 + [0] * 2}), {"joined": 1, "pairs": 1}))
    assert (found.level, found.summary) == (
        Level.WARNING,
        "more links are down than on other GPUs: GPU 1: 2",
    )
    assert only(health.nvlink(gpus({}, {}), {"joined": 0, "pairs": 1})).summary == "none: GPUs talk over PCIe"


def test_only_gpus_that_ranks_will_see_are_judged():
    two = gpus({"uuid": "GPU-a1"}, {"uuid": "GPU-b2"})
    assert sorted(health.visible(two, None)) == ["0", "1"]
    assert sorted(health.visible(two, "1")) == ["1"]
    assert sorted(health.visible(two, "GPU-a")) == ["0"]
    assert sorted(health.visible(two, "")) == []
    assert sorted(health.visible(two, "MIG-x")) == ["0", "1"]


# --- who is asked -----------------------------------------------------------------------------------------


class Library:
    """Answers as NVML does: 0 and a number written, or what it lacks."""

    def __init__(self, **said):
        for name, numbers in said.items():
            setattr(self, name, self._answering(numbers))

    @staticmethod
    def _answering(numbers):
        def function(*arguments):
            if numbers is None:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            for reference, number in zip(arguments[len(arguments) - len(numbers) :], numbers, strict=True):
                reference._obj.value = number
            return 0

        return function


def test_what_nvml_lacks_or_refuses_is_left_out():
    library = Library(
        nvmlInit_v2=(),
        nvmlDeviceGetCount_v2=(1,),
        nvmlDeviceGetHandleByIndex_v2=(7,),
        nvmlDeviceGetComputeMode=(3,),
        nvmlDeviceGetTotalEccErrors=None,
        nvmlDeviceGetRemappedRows=(1, 2, 0, 1),
    )
    assert nvml.read_state(nvml.Nvml(library)) == {
        "gpus": [{"compute_mode": 3, "rows": [1, 2, 0, 1]}],
        "joined": 0,
        "pairs": 0,
    }


def test_an_nvml_that_cannot_be_initialised_says_nothing():
    with pytest.raises(OSError, match="cannot be initialised"):
        nvml.Nvml(Library(nvmlInit_v2=None))


def test_the_field_of_a_gpus_recovery_has_nvmls_layout():
    assert ctypes.sizeof(nvml._Field) == 40


def test_without_a_driver_nothing_is_said(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(health._ASK_NVML)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "" or "gpus" in json.loads(done.stdout)


def test_a_kernel_log_that_may_not_be_read_is_empty(tmp_path):
    assert nvml.kernel_log(str(tmp_path / "none")) == ""
    (tmp_path / "log").write_text("NVRM: Xid (PCI:0000:0f:00): 48, DBE")
    assert nvml.xids(nvml.kernel_log(str(tmp_path / "log"))) == [("0000:0f:00", 48)]


def test_a_driver_that_hangs_is_a_warning_in_time(own, tmp_path, monkeypatch):
    stuck = tmp_path / "stuck.py"
    stuck.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(health, "_ASK_NVML", stuck)
    monkeypatch.setattr(health, "_SECONDS", 0.3)
    started = time.monotonic()
    found = only(health.health(own))
    assert time.monotonic() - started < 5
    assert (found.level, found.name) == (Level.WARNING, "GPU health")


def test_a_torch_for_the_cpu_has_no_gpus_to_judge(own, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert list(health.health(own)) == []
