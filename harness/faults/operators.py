"""Operators, of which faults are made: each does one wrong thing at one target. An operator is what a fault `does`.

A target is "module:attribute", such as "torch.optim:Optimizer.zero_grad"; a module that begins with a dot is one of
harness.core.trainers.llama3, such as ".trainer:scale_loss". It is looked up on each rank, before the trainer is built, and
never put back: each rank is a separate process. Each operator calls `fired()` where it does the wrong thing, and not
where it only might have. `when` gets what the target was called with; where it does not hold, the call is left as it
is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
from collections.abc import Callable
from typing import Any

from harness.core.evidence.near_names import did_you_mean
from harness.faults import FaultError, Fired

LLAMA3 = "harness.core.trainers.llama3"

Operator = Callable[[Fired], None]
Act = Callable[..., Any]
Condition = Callable[..., Any]


# ---- the call


def instead(target: str, wrong: Act, *, when: Condition | None = None) -> Operator:
    """Return the operator that calls wrong(original, *args, **kwargs) in the place of target(*args, **kwargs)."""

    def make(original: Act, fired: Fired) -> Act:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if when is not None and not when(*args, **kwargs):
                return original(*args, **kwargs)
            fired()
            return wrong(original, *args, **kwargs)

        return replacement

    return _replace_target(target, make)


def skip_call(target: str, result: Any = None, *, when: Condition | None = None) -> Operator:
    """Return the operator that skips calls of the target. Its caller gets `result`."""
    return instead(target, lambda original, *args, **kwargs: result, when=when)


def repeat_call(target: str, *, when: Condition | None = None) -> Operator:
    """Return the operator that calls the target twice. Its caller gets the second result."""

    def call_twice(original: Act, *args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        return original(*args, **kwargs)

    return instead(target, call_twice, when=when)


def before_call(target: str, act: Act, *, when: Condition | None = None) -> Operator:
    """Return the operator that calls act(*args, **kwargs) before target(*args, **kwargs)."""

    def act_and_call(original: Act, *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    return instead(target, act_and_call, when=when)


def after_call(target: str, act: Act, *, when: Condition | None = None) -> Operator:
    """Return the operator that calls act(*args, **kwargs) after target(*args, **kwargs).

    The caller gets the target's result.
    """

    def call_and_act(original: Act, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act(*args, **kwargs)
        return result

    return instead(target, call_and_act, when=when)


# ---- what goes in and what comes out


def override_argument(target: str, *, when: Condition | None = None, **values: Any) -> Operator:
    """Return the operator that gives arguments of the target these values, by name, whatever its caller gives."""
    return change_argument(target, when=when, **{name: lambda _, value=value: value for name, value in values.items()})


def change_argument(target: str, *, when: Condition | None = None, **changes: Callable[[Any], Any]) -> Operator:
    """Return the operator that passes change(value) in the place of an argument. changes: by the argument's name.

    It fires where the new value is another object. The operator raises FaultError if the target has no such argument.
    """

    def make(original: Act, fired: Fired) -> Act:
        signature = inspect.signature(original)
        _check_arguments(target, signature, changes)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if when is not None and not when(*args, **kwargs):
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            for name, change in changes.items():
                if _change_bound_argument(bound, name, change):
                    fired()
            return original(*bound.args, **bound.kwargs)

        return replacement

    return _replace_target(target, make)


def change_result(target: str, change: Callable[[Any], Any], *, when: Condition | None = None) -> Operator:
    """Return the operator that returns change(result) to the target's caller. It fires where that is another object."""

    def make(original: Act, fired: Fired) -> Act:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if when is not None and not when(*args, **kwargs):
                return result
            changed = change(result)
            if changed is not result:
                fired()
            return changed

        return replacement

    return _replace_target(target, make)


def scale_result(target: str, factor: float, *, when: Condition | None = None) -> Operator:
    """Return the operator that multiplies the target's result by a factor."""
    return change_result(target, lambda result: result * factor, when=when)


def scale_gradient(target: str, factor: float, *, when: Condition | None = None) -> Operator:
    """Return the operator that multiplies the gradient of the target's result in backward. The result itself is not changed."""

    def call_and_hook(original: Act, *args: Any, **kwargs: Any) -> Any:
        return with_scaled_gradient(original(*args, **kwargs), factor)

    return instead(target, call_and_hook, when=when)


