"""Ours beside libraries: reading cases (msgspec, pydantic), and storing a rank's evidence (msgspec, pydantic, safetensors).

    pip install msgspec pydantic safetensors
    python -m benchmarks.formats out/hsdp_2x2/run/ranks/rank_00.npz

Its output is in docs/format.md. The libraries get the same records: a case's TrainingConfig, and a rank's RankEvidence.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
import safetensors.numpy

from harness.evidence import store
from harness.evidence.records import RankEvidence
from harness.reference.config import TrainingConfig
from harness.spec.case import CaseError
from harness.spec.loading import built_case

MISTAKES: dict[str, dict[str, Any]] = {
    "a key misspelt": {"step": 4},
    "a word for a number": {"steps": "four"},
    "a truth for a number": {"steps": True},
    "a fraction for a count": {"steps": 2.5},
    "1e-3, which YAML reads as text": {"lr": "1e-3"},
    "no number": {"lr": float("nan")},
    "an unknown optimizer": {"optimizer": "adam"},
    "a negative count": {"steps": -1},
    "a mapping for a number": {"seed": {"a": 1}},
    "nothing for a number": {"steps": None},
}


# ---- cases


def ours(wrong: dict[str, Any]) -> None:
    built_case({"name": "x", "why": "x", "training": wrong}, file="x.yaml")


def by_msgspec(wrong: dict[str, Any]) -> None:
    msgspec.convert(wrong, TrainingConfig)


def by_pydantic(wrong: dict[str, Any]) -> None:
    STRICT.validate_json(json.dumps(wrong))


STRICT: Any = pydantic.TypeAdapter(
    pydantic.dataclasses.dataclass(TrainingConfig, frozen=True, config=pydantic.ConfigDict(extra="forbid", strict=True))
)
REFUSALS = (CaseError, ValueError, msgspec.ValidationError)


def refusal(read: Callable[[dict[str, Any]], None], wrong: dict[str, Any]) -> str:
    try:
        read(wrong)
    except REFUSALS as error:
        return " ".join(str(error).split())
    return "TAKEN"


def mistakes() -> Iterator[str]:
    for read in (ours, by_msgspec, by_pydantic):
        said = {name: refusal(read, wrong) for name, wrong in MISTAKES.items()}
        taken = [name for name, text in said.items() if text == "TAKEN"]
        yield f"{read.__name__:<12} refuses {len(said) - len(taken)} of {len(said)}; takes {', '.join(taken) or 'none'}"
        yield f"{'':<12} {said['a key misspelt']}"


# ---- evidence


def arrays_of(value: Any) -> Iterator[np.ndarray]:
    found: list[np.ndarray] = []
    header = store._encode(value, found)
    yield np.frombuffer(json.dumps(header).encode(), np.uint8)
    yield from found


def seconds(action: Callable[[], Any], times: int = 7) -> float:
    """The median; the middle one of runs beside other processes, not a claim about a machine."""
    found = []
    for _ in range(times):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return statistics.median(found)


def files(evidence: RankEvidence, folder: Path) -> Iterator[str]:
    """One file a rank, written and read whole; then one byte of it is changed, in 200 places."""
    mine, theirs = folder / "mine.npz", folder / "theirs.safetensors"
    arrays = {str(number): np.atleast_1d(array) for number, array in enumerate(arrays_of(evidence))}
    write = {"ours": lambda: store.save(mine, evidence), "safetensors": lambda: put(theirs, arrays)}
    read = {"ours": lambda: store.load(mine, RankEvidence), "safetensors": lambda: safetensors.numpy.load_file(theirs)}
    for name, path in (("ours", mine), ("safetensors", theirs)):
        wrote, took = seconds(write[name]), seconds(read[name])
        size, noticed = path.stat().st_size, sum(notices(path, at, read[name]) for at in places(path))
        yield f"{name:<12} {size / 1e6:.2f} MB, written in {1e3 * wrote:.1f} ms, read in {1e3 * took:.1f} ms,"
        yield f"{'':<12} one changed byte noticed in {noticed} of 200 places"


def put(path: Path, arrays: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(arrays, path)


def places(path: Path) -> list[int]:
    return random.Random(1).sample(range(path.stat().st_size), 200)


def notices(path: Path, at: int, read: Callable[[], Any]) -> bool:
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        read()
    except Exception:
        return True
    finally:
        path.write_bytes(whole)
    return False


def records(evidence: RankEvidence) -> Iterator[str]:
    """From plain values to records, without files and arrays."""
    found: list[np.ndarray] = []
    ours_plain = store._encode(evidence, found)
    blob = store._join(found).tobytes()
    yield f"{'ours':<12} {1e3 * seconds(lambda: store._decode(RankEvidence, ours_plain, blob)):.1f} ms"
    plain = dataclasses.asdict(evidence)
    hook = {"dec_hook": lambda kind, value: value}
    yield f"{'msgspec':<12} {1e3 * seconds(lambda: msgspec.convert(plain, RankEvidence, **hook)):.1f} ms"
    lax = pydantic.ConfigDict(arbitrary_types_allowed=True)
    adapter: Any = pydantic.TypeAdapter(pydantic.dataclasses.dataclass(RankEvidence, frozen=True, config=lax))
    yield f"{'pydantic':<12} {1e3 * seconds(lambda: adapter.validate_python(plain)):.1f} ms"


def main(path: str) -> None:
    evidence = store.load(Path(path), RankEvidence)
    print("mistakes in a case's `training`:", *mistakes(), sep="\n  ")
    with tempfile.TemporaryDirectory() as folder:
        print("a rank's file:", *files(evidence, Path(folder)), sep="\n  ")
    print("a rank's records from plain values:", *records(evidence), sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
