"""A checkpoint holds something else than the parameters and the optimizer's state that trained."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checks.checkpoint import PARAMETER, may_be, saved, unknown, wanted
from harness.diagnosis.hypothesis import Broken, Fact
from harness.diagnosis.words import finding_line, in_parameters
from harness.evidence.checkpoint_index import Checkpoint
from harness.judge.result import Cause
from harness.judge.trial import Trial


def wrong_checkpoint(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is more, of another type or lacking; that is wrong in ranks already is another law's."""
    held = trial.run.checkpoint
    if "checkpoint" not in broken or held is None:
        return
    texts = [*_more(trial, held), *_other_types(trial, held), *_lacking(trial, held)]
    line = finding_line("checkpoint", broken["checkpoint"])
    first = texts[0] if texts else f"holds something else than what trained: {line[1]}"
    text = f"the checkpoint of step {trial.case.saved_step} {first}"
    yield Fact(Cause("checkpoint", text), ("checkpoint",), (*(("also", f"it {more}") for more in texts[1:]), line))


def _more(trial: Trial, held: Checkpoint) -> Iterator[str]:
    """Names are shortened to what stands before and after the parameter's."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for key, tensors in saved(trial, held).items():
        if len(tensors) > max(may_be(trial, key), 1) or not may_be(trial, key):
            names = tuple(
                sorted(tensor.name.replace(tensor.fqn, "*") if tensor.fqn else tensor.name for tensor in tensors)
            )
            kinds.setdefault(names, []).append(key[1])
    for names, fqns in kinds.items():
        most = "one" if len(names) > 1 else "none"
        yield f"holds {len(names)} tensors for {most}, {' and '.join(names)}, {in_parameters(trial, fqns)}"
    if strange := unknown(trial, held):
        yield f"holds {len(strange)} tensors that are about no parameter: {strange[0].name}"


def _other_types(trial: Trial, held: Checkpoint) -> Iterator[str]:
    types = wanted(trial)
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for (name, fqn), tensors in saved(trial, held).items():
        trained = types.get((name, fqn), set())
        if len(tensors) == 1 and trained and tensors[0].dtype not in trained:
            kinds.setdefault((name, tensors[0].dtype, " or ".join(sorted(trained))), []).append(fqn)
    for (name, dtype, wide), fqns in kinds.items():
        yield f"holds {_plural(name)} in {dtype}, trained in {wide}, {in_parameters(trial, fqns)}"


def _lacking(trial: Trial, held: Checkpoint) -> Iterator[str]:
    found = saved(trial, held)
    lacking = [key for key in wanted(trial) if key not in found]
    for name in dict.fromkeys(name for name, _ in lacking):
        yield f"lacks {_plural(name)} {in_parameters(trial, [fqn for of, fqn in lacking if of == name])}"


def _plural(name: str) -> str:
    return "parameters" if name == PARAMETER else name
