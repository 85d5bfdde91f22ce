"""A trainer that is a script: imported, run as a program up to its first forward pass, stopped, and run on when told.

The script is not edited. What it imports, builds and wraps is its own; it sees the arguments of a command line. It may end
as scripts do: the process group is left by the adapter, once all has been read.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from harness.trainers.support import float64, process_group
from harness.trainers.support.training_function import TrainingFunction

Load = Callable[[nn.Module], None]


class Script:
    """module: the script as imported."""

    def __init__(self, path: Path, dtype: str) -> None:
        """dtype: the recipe's; where that is float64, float32 means it in the script and in all that it imports from beside it.
        Raises ValueError for a script that nothing tells from a module: it would train when it is imported."""
        self._program = program(path)
        process_group.redirect()
        _keep_process_group()
        float64.preserve(dtype)
        self.path, self.module = path, _imported(path)
        beside = [name for name, module in sys.modules.items() if self._is_beside(module) and hasattr(module, "torch")]
        float64.widen(dtype, *beside)
        self._function = TrainingFunction(lambda _: self._run())
        self._model: nn.Module | None = None
        self._called: Any = nn.Module.__call__

    def replace(self, name: str, by: Any) -> None:
        """In the script and in all that lies beside it, wherever this name is. Raises ValueError where it is nowhere."""
        beside = [module for module in list(sys.modules.values()) if self._is_beside(module) and hasattr(module, name)]
        for module in beside:
            setattr(module, name, by)
        if not beside:
            raise ValueError(f"{self.path.name} and what lies beside it have no {name!r}")

    def _is_beside(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return file is not None and Path(file).resolve().is_relative_to(self.path.resolve().parent)

    def set_up(self, arguments: Sequence[str], load: Load) -> nn.Module:
        """The module that its first forward pass calls, with whatever wraps it. load: copies weights into a model, before FSDP1
        has flattened it, or else where that pass begins. Raises what the script raises."""
        sys.argv = [str(self.path), *arguments]
        loaded = _before_fsdp1(load)
        self._at_first_call()
        self._function.set_up()
        assert self._model is not None
        if not loaded:
            load(self._model)
        return self._model

    def wait(self, model: nn.Module) -> None:
        """For what an adapter puts into a script whose first forward pass is too late to stop, as in a pipeline, where the last
        stage waits for the others first. model: what the script trains, with whatever wraps it."""
        nn.Module.__call__ = self._called
        self._model = model
        self._function.wait()

    def run(self) -> None:
        """On to its end. Raises what the script raises."""
        self._function.train()

    def _run(self) -> None:
        try:
            exec(self._program, vars(self.module))
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{self.path.name} ended with exit code {end.code}") from end

    def _at_first_call(self) -> None:
        """Trap: stopped before the module looks for its hooks, so that those that are put on it now see this very call."""
        original = self._called = nn.Module.__call__

        def stop(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "trainer" and any(True for _ in module.parameters()):
                self.wait(module)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = stop


def program(path: Path) -> CodeType:
    """What it does as a program: what stands under `if __name__ == "__main__"`."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and is_main(node.test)]
    if not blocks:
        raise ValueError(f'{path.name} has no `if __name__ == "__main__":` and would train when it is imported')
    return compile(ast.Module([line for block in blocks for line in block.body], []), str(path), "exec")


def is_main(test: ast.expr) -> bool:
    return ast.unparse(test).replace('"', "'") in ("__name__ == '__main__'", "'__main__' == __name__")


def _imported(path: Path) -> ModuleType:
    """Under its own name, with what lies beside it, and not as the program that is run. What it starts may import it again."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _before_fsdp1(load: Load) -> list[nn.Module]:
    """Load into what FSDP1 is about to wrap, the first time; whole, for it wraps parts from within. The list has it then."""
    original, loaded = FullyShardedDataParallel.__init__, list[nn.Module]()

    def wrap(self: FullyShardedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not loaded:
            loaded.append(module)
            load(module)
        original(self, module, *args, **kwargs)

    FullyShardedDataParallel.__init__ = wrap
    return loaded


def _keep_process_group() -> None:
    """A script that leaves it at its end does so later, by the adapter's `stop`."""
    original = dist.destroy_process_group

    def leave(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name != "trainer":
            original(*args, **kwargs)

    dist.destroy_process_group = leave
