"""What the torchtitan adapter reads from the sources of a version, and which version a rank runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from literal import tiny_case

from harness.adapters.torchtitan import cpu, source, syntax
from harness.core import trainers
from harness.core.case.dims import ParallelDims

FSDP = ParallelDims(dp_shard=4)


def test_what_a_comment_or_a_string_says_is_no_fact_of_a_version(middle: Path) -> None:
    (middle / "torchtitan" / "train.py").write_text(
        'class Trainer:\n    """gradient_accumulation_steps: int"""\n    # gradient_accumulation_steps: int\n'
    )
    assert "accumulation" not in source.find_source(str(middle)).era.features


def test_another_commit_in_the_same_folder_is_another_source(middle: Path) -> None:
    script = middle / "torchtitan" / "train.py"
    before = source.find_source(str(middle))
    assert source.find_source(str(middle)) is before, "its files are read once"
    script.write_text("class Trainer:\n    gradient_accumulation_steps: int\n")
    assert "accumulation" in source.find_source(str(middle)).era.features
    script.unlink()
    with pytest.raises(source.NotThere):
        source.find_source(str(middle))


def test_a_checkouts_rank_forgets_the_torchtitan_that_its_server_has_imported(
    middle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, others = middle / "torchtitan", "torchtitan_of_somebody_else"
    for name in ("torchtitan", "torchtitan.trainer", others):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[str(package)]))  # type: ignore[arg-type]
    source.forget_another(package)
    assert "torchtitan.trainer" in sys.modules, "it is this one"
    source.forget_another(middle / "elsewhere")
    assert [name for name in ("torchtitan", "torchtitan.trainer", others) if name in sys.modules] == [others]


def test_what_is_called_below_a_condition_is_not_always_called() -> None:
    always = syntax.a_certain_call("apply_fsdp")
    assert syntax.holds(always, "def parallelize(model):\n    apply_fsdp(model)\n")
    assert not syntax.holds(always, "def parallelize(model):\n    if sharded:\n        apply_fsdp(model)\n")


def test_a_file_that_is_no_python_is_a_reason(middle: Path) -> None:
    script = middle / "torchtitan" / "train.py"
    script.write_text("class Trainer(\n")
    reason = trainers.load_adapter(f"torchtitan@{middle}").unsupported(tiny_case(FSDP))
    assert reason == f"{script}: cannot be parsed: '(' was never closed, line 1"


def test_what_a_version_can_do_is_read_from_its_sources(middle: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{middle}")
    accumulating = tiny_case(FSDP, accumulation=2, defer_sync=False)
    assert adapter.unsupported(accumulating) is None
    assert (adapter.reports, adapter.traits(tiny_case(FSDP)).fsdp_units) == (("loss",), "root")
    (middle / "torchtitan" / "train.py").write_text("class Trainer:\n    log(grad_norm.item())\n")
    units = middle / "torchtitan" / "models" / "llama3" / "infra" / "parallelize.py"
    units.parent.mkdir(parents=True)
    units.write_text("fully_shard([model.norm, model.output])\n")
    assert adapter.unsupported(accumulating) is not None
    assert (adapter.reports, adapter.traits(tiny_case(FSDP)).fsdp_units) == (("loss", "grad_norm"), "apart")


def test_a_package_that_is_installed_lends_no_module_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 asks triton for a module that few tritons have."""
    lend = cpu.Lend(("triton", "grain"))
    lent = lend.find_spec("grain")
    assert lent is not None
    monkeypatch.setitem(sys.modules, "grain", lend.create_module(lent))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert lend.find_spec("grain.python") is not None
    assert lend.find_spec("triton._torchtlx_default") is None
