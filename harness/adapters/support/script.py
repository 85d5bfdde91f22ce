"""A trainer that is a script: it runs as a program up to its first forward pass that trains, stops there, and runs on later.

The script is not edited. What it imports, builds and wraps is its own; it sees the arguments of a command line. It may
end as scripts do: the process group is left by the adapter, once all has been read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from harness.adapters.support import float64
from harness.adapters.support.training_function import TrainingFunction
from harness.core.probe.without_memory import records_gradients
from harness.core.trainers.support import process_group

Load = Callable[[nn.Module], None]

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
"""Statements that define what others use, of a script that has no `if __name__ == "__main__"`."""


class Script:
    """A trainer's script, run in a thread of this process. No line of it is run before `set_up`."""

    def __init__(self, path: Path, dtype: str) -> None:
        """dtype: the recipe's; where that is float64, float32 means it in the script and in all that it imports from beside
        it."""
        process_group.redirect()
        _keep_process_group()
        float64.preserve(dtype)
        self.path = path
        self.dtype = dtype
        self._makes: dict[str, Callable[[Any], Any]] = {}
        self._given: dict[str, Any] = {}  # by name, once it was found
        self._beside: dict[str, bool] = {}  # by name of a module, whether it is the script or lies beside it
        self._function = TrainingFunction(lambda _: self._run())
        self._model: nn.Module | None = None
        self._called: Any = nn.Module.__call__

    def replace(self, name: str, value: Any) -> None:
        """Give a name in the script, and in all modules beside it, another value.

        If nothing has this name, `set_up` raises ValueError.
        """
        self.wrap(name, lambda _: value)

    def wrap(self, name: str, make: Callable[[Any], Any]) -> None:
        """Give a name in the script, and in all modules beside it, the value that `make` returns for the old one."""
        self._makes[name] = make

    def set_up(self, arguments: Sequence[str], load: Load) -> nn.Module:
        """Run the script up to its first forward pass with gradients. Return the module that this pass calls, with its wrapper.

        arguments: of the command line. load: copies weights into a model, before FSDP1 flattens it, else where that
        pass begins. An evaluation before is not stopped. Raises what the script raises, and ValueError for a replaced
        name that was not found.
        """
        sys.argv = [str(self.path), *arguments]
        loaded = _before_fsdp1(load)
        self._at_first_call()
        self._function.set_up()
        if missing_names := [name for name in self._makes if name not in self._given]:
            raise ValueError(
                f"{self.path.name} and what lies beside it have no {missing_names[0]!r} before the first forward pass"
            )
        assert self._model is not None
        _reshard_units(self._model)
        if not loaded:
            load(self._model)
        return self._model

    def wait(self, model: nn.Module) -> None:
        """Stop the script here, in the script's own thread, until `run` is called. Only the first call stops it.

        An adapter puts this into a script whose first forward pass is too late to stop: the last stage of a pipeline
        waits for the others before it.
        model: what the script trains, with its wrapper.
        """
        nn.Module.__call__ = self._called
        self._model = model
        self._function.wait()

    def hold(self, name: str) -> None:
        """Have the script stop before and after each call of the function of this name.

        The call itself runs in a `run` of its own. What it moves in between, as a checkpoint does, belongs to no step.
        """

        def pause_around(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._function.pause()
                answer = original(*args, **kwargs)
                self._function.pause()
                return answer

            return call

        self.wrap(name, pause_around)

    def run(self) -> None:
        """Run the script on to where it is held, or to its end. Raises what it raises."""
        self._function.train()

    def _run(self) -> None:
        """Run all statements of the script, in its thread. Replaced names are put in before each statement that acts.

        Raises RuntimeError if it exits with a code other than 0.
        """
        module = _register_empty_module(self.path)
        try:
            for acts, code in acting_statements(self.path):
                if acts:
                    self.put_replacements()
                exec(code, vars(module))
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{self.path.name} ended with exit code {end.code}") from end

    def put_replacements(self) -> None:
        """Put replaced names, and float64 in the place of float32, into the script and the modules beside it that are
        loaded by now.

        A name that comes later is put in at the next call. Each replacement is made once.
        """
        for module in self.beside():
            if hasattr(module, "torch"):
                float64.widen(self.dtype, module.__name__)
            for own in self._makes.keys() & vars(module).keys():
                if own not in self._given:
                    self._given[own] = self._makes[own](getattr(module, own))
                setattr(module, own, self._given[own])

    def beside(self) -> list[ModuleType]:
        """Return the modules loaded so far that are the script, or lie in its folder or below."""
        for name, module in list(sys.modules.items()):
            if name not in self._beside:
                self._beside[name] = is_beside(module, self.path)
        return [sys.modules[name] for name, is_own in self._beside.items() if is_own and name in sys.modules]

    def _at_first_call(self) -> None:
        """Patch `Module.__call__` to stop the script's thread at its first call that records gradients.

        Trap: it stops before the module looks for its hooks, so that hooks that are put on it now see this very call.
        """
        original = self._called = nn.Module.__call__

        def stop(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "trainer" and records_gradients(module):
                self.wait(module)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = stop


def _reshard_units(model: nn.Module) -> None:
    """Reshard all FSDP units of a model.

    An evaluation before the first step leaves FSDP's root gathered: weights copied there would be dropped, and step 1
    would gather less than the others.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif (
            isinstance(module, FullyShardedDataParallel)
            and module._is_root is not None
            and _is_shard_call(module._handle)
        ):
            module._handle.reshard(True)
            module._handle.post_reshard()


def _is_shard_call(handle: Any) -> bool:
    """Return whether a unit of FSDP1 is sharded.

    False for a unit without parameters, and on a single rank. handle: FSDP1's, or None.
    """
    return handle is not None and handle.uses_sharded_strategy


def acting_statements(path: Path) -> Iterator[tuple[bool, CodeType]]:
    """Yield (whether a statement acts as a program does, the statement compiled), in the order in which they run.

    Statements under `if __name__ == "__main__"` act; without that, those that define nothing. Bare texts are left out.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    guarded = any(_is_main(node) for node in tree.body)
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a text: compiled alone it would be the docstring
        acts = _is_main(node) if guarded else not isinstance(node, DEFINITIONS)
        statements = node.body if isinstance(node, ast.If) and _is_main(node) else [node]
        for statement in statements:
            yield acts, compile(ast.Module([*futures, statement], []), str(path), "exec", dont_inherit=True)


def _is_main(node: ast.stmt) -> bool:
    test = ast.unparse(node.test).replace('"', "'") if isinstance(node, ast.If) else ""
    return test in ("__name__ == '__main__'", "'__main__' == __name__")


def _register_empty_module(path: Path) -> ModuleType:
    """Make an empty module for the script, put it into sys.modules under the file's name, and return it.

    Its folder goes to sys.path. It is not `__main__`: processes that it starts may import it again.
    """
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    module.__doc__ = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False)
    return module


def is_beside(module: ModuleType, path: Path) -> bool:
    """Return whether the module lies in the script's folder or below, and not where packages are installed."""
    file = getattr(module, "__file__", None)
    folder = path.resolve().parent
    if not isinstance(file, str) or not (resolved := Path(file).resolve()).is_relative_to(folder):
        return False
    folders_between = [folder / part for part in resolved.relative_to(folder).parents]
    return not any(_is_installed(folder_between) for folder_between in folders_between if folder_between != folder)


@functools.cache
def _is_installed(folder: Path) -> bool:
    """Return whether the folder holds installed packages, is an environment's, or is hidden, as caches are."""
    named = folder.name in ("site-packages", "dist-packages") or folder.name.startswith(".")
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    return named or folder in prefixes or (folder / "pyvenv.cfg").exists() or any(folder.glob("*.dist-info"))


def _before_fsdp1(load: Load) -> list[nn.Module]:
    """Patch FSDP1 to load weights into the first module that it wraps, while that is whole.

    Return a list that then has the module. Only the first one is loaded. The list stays empty if FSDP1 wraps nothing.
    """
    original = FullyShardedDataParallel.__init__
    loaded = list[nn.Module]()

    def wrap(self: FullyShardedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not loaded:
            loaded.append(module)
            load(module)
        original(self, module, *args, **kwargs)

    FullyShardedDataParallel.__init__ = wrap
    return loaded


def _keep_process_group() -> None:
    """Patch destroy_process_group to do nothing in the script's thread: the adapter's `stop` leaves the group later."""
    original = dist.destroy_process_group

    def leave(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name != "trainer":
            original(*args, **kwargs)

    dist.destroy_process_group = leave
