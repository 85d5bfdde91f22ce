"""What is requested: Case and its parts, and loading them from YAML.

Any mistake in a file raises a CaseError that names the file, the case, the key and the remedy. Nothing is guessed and no
key is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from harness import BUILTIN
from harness.core.case import case_files, declared_traits, limits, releases
from harness.core.case.allowance import Allowance
from harness.core.case.case import TIERS, Case, CaseError, ExpectedFailure, Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.options import merge, with_options
from harness.core.case.validation import refuse_missing_script, validate, validate_resume
from harness.core.case.yaml_documents import document_of
from harness.core.evidence.reading import read_text
from harness.reference.config import PRESETS, Lora, ModelConfig, RopeScaling, TrainingConfig


def from_json(record: Mapping[str, Any]) -> Case:
    """The inverse of to_json. Raises CaseError where the record has unknown keys or values."""
    record = as_mapping(record, "case")
    return built_case(record, file=record.get("file", ""))


_BEFORE = "; for a checkpoint, `resume: [{after: STEP, dims: ..}]` lists the launches before it"

UNWRITTEN = {
    "name": ": its key is its name",
    "file": ": it is the file's path",
    "last_step": _BEFORE,
    "saves_after": _BEFORE,
    "cut_short": _BEFORE,
}


def load_cases(path: Path) -> list[Case]:
    """All cases of one YAML file, in the order written. Raises CaseError."""
    shown = case_files.recorded(path)
    document = _read_yaml(path, shown)
    refuse_unknown(document, ("defaults", "cases", "matrix"), f"{shown}: top level")
    defaults = as_mapping(document.get("defaults"), f"{shown}: defaults")
    cases: list[Case] = []
    for name, fragment in _named_fragments(document, shown):
        fragment = merge(defaults, with_options(as_mapping(fragment, f"{shown}: case {name!r}"), shown))
        for key in set(UNWRITTEN) & set(fragment):
            raise CaseError(f"{shown}: case {name!r}: {key!r} is not written in a case{UNWRITTEN[key]}")
        case = built_case(fragment | {"name": name}, file=shown)
        refuse_missing_script(case.expected_failure, shown, f"{shown}: case {name!r}")
        if any(case.name == other.name for other in cases):
            raise CaseError(f"{shown}: two cases are named {case.name!r}; names must be unique")
        cases.append(case)
    if not cases:
        raise CaseError(f"{shown}: no case in it; add one under 'cases:' or a cross product under 'matrix:'")
    return cases


def load_all(folder: Path = BUILTIN / case_files.USUAL) -> list[Case]:
    """Every case of every file. A name used in two files is refused: `pytest -k` could not choose one."""
    cases = of_files(sorted(folder.glob("*.yaml")))
    if not cases:
        raise CaseError(f"{case_files.recorded(folder)}: no *.yaml file with cases in it")
    return cases


def of_files(paths: Iterable[Path]) -> list[Case]:
    """Raises CaseError for a name that two of them have."""
    cases = [case for path in paths for case in load_cases(path)]
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


def _read_yaml(path: Path, shown: str) -> dict[str, Any]:
    try:
        document = document_of(read_text(path))
    except OSError as error:
        raise CaseError(f"{shown}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # the second: no UTF-8, a number of 5000 digits, the 32nd of May
        raise CaseError(f"{shown}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise CaseError(f"{shown}: expected a mapping with 'cases:' or 'matrix:' at the top level")
    return document


def _named_fragments(document: Mapping[str, Any], shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from as_mapping(document.get("cases"), f"{shown}: cases").items()
    for number, product in enumerate(_list(document.get("matrix"), f"{shown}: matrix"), start=1):
        yield from _cross_product(product, f"{shown}: matrix entry {number}")


def _cross_product(product: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`each` names axes, an axis maps labels to fragments; a case per combination, its name the labels joined.

    `exclude` lists combinations to leave out (a partial one leaves out all that match). `include` lists more: labels
    for every axis, a `name`, and anything a case may say.
    """
    product = as_mapping(product, where)
    refuse_unknown(product, ("each", "exclude", "include"), where)
    axes = {
        axis: as_mapping(labels, f"{where}: {axis}") for axis, labels in as_mapping(product.get("each"), where).items()
    }
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
        extra = as_mapping(extra, f"{where}: include")
        chosen = _labels({axis: extra[axis] for axis in axes if axis in extra}, axes, f"{where}: include")
        rest = {key: value for key, value in extra.items() if key not in axes}
        name = rest.pop("name", "".join(map(str, chosen.values())))
        yield name, merge(_combined(chosen, axes, where), rest)


