"""Facts about a training script, observed while it runs on one rank: up to the first step of its model's optimizer.

The script runs as an adapter would run it: with the arguments of the smallest case, and with the recipe's samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.adapters.onboarding.matching import layer_of
from harness.core.case.case import Case
from harness.core.launch.python_path import module_command, python_path
from harness.reference.config import TrainingConfig

WHY = "On one rank it must train as the reference does."
CASE = Case("single", WHY, training=TrainingConfig(all_valid=True))
SECONDS = 300
WRAPPERS = {"ddp": {"DDP", "DistributedDataParallel"}, "fsdp2": {"fully_shard"}}
WRAPPERS |= {"fsdp1": {"FSDP", "FullyShardedDataParallel"}}
LLAMAS = {"RMSNorm": {"rsqrt", "_fused_rms_norm"}, "rotary embedding": {"cos", "polar"}, "SiLU": {"silu", "sigmoid"}}
OTHERS = {"LayerNorm": ("native_layer_norm", "RMSNorm"), "GELU": ("gelu", "SiLU"), "ReLU": ("relu", "SiLU")}
"""Operators of torch by what Llama 3 has; what others have, with their operator and Llama's counterpart."""


@dataclass(frozen=True)
class Flag:
    """A flag of the script's command line."""

    name: str
    default: str
    switch: bool = False
    help: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False


@dataclass
class Facts:
    """Facts about a script, observed while it ran. They are stored as JSON between two processes."""

    flags: list[Flag] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Names used in the script and in what it imported from beside it."""
    files: list[str] = field(default_factory=list)
    """The files whose names these are."""
    model: str = ""
    """Class of the model that trains; empty if none was seen."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole shapes of its parameters."""
    sizes: dict[str, float] = field(default_factory=dict)
    """Constants of the model that no shape has: norm_eps and rope_theta."""
    heads: int | None = None
    halves: bool = False
    """Whether a head's entries are cut in two halves, as a rotary embedding does that turns halves."""
    operators: dict[str, str] = field(default_factory=dict)
    """File and line of the first use, by operator of torch."""
    data: tuple[str, str, str] | None = None
    """What makes samples: its name, its kind (samples, stream, function or generator) and the form of a sample."""
    sampler: tuple[bool, int | None] | None = None
    """Whether a sampler shuffles, and torch's seed of it; None if no sampler was made."""
    optimizer: str = ""
    """Class of the optimizer that holds the model's parameters; empty if none stepped."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Constants of the recipe that it has."""
    saves: list[str] = field(default_factory=list)
    """Functions that save, by their names."""
    stopped: str = ""
    """Why the script did not get to the first step; empty if it did."""

    @property
    def is_empty(self) -> bool:
        """Return whether neither a model nor samples were observed."""
        return not (self.shapes or self.data)

    @property
    def wrappers(self) -> dict[str, str]:
        """Return the first two-rank case of each wrapper that the script names."""
        used = {wrapper for wrapper, names in WRAPPERS.items() if names & {*self.words}}
        return {wrapper: "ddp_2" if wrapper == "ddp" else "fsdp_2" for wrapper in WRAPPERS if wrapper in used}

    def other_parts(self, unmatched: list[str]) -> Iterator[str]:
        """Yield a phrase for each part of the model that Llama 3 does not have, if its counterpart was not observed either.

        unmatched: names of parameters that the reference does not have.
        """
        observed_parts = {part for part, names in LLAMAS.items() if names & self.operators.keys()}
        for other_part, (operator, part) in OTHERS.items():
            if operator in self.operators and part not in observed_parts:
                yield f"{other_part} ({self.operators[operator]}) and no {part}"
        tables = [name for name in unmatched if len(self.shapes[name]) > 1 and layer_of(name) is None]
        if tables and "rotary embedding" not in observed_parts:
            yield f"learned positions ({tables[0]}) and no rotary embedding"


def observe(script: Path) -> Facts:
    """Run the script as one rank in a new process, up to its optimizer's first step, and return the facts observed.

    If the process dies or takes too long, only `stopped` is set, with the end of its log. Raises OSError, ValueError or
    SyntaxError if the script cannot be read or is not Python.
    """
    compile(script.read_text(encoding="utf-8"), str(script), "exec")
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w") as log:
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "INIT_METHOD": f"file://{folder}/meet"}
        environment |= {"PYTHONPATH": python_path()}
        command = module_command("harness.adapters.onboarding.observing", str(script.resolve()), f"{folder}/facts.json")
        try:
            subprocess.run(command, env=os.environ | environment, stdout=log, stderr=log, timeout=SECONDS + 30)
            facts = json.loads(Path(folder, "facts.json").read_text(encoding="utf-8"))
        except (subprocess.TimeoutExpired, OSError):
            lines = Path(folder, "log").read_text(encoding="utf-8", errors="replace").split("\n")
            return Facts(stopped=f"its process ended: {' '.join(lines[-3:]).strip()}")
    facts |= {key: facts[key] and tuple(facts[key]) for key in ("data", "sampler")}
    facts["shapes"] = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    facts["flags"] = [Flag(**{**flag, "choices": tuple(flag["choices"])}) for flag in facts["flags"]]
    return Facts(**facts)
