"""What a training script says of itself, read by its syntax tree; nothing of it is run."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.evidence.reading import read_text
from harness.onboarding import constructors, optimizers, overrides, unlike_llama

MADE = {
    "optimizer": r"(Adam|AdamW|SGD|Adafactor|Lion)$|optimizer$",
    "wrapper": r"(fully_shard|DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|parallelize_module|replicate)$",
    "loader": r"(DataLoader|StatefulDataLoader)$",
    "sampler": r"\w*Sampler$",
    "loss": r"(cross_entropy|CrossEntropyLoss|nll_loss|NLLLoss)$",
    "schedule": r"(LambdaLR|CosineAnnealingLR|OneCycleLR|LinearLR|SequentialLR)$",
    "clipping": r"clip_grad_norm_?$",
    "process group": r"init_process_group$",
    "mesh": r"(init_device_mesh|DeviceMesh)$",
}
"""Where it is made: by the name that is called."""

ROOTS = (".git", "pyproject.toml", "setup.py")  # one of them lies where a repository begins

HALVES = r"rotate_half|\[\.\.\., *: *\w*(half|// ?2) *\]|chunk\(2, ?(dim=)?-1\)"
SPARED = r"\.(dim\(\)|ndim) *(>=? *[12]|<=? *[12])"  # in an optimizer's groups: no weight decay on vectors


@dataclass(frozen=True)
class Flag:
    name: str
    default: str
    is_switch: bool = False
    help: str = ""
    choices: str = ""
    set_by: str = ""  # the file that sets it, where it is a global of the script and no option of a parser


@dataclass(frozen=True)
class Place:
    what: str
    called: str
    file: str
    line: int
    text: str


@dataclass(frozen=True)
class ScriptFacts:
    """models: classes of modules that are part of no other, with an embedding first. names: what each class of
    modules calls its parts. sizes: of the model, and sampler: its shuffle and seed, that are written into it.
    data_sets: their classes, each with the module that has it and what its `__getitem__` answers. batches: functions that by
    their name answer one. optimizer: literal
    keywords of the call that makes the model's; None where no call was seen. spares_vectors: it has groups by the number of
    dims. unlike: what the model is seen to be made of, and Llama 3 is not. files: that were read.
    """

    path: Path
    flags: tuple[Flag, ...]
    models: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    data_sets: tuple[tuple[str, str, str], ...]
    batches: tuple[str, ...]
    places: tuple[Place, ...]
    optimizer: dict[str, object] | None
    turns_halves: bool
    spares_vectors: bool
    sizes: Mapping[str, int]
    sampler: Mapping[str, object] | None
    unlike: tuple[str, ...]
    files: tuple[Path, ...]

    def at(self, what: str) -> list[Place]:
        return [place for place in self.places if place.what == what]

    def wrappers(self) -> set[str]:
        return {place.called for place in self.at("wrapper")}

    def tell_nothing(self) -> bool:
        """Of a model, how it is wrapped and stepped, or its samples: there is nothing to begin an adapter with."""
        return not (self.models or self.wrappers() or self.at("optimizer") or self.data_sets or self.batches)


def read(path: Path) -> ScriptFacts:
    """Of the script and what it imports of its repository. Raises OSError, SyntaxError and UnicodeDecodeError."""
    sources = _with_imports(path)
    trees = {file: ast.parse(text, str(file)) for file, text in sources.items()}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    modules, sets = _extending({"Module"}, classes), _extending({"Dataset", "IterableDataset"}, classes)
    models = _models(modules)
    places = tuple(place for file, tree in trees.items() for place in _places(file, tree))
    return ScriptFacts(
        path,
        flags=(*(flag for tree in trees.values() for flag in _flags(tree)), *_globals(path, trees[path])),
        models=models,
        names=tuple(tuple(dict.fromkeys(_attributes(module))) for module in modules),
        data_sets=tuple(found for file, tree in trees.items() for found in _data_sets(file, tree, sets)),
        batches=tuple(name for tree in trees.values() for name in _batch_functions(tree)),
        places=places,
        optimizer=optimizers.of_the_model(list(trees.values()), models, [module.name for module in modules]),
        turns_halves=any(re.search(HALVES, text) for text in sources.values()),
        spares_vectors=any("weight_decay" in text and re.search(SPARED, text) for text in sources.values()),
        sizes=constructors.sizes(list(trees.values()), models),
        sampler=constructors.sampler(trees.values()),
        unlike=tuple(unlike_llama.seen(trees)),
        files=tuple(trees),
    )


def _batch_functions(tree: ast.Module) -> Iterator[str]:
    """get_batch and the like; none that yields."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "batch" in node.name:
            inside = {type(one) for one in ast.walk(node)}
            if ast.Return in inside and not inside & {ast.Yield, ast.YieldFrom}:
                yield node.name


