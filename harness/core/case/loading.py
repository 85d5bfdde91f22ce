"""Loading of cases from YAML files, and from the JSON of evidence.

Any mistake in a file raises a CaseError that names the file, the case, the key and the remedy. Nothing is guessed and
no key is ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
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
from harness.core.case.options import merge_fragments, with_options
from harness.core.case.validation import refuse_missing_script, validate, validate_resume
from harness.core.case.yaml_documents import document_of
from harness.core.evidence.near_names import did_you_mean
from harness.core.evidence.reading import read_text
from harness.reference.config import PRESETS, Lora, ModelConfig, RopeScaling, TrainingConfig


def from_json(record: Mapping[str, Any]) -> Case:
    """Return the case of a record, the inverse of to_json. Raises CaseError for a record with unknown keys or values."""
    record = as_mapping(record, "case")
    return build_case(record, file=record.get("file", ""))


_RESUME_HINT = "; for a checkpoint, `resume: [{after: STEP, dims: ..}]` lists the launches before it"

UNWRITTEN_KEYS = {
    "name": ": its key is its name",
    "file": ": it is the file's path",
    "last_step": _RESUME_HINT,
    "saves_after": _RESUME_HINT,
    "cut_short": _RESUME_HINT,
}


def load_cases(path: Path) -> list[Case]:
    """Return all cases of one YAML file, those of `cases` before those of `matrix`, in the order written.

    Raises CaseError for anything wrong in it, and for a file without a case.
    """
    shown = case_files.recorded_path(path)
    document = _read_yaml(path, shown)
    refuse_unknown(document, ("defaults", "cases", "matrix"), f"{shown}: top level")
    defaults = as_mapping(document.get("defaults"), f"{shown}: defaults")
    cases: list[Case] = []
    for name, fragment in _named_fragments(document, shown):
        fragment = merge_fragments(defaults, with_options(as_mapping(fragment, f"{shown}: case {name!r}"), shown))
        for key in set(UNWRITTEN_KEYS) & set(fragment):
            raise CaseError(f"{shown}: case {name!r}: {key!r} is not written in a case{UNWRITTEN_KEYS[key]}")
        case = build_case(fragment | {"name": name}, file=shown)
        refuse_missing_script(case.expected_failure, shown, f"{shown}: case {name!r}")
        if any(case.name == earlier_case.name for earlier_case in cases):
            raise CaseError(f"{shown}: two cases are named {case.name!r}; names must be unique")
        cases.append(case)
    if not cases:
        raise CaseError(f"{shown}: no case in it; add one under 'cases:' or a cross product under 'matrix:'")
    return cases


def load_all(folder: Path = BUILTIN / case_files.CASES_FOLDER) -> list[Case]:
    """Return every case of every *.yaml file of a folder, file by file. Raises CaseError if there is none.

    A name used in two files is refused: `pytest -k` could not choose one.
    """
    cases = load_files(sorted(folder.glob("*.yaml")))
    if not cases:
        raise CaseError(f"{case_files.recorded_path(folder)}: no *.yaml file with cases in it")
    return cases


def load_files(paths: Iterable[Path]) -> list[Case]:
    """Return the cases of several files, in order.

    Raises CaseError for a name that two of them have, and for a file that is wrong.
    """
    cases: list[Case] = []
    for path in paths:
        cases += load_cases(path)
    files: dict[str, str] = {}
    for case in cases:
        if case.name in files:
            raise CaseError(f"{case.file}: case {case.name!r} also exists in {files[case.name]}; rename one")
        files[case.name] = case.file
    return cases


def find_case(name: str, cases: Iterable[Case]) -> Case:
    """Return the case of that name. Raises CaseError, with the nearest name, if there is none."""
    known = {case.name: case for case in cases}
    if name not in known:
        first_file = next((case.file for case in known.values()), "")
        command = shlex.join(["harness", "matrix", "--list", *case_files.cases_arguments(first_file)])
        raise CaseError(f"no case is named {name!r}{did_you_mean(name, known)}; `{command}` lists them")
    return known[name]


def _read_yaml(path: Path, shown: str) -> dict[str, Any]:
    """Return the document of a file of cases. Raises CaseError if it cannot be read, is no valid YAML, or no mapping.

    shown: the path as messages name it.
    """
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
    """Yield the name and the fragment of each case of a document: those of `cases`, then those of each cross product in
    `matrix`."""
    yield from as_mapping(document.get("cases"), f"{shown}: cases").items()
    for number, product in enumerate(_as_list(document.get("matrix"), f"{shown}: matrix"), start=1):
        yield from _cross_product(product, f"{shown}: matrix entry {number}")


def _cross_product(product: Any, location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the fragment of each case of a cross product.

    `each` names axes, an axis maps labels to fragments; there is a case per combination, its name the labels joined.
    `exclude` lists combinations to leave out (a partial one leaves out all that match). `include` lists more: labels
    for every axis, a `name`, and anything a case may say.
    """
    product = as_mapping(product, location)
    refuse_unknown(product, ("each", "exclude", "include"), location)
    axes = {
        axis: as_mapping(labels, f"{location}: {axis}")
        for axis, labels in as_mapping(product.get("each"), location).items()
    }
    if not axes:
        raise CaseError(f"{location}: 'each' must name at least one axis with labels")
    if problem := limits.combinations_problem(axes):
        raise CaseError(f"{location}: {problem}")
    patterns = _as_list(product.get("exclude"), f"{location}: exclude")
    excluded = [_check_labels(pattern, axes, f"{location}: exclude") for pattern in patterns]
    for labels in itertools.product(*axes.values()):
        chosen = dict(zip(axes, labels, strict=True))
        if not any(chosen.items() >= pattern.items() for pattern in excluded):
            yield "".join(map(str, labels)), _merge_fragments(chosen, axes, location)
    for extra in _as_list(product.get("include"), f"{location}: include"):
        extra = as_mapping(extra, f"{location}: include")
        chosen = _check_labels({axis: extra[axis] for axis in axes if axis in extra}, axes, f"{location}: include")
        overrides = {key: value for key, value in extra.items() if key not in axes}
        name = overrides.pop("name", "".join(map(str, chosen.values())))
        yield name, merge_fragments(_merge_fragments(chosen, axes, location), overrides)


