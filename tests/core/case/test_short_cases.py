"""Which cases `make test` runs: of everything that trains ranks in another way, one."""

from __future__ import annotations

from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.options import all_options

NAMES = Path(__file__).parents[2].joinpath("short_cases.txt").read_text().split()
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
FAMILIES = ("float32", "bfloat16", "float8", "mxfp8")
"""The beginnings of the names of precisions."""


def has_reach(case: Case) -> set[str]:
    """Return the wrappers, axes and precisions that it has, and whether it resumes."""
    names = {
        option.name
        for option in all_options()
        if option.is_requested_by(case) and option.kind in ("data parallel", "precision")
    }
    families = {family for family in FAMILIES for name in names if name.startswith(family)}
    wrappers = {name for name in names if not any(name.startswith(family) for family in FAMILIES)}
    axes = {axis for axis in AXES if getattr(case.dims, axis) > 1}
    return wrappers | families | axes | ({"resume"} if case.resume else set())


def test_the_cases_of_make_test_reach_each_wrapper_axis_and_precision_and_resume() -> None:
    default = {case.name: case for case in load_all() if case.tier == "default"}
    assert set(NAMES) <= set(default) and len(NAMES) == len(set(NAMES))
    wanted = {reached for case in default.values() for reached in has_reach(case)}
    assert wanted >= {*AXES, *FAMILIES, "resume", "DDP", "FSDP2", "HSDP", "FSDP1", "replicate"}
    assert wanted - {reached for name in NAMES for reached in has_reach(default[name])} == set()
