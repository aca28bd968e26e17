"""What tests share that run a program of their own, in a process of its own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

MEGABYTE = 1 << 20

INTERRUPTER = """
import json, linecache, os, random, signal, sys, threading, time
import psutil
import nblaunch

def in_finalizer(frame):
    while frame is not None:
        if frame.f_code.co_filename.endswith("weakref.py"):
            return True
        frame = frame.f_back
    return False

class Interrupt:
    # Is the stop button before the line of ours, in this file, that is the `at`-th to be executed.
    def __init__(self, at, file="/nblaunch/"):
        self.at, self.file, self.lines, self.where = at, file, 0, None
    def __call__(self, frame, event, arg):
        return self.each if self.file in frame.f_code.co_filename else None
    def each(self, frame, event, arg):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # Python asks for signals neither between a lock that is taken and its `with`, nor at the end of one;
        # and what is raised in a finalizer it only prints.
        if event == "line" and not line.strip().startswith("with ") and not in_finalizer(frame):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.each

def traced(call, interrupt):
    sys.settrace(interrupt)
    try:
        return call()
    finally:
        sys.settrace(None)
"""
"""The beginning of a program that interrupts itself before a line of ours."""

STARTER = """
import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
print(f"rank {rank} of {world_size}")
dist.init_process_group("gloo", init_method="env://")
tensor = torch.tensor([1])
dist.all_reduce(tensor)
print("sum", tensor.item())
dist.barrier()
print("done")
"""

STARTER_WITH_MAIN = """
import os
import torch
import torch.distributed as dist

def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    print(f"rank {rank} of {size}")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    tensor = torch.tensor([1])
    dist.all_reduce(tensor)
    print("sum", tensor.item())
    dist.barrier()
    print("done")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
"""The two programs that everybody starts from: in a cell, and as a file."""


def said_by(source: str, directory: Path, *arguments: object) -> str:
    """Run a program, which must end well; return what it has printed."""
    program = directory / "program.py"
    program.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def end_of_torchrun(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], seconds: float = 100
) -> tuple[int, str]:
    """Run real torchrun; return its exit status and what it wrote to stderr.

    One that takes too long is asked to end, not killed: its workers would go on for ever.
    """
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as torchrun:
        try:
            said = torchrun.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            torchrun.terminate()
            said = torchrun.communicate()[1]
        return torchrun.returncode, said


def must_not_grow(used: Sequence[Mapping[str, int]]) -> None:
    """Check the memory of processes, measured again and again, by name and in bytes."""
    for name in used[0]:
        growth = [later[name] - earlier[name] for earlier, later in itertools.pairwise(used)]
        # An allocator may take a new arena once; what leaks does so every time.
        assert min(growth) < MEGABYTE, (name, growth)