def _labels(chosen: Any, axes: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, Any]:
    for axis, label in as_mapping(chosen, where).items():
        if axis not in axes:
            raise CaseError(f"{where}: unknown axis {axis!r}{_nearest(axis, axes)}")
        if label not in list(axes[axis]):  # a list, because a label that somebody wrote may be unhashable
            raise CaseError(f"{where}: axis {axis!r} has no label {label!r}{_nearest(label, axes[axis])}")
    return dict(chosen)


def _combined(chosen: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, Any]:
    fragment: dict[str, Any] = {}
    for axis, label in chosen.items():
        fragment = merge(fragment, as_mapping(axes[axis][label], f"{where}: {axis}: {label}"))
    return fragment


def built_case(fragment: Mapping[str, Any], file: str) -> Case:
    """A valid case from what YAML or JSON holds of it. Raises CaseError with file, case, key and remedy."""
    name = fragment.get("name", "")
    where = f"{file}: case {name!r}"
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise CaseError(f"{where}: a name is made of letters, digits and underscores, so that `pytest -k` takes it")
    known = [f.name for f in dataclasses.fields(Case)] + ["world_size"]
    refuse_unknown(fragment, known, where, unsaid=UNWRITTEN)
    if not fragment.get("why") or not isinstance(fragment["why"], str):
        raise CaseError(f"{where}: 'why' is missing: one sentence that says what this case is here to catch")
    case = Case(
        name=name,
        why=fragment["why"],
        dims=_record(ParallelDims, fragment.get("dims"), f"{where}: dims"),
        model=_model(fragment.get("model", "debug"), f"{where}: model"),
        training=_record(TrainingConfig, _with_lists(fragment.get("training"), where), f"{where}: training"),
        features=_record(Features, fragment.get("features"), f"{where}: features"),
        runs=fragment.get("runs", 1),
        tier=_tier(fragment.get("tier", "default"), f"{where}: tier"),
        expected_failure=_expected_failure(fragment.get("expected_failure"), f"{where}: expected_failure"),
        resume=_resume(fragment.get("resume"), f"{where}: resume"),
        last_step=fragment.get("last_step"),
        allow=_allowances(fragment.get("allow"), f"{where}: allow"),
        traits=_traits(fragment.get("traits"), f"{where}: traits"),
        saves_after=fragment.get("saves_after"),
        cut_short=fragment.get("cut_short", False),
        file=file,
    )
    if problem := limits.too_large(case):
        raise CaseError(f"{where}: {problem}")
    validate(case, fragment.get("world_size"), where)
    validate_resume(case, where)
    return case


def _with_lists(value: Any, where: str) -> Mapping[str, Any]:
    """Lists of rates and of patterns as a record keeps them."""
    training = as_mapping(value, f"{where}: training")
    return _as_tuple(
        _as_tuple(training, "rates", "float", f"{where}: training"), "trainable", "str", f"{where}: training"
    )


def _as_tuple(record: Mapping[str, Any], key: str, kind: str, where: str) -> Mapping[str, Any]:
    values = record.get(key)
    if not isinstance(values, list):
        return record
    for number, one in enumerate(values, start=1):
        _check_type(one, None, kind, f"{where}: {key}: entry {number}")
    return {**record, key: tuple(values)}


def _tier(value: Any, where: str) -> str:
    if value not in list(TIERS):
        raise CaseError(f"{where}: unknown tier {value!r}{_nearest(value, TIERS)}; known: {', '.join(TIERS)}")
    return str(value)


def _expected_failure(value: Any, where: str) -> ExpectedFailure | None:
    """Read it. All fields but torch and raised are needed, so that a reader can look into the failure."""
    if value is None:
        return None
    expected: ExpectedFailure = _record(ExpectedFailure, value, where)
    for field in dataclasses.fields(expected):
        if not getattr(expected, field.name) and field.name not in ("raised", "torch"):
            raise CaseError(f"{where}: {field.name} is missing")
    try:
        releases.parsed(expected.torch or "<2.0")
    except (TypeError, ValueError) as error:
        raise CaseError(f"{where}: torch: {error}") from error
    return expected


ALLOWED_TYPES = {"bytes": "int | str", "matmuls": "int | str", "graphs": "int"}