def with_scaled_gradient(tensor: Any, factor: Any) -> Any:
    """Return the tensor itself, with a hook that multiplies its gradient by a factor. Unchanged if it needs no gradient."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * factor)
    return tensor


# ---- where, when, what


def on_rank(rank: int | tuple[int, ...], does: Operator) -> Operator:
    """Return the operator that applies another one on this rank only, or on these ranks."""
    ranks = rank if isinstance(rank, tuple) else (rank,)
    return lambda fired: does(fired) if this_rank() in ranks else None


def before_step(step: int, act: Callable[[], Any]) -> Operator:
    """Return the operator that calls act() just before the `step`-th step of optimizers in a rank, counted from 1."""

    def apply(fired: Fired) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        is_due = nth_call(step)

        def hook(*_: Any) -> None:
            if is_due():
                fired()
                act()

        register_optimizer_step_pre_hook(hook)

    return apply


def together(*does: Operator) -> Operator:
    """Return the operator that applies several ones: one mistake at several targets."""

    def apply(fired: Fired) -> None:
        for operator in does:
            operator(fired)

    return apply


def nth_call(*numbers: int) -> Condition:
    """Return a condition that holds in these of its evaluations, counted from 1 on each rank."""
    count = itertools.count(1)
    return lambda *_, **__: next(count) in numbers


def in_backward(*_: Any, **__: Any) -> bool:
    """Return whether autograd is running backward in this thread. FSDP2 reduces there."""
    import torch

    return torch._C._current_graph_task_id() != -1


def this_rank() -> int:
    """Return the global rank of this process; 0 without RANK."""
    return int(os.environ.get("RANK", 0))


def make_call(target: str, *args: Any, **kwargs: Any) -> Act:
    """Return an act that calls the target with these arguments, whatever it gets.

    The target is imported when the act is called.
    """

    def act(*_: Any, **__: Any) -> Any:
        owner, name = find_target(target)
        return getattr(owner, name)(*args, **kwargs)

    return act


# ---- targets


RENAMED_TARGETS = {".trainer:scaled": ".trainer:scale_loss"}
"""Targets of the documentation by their names before 0.2.0, which work until 0.3.0."""


def find_target(target: str) -> tuple[Any, str]:
    """Return (the object that holds the target, the target's name there), after importing its module.

    Raises FaultError, with the nearest name, if the module or the attribute does not exist.
    """
    target = RENAMED_TARGETS.get(target, target)
    module, _, path = target.partition(":")
    if not path:
        raise FaultError(f"target {target!r}: one is given as 'module:attribute'")
    try:
        owner: Any = importlib.import_module(module, LLAMA3)
    except ModuleNotFoundError as error:
        raise FaultError(
            f"target {target!r}: {error}{did_you_mean(error.name or '', _neighbour_modules(error.name or ''))}"
        ) from error
    *owners, name = path.split(".")
    for part in (*owners, name):
        if not hasattr(owner, part):
            raise FaultError(
                f"target {target!r}: {getattr(owner, '__name__', owner)} has no {part!r}{did_you_mean(part, dir(owner))}"
            )
        owner = getattr(owner, part) if part is not name else owner
    return owner, name


def _replace_target(target: str, make: Callable[[Act, Fired], Act]) -> Operator:
    """Return the operator that sets the target to make(original, fired) on each rank."""

    def apply(fired: Fired) -> None:
        owner, name = find_target(target)
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original, fired)))

    return apply


def _check_arguments(target: str, signature: inspect.Signature, names: Any) -> None:
    """Raise FaultError for a name that is no argument of the target. A target with **kwargs takes any name."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in names:
        if name not in signature.parameters and not takes_any:
            raise FaultError(f"target {target!r} has no argument {name!r}{did_you_mean(name, signature.parameters)}")


def _change_bound_argument(bound: inspect.BoundArguments, name: str, change: Callable[[Any], Any]) -> bool:
    """Set an argument of a bound call to change(its value). Return whether the argument is another object now.

    An argument that was not given has its default; one of **kwargs has None.
    """
    parameter = bound.signature.parameters.get(name)
    if parameter is not None:
        arguments = bound.arguments
        default = parameter.default
    else:
        parameters = bound.signature.parameters.values()
        name_of_rest = next(other.name for other in parameters if other.kind is other.VAR_KEYWORD)
        arguments = bound.arguments.setdefault(name_of_rest, {})
        default = None
    before = arguments.get(name, default)
    arguments[name] = change(before)
    return arguments[name] is not before


def _neighbour_modules(module: str) -> list[str]:
    """Return the full names of the modules beside one that does not exist: all in its parent package.

    Empty for a top-level module, and if the parent does not exist or is no package.
    """
    parent = module.rpartition(".")[0]
    try:
        spec = importlib.util.find_spec(parent) if parent else None
    except ModuleNotFoundError:  # the parent of the parent is missing, or is no package
        return []
    folders = spec.submodule_search_locations if spec else None
    if folders is None:  # of which pkgutil would list all top-level modules
        return []
    return [f"{parent}.{neighbour.name}" for neighbour in pkgutil.iter_modules(folders)]
