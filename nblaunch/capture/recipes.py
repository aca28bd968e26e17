"""Objects that pickle cannot send, or not whole: each is sent as what makes it again.

A compiled function is its function and its options, a custom operator what was registered for it. An
optimizer goes with its hooks, which torch's own pickle leaves out.

No library is imported here: an object can be torch's only if torch has been imported already.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

from cloudpickle import cloudpickle as _cloudpickle

from nblaunch.capture.parts import class_name, closure_of, mro_of, set_attributes

Recipe: TypeAlias = "Callable[[Any], Any]"
"""Returns how to rebuild an object, or `NotImplemented`."""

_WRAPPED = "_wrapped_by_lr_sched"


def reduce(obj: Any) -> Any:
    """Return how to rebuild one of these objects, `NotImplemented` for anything else."""
    kind = type(obj)
    if kind in _REDUCERS and (reduced := _REDUCERS[kind](obj)) is not NotImplemented:
        return reduced
    if kind is types.FunctionType:
        # The mark that torch.compile leaves on its wrapper.
        return _compiled_function(obj) if "_torchdynamo_orig_callable" in obj.__dict__ else NotImplemented
    if kind not in _recipes:
        _recipes[kind] = next(_recipes_of(kind), None)
    recipe = _recipes[kind]
    return NotImplemented if recipe is None else recipe(obj)


_recipes: weakref.WeakKeyDictionary[type, Recipe | None] = weakref.WeakKeyDictionary()


def _recipes_of(kind: type) -> Iterator[Recipe]:
    for name in map(class_name, mro_of(kind)):
        if name in _BY_NAME:
            yield _BY_NAME[name]
    if class_name(kind).startswith("torch.nn.utils.parametrize.Parametrized"):
        yield _parametrized_module


# torch.compile


def _compiled_function(function: types.FunctionType) -> Any:
    context = next(filter(_is_compiling, closure_of(function).values()), None)
    if context is None:
        return NotImplemented
    return _compiled, (function.__dict__["_torchdynamo_orig_callable"], _settings(context))


def _is_compiling(context: object) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(context, dynamo.OptimizeContext)


def _compiled_module(module: Any) -> Any:
    context = module.dynamo_ctx
    if not _is_compiling(context):
        return NotImplemented
    hooks = {name: each for name, each in module.__dict__.items() if name.endswith("_hooks") and each}
    reduced = _compiled, (module._orig_mod, _settings(context))  # noqa: SLF001 - torch has no public way
    return (*reduced, hooks, None, None, set_attributes) if hooks else reduced


def _settings(context: Any) -> dict[str, Any]:
    """Return the keywords of `torch.compile` that lead to this context."""
    import torch
    from torch._dynamo.eval_frame import innermost_backend

    backend = innermost_backend(context.callback)
    # `fullgraph` has no name of its own before torch 2.9.
    settings = {"fullgraph": bool(getattr(context, "fullgraph", False)), "dynamic": context._dynamic}  # noqa: SLF001 - torch has no public way
    if isinstance(backend, torch._TorchCompileInductorWrapper):  # noqa: SLF001 - likewise
        return settings | {"options": dict(backend.config) or None}
    if isinstance(backend, torch._TorchCompileWrapper):  # noqa: SLF001 - likewise
        return settings | {"backend": backend.compiler_fn, **backend.kwargs}
    return settings | {"backend": backend}


def _compiled(inner: Any, settings: dict[str, Any]) -> Any:
    import torch

    return torch.compile(inner, **settings)


# Modules, optimizers, loaders


def _parametrized_module(module: Any) -> Any:
    """Reduce a module whose class `torch.nn.utils.parametrize` has made for it alone."""
    attributes = dict(module.__dict__)
    made_of = type(module).__bases__[0], tuple(module.parametrizations)
    return _parametrized, made_of, attributes, None, None, set_attributes


def _parametrized(base: Any, names: tuple[str, ...]) -> Any:
    from torch.nn.utils import parametrize

    module = base.__new__(base)
    parametrize._inject_new_class(module)  # noqa: SLF001 - what `register_parametrization` calls
    for name in names:
        parametrize._inject_property(module, name)  # noqa: SLF001 - see above
    return module


class _TrackedStep:
    """An optimizer's `step` that a scheduler watches: torch's own holds a weak reference."""

    def __init__(self, optimizer: Any) -> None:
        setattr(self, _WRAPPED, True)
        self._optimizer = optimizer

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._optimizer._opt_called = True  # noqa: SLF001 - what the scheduler looks at
        return type(self._optimizer).step(self._optimizer, *arguments, **keywords)


def _optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer to all its attributes; torch's pickle leaves out hooks and what LBFGS has."""
    torch = sys.modules["torch"]
    if type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
        return NotImplemented
    reduced = optimizer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if type(reduced) is not tuple:
        return reduced
    make, arguments, state, *others = reduced
    state = {**state, **optimizer.__dict__}
    if hasattr(state.get("step"), _WRAPPED):
        state["step"] = _TrackedStep(optimizer)
    return (make, arguments, state, *others)


