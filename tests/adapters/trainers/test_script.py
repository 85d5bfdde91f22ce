"""A script as a trainer: with a main guard or without, it is run up to its first pass that trains, with its own arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from harness.adapters.support.script import Script

NO_GUARD = '''
"""Trains where it stands."""
from __future__ import annotations
import sys
import torch
from torch import nn

width = int(sys.argv[1])
seen = [sys.argv[1:], __doc__]

class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

def get_batch() -> Nowhere:
    raise AssertionError("it is replaced")

bare = nn.Linear(width, 1)
model = Wrapper(bare)
teacher = nn.Linear(width, 1).requires_grad_(False)
with torch.no_grad():
    seen.append(bare(get_batch()))
teacher(get_batch())
with torch.device("meta"):
    nn.Linear(width, 1)(torch.ones(2, width)).sum().backward()
for _ in range(2):
    seen.append(model(get_batch()).sum().item())
sys.exit()
'''


@pytest.fixture
def script_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Script]:
    """Of this text. What a script changes of torch and Python is put back."""
    monkeypatch.setattr(sys, "argv", ["harness"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    monkeypatch.setattr(FullyShardedDataParallel, "__init__", FullyShardedDataParallel.__init__)
    monkeypatch.setattr(dist, "destroy_process_group", dist.destroy_process_group)
    monkeypatch.setitem(sys.modules, "little_script", sys)

    def write(text: str) -> Script:
        path = tmp_path / "little_script.py"
        path.write_text(text.lstrip())
        return Script(path, "float32")

    return write


def test_a_script_without_a_main_guard_is_stopped_at_the_first_pass_that_trains(
    script_of: Callable[[str], Script],
) -> None:
    script, loaded = script_of(NO_GUARD), list[nn.Module]()
    script.replace("get_batch", lambda: torch.ones(1, 3))
    model = script.set_up(["3"], loaded.append)
    module = sys.modules["little_script"]
    assert (model, loaded, type(model).__name__) == (module.model, [model], "Wrapper")
    assert module.seen[:2] == [["3"], "Trains where it stands."] and len(module.seen) == 3  # evaluated, not yet trained
    with torch.no_grad():
        module.bare.weight.fill_(2.0)
        module.bare.bias.zero_()
    script.run()
    assert module.seen[3:] == [6.0, 6.0]


def test_what_is_replaced_of_a_script_with_a_main_guard_is_its_own_until_all_is_defined(
    script_of: Callable[[str], Script],
) -> None:
    script = script_of("""
import sys
from torch import nn
argument = sys.argv[1]
class Rows:
    pass
class Shuffled(Rows):
    pass
def made(n):
    return n
if __name__ == "__main__":
    rows = Rows()
    nn.Linear(made(2), 1)(__import__("torch").ones(1, 2))
""")
    script.replace("Rows", lambda: "the recipe's")
    script.wrap("made", lambda own: lambda n: own(n))
    script.set_up(["--some"], lambda _: None)
    module = sys.modules["little_script"]
    assert (module.argument, module.rows, module.Shuffled.__name__) == ("--some", "the recipe's", "Shuffled")
    script.run()


def test_a_name_that_is_nowhere_and_an_exit_code_and_a_script_that_trains_nothing_are_told(
    script_of: Callable[[str], Script],
) -> None:
    script = script_of("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1))")
    script.replace("Tokens", None)
    with pytest.raises(ValueError, match=r"little_script.py and what lies beside it have no 'Tokens' before"):
        script.set_up([], lambda _: None)
    script.run()
    with pytest.raises(RuntimeError, match="little_script.py ended with exit code 2"):
        script_of("import argparse\nargparse.ArgumentParser().parse_args()").set_up(["--no"], lambda _: None)
    with pytest.raises(RuntimeError, match="ended before its first step"):
        script_of("import torch\nwith torch.no_grad():\n    torch.nn.Linear(1, 1)(torch.ones(1))").set_up([], print)


def fsdp1(model: nn.Module) -> nn.Module:
    """Which shards nothing on a single rank."""
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrap", [fully_shard, fsdp1])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_weights_reach_what_fsdp_left_gathered_after_an_evaluation(
    wrap: Callable[[nn.Module], nn.Module], script_of: Callable[[str], Script], tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        script = script_of("""
import torch
from torch import nn
sharded = None
model = sharded(nn.Linear(2, 1, bias=False))
with torch.no_grad():
    model(torch.ones(1, 2))
seen = [model(torch.ones(1, 2)).item()]
""")
        script.replace("sharded", wrap)
        script.set_up([], lambda model: [nn.init.ones_(p) for p in model.parameters()])
        script.run()
        assert sys.modules["little_script"].seen == [2.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("folder", "own"),
    [
        ("helpers", True),
        ("lib", True),
        (".venv/lib/python3/site-packages", False),
        ("env/lib/python3/dist-packages/deep", False),
        ("prefix/lib/python3", False),
        ("made_by_venv/lib", False),
        ("vendored", False),
        ("out/.inductor/ab", False),
    ],
)
def test_what_is_installed_below_the_scripts_folder_is_not_the_scripts(
    folder: str, own: bool, script_of: Callable[[str], Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    (tmp_path / "made_by_venv").mkdir()
    (tmp_path / "made_by_venv" / "pyvenv.cfg").touch()
    (tmp_path / "vendored" / "package-1.0.dist-info").mkdir(parents=True)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "some_package.py").write_text("made = 'its own'")
    monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *sys.path])
    monkeypatch.delitem(sys.modules, "some_package", raising=False)
    script = script_of("""
import torch, some_package
made = None
torch.nn.Linear(1, 1)(torch.ones(1))
""")
    script.replace("made", "replaced")
    try:
        script.set_up([], lambda _: None)
        assert sys.modules["some_package"].made == ("replaced" if own else "its own")
        assert sys.modules["little_script"].made == "replaced"
        script.run()
    finally:
        del sys.modules["some_package"]


def test_a_prefix_that_holds_the_scripts_folder_hides_none_of_it(
    script_of: Callable[[str], Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import ModuleType

    from harness.adapters.support.script import is_beside

    module = ModuleType("helper")
    module.__file__ = str(tmp_path / "src" / "app" / "helper.py")
    for prefix in (tmp_path, tmp_path / "src", tmp_path / "src" / "app"):
        monkeypatch.setattr(sys, "prefix", str(prefix))
        assert is_beside(module, tmp_path / "src" / "app" / "train.py")
