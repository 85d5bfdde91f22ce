"""The process that observes a script: it runs it on one rank, and writes down what torch and argparse were called with.

Up to the first step of the model's optimizer, which ends it.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import inspect
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from harness.adapters.onboarding import skeleton
from harness.adapters.onboarding.observed import CASE, SECONDS, Facts, Flag
from harness.adapters.support.script import Script, is_beside
from harness.adapters.support.script_adapter import import_from, repository
from harness.core.evidence.errors import error_text
from harness.core.probe.clipping import CLIP_BY_TOTAL_NORM, ClipFunction, observe_clipping
from harness.core.trainers.support.samples import RecipeSamples, RecipeStream, recipe_batches
from harness.core.trainers.support.weights import plain

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pair": lambda tokens, labels: (tokens, labels),
    "joined": lambda tokens, labels: torch.cat([tokens, labels[-1:]]),
}


class Operators(TorchDispatchMode):
    """Records the first use of each operator, the number of heads, and the sizes that are cut in halves."""

    def __init__(self, facts: Facts, folder: Path) -> None:
        super().__init__()
        self.facts = facts
        self.folder = str(folder)
        self.halved = set[int]()
        self.added = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        first = args[0] if args else None
        if name not in self.facts.operators:
            self.facts.operators[name] = self._script_line()
        number = next((argument for argument in args[:2] if isinstance(argument, float | int)), 0)
        if name == "pow" and isinstance(first, float | int) and number > 1:
            self.facts.sizes["rope_theta"] = float(number)
        elif name in ("rsqrt", "sqrt") and self.added:
            self.facts.sizes["norm_eps"] = self.added
        elif name == "_fused_rms_norm" and args[3]:
            self.facts.sizes["norm_eps"] = args[3]
        self.added = number if name in ("add", "add_") and 0 < number < 1e-3 else 0.0
        if isinstance(first, Tensor) and first.dim() == 4:
            if "scaled_dot_product" in name or ("softmax" in name and first.shape[2] == first.shape[3]):
                self.facts.heads = self.facts.heads or first.shape[1]
            half = first.shape[3] // 2
            cut_arguments = str([argument for argument in args[1:] if isinstance(argument, int | list)])
            if cut_arguments.replace("-1", "3") in (f"[3, 0, {half}]", f"[{half}, 3]", f"[[{half}, {half}], 3]"):
                self.halved.add(2 * half)
        return func(*args, **(kwargs or {}))

    def _script_line(self) -> str:
        """Return the file and line of the script that called what runs now; empty if none of its frames did."""
        frame = inspect.currentframe()
        while frame and not frame.f_code.co_filename.startswith(self.folder):
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


class Observer(Script):
    """The script, run as an adapter would, with what it does noted in `facts`."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.facts = facts
        self.operators = Operators(facts, path.parent)
        with self.operators:  # which the script's thread takes over
            super().__init__(path, CASE.training.dtype)
        self.root = repository(path)
        self.seen: nn.Module | None = None
        self.defined: tuple[str, str, str] | None = None  # a data set that may never be made

    def put_replacements(self) -> None:
        """Wrap what makes samples as soon as it is defined, and count the names used."""
        pairs: list[tuple[str, Any]] = []
        for module in self.beside():
            pairs += vars(module).items()
        for name, value in pairs:
            if inspect.isfunction(value) and Path(value.__code__.co_filename).is_relative_to(self.root):
                if "save" in name and name not in self.facts.saves:
                    self.facts.saves.append(name)
                if "batch" in name:
                    self.wrap(name, self._wrap_batches)
            elif inspect.isclass(value) and issubclass(value, TorchDataset) and self._makes_samples(value):
                self.wrap(name, self._wrap_samples)
        super().put_replacements()

    @staticmethod
    def _makes_samples(cls: type) -> bool:
        """Return whether a class of data sets makes samples itself, and does not arrange those of others, as torch's do."""
        return not cls.__module__.startswith("torch.") or cls.__name__ == "TensorDataset"

    def _wrap_samples(self, cls: type) -> Callable[..., Any]:
        """Return a function in place of a data set's class, that makes the recipe's samples in the class's own form."""
        stream = issubclass(cls, IterableDataset)
        kind = "stream" if stream else "samples"
        self.defined = self.defined or (cls.__name__, kind, "pair")

        def make_recipe_samples(*args: Any, **kwargs: Any) -> Any:
            form = "pair"
            try:
                own = cls(*args, **kwargs)
                form = form_of(next(iter(own)) if stream else own[0])
            except Exception as error:  # without its own data, the form is usual
                print(f"{cls.__name__}: {error}", file=sys.stderr)
            self.facts.data = self.facts.data or (cls.__name__, kind, form)
            in_form = FORMS.get(form) or (lambda tokens, labels: dict(zip(form.split(), (tokens, labels), strict=True)))
            return RecipeStream(CASE, 0, 1, form=in_form) if stream else RecipeSamples(CASE, form=in_form)

        return make_recipe_samples

    def _wrap_batches(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in place of one that makes batches, with the recipe's in place of [rows, length] pairs.

        Other results stay as they are. If the function raises, the recipe's are made, too.
        """
        recipe = recipe_batches(CASE)
        generates = inspect.isgeneratorfunction(function)

        def make_recipe_batches(*args: Any, **kwargs: Any) -> Any:
            try:
                own = function(*args, **kwargs)
                own = next(own) if generates else own
            except Exception as error:
                print(f"{function.__name__}: {error}", file=sys.stderr)
            else:
                if form_of(own) != "pair" or not all(
                    isinstance(tensor, Tensor) and tensor.dim() == 2 for tensor in own
                ):
                    return function(*args, **kwargs)
            self.facts.data = self.facts.data or (function.__name__, "generator" if generates else "function", "pair")
            return recipe_batches(CASE) if generates else next(recipe)

        return make_recipe_batches

    def load(self, model: nn.Module) -> None:
        """Keep the model and its shapes, in place of copying weights."""
        self.seen = model
        self.facts.model = type(getattr(model, "module", model)).__name__.removeprefix("FSDP")
        self.facts.shapes = {plain(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def end_after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note the recipe of an optimizer that has stepped parameters of the model, and end the script by SystemExit.

        Nothing for another optimizer.
        """
        assert self.seen is not None
        shapes = {}
        for name, parameter in self.seen.named_parameters():
            shapes[id(parameter)] = self.facts.shapes.get(plain(name), ())
        groups = optimizer.param_groups
        parameters = itertools.chain.from_iterable(group["params"] for group in groups)
        if not any(id(parameter) in shapes for parameter in parameters):
            return
        self.facts.optimizer = type(optimizer).__name__
        decays = {group.get("weight_decay", 0) for group in groups}
        spared = []
        for group in groups:
            if not group.get("weight_decay"):
                spared += group["params"]
        if spared and len(decays) > 1 and all(len(shapes.get(id(parameter), (1,))) == 1 for parameter in spared):
            self.facts.recipe["decay"] = "matrices"
        first = max(groups, key=lambda group: group.get("weight_decay", 0))
        betas = dict(zip(("beta1", "beta2"), first.get("betas", ()), strict=False))
        self.facts.recipe |= betas | {key: first[key] for key in ("weight_decay", "eps") if key in first}
        sys.exit(0)


def form_of(sample: Any) -> str:
    """Return "pair", "joined" for tokens with one label more, or both keys of a mapping."""
    if hasattr(sample, "keys"):
        return " ".join(list(sample.keys())[:2])
    return "joined" if isinstance(sample, Tensor) else "pair"


def names_used(code: CodeType) -> Iterator[str]:
    """Yield the names that compiled code refers to, with those of functions and classes in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_used(inner)


# ---- what is wrapped of Python and torch, in this process alone


def watch_torch(facts: Facts, observer: Observer) -> None:
    """Patch torch in this process: note norms that clip, samplers and the optimizer's step; torch.compile does nothing."""

    def note_max_norm(_: str, original: ClipFunction) -> ClipFunction:
        def clip(*args: Any, **kwargs: Any) -> Any:
            own = inspect.signature(original).bind(*args, **kwargs).arguments["max_norm"]
            facts.recipe.setdefault("max_norm", float(own) if float(own) < float("inf") else None)
            return original(*args, **kwargs)

        return clip

    def note_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            facts.sampler = facts.sampler or (getattr(self, "shuffle", True), getattr(self, "seed", None))

        return init

    observe_clipping(note_max_norm, (CLIP_BY_TOTAL_NORM,))
    DistributedSampler.__init__ = note_sampler(DistributedSampler.__init__)
    RandomSampler.__init__ = note_sampler(RandomSampler.__init__)
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    register_optimizer_step_post_hook(observer.end_after_step)
    _watch_arguments(facts)


def _watch_arguments(facts: Facts) -> None:
    """Note a script's flags as it parses them, and have it parse the case's command line instead.

    argparse is seen, and nanochat's way to execute "globals()" by the command line.
    """
    parse = argparse.ArgumentParser.parse_known_args
    execute = builtins.exec

    def note_flags_and_parse(self: Any, args: Any = None, namespace: Any = None) -> Any:
        typed = args is None or [*args] == sys.argv[1:]
        if typed and not facts.flags:
            facts.flags += [flag for action in self._actions if (flag := _flag_of(action))]
            sys.argv[1:] = skeleton.command_line(facts, CASE)
        for action in self._actions:  # what is required may be the place of samples, which are replaced
            action.required = False
            action.nargs = action.nargs if action.option_strings else action.nargs or "?"
        args = None if typed else args
        return parse(self, args, namespace)

    def note_flags_and_execute(code: Any, names: Any = None, local: Any = None, /, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        names = frame.f_globals if names is None else names
        if isinstance(code, str) and "globals()" in code and "sys.argv" in code and not facts.flags:
            own = {name: value for name, value in names.items() if isinstance(value, int | float | str)}
            facts.flags += [Flag(f"--{name}", repr(value)) for name, value in own.items() if not name.startswith("_")]
            sys.argv[1:] = skeleton.command_line(facts, CASE)
        execute(code, names, local, **kwargs)

    argparse.ArgumentParser.parse_known_args = note_flags_and_parse  # type: ignore[method-assign]
    builtins.exec = note_flags_and_execute


def _flag_of(action: argparse.Action) -> Flag | None:
    """Return the flag of a parser's action, by its first name that begins with "--". None without one, and for --help."""
    name = next((option for option in action.option_strings if option.startswith("--")), "")
    if not name or action.dest == "help":
        return None
    choices = tuple(map(str, action.choices or ()))
    return Flag(name, repr(action.default), action.nargs == 0, action.help or "", choices, action.required)


def main(path: Path, out: Path) -> None:
    """Run the script, and write the facts as JSON to `out`. Ends the process.

    A script that raises, or takes longer than SECONDS, has the reason in `stopped`.
    """
    facts = Facts()
    import_from(repository(path))
    observer = Observer(path, facts)
    watch_torch(facts, observer)
    try:
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        observer.set_up([], observer.load)
        observer.run()
        facts.stopped = "" if facts.optimizer else "it ended before an optimizer of the model stepped"
    except BaseException as error:
        facts.stopped = error_text(path, error)
        modules = (value for value in gc.get_objects() if isinstance(value, nn.Module))
        script = observer.root / path.name
        models = [module for module in modules if is_beside(sys.modules[type(module).__module__], script)]
        if models and not facts.shapes:
            observer.load(max(models, key=lambda model: sum(1 for _ in model.parameters())))
    facts.data = facts.data or observer.defined
    own_modules = [module for module in list(sys.modules.values()) if is_beside(module, observer.root / path.name)]
    files = dict.fromkeys([path, *(Path(module.__file__ or "") for module in own_modules)])
    facts.files = [str(file) for file in files if file.is_file()]
    codes = [compile(Path(file).read_text(encoding="utf-8"), file, "exec") for file in facts.files]
    facts.words = sorted({*itertools.chain.from_iterable(names_used(code) for code in codes)})
    facts.halves = CASE.model.dim // (facts.heads or CASE.model.n_heads) in observer.operators.halved
    out.write_text(json.dumps(asdict(facts)))
    os._exit(0)  # threads of the script may wait for ever


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no first step within {SECONDS} seconds")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
