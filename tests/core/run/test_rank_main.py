"""What one rank does before it trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import faults
from harness.core.case.case import Case, to_json
from harness.core.case.dims import ParallelDims
from harness.core.run import rank_main
from harness.core.trainers import CannotStart

MINE = """
from harness.core.trainers import Adapter
class Mine(Adapter):
    name = "mine"
    def unsupported(self, case):
        return None
    def start(self, case, weights, device):
        {}
adapter = Mine()
"""


@pytest.mark.parametrize("begin", [rank_main.rank, rank_main.run_unwatched])
def test_a_fault_is_put_into_the_source_that_was_named_not_into_what_is_installed(
    begin: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def put_in(_: object) -> None:
        order.append("fault")
        raise KeyboardInterrupt

    adapter = SimpleNamespace(importable=lambda: order.append("importable"))
    monkeypatch.setattr(rank_main.trainers, "load_adapter", lambda _: adapter)
    monkeypatch.setattr(faults, "load_fault", lambda _: SimpleNamespace(apply=put_in))
    case = to_json(Case("any", "a test", ParallelDims()))
    with pytest.raises(KeyboardInterrupt):
        begin({"case": case, "trainer": "", "fault": "any", "directory": str(tmp_path), "checkpoints": ""})  # type: ignore[operator]
    assert order == ["importable", "fault"]


@pytest.mark.parametrize("begin", [rank_main.rank, rank_main.run_unwatched])
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import not_there_at_all", "not_there_at_all"),
        ("raise ValueError('at import')", "at import"),
        ("x = 1", "adapter"),
        (MINE.format("from harness import not_there_at_all"), "not_there_at_all"),
    ],
)
def test_an_adapter_that_cannot_start_is_told_apart_from_a_trainer_that_failed(
    begin: object, source: str, reason: str, tmp_path: Path
) -> None:
    adapter = tmp_path / "mine.py"
    adapter.write_text(source)
    options = {"case": to_json(Case("any", "a test", ParallelDims())), "trainer": str(adapter), "weights": "none"}
    with pytest.raises(CannotStart) as raised:
        begin({**options, "device": "cpu", "directory": str(tmp_path), "checkpoints": ""})  # type: ignore[operator]
    assert str(adapter) in str(raised.value) and reason in str(raised.value)