def _check_labels(chosen: Any, axes: Mapping[str, Mapping[str, Any]], location: str) -> dict[str, Any]:
    """Return the chosen label of each axis as a new dict.

    Raises CaseError for an axis or a label that the cross product lacks.
    """
    for axis, label in as_mapping(chosen, location).items():
        if axis not in axes:
            raise CaseError(f"{location}: unknown axis {axis!r}{did_you_mean(axis, axes)}")
        if label not in list(axes[axis]):  # a list, because a label that somebody wrote may be unhashable
            raise CaseError(f"{location}: axis {axis!r} has no label {label!r}{did_you_mean(label, axes[axis])}")
    return dict(chosen)


def _merge_fragments(chosen: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]], location: str) -> dict[str, Any]:
    """Return the fragments of the chosen labels as one. chosen: axis -> label; an axis further back in it wins."""
    fragment: dict[str, Any] = {}
    for axis, label in chosen.items():
        fragment = merge_fragments(fragment, as_mapping(axes[axis][label], f"{location}: {axis}: {label}"))
    return fragment


def build_case(fragment: Mapping[str, Any], file: str) -> Case:
    """Return a valid case from what YAML or JSON holds of it. Raises CaseError with file, case, key and remedy."""
    name = fragment.get("name", "")
    location = f"{file}: case {name!r}"
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise CaseError(f"{location}: a name is made of letters, digits and underscores, so that `pytest -k` takes it")
    known = [field.name for field in dataclasses.fields(Case)] + ["world_size"]
    refuse_unknown(fragment, known, location, unsaid=UNWRITTEN_KEYS)
    if not fragment.get("why") or not isinstance(fragment["why"], str):
        raise CaseError(f"{location}: 'why' is missing: one sentence that says what this case is here to catch")
    case = Case(
        name=name,
        why=fragment["why"],
        dims=_build_record(ParallelDims, fragment.get("dims"), f"{location}: dims"),
        model=_read_model(fragment.get("model", "debug"), f"{location}: model"),
        training=_build_record(
            TrainingConfig, _with_tuples(fragment.get("training"), location), f"{location}: training"
        ),
        features=_build_record(Features, fragment.get("features"), f"{location}: features"),
        runs=fragment.get("runs", 1),
        tier=_read_tier(fragment.get("tier", "default"), f"{location}: tier"),
        expected_failure=_read_expected_failure(fragment.get("expected_failure"), f"{location}: expected_failure"),
        resume=_read_resume(fragment.get("resume"), f"{location}: resume"),
        last_step=fragment.get("last_step"),
        allow=_read_allowances(fragment.get("allow"), f"{location}: allow"),
        traits=_read_traits(fragment.get("traits"), f"{location}: traits"),
        saves_after=fragment.get("saves_after"),
        cut_short=fragment.get("cut_short", False),
        file=file,
    )
    if problem := limits.size_problem(case):
        raise CaseError(f"{location}: {problem}")
    validate(case, fragment.get("world_size"), location)
    validate_resume(case, location)
    return case


