"""What one flipped bit leads to: is it caught, are step and rank located, and is it reported as a mistake of the code?

    python benchmarks/bit_flips.py [--flips 1000] [--seed 1] [CASE ..]

Each run flips one bit of one number, once. The number is in what a matmul returned on one rank, or in what a collective left
there. Each is compared with a run without the flip, as `harness matrix` compares what fails with what it makes again. No check
can see a flip that moves no gradient and no loss by more than SEEN times its largest entry. Such flips are counted separately.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all
from harness.core.evidence.records import Run
from harness.core.evidence.store import load_run
from harness.core.judge.result import Verdict
from harness.core.judge.twice import find_first_difference
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.faults import fault
from harness.faults import operators as op

FLIP = "HARNESS_BIT_FLIP"  # a file: ranks have the environment of the server that they are forked from
SEEN = 1e-9
MATMULS = ("mm", "bmm", "addmm", "_scaled_dot_product")
FILLED = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
BITS = {"float64": 64, "float32": 32, "bfloat16": 16}


# ---- in the ranks


def _trained(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Train with the flip of the file in FLIP; return the trainer's result. It runs in a rank, in place of Trainer.train.

    The step of the flip is written to the file `told`. For kind "count" nothing is flipped: the numbers of matmuls and
    collectives are written.
    """
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    wanted = json.loads(Path(os.environ[FLIP]).read_text(encoding="utf-8"))
    here = int(os.environ["RANK"]) == wanted["rank"]
    seen: Counter[str] = Counter()

    class Flipping(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result, name = func(*args, **(kwargs or {})), str(func._opname)
            kind = "matmul" if name.startswith(MATMULS) else "collective" if name in FILLED else ""
            if kind:
                seen[kind] += 1
                if (kind, seen[kind]) == (wanted["kind"], wanted["nth"]) and here:
                    if kind == "collective":
                        dist.Work.unbox(result[-1]).wait()
                    _flip(args[0] if kind == "collective" else result, wanted)
                    step = len(trainer.metrics) + 1  # trainer.step is that already where the loss is reduced
                    Path(wanted["told"]).write_text(str(step), encoding="utf-8")
            return result

    def _flip(result: Any, wanted: Any) -> None:
        while isinstance(result, tuple | list):
            result = result[0]
        result = getattr(result, "_local_tensor", result)
        with torch.no_grad():
            integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[result.element_size()]
            where = int(wanted["place"] * result.numel())
            number = result.reshape(-1)[where : where + 1].clone()
            bit = min(int(wanted["bit"] * 8 * result.element_size()), 8 * result.element_size() - 2)
            flipped = (number.view(integers) ^ (1 << bit)).view(number.dtype)
            result[np.unravel_index(where, result.shape)] = flipped[0]

    with Flipping():
        done = original(trainer, *args, **kwargs)
    if here and wanted["kind"] == "count":
        Path(wanted["told"]).write_text(json.dumps(seen), encoding="utf-8")
    return done


flipped = fault(
    breaks="one bit of one number is flipped once",
    bug="a defect of hardware",
    case="hsdp_2x2",
    caught_by="gradients",
    named="not explained",
    does=op.instead(".trainer:Trainer.train", _trained),
)


# ---- from outside


def made(case: Case, out: Path, flip: dict[str, Any] | None) -> tuple[Any, Run]:
    """Run the case, with this flip (None: without), and return its judgement and its evidence."""
    Path(os.environ[FLIP]).write_text(json.dumps(flip), encoding="utf-8")
    options = Options(out=out, fault=f"{Path(__file__).resolve()}:flipped" if flip else None)
    judgement = run_case(case, options)
    return judgement, load_run(judgement.folder / "run")


def flips(case: Case, out: Path, number: int, draw: random.Random) -> Counter[str]:
    """Make `number` flips in this case, and count what became of them, in all and by kind.

    A flip reported as a mistake is printed.
    """
    counts: list[dict[str, int]] = []
    for rank in range(case.dims.world_size):
        made(case, out, {"rank": rank, "kind": "count", "nth": 0, "told": str(out / "told")})
        counts.append(json.loads((out / "told").read_text(encoding="utf-8")))
    usual = made(case, out, None)[1]
    found: Counter[str] = Counter()
    for _ in range(number):
        rank, kind = draw.randrange(case.dims.world_size), draw.choice(["matmul", "collective"])
        flip = {"rank": rank, "kind": kind, "nth": draw.randint(1, counts[rank][kind]), "told": str(out / "told")}
        flip |= {"place": draw.random(), "bit": draw.random()}
        judgement, run = made(case, out, flip)
        for what in became(judgement, run, usual, rank, int((out / "told").read_text(encoding="utf-8"))):
            found[what] += 1
            found[f"{what}, {kind}"] += 1
        if "told as a mistake" in [*became(judgement, run, usual, rank, 0)]:
            print(case.name, flip, judgement.diagnosis.kinds, flush=True)
    return found


def became(judgement: Any, run: Run, usual: Run, rank: int, step: int) -> list[str]:
    """Return the words that describe what became of a flip: "flips", "seen", "missed", "caught", "step located" and so on.

    usual: the run without a flip. rank, step: where the flip was made.
    """
    moved = _moved(run, usual)
    if moved <= SEEN and judgement.verdict is not Verdict.FAIL:
        return ["flips", "moves nothing that is seen"]
    if judgement.verdict is not Verdict.FAIL:
        return ["flips", "seen", "missed"]
    first = find_first_difference(run, usual)
    told = ["flips", "seen", "caught"]
    told += ["step located"] if first and first.step == step else []
    told += ["rank located"] if first and first.ranks == (rank,) else []
    kinds = judgement.diagnosis.kinds if judgement.diagnosis else ()
    return told + ["told as a mistake"] * (not _located(kinds))


def _located(kinds: tuple[str, ...]) -> bool:
    """Return whether a diagnosis only says where it is, and names no mistake of the code."""
    return all("explained" in kind or "wrong" in kind or "differ" in kind for kind in kinds)


def _moved(run: Run, usual: Run) -> float:
    """Return the largest difference of any gradient or loss, relative to its largest entry.

    inf if ranks or steps are missing.
    """
    most = 0.0
    for rank, evidence in usual.ranks.items():
        if rank not in run.ranks or len(run.ranks[rank].steps) != len(evidence.steps):
            return float("inf")
        for one, other in zip(run.ranks[rank].steps, evidence.steps, strict=True):
            pairs = [(one.gradients[fqn], value) for fqn, value in other.gradients.items()]
            pairs += [
                (np.array(mine.loss_sum), np.array(theirs.loss_sum))
                for mine, theirs in zip(one.microbatches, other.microbatches, strict=True)
                if theirs.loss_sum is not None
            ]
            for mine, theirs in pairs:
                largest = float(np.max(np.abs(theirs), initial=0.0))
                change = float(np.max(np.abs(np.nan_to_num(mine - theirs, nan=np.inf)), initial=0.0))
                most = max(most, change / largest if largest else change)
    return most


def main() -> None:
    """Make flips in each case and print the counts."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", default=["fsdp_2", "tp_2", "ddp_2"])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    draw, total = random.Random(chosen.seed), Counter[str]()
    known = load_all()
    for name in chosen.cases:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.setdefault(FLIP, tempfile.mkstemp()[1])
            found = flips(find_case(name, known), Path(folder), chosen.flips // len(chosen.cases), draw)
        print(name, dict(found), flush=True)
        total += found
    for kind in ("", ", matmul", ", collective"):
        of = {what: total[what + kind] for what in ("flips", "seen", "caught", "step located", "rank located")}
        print(f"{kind[2:] or 'all':<11}", of, {"told as a mistake": total["told as a mistake" + kind]})


if __name__ == "__main__":
    main()