def _with_imports(path: Path) -> dict[Path, str]:
    """The file and those of its repository that it imports, and they; by absolute names from beside it or from the root."""
    root = next((folder for folder in path.parents if any((folder / name).exists() for name in ROOTS)), path.parent)
    sources, waiting = {}, [path]
    while waiting:
        file = waiting.pop(0)
        if file in sources:
            continue
        sources[file] = read_text(file)
        for node in ast.walk(ast.parse(sources[file], str(file))):
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            folders = [file.parents[level - 1]] if 0 < level <= len(file.parents) else [path.parent, root, root / "src"]
            for name in _imported(node):
                bases = [folder.joinpath(*name.split(".")) for folder in folders]
                there = (
                    one for base in bases for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()
                )
                waiting += [one for one in itertools.islice(there, 1)]
    return sources


def _imported(node: ast.AST) -> list[str]:
    """Names of modules, or of what is in them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = f"{node.module}." if node.module else ""
    return [*filter(None, [node.module]), *(f"{base}{alias.name}" for alias in node.names)]


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _places(file: Path, tree: ast.AST) -> Iterator[Place]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for what, pattern in MADE.items():
                if re.search(rf"(^|\.)({pattern})", _called(node)):
                    text = ast.unparse(node)
                    yield Place(
                        what,
                        _called(node).rpartition(".")[2],
                        file.name,
                        node.lineno,
                        text if len(text) < 80 else f"{text[:76]} ..",
                    )


def _flags(tree: ast.AST) -> Iterator[Flag]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node).endswith("add_argument") and node.args:
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            name = next((name for name in names if name.startswith("--")), "")
            if name:
                action = told.get("action", "")
                switch = "store_" in action or "Boolean" in action
                yield Flag(name, told.get("default", "none"), switch, told.get("help", ""), told.get("choices", ""))


def _globals(path: Path, tree: ast.Module) -> Iterator[Flag]:
    return (Flag(f"--{name}", value, set_by=file) for name, value, file in overrides.constants(path, tree))


def _extending(names: set[str], classes: list[ast.ClassDef]) -> list[ast.ClassDef]:
    """Those with such a base, or with one of these as a base: by the last part of its name."""
    bases = [{ast.unparse(base).rpartition(".")[2] for base in node.bases} for node in classes]
    known: set[str] = set()
    while not names <= known:
        known |= names
        names = {node.name for node, of in zip(classes, bases, strict=True) if of & known}
    return [node for node, of in zip(classes, bases, strict=True) if of & known]


def _attributes(module: ast.ClassDef) -> Iterator[str]:
    """What it assigns to itself that may be a module or a parameter: something that is called."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target, value in (pair for one in node.targets for pair in _paired(one, node.value)):
                if isinstance(value, ast.Call) and ast.unparse(target).startswith("self."):
                    yield ast.unparse(target).removeprefix("self.")


def _paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """a, b = c, d assigns c to a; a, b = (c() for _ in range(2)) assigns c() to both."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.GeneratorExp | ast.ListComp):
        return [(one, value.elt) for one in target.elts]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _models(modules: list[ast.ClassDef]) -> tuple[str, ...]:
    parts = {
        (other.name, name)
        for other in modules
        for node in ast.walk(other)
        if isinstance(node, ast.Call) and (name := _called(node)) != other.name
    }
    whole = [module for module in modules if not any(name == module.name for _, name in parts)]
    embeds = [module.name for module in whole if "Embedding" in ast.unparse(module)]
    return tuple(dict.fromkeys([*embeds, *(module.name for module in whole)]))


def _data_sets(file: Path, tree: ast.AST, sets: list[ast.ClassDef]) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node in sets:
            items = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__getitem__"]
            answers = [
                ast.unparse(one.value)
                for item in items
                for one in ast.walk(item)
                if isinstance(one, ast.Return) and one.value
            ]
            iterable = any(isinstance(one, ast.FunctionDef) and one.name == "__iter__" for one in node.body)
            yield file.stem, node.name, answers[-1] if answers else "an iterator" if iterable else ""