def _loader(loader: Any) -> Any:
    """Reduce a `DataLoader` without its workers, which are this process's; the next loop starts others."""
    if loader.__dict__.get("_iterator") is None:
        return NotImplemented
    make, arguments, state, *others = loader.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return (make, arguments, {**state, "_iterator": None}, *others)


def class_by_value(cls: type) -> Any:
    return _cloudpickle._dynamic_class_reduce(cls)  # noqa: SLF001 - no public name


# Operators, scripts, validated functions, facts


def _custom_operator(operator: Any) -> Any:
    kernels = {}
    for device, wrapped in operator._backend_fns.items():  # noqa: SLF001 - torch has no public way
        kernels[device] = closure_of(inspect.unwrap(wrapped))["fn"]
    facts = {
        name: operator.__dict__.get(name)
        for name in ("_abstract_fn", "_backward_fn", "_setup_context_fn", "_vmap_fn")
    }
    rules = dict(operator._torch_dispatch_fns)  # noqa: SLF001 - see above
    tags = [tag.name for tag in operator.__dict__.get("_tags") or ()]
    made_of = operator._namespace, operator._name, operator._schema, operator._init_fn  # noqa: SLF001 - see above
    return _registered, (*made_of, tags), (kernels, rules, facts), None, None, _register


def _registered(namespace: str, name: str, schema: str, function: Any, tags: list[str]) -> Any:
    import torch

    # The public decorator infers the schema from annotations, and gives no operator without a kernel.
    kind = torch._library.custom_ops.CustomOpDef  # noqa: SLF001 - see above
    return kind(namespace, name, schema, function, tuple(getattr(torch.Tag, tag) for tag in tags))


def _register(operator: Any, registered: tuple[dict[Any, Any], dict[Any, Any], dict[str, Any]]) -> None:
    kernels, rules, facts = registered
    for device, kernel in kernels.items():
        operator.register_kernel(device)(kernel)
    for kind, rule in rules.items():
        operator.register_torch_dispatch(kind, rule)
    if facts["_abstract_fn"] is not None:
        operator.register_fake(facts["_abstract_fn"])
    if facts["_backward_fn"] is not None:
        operator.register_autograd(facts["_backward_fn"], setup_context=facts["_setup_context_fn"])
    if facts["_vmap_fn"] is not None:
        operator.register_vmap(facts["_vmap_fn"])


def _scripted_function(function: Any) -> Any:
    source = getattr(function, "_torchdynamo_inline", None)
    # A traced function has a source too, which is not what was traced. torch wraps the one it knows anew.
    known = sys.modules["torch.jit._state"]._try_get_jit_cached_function(source)  # noqa: SLF001 - torch has no public way
    if known is None or known.qualified_name != function.qualified_name:
        return NotImplemented
    return _scripted, (source,)


def _scripted(function: Any) -> Any:
    import torch

    return torch.jit.script(function)


