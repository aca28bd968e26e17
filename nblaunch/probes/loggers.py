"""Points out of what libraries log already: Trainer of transformers, Lightning, Fabric, and bars of tqdm.

    library                 wrapped while a job runs       its points
      transformers            CallbackHandler.on_log         what callbacks get, at `state.global_step`
      lightning, and          _LoggerConnector.log_metrics   `self.log`, also with `logger=False`, at the step
        pytorch_lightning                                    that its own loggers get
        their Fabric          Fabric.log_dict                `fabric.log` and `fabric.log_dict`
      tqdm                    tqdm.set_postfix               numbers, also as text such as `f"{loss:.3f}"`

A library that the job does not import is not imported for this. One that is imported later is wrapped then,
by a finder that knows these few modules by name: any other new module costs it one look into a dictionary. At
the end of the job all is as it was. A version of a library that lacks the wrapped method gives no points.

Each rank logs what its own library gives it: a Trainer the mean loss over all ranks, on each of them;
Lightning the rank's own, unless `sync_dist=True`. Left out is what is no curve: `epoch`, `total_flos`, the
times and speeds of a training (`train_runtime`, `eval_samples_per_second`).

A bar that is switched off on a rank (`disable=rank > 0`) gives points, too. Such a bar does not count, and
one that iterates counts only as it is drawn, so `bar.n` is no step: the step is that of `nblaunch.step()`,
else the number of the call of `set_postfix` in this job, which is the same on all ranks.

No point comes twice. A name is whose that logs it first in a job: the program's own `nblaunch.log`, or one
library. Bars that a library draws are not read. What a library is given is logged after its own callbacks,
and the first points of a bar wait for its next ones: a program that logs them itself has done so by then.

`NBLAUNCH_LOGGERS=0` in the environment of the ranks turns all of this off.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from numbers import Real
from types import ModuleType
from typing import Any

import torch

from nblaunch.probes import steps

SWITCH = "NBLAUNCH_LOGGERS"
LIGHTNINGS_STEP = "_batches_that_stepped"
"""Of its loop over batches: what its own loggers get as the step."""

LogPoints = Callable[[int | None, Mapping[str, object]], None]
"""`nblaunch.probes.rank_metrics.log`: the step, and values by name."""

Read = Callable[..., tuple[int | None, Mapping[str, object]]]
"""Called with the arguments of the wrapped method: what these say."""

_NO_CURVES = ("epoch", "total_flos")
_NO_CURVE_ENDS = ("_runtime", "_per_second", "_preparation_time")

_BARS_OF_THEIR_OWN = frozenset({"accelerate", "lightning", "pytorch_lightning", "torch", "transformers"})
"""Libraries whose bars say what their loggers say, or nothing of a training."""


def _of_transformers(
    _handler: Any, _args: Any, state: Any, _control: Any, logs: Mapping[str, object] | None = None, **_: Any
) -> tuple[int | None, Mapping[str, object]]:
    return int(state.global_step), dict(logs or {})


def _of_lightning(
    connector: Any, metrics: Mapping[str, object], step: int | None = None
) -> tuple[int | None, Mapping[str, object]]:
    values = dict(metrics)
    if step is None:
        # As the method itself chooses the step for its loggers.
        step = values.pop("step", None)  # type: ignore[assignment]
    if step is None:
        trainer = connector.trainer
        epochs = getattr(trainer.fit_loop, "epoch_loop", None)
        step = getattr(epochs, LIGHTNINGS_STEP, trainer.global_step)
    return int(step), values


def _of_fabric(
    _fabric: Any, metrics: Mapping[str, object], step: int | None = None
) -> tuple[int | None, Mapping[str, object]]:
    return step, dict(metrics)


def _of_tqdm(
    _bar: Any, ordered_dict: Any = None, refresh: object = None, **keywords: object
) -> tuple[int | None, Mapping[str, object]]:
    del refresh
    values = dict(ordered_dict or {}) | keywords
    for name, value in values.items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                values[name] = float(value)
    return steps.current(), values


_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_METHODS: dict[str, tuple[str, str, Read]] = {
    "transformers.trainer_callback": ("CallbackHandler", "on_log", _of_transformers),
    f"lightning.pytorch.{_CONNECTOR}": ("_LoggerConnector", "log_metrics", _of_lightning),
    f"pytorch_lightning.{_CONNECTOR}": ("_LoggerConnector", "log_metrics", _of_lightning),
    "lightning.fabric.fabric": ("Fabric", "log_dict", _of_fabric),
    "lightning_fabric.fabric": ("Fabric", "log_dict", _of_fabric),
    "tqdm.std": ("tqdm", "set_postfix", _of_tqdm),
}
"""The modules, and in each the class, its method, and what reads the method's arguments."""