def _allowances(value: Any, where: str) -> tuple[Allowance, ...]:
    found = []
    for number, entry in enumerate(_list(list(value) if isinstance(value, tuple) else value, where), start=1):
        here, entry = f"{where}: entry {number}", as_mapping(entry, f"{where}: entry {number}")
        refuse_unknown(entry, [f.name for f in dataclasses.fields(Allowance)], here)
        for key, given in entry.items():
            _check_type(given, "", ALLOWED_TYPES.get(key, "str"), f"{here}: {key}")
        try:
            found.append(Allowance(**entry))
        except ValueError as error:
            raise CaseError(f"{here}: {error}") from error
    return tuple(found)


def _traits(value: Any, where: str) -> tuple[tuple[str, Any], ...]:
    values = as_mapping(value, where)
    try:
        return declared_traits.checked(values)
    except ValueError as error:
        raise CaseError(f"{where}: {error}") from error


def _resume(value: Any, where: str) -> tuple[Saved, ...]:
    found = []
    for number, entry in enumerate(_list(list(value) if isinstance(value, tuple) else value, where), start=1):
        here = f"{where}: entry {number}"
        entry = dict(as_mapping(entry, here))
        entry["dims"] = _record(ParallelDims, entry.get("dims"), f"{here}: dims")
        entry["features"] = _record(Features, entry.get("features"), f"{here}: features")
        if "after" not in entry:
            raise CaseError(f"{here}: 'after' is missing: the step after which that launch saves")
        found.append(_record(Saved, entry, here, base=Saved(after=1)))
    return tuple(found)


def _model(value: Any, where: str) -> ModelConfig:
    value = {"preset": value} if isinstance(value, str) else dict(as_mapping(value, where))
    preset = value.pop("preset", "debug")
    if preset not in list(PRESETS):
        raise CaseError(f"{where}: unknown preset {preset!r}{_nearest(preset, PRESETS)}; known: {', '.join(PRESETS)}")
    if isinstance(value.get("rope_scaling"), Mapping):
        value["rope_scaling"] = _record(RopeScaling, value["rope_scaling"], f"{where}: rope_scaling")
    if isinstance(value.get("lora"), Mapping):
        value["lora"] = _record(Lora, _as_tuple(value["lora"], "targets", "str", f"{where}: lora"), f"{where}: lora")
    for key, given in value.items():
        if isinstance(given, int) and given < 1 and not isinstance(given, bool):
            raise CaseError(f"{where}: {key} must be at least 1, got {given}")
    return _record(ModelConfig, value, where, base=PRESETS[preset])


def _record(kind: type, value: Any, where: str, base: Any = None) -> Any:
    """A frozen dataclass from a mapping: unknown keys refused, types checked, the class's own ValueError located."""
    value = as_mapping(value, where)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    refuse_unknown(value, fields, where)
    base = base or kind()
    for key, given in value.items():
        _check_type(given, getattr(base, key), str(fields[key].type), f"{where}: {key}")
    try:
        record = dataclasses.replace(base, **value)
    except ValueError as error:
        raise CaseError(f"{where}: {error}") from error
    for key, given in value.items():
        if isinstance(given, float) and not math.isfinite(given):
            raise CaseError(
                f"{where}: {key}: expected a finite number, got {given}; the default is {getattr(base, key)!r}"
            )
    return record


def _check_type(given: Any, default: Any, annotation: str, where: str) -> None:
    wanted = [part.strip() for part in annotation.split("|")]
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    kinds |= {"RopeScaling": RopeScaling, "ParallelDims": ParallelDims, "Features": Features, "None": type(None)}
    kinds |= {"Lora": Lora, "tuple[float, ...]": tuple, "tuple[str, ...]": tuple}
    for kind in wanted:
        if isinstance(given, kinds[kind]) and not (isinstance(given, bool) and kind != "bool"):
            return
    as_text = isinstance(given, str) and "float" in wanted and given[:1].isdigit()
    hint = " (YAML reads 1e-3 as text: write 1.0e-3)" if as_text else ""
    raise CaseError(f"{where}: expected {annotation}, got {limits.shown(given)}{hint}; the default is {default!r}")


def as_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """An absent value is an empty mapping; anything else but a mapping is a CaseError."""
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


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str], where: str, unsaid: Iterable[str] = ()) -> None:
    """Refuse keys that are not known. unsaid: known keys that the message does not list."""
    known = list(known)
    for key in given:
        if key not in known:
            said = [name for name in known if name not in unsaid]
            raise CaseError(f"{where}: unknown key {key!r}{_nearest(key, said)}; known: {', '.join(said)}")


def _nearest(word: Any, known: Iterable[Any]) -> str:
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