def _validated_call(wrapper: Any) -> Any:
    """Reduce what `pydantic.validate_call` makes: validators hold compiled code, and cannot be sent."""
    config = wrapper.config_wrapper.config_dict
    return type(wrapper), (wrapper.function, config, wrapper.validate_return, None)


def _number_facts(facts: Any) -> Any:
    dtype = facts.dtype  # torch's are texts
    return type(facts), (getattr(sys.modules["torch"], dtype) if type(dtype) is str else dtype,)


_BY_NAME: dict[str, Recipe] = {
    "torch._dynamo.eval_frame.OptimizedModule": _compiled_module,
    "torch.optim.optimizer.Optimizer": _optimizer,
    "torch.utils.data.dataloader.DataLoader": _loader,
    "torch._library.custom_ops.CustomOpDef": _custom_operator,
    "torch.jit.torch.jit.ScriptFunction": _scripted_function,
    "torch.finfo": _number_facts,
    "torch.iinfo": _number_facts,
    "numpy.finfo": _number_facts,
    "numpy.iinfo": _number_facts,
    "pydantic._internal._validate_call.ValidateCallWrapper": _validated_call,
}
"""By the qualified name of a class; it goes for the classes made of it."""


# Objects that notebooks define and cloudpickle cannot send: caches, cached properties, dispatch, new types.
# The standard library pickles some of these by name, which a rank cannot look up in the notebook, and others
# not at all, because of a lock or a weak reference that has no meaning elsewhere.


def _reduce_cached_function(obj: Any) -> Any:
    if not _is_notebooks_own(obj):
        return NotImplemented
    return _cached_function, (obj.__wrapped__, obj.cache_parameters())


def _reduce_new_type(obj: Any) -> Any:
    if not _is_notebooks_own(obj):
        return NotImplemented
    return _new_type, (obj.__name__, obj.__supertype__, obj.__module__)


def _reduce_mapping(obj: Any) -> Any:
    return type(obj), (dict(obj),)


def _is_notebooks_own(obj: object) -> bool:
    return _cloudpickle._lookup_module_and_qualname(obj) is None  # noqa: SLF001 - as for functions and classes


def _cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _new_type(name: str, supertype: Any, module: str) -> Any:
    made = typing.NewType(name, supertype)  # type: ignore[misc] # not for a type checker
    made.__module__ = module
    return made


def _reduce_cell(cell: types.CellType) -> tuple[Any, ...]:
    # Its content, which may lead back to the cell, comes after it.
    make = _cloudpickle._make_empty_cell  # noqa: SLF001 - no public name
    try:
        content = cell.cell_contents
    except ValueError:  # the variable is not defined yet
        return make, ()
    return make, (), (content,), None, None, fill_cell


def fill_cell(cell: types.CellType, content: tuple[Any]) -> None:
    (cell.cell_contents,) = content


def _reduce_context_variable(variable: contextvars.ContextVar[Any]) -> Any:
    default: tuple[Any, ...] = ()
    with suppress(LookupError):
        default = (contextvars.Context().run(variable.get),)
    now = contextvars.copy_context()
    reduced = _context_variable, (variable.name, default)
    if variable not in now:
        return reduced
    return (*reduced, now[variable], None, None, _set_context_variable)


def _context_variable(name: str, default: tuple[Any, ...]) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=default[0]) if default else contextvars.ContextVar(name)


def _set_context_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    variable.set(value)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.cache(id)): _reduce_cached_function,
    types.CellType: _reduce_cell,
    contextvars.ContextVar: _reduce_context_variable,
    # `HfArgumentParser` and others ask whether a default is this very object.
    type(dataclasses.MISSING): lambda _: "MISSING",
    type(dataclasses.KW_ONLY): lambda _: "KW_ONLY",
    functools.cached_property: lambda obj: (_cached_property, (obj.func, obj.attrname)),
    typing.NewType: _reduce_new_type,
    # `functools.singledispatch` keeps a weak dictionary and a proxy in the function that it makes.
    weakref.WeakKeyDictionary: _reduce_mapping,
    weakref.WeakValueDictionary: _reduce_mapping,
    types.MappingProxyType: _reduce_mapping,
}