def _with_tuples(value: Any, location: str) -> Mapping[str, Any]:
    """Return the training section with lists of rates and of patterns as tuples, as a record keeps them."""
    training = as_mapping(value, f"{location}: training")
    return _as_tuple(
        _as_tuple(training, "rates", "float", f"{location}: training"), "trainable", "str", f"{location}: training"
    )


def _as_tuple(record: Mapping[str, Any], key: str, kind: str, location: str) -> Mapping[str, Any]:
    """Return the record with the list at `key` as a tuple; unchanged if there is no list.

    Raises CaseError for an entry not of `kind`.
    """
    values = record.get(key)
    if not isinstance(values, list):
        return record
    for number, value in enumerate(values, start=1):
        _check_type(value, None, kind, f"{location}: {key}: entry {number}")
    return {**record, key: tuple(values)}


def _read_tier(value: Any, location: str) -> str:
    """Return the tier. Raises CaseError for one that is not in TIERS."""
    if value not in list(TIERS):
        raise CaseError(f"{location}: unknown tier {value!r}{did_you_mean(value, TIERS)}; known: {', '.join(TIERS)}")
    return str(value)


def _read_expected_failure(value: Any, location: str) -> ExpectedFailure | None:
    """Return the expected failure that a case declares. None if it declares none.

    Raises CaseError if `torch` is no condition on releases. So does a field other than `torch` and `raised` that is
    empty: a reader needs them to look into the failure.
    """
    if value is None:
        return None
    expected: ExpectedFailure = _build_record(ExpectedFailure, value, location)
    for field in dataclasses.fields(expected):
        if not getattr(expected, field.name) and field.name not in ("raised", "torch"):
            raise CaseError(f"{location}: {field.name} is missing")
    try:
        releases.parse_condition(expected.torch or "<2.0")
    except (TypeError, ValueError) as error:
        raise CaseError(f"{location}: torch: {error}") from error
    return expected


ALLOWED_TYPES = {"bytes": "int | str", "matmuls": "int | str", "graphs": "int"}


def _read_allowances(value: Any, location: str) -> tuple[Allowance, ...]:
    """Return the allowances of a list of mappings; () for an absent list. Raises CaseError for an entry that is none."""
    allowances = []
    for number, entry in enumerate(_as_list(list(value) if isinstance(value, tuple) else value, location), start=1):
        entry_location = f"{location}: entry {number}"
        entry = as_mapping(entry, entry_location)
        refuse_unknown(entry, [field.name for field in dataclasses.fields(Allowance)], entry_location)
        for key, value_of_key in entry.items():
            _check_type(value_of_key, "", ALLOWED_TYPES.get(key, "str"), f"{entry_location}: {key}")
        try:
            allowances.append(Allowance(**entry))
        except ValueError as error:
            raise CaseError(f"{entry_location}: {error}") from error
    return tuple(allowances)


def _read_traits(value: Any, location: str) -> tuple[tuple[str, Any], ...]:
    """Return the declared traits as pairs of name and value; () if there are none.

    Raises CaseError for an unknown trait or value.
    """
    values = as_mapping(value, location)
    try:
        return declared_traits.traits_for_case(values)
    except ValueError as error:
        raise CaseError(f"{location}: {error}") from error


def _read_resume(value: Any, location: str) -> tuple[Saved, ...]:
    """Return the earlier launches that `resume` lists; () if it is absent.

    Raises CaseError for an entry without `after`, or a wrong one.
    """
    launches = []
    for number, entry in enumerate(_as_list(list(value) if isinstance(value, tuple) else value, location), start=1):
        entry_location = f"{location}: entry {number}"
        entry = dict(as_mapping(entry, entry_location))
        entry["dims"] = _build_record(ParallelDims, entry.get("dims"), f"{entry_location}: dims")
        entry["features"] = _build_record(Features, entry.get("features"), f"{entry_location}: features")
        if "after" not in entry:
            raise CaseError(f"{entry_location}: 'after' is missing: the step after which that launch saves")
        launches.append(_build_record(Saved, entry, entry_location, base=Saved(after=1)))
    return tuple(launches)


