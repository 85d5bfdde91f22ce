"""What is asked for: Case and its parts, and loading them from YAML.

Whatever a person can get wrong in a file is answered with a CaseError that names the file, the case, the key and the
remedy; nothing is guessed and no key is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness import ROOT, limits, releases, schedule
from harness.allowance import Allowance
from reference.config import PRESETS, ModelConfig, RopeScaling, TrainingConfig, noise_key

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class CaseError(ValueError):
    """A case asks for something that does not exist or does not fit. The message is for the person who wrote it."""


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every mesh axis, outermost first: pp, dp_replicate, dp_shard, cp, tp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, got {degree!r}")

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """How many ways the samples of a step are divided."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees, strict=True))


TIERS = ("default", "nightly", "compiled")
WRAPPERS = ("ddp", "replicate", "fsdp2", "fsdp1")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FEATURE_CHOICES: dict[str, tuple[str | None, ...]] = {
    "wrapper": (None, *WRAPPERS),
    "schedule": ("GPipe", "1F1B", *LOOPED),
    "cp_rotation": ("allgather", "alltoall"),
    "fsdp_units": (None, "apart", "root", "observed"),
    "cp_heads": ("query", "key_value"),
    "attention": (None, "fused"),
    "activation_checkpointing": ("none", "full", "layer", "op"),
    "reduce_dtype": (None, "float64", "float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class Features:
    """How the recipe is carried out. None of it may change a loss or a gradient in exact arithmetic.

    wrapper: who divides parameters or reduces gradients over the data ranks; None: Case.wrapper decides.
    accumulation: forward and backward passes (under pp: passes of the schedule) per optimizer step. defer_sync: gradients
    are reduced over the data ranks after the last of them only, rather than after each.
    bucket_mb: how many MiB of gradients DDP and replicate reduce at once; None: torch's usual 25.
    reshard_after_forward: "default" (all but the last unit; under pp none), "always", "never", or over how many ranks a
    unit stays sharded. reduce_dtype: of gradients on their way; None: as they are computed.
    schedule, microbatches, stages_per_rank: of a pipeline; None: see Case. cp_rotation: how keys and values go round.
    activation_checkpointing: of every block ("full"), of every second ("layer"), of all but the costly operators ("op").
    compile: torch.compile for each block. fsdp_units: what FSDP2 gathers together besides each block: "apart", the embedding,
    and norm with output; "root", all the rest, and by default only the last block stays whole after forward; "observed", what
    the trainer wraps, which is then its choice, as is what it keeps by default; None: the adapter says which. cp_heads: keys
    and values go round repeated for each "query" head, or as they are. ac_early_stop: a block runs again only until backward
    has all it needs, rather than to its end. own_model: it is not the reference's, and rounds at other places. attention:
    "fused", one kernel does all of it; None: as the trainer has it, but all of its layers alike. loss_chunks: in how many
    parts of a sequence the loss applies the output, one after the other; with FSDP2 the output's unit is freed behind the
    last, and gathered again for the final norm's backward. keeps_loss_unit: what FSDP2 gathered for that loss is kept until
    the next forward pass. Trainers choose these seven, cases need not.
    """

    wrapper: str | None = None
    accumulation: int = 1
    defer_sync: bool = True
    bucket_mb: float | None = None
    reshard_after_forward: str | int = "default"
    cpu_offload: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    schedule: str = "1F1B"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    cp_rotation: str = "allgather"
    cp_load_balance: bool = True
    activation_checkpointing: str = "none"
    compile: bool = False
    reduce_dtype: str | None = None
    fsdp_units: str | None = None
    cp_heads: str = "query"
    ac_early_stop: bool = True
    own_model: bool = False
    attention: str | None = None
    loss_chunks: int = 1
    keeps_loss_unit: bool = False

    def __post_init__(self) -> None:
        for key in ("accumulation", "microbatches", "stages_per_rank", "loss_chunks"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ValueError(f"bucket_mb must be positive, got {self.bucket_mb}")
        policy = self.reshard_after_forward
        if policy not in ("default", "always", "never") and (not isinstance(policy, int) or policy < 2):
            raise ValueError(f"reshard_after_forward {policy!r}: choose default, always, never or a number above 1")
        for key, known in FEATURE_CHOICES.items():
            if getattr(self, key) not in known:
                named = ", ".join("null" if choice is None else choice for choice in known)
                raise ValueError(f"{key} {getattr(self, key)!r}: choose one of {named}")


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """A case that torch gets wrong. It must fail in just this way, else it is no longer true and must be looked at.

    because: what is wrong, and where that is reported. script: a minimal program in the project that shows it without the
    harness. laws: those that fail, separated by blanks. named: part of the diagnosis' first line. torch: on which releases,
    such as "<2.15"; empty for all. On others the case is judged as any other.
    """

    because: str = ""
    script: str = ""
    laws: str = ""
    named: str = ""
    torch: str = ""


@dataclass(frozen=True)
class Saved:
    """An earlier launch: it trained up to step `after` in this layout, and saved.

    until: it went on up to this step, after which it was lost, as a job that is killed some time after it saved.
    """

    after: int
    dims: ParallelDims = ParallelDims()
    features: Features = Features()
    until: int | None = None

    def __post_init__(self) -> None:
        if self.after < 1:
            raise ValueError(f"after must be at least 1, got {self.after}")
        if self.until is not None and self.until <= self.after:
            raise ValueError(f"until must be above after {self.after}, got {self.until}")


@dataclass(frozen=True)
class Case:
    """One row of the matrix. `runs` 2 repeats the case, so that the law `determinism` has something to compare.

    resume: the earlier launches that this one continues, in order; dims and features are those of the last launch.
    last_step: of an earlier launch alone; saves_after: of one that saves before its last step; never written in a file.
    allow: what the trainer may keep, copy or move besides what the plan knows, each with its reason.
    tier: when it runs. "default": before every push. "nightly": more of the same, and combinations that no smaller case
    has. "compiled": what waits for a compiler.
    """

    name: str
    why: str
    dims: ParallelDims = ParallelDims()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    features: Features = Features()
    runs: int = 1
    tier: str = "default"
    expected_failure: ExpectedFailure | None = None
    resume: tuple[Saved, ...] = ()
    last_step: int | None = None
    saves_after: int | None = None
    file: str = ""
    allow: tuple[Allowance, ...] = ()

    @property
    def steps(self) -> range:
        """The steps that this launch trains, counted from 1 as if it were the first."""
        return range(self.resume[-1].after + 1 if self.resume else 1, (self.last_step or self.training.steps) + 1)

    @property
    def saved_step(self) -> int | None:
        """After which step this launch saves; None if it saves nothing."""
        return self.saves_after or self.last_step

    @property
    def launches(self) -> dict[str, Case]:
        """By the name of its folder: the earlier launches as cases of their own, then this one."""
        earlier = {
            f"saved_{number}": dataclasses.replace(
                self,
                dims=s.dims,
                features=s.features,
                resume=self.resume[: number - 1],
                last_step=s.until or s.after,
                saves_after=s.until and s.after,
                runs=1,
            )
            for number, s in enumerate(self.resume, start=1)
        }
        return earlier | {"run": self}

    @property
    def local_batch(self) -> int:
        """Samples in one microbatch of one rank."""
        return self.training.global_batch // (self.dims.dp * self.features.accumulation * self.microbatches)

    @property
    def microbatches(self) -> int:
        """Into how many parts a pipeline's schedule cuts a batch: twice the stages, if the case does not say; else 1."""
        if self.dims.pp == 1:
            return 1
        return self.features.microbatches or 2 * self.dims.pp

    @property
    def passes(self) -> int:
        """Forward passes of a sample's length and width per optimizer step on a rank."""
        return self.features.accumulation * self.microbatches

    @property
    def stages_per_rank(self) -> int:
        if self.dims.pp == 1:
            return 1
        return self.features.stages_per_rank or (2 if self.features.schedule in LOOPED else 1)

    @property
    def n_stages(self) -> int:
        return self.dims.pp * self.stages_per_rank

    @property
    def wrapper(self) -> str | None:
        """Who looks after the data ranks: FSDP2 where parameters are sharded, else DDP; None without data parallelism.

        Context parallel counts as sharding: its ranks hold equal parameters and different tokens.
        """
        if self.features.wrapper is not None:
            return self.features.wrapper
        if self.dims.dp_shard * self.dims.cp > 1:
            return "fsdp2"
        return "ddp" if self.dims.dp_replicate > 1 else None

    @property
    def shards(self) -> int:
        """Over how many ranks FSDP cuts a parameter."""
        return self.dims.dp_shard * self.dims.cp

    def seq_len(self, step: int) -> int:
        """Tokens of each sample that step (from 1) trains on."""
        return self.training.seq_len // 2 if self.training.variable_length and step % 2 == 0 else self.training.seq_len

    @property
    def noise_key(self) -> str:
        """Under which the reference's noise is kept: how gradients are added over ranks, and whether products are rounded
        as on one device."""
        cut = self.dims.tp * self.dims.cp > 1 or self.features.compile or self.features.own_model
        return noise_key(self.training, self.features.reduce_dtype, "parts" if cut else "shares")

    @property
    def golden_noise_key(self) -> str:
        """The same for the reference itself: another build's kernels may sum in any order."""
        return noise_key(self.training, self.features.reduce_dtype, "parts")

    @property
    def exact(self) -> bool:
        """Judged by derived float64 bounds, rather than by a bound measured from the reference's own noise."""
        narrow = {self.training.compute_dtype, self.features.reduce_dtype} - {None, "float64"}
        return self.training.dtype == "float64" and not narrow and not self.training.quantize


def to_json(case: Case) -> dict[str, Any]:
    return dataclasses.asdict(case)


def from_json(record: Mapping[str, Any]) -> Case:
    """The inverse of to_json. Raises CaseError where the record has unknown keys or values."""
    record = _mapping(record, "case")
    return _build_case(record, file=record.get("file", ""))


_BEFORE = "; for a checkpoint, `resume: [{after: STEP, dims: ..}]` lists the launches before it"
UNWRITTEN = {
    "name": ": its key is its name",
    "file": ": it is the file's path",
    "last_step": _BEFORE,
    "saves_after": _BEFORE,
}


def load_cases(path: Path) -> list[Case]:
    """All cases of one YAML file, in the order written. Raises CaseError."""
    shown = _shown(path)
    document = _read_yaml(path, shown)
    _refuse_unknown(document, ("defaults", "cases", "matrix"), f"{shown}: top level")
    defaults = _mapping(document.get("defaults"), f"{shown}: defaults")
    cases: list[Case] = []
    for name, fragment in _named_fragments(document, shown):
        fragment = _merge(defaults, _mapping(fragment, f"{shown}: case {name!r}"))
        for key in set(UNWRITTEN) & set(fragment):
            raise CaseError(f"{shown}: case {name!r}: {key!r} is not written in a case{UNWRITTEN[key]}")
        case = _build_case(fragment | {"name": name}, file=shown)
        if any(case.name == other.name for other in cases):
            raise CaseError(f"{shown}: two cases are named {case.name!r}; names must be unique")
        cases.append(case)
    if not cases:
        raise CaseError(f"{shown}: no case in it; add one under 'cases:' or a cross product under 'matrix:'")
    return cases


def load_all(folder: Path = ROOT / "cases") -> list[Case]:
    """Every case of every file. A name used in two files is refused: `pytest -k` could not tell them apart."""
    cases = [case for path in sorted(folder.glob("*.yaml")) for case in load_cases(path)]
    if not cases:
        raise CaseError(f"{_shown(folder)}: no *.yaml file with cases in it")
    files: dict[str, str] = {}
    for case in cases:
        if case.name in files:
            raise CaseError(f"{case.file}: case {case.name!r} also exists in {files[case.name]}; rename one")
        files[case.name] = case.file
    return cases


def find_case(name: str, cases: Iterable[Case]) -> Case:
    """The case of that name. Raises CaseError with the nearest names."""
    known = {case.name: case for case in cases}
    if name not in known:
        raise CaseError(f"no case is named {name!r}{_nearest(name, known)}; `harness matrix --list` lists them")
    return known[name]


# ---- from YAML to fragments


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML as people mean it: a key written twice is an error, not the last one winning."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    written = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # << may be overridden
    keys = [loader.construct_object(key, deep=deep) for key in written]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            raise yaml.YAMLError(f"line {written[position].start_mark.line + 1}: key {key!r} is written twice")
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _read_yaml(path: Path, shown: str) -> dict[str, Any]:
    try:
        loader = _UniqueKeyLoader(path.read_text(encoding="utf-8"))
        limits.refuse_bombs(node := loader.get_single_node())
        document = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise CaseError(f"{shown}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise CaseError(f"{shown}: not valid YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # the second: no UTF-8, a number of 5000 digits, the 32nd of May
        raise CaseError(f"{shown}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise CaseError(f"{shown}: expected a mapping with 'cases:' or 'matrix:' at the top level")
    return document


def _named_fragments(document: Mapping[str, Any], shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _mapping(document.get("cases"), f"{shown}: cases").items()
    for number, product in enumerate(_list(document.get("matrix"), f"{shown}: matrix"), start=1):
        yield from _cross_product(product, f"{shown}: matrix entry {number}")


def _cross_product(product: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`each` names axes, an axis maps labels to fragments; a case per combination, its name the labels joined.

    `exclude` lists combinations to leave out (a partial one leaves out all that match). `include` lists more: labels
    for every axis, a `name`, and anything a case may say.
    """
    product = _mapping(product, where)
    _refuse_unknown(product, ("each", "exclude", "include"), where)
    axes = {axis: _mapping(labels, f"{where}: {axis}") for axis, labels in _mapping(product.get("each"), where).items()}
    if not axes:
        raise CaseError(f"{where}: 'each' must name at least one axis with labels")
    if problem := limits.too_many(axes):
        raise CaseError(f"{where}: {problem}")
    patterns = _list(product.get("exclude"), f"{where}: exclude")
    excluded = [_labels(pattern, axes, f"{where}: exclude") for pattern in patterns]
    for labels in itertools.product(*axes.values()):
        chosen = dict(zip(axes, labels, strict=True))
        if not any(chosen.items() >= pattern.items() for pattern in excluded):
            yield "".join(map(str, labels)), _combined(chosen, axes, where)
    for extra in _list(product.get("include"), f"{where}: include"):
        extra = _mapping(extra, f"{where}: include")
        chosen = _labels({axis: extra[axis] for axis in axes if axis in extra}, axes, f"{where}: include")
        rest = {key: value for key, value in extra.items() if key not in axes}
        name = rest.pop("name", "".join(map(str, chosen.values())))
        yield name, _merge(_combined(chosen, axes, where), rest)


def _labels(chosen: Any, axes: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, Any]:
    for axis, label in _mapping(chosen, where).items():
        if axis not in axes:
            raise CaseError(f"{where}: unknown axis {axis!r}{_nearest(axis, axes)}")
        if label not in list(axes[axis]):  # a list, because a label that somebody wrote may be unhashable
            raise CaseError(f"{where}: axis {axis!r} has no label {label!r}{_nearest(label, axes[axis])}")
    return dict(chosen)


def _combined(chosen: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, Any]:
    fragment: dict[str, Any] = {}
    for axis, label in chosen.items():
        fragment = _merge(fragment, _mapping(axes[axis][label], f"{where}: {axis}: {label}"))
    return fragment


def _merge(base: Mapping[str, Any], over: Mapping[str, Any] | None) -> dict[str, Any]:
    """`over` wins; mappings are merged key by key. A model named by its preset counts as {preset: name}."""
    merged = dict(base)
    for key, value in (over or {}).items():
        old = {"preset": merged[key]} if isinstance(merged.get(key), str) and key == "model" else merged.get(key)
        new = {"preset": value} if isinstance(value, str) and key == "model" else value
        new = {} if new is None and isinstance(old, Mapping) else new  # a key with nothing after it changes nothing
        merged[key] = _merge(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else value
    return merged


# ---- from fragments to cases


def _build_case(fragment: Mapping[str, Any], file: str) -> Case:
    name = fragment.get("name", "")
    where = f"{file}: case {name!r}"
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise CaseError(f"{where}: a name is made of letters, digits and underscores, so that `pytest -k` takes it")
    _refuse_unknown(fragment, [f.name for f in dataclasses.fields(Case)] + ["world_size"], where)
    if not fragment.get("why") or not isinstance(fragment["why"], str):
        raise CaseError(f"{where}: 'why' is missing: one sentence that says what this case is here to catch")
    case = Case(
        name=name,
        why=fragment["why"],
        dims=_record(ParallelDims, fragment.get("dims"), f"{where}: dims"),
        model=_model(fragment.get("model", "debug"), f"{where}: model"),
        training=_record(TrainingConfig, fragment.get("training"), f"{where}: training"),
        features=_record(Features, fragment.get("features"), f"{where}: features"),
        runs=fragment.get("runs", 1),
        tier=_tier(fragment.get("tier", "default"), f"{where}: tier"),
        expected_failure=_expected_failure(fragment.get("expected_failure"), f"{where}: expected_failure"),
        resume=_resume(fragment.get("resume"), f"{where}: resume"),
        last_step=fragment.get("last_step"),
        allow=_allowances(fragment.get("allow"), f"{where}: allow"),
        saves_after=fragment.get("saves_after"),
        file=file,
    )
    if problem := limits.too_large(case):
        raise CaseError(f"{where}: {problem}")
    _validate(case, fragment.get("world_size"), where)
    _validate_resume(case, where)
    return case


def _tier(value: Any, where: str) -> str:
    if value not in list(TIERS):
        raise CaseError(f"{where}: unknown tier {value!r}{_nearest(value, TIERS)}; known: {', '.join(TIERS)}")
    return str(value)


def _expected_failure(value: Any, where: str) -> ExpectedFailure | None:
    """All but torch are needed: a failure that nobody can look into is not expected but ignored."""
    if value is None:
        return None
    expected: ExpectedFailure = _record(ExpectedFailure, value, where)
    for field in dataclasses.fields(expected):
        if not getattr(expected, field.name) and field.name != "torch":
            raise CaseError(f"{where}: {field.name} is missing")
    try:
        releases.parsed(expected.torch or "<2.0")
    except (TypeError, ValueError) as error:
        raise CaseError(f"{where}: torch: {error}") from error
    if not (ROOT / expected.script).is_file():
        raise CaseError(f"{where}: script {expected.script!r}: no such file in the project; write the minimal program")
    return expected


def _allowances(value: Any, where: str) -> tuple[Allowance, ...]:
    found = []
    for number, entry in enumerate(_list(list(value) if isinstance(value, tuple) else value, where), start=1):
        here, entry = f"{where}: entry {number}", _mapping(entry, f"{where}: entry {number}")
        _refuse_unknown(entry, [f.name for f in dataclasses.fields(Allowance)], here)
        for key, given in entry.items():
            _check_type(given, "", "int | str" if key == "bytes" else "str", f"{here}: {key}")
        try:
            found.append(Allowance(**entry))
        except ValueError as error:
            raise CaseError(f"{here}: {error}") from error
    return tuple(found)


def _resume(value: Any, where: str) -> tuple[Saved, ...]:
    found = []
    for number, entry in enumerate(_list(list(value) if isinstance(value, tuple) else value, where), start=1):
        here = f"{where}: entry {number}"
        entry = dict(_mapping(entry, here))
        entry["dims"] = _record(ParallelDims, entry.get("dims"), f"{here}: dims")
        entry["features"] = _record(Features, entry.get("features"), f"{here}: features")
        if "after" not in entry:
            raise CaseError(f"{here}: 'after' is missing: the step after which that launch saves")
        found.append(_record(Saved, entry, here, base=Saved(after=1)))
    return tuple(found)


def _validate_resume(case: Case, where: str) -> None:
    """Each launch has something to train, and each of them is a case that could be run by itself."""
    ends = [0, *(saved.after for saved in case.resume), case.last_step or case.training.steps]
    if any(end <= begin for begin, end in itertools.pairwise(ends)):
        raise CaseError(
            f"{where}: resume: launches end after steps {', '.join(map(str, ends[1:]))}; each must train at least one step"
        )
    for saved in case.resume:
        if (saved.until or 0) > case.training.steps:
            raise CaseError(
                f"{where}: resume: until {saved.until} is beyond the {case.training.steps} steps of the recipe"
            )
    for name, launch in list(case.launches.items())[:-1]:
        _validate(launch, None, f"{where}: resume: {name}")


def _model(value: Any, where: str) -> ModelConfig:
    value = {"preset": value} if isinstance(value, str) else dict(_mapping(value, where))
    preset = value.pop("preset", "debug")
    if preset not in list(PRESETS):
        raise CaseError(f"{where}: unknown preset {preset!r}{_nearest(preset, PRESETS)}; known: {', '.join(PRESETS)}")
    if isinstance(value.get("rope_scaling"), Mapping):
        value["rope_scaling"] = _record(RopeScaling, value["rope_scaling"], f"{where}: rope_scaling")
    for key, given in value.items():
        if isinstance(given, int) and given < 1 and not isinstance(given, bool):
            raise CaseError(f"{where}: {key} must be at least 1, got {given}")
    return _record(ModelConfig, value, where, base=PRESETS[preset])


def _record(kind: type, value: Any, where: str, base: Any = None) -> Any:
    """A frozen dataclass from a mapping: unknown keys refused, types checked, the class's own ValueError located."""
    value = _mapping(value, where)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    _refuse_unknown(value, fields, where)
    base = base or kind()
    for key, given in value.items():
        _check_type(given, getattr(base, key), str(fields[key].type), f"{where}: {key}")
    try:
        record = dataclasses.replace(base, **value)
    except ValueError as error:
        raise CaseError(f"{where}: {error}") from error
    for key, given in value.items():
        if isinstance(given, float) and math.isnan(given):
            raise CaseError(f"{where}: {key}: expected a number, got nan")
    return record


def _check_type(given: Any, default: Any, annotation: str, where: str) -> None:
    wanted = [part.strip() for part in annotation.split("|")]
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    kinds |= {"RopeScaling": RopeScaling, "ParallelDims": ParallelDims, "Features": Features, "None": type(None)}
    for kind in wanted:
        if isinstance(given, kinds[kind]) and not (isinstance(given, bool) and kind != "bool"):
            return
    hint = " (YAML reads 1e-3 as text: write 1.0e-3)" if isinstance(given, str) and "float" in wanted else ""
    raise CaseError(f"{where}: expected {annotation}, got {limits.shown(given)}{hint}; the default is {default!r}")


def _validate(case: Case, world_size: Any, where: str) -> None:
    """What no single part can know: that the degrees fit the world, the model, the batch and the sequence."""
    dims, model, training = case.dims, case.model, case.training
    if world_size is not None and world_size != dims.world_size:
        raise CaseError(f"{where}: {dims} = {dims.world_size} ranks, but world_size asks for {world_size!r}")
    for key in ("n_heads", "n_kv_heads"):
        if getattr(model, key) % dims.tp:
            raise CaseError(f"{where}: {key} {getattr(model, key)} is not divisible by tp {dims.tp}")
    shares = dims.dp * case.features.accumulation * case.microbatches
    if training.global_batch % shares:
        of_pp = f" x microbatches {case.microbatches}" if dims.pp > 1 else ""
        raise CaseError(
            f"{where}: global_batch {training.global_batch} is not divisible by dp_replicate {dims.dp_replicate}"
            f" x dp_shard {dims.dp_shard} x accumulation {case.features.accumulation}{of_pp} = {shares}"
        )
    halves = 2 if dims.cp > 1 and case.features.cp_load_balance else 1
    length, ways = case.seq_len(2), dims.tp if case.features.sequence_parallel else 1
    if length % (dims.cp * math.lcm(halves, ways)):
        balanced = " x 2 (load balance)" * (halves - 1)
        raise CaseError(
            f"{where}: seq_len {length} is not divisible by cp {dims.cp}{balanced} x tp {dims.tp} (sequence parallel)"
        )
    if case.n_stages > model.n_layers:
        raise CaseError(
            f"{where}: pp {dims.pp} x stages_per_rank {case.stages_per_rank} = {case.n_stages} stages,"
            f" but the model has only {model.n_layers} layers"
        )
    _validate_features(case, where)
    _validate_blocks(case, where)
    if case.runs not in (1, 2) or not isinstance(case.runs, int) or isinstance(case.runs, bool):
        raise CaseError(f"{where}: runs must be 1, or 2 to compare a repeat, got {case.runs!r}")


def _validate_blocks(case: Case, where: str) -> None:
    """mxfp8 scales blocks of 32 along what a product sums over: features and, for weights' gradients, tokens.

    A block must lie in one sample and on one tp rank. Elsewise each layout would compute something else.
    """
    if case.training.quantize != "mxfp8":
        return
    model, tp = case.model, case.dims.tp
    sums = {"dim": (model.dim, tp), "ffn_dim": (model.ffn_dim, tp)}
    sums |= {"n_kv_heads * head_dim": (model.n_kv_heads * model.head_dim, tp), "seq_len": (case.seq_len(2), 1)}
    for name, (size, ways) in sums.items():
        if size % (32 * ways):
            raise CaseError(f"{where}: mxfp8 has blocks of 32, which {name} {size} over tp {ways} does not hold whole")


def _validate_features(case: Case, where: str) -> None:
    """Options that ask for something on an axis of degree 1, or of each other what no trainer can do."""
    dims, features = case.dims, case.features
    usual = Features()
    for keys, axis in (
        (("schedule", "microbatches", "stages_per_rank"), "pp"),
        (("cp_rotation", "cp_load_balance"), "cp"),
        (("async_tp", "sequence_parallel", "loss_parallel"), "tp"),
    ):
        for key in keys:
            if getattr(dims, axis) == 1 and getattr(features, key) != getattr(usual, key):
                raise CaseError(f"{where}: {key} {getattr(features, key)!r} means nothing with {axis} 1; leave it out")
    if features.wrapper not in (None, "fsdp2") and dims.dp * dims.cp == 1:
        raise CaseError(f"{where}: wrapper {features.wrapper!r} has no data ranks to look after; leave it out")
    if features.wrapper in ("ddp", "replicate") and dims.dp_shard * dims.cp > 1:
        raise CaseError(
            f"{where}: wrapper {features.wrapper!r} shards nothing, but dp_shard {dims.dp_shard} x cp {dims.cp}"
        )
    _validate_wrapper_options(case, where)
    if dims.pp > 1 and case.model.tied_embeddings:
        raise CaseError(
            f"{where}: tied_embeddings with pp {dims.pp}: first and last stage would have to share a weight"
        )
    numbers = features.schedule, dims.pp, case.stages_per_rank, case.microbatches
    if dims.pp > 1 and (reason := schedule.refusal(*numbers)):
        raise CaseError(f"{where}: {reason}")


def _validate_wrapper_options(case: Case, where: str) -> None:
    """Options that only some wrappers have, or that mean something only where parameters are sharded."""
    features, usual = case.features, Features()
    for keys, wrappers, whose in (
        (("reshard_after_forward", "cpu_offload"), ("fsdp1", "fsdp2"), "FSDP's"),
        (("bucket_mb",), ("ddp", "replicate"), "DDP's and replicate's"),
    ):
        for key in keys:
            if case.wrapper not in wrappers and getattr(features, key) != getattr(usual, key):
                raise CaseError(
                    f"{where}: {key} is {whose}, and this case has wrapper {case.wrapper or 'none'}; leave it out"
                )
    ways, policy = case.dims.dp_shard * case.dims.cp, features.reshard_after_forward
    if ways == 1 and policy != "default":
        raise CaseError(
            f"{where}: reshard_after_forward {policy!r} means nothing with dp_shard 1 and cp 1; leave it out"
        )
    if isinstance(policy, int) and ways % policy:
        raise CaseError(f"{where}: reshard_after_forward {policy} does not divide the {ways} ranks of a shard group")
    if not features.defer_sync and (features.accumulation == 1 or case.wrapper is None):
        missing = "wrapper none" if case.wrapper is None else "accumulation 1"
        raise CaseError(f"{where}: defer_sync false means nothing with {missing}; leave it out")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CaseError(f"{where}: expected a mapping of keys to values, got {limits.shown(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise CaseError(f"{where}: expected a list (lines that begin with '-'), got {limits.shown(value)}")
    return value


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise CaseError(f"{where}: unknown key {key!r}{_nearest(key, known)}; known: {', '.join(known)}")


def _nearest(word: Any, known: Iterable[Any]) -> str:
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _shown(path: Path) -> str:
    path = Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
