"""Compares the nodes of a run: differences that break a run are refused by name, others are warnings.

Nothing here inspects this machine: `host` makes each node's `Inventory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nblaunch.host.wire import Inventory

_HERE = "the notebook's machine"
_NAMES = 8
_SINGLE = 1


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences, one line each: the values, and the hosts that have them."""

    refused: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()

    @property
    def refusal(self) -> str:
        """Why these machines cannot run together, and what to do; empty if they can."""
        if not self.refused:
            return ""
        return (
            f"These machines cannot run together: {' '.join(self.refused)} Install the same on all of them."
        )


def compare(here: Inventory, nodes: Mapping[str, Inventory], backend: str = "auto") -> Differences:
    """Compare the nodes, by name, with the notebook's machine and with one another.

    Different minor versions of Python and releases of torch are refused, because functions travel as
    bytecode. If all nodes use NCCL, so are its different minor versions: `backend` is that of the run, each
    node's own where it is "auto". Different versions of nblaunch, drivers, CUDA and glibc, patch versions of
    NCCL, builds of torch and models of GPUs are warnings.
    """
    everybody = {_HERE: here, **nodes}
    used = {each.backend for each in nodes.values()} if backend == "auto" else {backend}
    nccl = nodes if all("nccl" in each for each in used) else {}
    builds = {name: each for name, each in nodes.items() if _release(each) == _release(here)}
    refused = (
        _differing("Python", everybody, _minor_of_python),
        _differing("torch", everybody, _release),
        _differing("NCCL", nccl, lambda each: each.nccl, alike=_minor_of_nccl),
    )
    warned = (
        _differing("nblaunch", everybody, lambda each: each.nblaunch),
        _differing("torch", builds, lambda each: each.torch),
        "" if refused[-1] else _differing("NCCL", nccl, lambda each: each.nccl),
        _differing("CUDA", nodes, lambda each: each.cuda),
        _differing("NVIDIA driver", nodes, lambda each: each.driver),
        _differing("GPUs", nodes, lambda each: ", ".join(sorted(set(each.gpus)))),
        _differing("glibc", nodes, lambda each: each.glibc),
    )
    return Differences(tuple(filter(None, refused)), tuple(filter(None, warned)))


def shared_gpu(nodes: Mapping[str, Inventory]) -> str:
    """Return which two of the nodes, by name, are on one machine and have the same GPU; empty if none do."""
    owners: dict[tuple[str, str], str] = {}
    for name, machine in nodes.items():
        for gpu in machine.own_gpus:
            owner = owners.setdefault((machine.boot, gpu), name)
            if owner != name:
                return f"{owner} and {name} are on one machine and share its GPU {gpu}"
    return ""


def _minor_of_python(machine: Inventory) -> str:
    return _minor(machine.python)


def _minor_of_nccl(machine: Inventory) -> str:
    return _minor(machine.nccl)


def _release(machine: Inventory) -> str:
    # Without the build: machines with GPUs have another build of the same torch.
    return machine.torch.partition("+")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _differing(
    what: str,
    machines: Mapping[str, Inventory],
    value: Callable[[Inventory], str],
    alike: Callable[[Inventory], str] | None = None,
) -> str:
    """Return the line for what these machines have of something; empty if all that have any have the same.

    Values for which `alike` is the same do not differ.
    """
    having: dict[str, list[str]] = {}
    kinds = set()
    for name, machine in machines.items():
        if found := value(machine):
            having.setdefault(found, []).append(name)
            kinds.add((alike or value)(machine))
    if len(kinds) <= _SINGLE:
        return ""
    return f"{what} " + "; ".join(f"{found}: {_listed(names)}" for found, names in having.items()) + "."


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")