def _read_model(value: Any, location: str) -> ModelConfig:
    """Return the model of a preset's name, or of a mapping that changes a preset ("debug" if it names none).

    Raises CaseError for an unknown preset or key, and for a size below 1.
    """
    value = {"preset": value} if isinstance(value, str) else dict(as_mapping(value, location))
    preset = value.pop("preset", "debug")
    if preset not in list(PRESETS):
        raise CaseError(
            f"{location}: unknown preset {preset!r}{did_you_mean(preset, PRESETS)}; known: {', '.join(PRESETS)}"
        )
    if isinstance(value.get("rope_scaling"), Mapping):
        value["rope_scaling"] = _build_record(RopeScaling, value["rope_scaling"], f"{location}: rope_scaling")
    if isinstance(value.get("lora"), Mapping):
        value["lora"] = _build_record(
            Lora, _as_tuple(value["lora"], "targets", "str", f"{location}: lora"), f"{location}: lora"
        )
    for key, value_of_key in value.items():
        if isinstance(value_of_key, int) and value_of_key < 1 and not isinstance(value_of_key, bool):
            raise CaseError(f"{location}: {key} must be at least 1, got {value_of_key}")
    return _build_record(ModelConfig, value, location, base=PRESETS[preset])


def _build_record(kind: type, value: Any, location: str, base: Any = None) -> Any:
    """Return a frozen dataclass of class `kind`: `base`, or its defaults, with the values of a mapping.

    Raises CaseError with the location for an unknown key, a wrong type, and a number that is not finite. What the class
    itself refuses becomes a CaseError, too.
    """
    value = as_mapping(value, location)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    refuse_unknown(value, fields, location)
    base = base or kind()
    for key, value_of_key in value.items():
        _check_type(value_of_key, getattr(base, key), str(fields[key].type), f"{location}: {key}")
    try:
        record = dataclasses.replace(base, **value)
    except ValueError as error:
        raise CaseError(f"{location}: {error}") from error
    for key, value_of_key in value.items():
        if isinstance(value_of_key, float) and not math.isfinite(value_of_key):
            raise CaseError(
                f"{location}: {key}: expected a finite number, got {value_of_key}; the default is {getattr(base, key)!r}"
            )
    return record


def _check_type(value: Any, default: Any, annotation: str, location: str) -> None:
    """Raise CaseError if a value is of none of the types in an annotation such as "int | None". A bool is no number.

    default: shown in the message.
    """
    wanted = [part.strip() for part in annotation.split("|")]
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    kinds |= {"RopeScaling": RopeScaling, "ParallelDims": ParallelDims, "Features": Features, "None": type(None)}
    kinds |= {"Lora": Lora, "tuple[float, ...]": tuple, "tuple[str, ...]": tuple}
    for kind in wanted:
        if isinstance(value, kinds[kind]) and not (isinstance(value, bool) and kind != "bool"):
            return
    as_text = isinstance(value, str) and "float" in wanted and value[:1].isdigit()
    hint = " (YAML reads 1e-3 as text: write 1.0e-3)" if as_text else ""
    raise CaseError(
        f"{location}: expected {annotation}, got {limits.short_repr(value)}{hint}; the default is {default!r}"
    )


def as_mapping(value: Any, location: str) -> Mapping[str, Any]:
    """Return the mapping, an empty one for an absent value. Raises CaseError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CaseError(f"{location}: expected a mapping of keys to values, got {limits.short_repr(value)}")
    return value


def _as_list(value: Any, location: str) -> list[Any]:
    """Return the list, an empty one for an absent value. Raises CaseError for anything else."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise CaseError(f"{location}: expected a list (lines that begin with '-'), got {limits.short_repr(value)}")
    return value


def refuse_unknown(keys: Mapping[str, Any], known: Iterable[str], location: str, unsaid: Iterable[str] = ()) -> None:
    """Raise CaseError, with the nearest known key, if a key is not known.

    unsaid: known keys that the message does not list.
    """
    known = list(known)
    for key in keys:
        if key not in known:
            listed = [name for name in known if name not in unsaid]
            raise CaseError(f"{location}: unknown key {key!r}{did_you_mean(key, listed)}; known: {', '.join(listed)}")