class LibraryPoints:
    """What the libraries log in one job."""

    def __init__(self, log: LogPoints, logged: Callable[[], Collection[str]]) -> None:
        """Give points to `log`; `logged` returns the names that have been logged in this job, by anybody."""
        self._log, self._logged = log, logged
        self.owners: dict[str, str] = {}
        """By name: the library that it is taken from, "" if it is the program's."""
        self._postfixes = 0
        self._waiting: tuple[int | None, Mapping[str, object]] | None = None
        self._failed: set[str] = set()
        self._process = os.getpid()

    def reads(self, library: str, caller: str) -> bool:
        """Whether what `caller`, a module, gives to this library becomes points."""
        if library in self._failed or os.getpid() != self._process:
            return False  # a child of the rank, such as a worker of a DataLoader, sends nothing
        return library != "tqdm" or caller.partition(".")[0] not in _BARS_OF_THEIR_OWN

    def log(self, library: str, step: int | None, values: Mapping[str, object]) -> None:
        values = dict(_numbers(values))
        if library != "tqdm":
            self._send(library, step, values)
            return
        self.end()
        if step is None:
            step = self._postfixes
        self._postfixes += 1
        if values.keys() <= self.owners.keys():
            self._send(library, step, values)
        else:
            self._waiting = (step, values)

    def end(self) -> None:
        """Log the points of a bar that have waited."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._send("tqdm", *waiting)

    def _send(self, library: str, step: int | None, values: Mapping[str, object]) -> None:
        if new := values.keys() - self.owners.keys():
            logged = self._logged()
            self.owners.update({name: "" if name in logged else library for name in new})
        if own := {name: value for name, value in values.items() if self.owners[name] == library}:
            self._log(step, own)

    def failed(self, library: str, error: Exception) -> None:
        """Read this library no more in this job: a probe that fails does not fail the job."""
        self._failed.add(library)
        with contextlib.suppress(Exception):
            sys.stderr.write(f"nblaunch: no points are taken from {library} any more: {error}\n")


def _numbers(values: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if not isinstance(name, str) or name in _NO_CURVES or name.endswith(_NO_CURVE_ENDS):
            continue
        if isinstance(value, torch.Tensor):
            # A tensor that is spread over ranks would need all of them to be read.
            spread = hasattr(value, "placements")
            if value.numel() == 1 and not (value.is_complex() or value.is_meta or spread):
                yield name, value.detach()
        elif isinstance(value, Real):
            yield name, value
        elif getattr(value, "size", None) == 1 and hasattr(value, "item"):
            number = value.item()
            if isinstance(number, Real):
                yield name, number


_points: LibraryPoints | None = None
"""Of the job that runs."""

_wrapped: list[_Wrapped] = []


class _Wrapped:
    """A method of a library's class, wrapped."""

    def __init__(self, owner: type, method: str, read: Read) -> None:
        self.owner, self._method = owner, method
        self._original = original = vars(owner)[method]
        library = owner.__module__.partition(".")[0]

        @functools.wraps(original)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            points = _points
            if points is None or not points.reads(library, _caller()):
                return original(*args, **keywords)
            logged = _guarded(points, library, lambda: read(*args, **keywords))
            try:
                return original(*args, **keywords)
            finally:
                # After the library's own loggers and callbacks: one of them may call `nblaunch.log`.
                if logged is not None:
                    _guarded(points, library, lambda: points.log(library, *logged))

        self._wrapper = wrapper
        setattr(owner, method, wrapper)

    def undo(self) -> bool:
        """Give the class its method back; return whether the wrapper is gone.

        It stays, and does nothing between jobs, if somebody else has wrapped it since.
        """
        if vars(self.owner).get(self._method) is not self._wrapper:
            return False
        setattr(self.owner, self._method, self._original)
        return True


def _caller() -> str:
    # No other way is quick enough to be taken at each call.
    return str(sys._getframe(2).f_globals.get("__name__"))  # noqa: SLF001


def _guarded(points: LibraryPoints, library: str, step: Callable[[], Any]) -> Any:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whatever another version of the library makes of it
        points.failed(library, error)
        return None


def _wrap(module: ModuleType) -> None:
    """Wrap the method that this module has, if it has it."""
    name, method, read = _METHODS[module.__name__]
    owner = getattr(module, name, None)
    if (
        isinstance(owner, type)
        and method in vars(owner)
        and all(each.owner is not owner for each in _wrapped)
    ):
        _wrapped.append(_Wrapped(owner, method, read))


class _Finder(importlib.abc.MetaPathFinder):
    """Has the modules that are known here wrapped as they are imported; the other finders find them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the others load the module, and wrap it then; None for all other modules."""
        if fullname not in _METHODS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _WrappingLoader(spec.loader)
                return spec
        return None


class _WrappingLoader(importlib.abc.Loader):
    """Loads a module by its own loader, which it then has as if nothing else had been there."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        _wrap(module)


_finder = _Finder()


@contextlib.contextmanager
def reading(log: LogPoints, logged: Callable[[], Collection[str]]) -> Iterator[None]:
    """Take points from the libraries that are loaded, and from those that the job loads, until it ends.

    `log` gets the points; `logged` returns the names that have been logged in this job, by anybody. Does
    nothing if the environment says `NBLAUNCH_LOGGERS=0`.
    """
    global _points
    if os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "off", "no"):
        yield
        return
    _points = points = LibraryPoints(log, logged)
    for name in _METHODS:
        if (module := sys.modules.get(name)) is not None:
            _wrap(module)
    sys.meta_path.insert(0, _finder)
    try:
        yield
    finally:
        _points = None
        with contextlib.suppress(ValueError):  # the job has changed the list
            sys.meta_path.remove(_finder)
        _guarded(points, "tqdm", points.end)
        _wrapped[:] = [each for each in _wrapped if not each.undo()]
