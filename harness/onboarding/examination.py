"""A trainer examined in the order in which it is brought in: it runs on one rank, its names, its model, then two ranks.

Each step says in a sentence what was seen, and for what is wrong the usual explanation that the evidence confirms, with the
line that puts it right. Explanations are tried by judging the stored evidence again: none is said that was not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import trainers
from harness.checks import judge
from harness.diagnosis import diagnose
from harness.diagnosis.localise import BY_ORDER
from harness.evidence.reading import read_json
from harness.evidence.store import load
from harness.judge.judgement import Judgement
from harness.judge.losses import global_loss
from harness.judge.result import Result, Verdict
from harness.judge.stored_trial import load_trial
from harness.judge.trial import Trial
from harness.onboarding import names
from harness.onboarding.suppositions import Supposed, as_yaml, suppose, with_own_rates
from harness.reference.record import ReferenceRun
from harness.report.cause_text import diagnosis_line, evidence_rows
from harness.report.finding_text import sentence
from harness.run.options import Options, Unsupported
from harness.run.rank_main import SHAPES_FILE
from harness.run.reference_cache import reference_folder
from harness.run.run_case import run_case
from harness.spec.case import Case
from harness.trainers.support.requests import NOT_PASSED_ON

Tell = Callable[[str, str], None]
"""A label, and a sentence."""

FLOAT32 = 1e-5  # relative; what float32 arithmetic leaves of a loss, at most


@dataclass(frozen=True)
class Examination:
    """judged: how each case ended, by name. stopped: whether later cases were not run, as they may show the same. unaccepted:
    the cases of whose reference no curve is accepted. judgements: of the cases that ran."""

    judged: dict[str, Verdict]
    stopped: bool = False
    unaccepted: tuple[Case, ...] = ()
    judgements: tuple[Judgement, ...] = ()


def examine(cases: Sequence[Case], options: Options, tell: Tell, judged: dict[str, Verdict]) -> Examination:
    """One rank first, then the others; after a case that is wrong, none. judged: filled on the way, for who interrupts it.
    Raises what `run_case` raises."""
    unaccepted, judgements = list[Case](), list[Judgement]()
    for case in sorted(cases, key=lambda case: case.dims.world_size):
        judgement = _run(case, options, tell)
        judgements.append(judgement)
        judged[case.name] = verdict = without_golden(judgement)
        unaccepted += [judgement.case] * _lacks_golden(judgement)
        tell(case.name, f"{verdict}: {_ran(judgement)}")
        if verdict is not Verdict.PASS:
            explain(judgement, options, tell)
            return Examination(judged, stopped=len(judged) < len(cases), judgements=tuple(judgements))
    return Examination(judged, unaccepted=tuple(unaccepted), judgements=tuple(judgements))


def _run(case: Case, options: Options, tell: Tell) -> Judgement:
    """Raises what `run_case` raises. What an adapter is not known to pass on is said with the line to write."""
    try:
        return run_case(case, options)
    except Unsupported as reason:
        field = str(reason).partition(" ")[0]
        records = (case.dims, case.features, case.training, case.model)
        values = [getattr(record, field) for record in records if hasattr(record, field)]
        if NOT_PASSED_ON in str(reason) and values:
            tell(case.name, names.to_known({field: values[0]}, options.trainer))
        raise


def without_golden(judgement: Judgement) -> Verdict:
    """A new repository has accepted no curve of the reference yet, which says nothing of the trainer."""
    verdicts = {result.verdict for result in judgement.results if result.check != "golden"}
    return next((v for v in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS) if v in verdicts), Verdict.UNKNOWN)


def _lacks_golden(judgement: Judgement) -> bool:
    return any(result.check == "golden" and result.verdict is Verdict.UNKNOWN for result in judgement.results)


def _ran(judgement: Judgement) -> str:
    count = {v: sum(result.verdict is v for result in judgement.results) for v in Verdict}
    ranks, steps = judgement.case.dims.world_size, judgement.case.training.steps
    wrong = [result.check for result in judgement.results if result.verdict is Verdict.FAIL]
    broken = f", broken {', '.join(wrong)}" if wrong else ""
    return f"{steps} steps on {ranks} rank{'s' * (ranks > 1)}; {count[Verdict.PASS]} checks pass{broken}"


def explain(judgement: Judgement, options: Options, tell: Tell) -> None:
    """Why a case did not pass: the first of these that there is something to say of."""
    _ = (
        _died(judgement, options, tell)
        or _another_dtype(judgement, tell)
        or _other_samples(judgement, options, tell)
        or _another_order(judgement, options, tell)
        or _another_model(judgement, tell)
        or _diagnosed(judgement, tell)
        or _unknown(judgement, tell)
    )


def _died(judgement: Judgement, options: Options, tell: Tell) -> bool:
    """A rank that raised, and whether it was for parameters that do not fit."""
    completed = next(result for result in judgement.results if result.check == "completed")
    if completed.verdict is Verdict.PASS:
        return False
    path = judgement.folder / "run" / SHAPES_FILE
    if path.exists():
        adapter = trainers.load(options.trainer)
        shapes = {name: tuple(shape) for name, shape in read_json(path).items()}
        told, fused = (shapes, judgement.case, adapter.fqn), adapter.fused(judgement.case)
        for text in names.unfit(*told, fused):
            tell("names", text)
        for label, text in names.remedies(*told, adapter.unsupported, options.trainer, fused):
            tell(label, text)
        tell("", f"parameters are mapped by `fqn`, of NAMES: {options.trainer}")
        return True
    if _other_steps(judgement, tell):
        return False
    for finding in completed.findings[:2]:
        tell("stopped", sentence(finding))
    tell("log", str(judgement.folder / "run" / "logs" / "rank_00.log"))
    return True


def _other_steps(judgement: Judgement, tell: Tell) -> bool:
    """Ranks that trained to their end, for more or fewer steps than requested: what they did in them can be judged."""
    completed = next(result for result in judgement.results if result.check == "completed")
    ranks = load_trial(judgement.folder).ranks.values()
    trained = {len(evidence.steps) for evidence in ranks} - {len(judgement.case.steps)}
    if len(trained) != 1 or len(completed.findings) != len(ranks):
        return False
    (steps,) = trained
    tell(
        "steps",
        f"it trained {steps} steps, requested {len(judgement.case.steps)}; if a flag of the script tells how many,",
    )
    tell("", "adapter: pass case.training.steps on in `arguments`; else")
    tell("", f"case: training: {{steps: {steps}}}")
    return True


def _another_dtype(judgement: Judgement, tell: Tell) -> bool:
    """Parameters in another dtype than the recipe's: nothing else can be compared."""
    wanted = judgement.case.training.dtype
    found = {t.dtype for e in load_trial(judgement.folder).ranks.values() for t in e.parameters} - {wanted}
    if not found:
        return False
    dtype = sorted(found)[0]
    tell("dtype", f"its parameters are {dtype}, requested {wanted}; if it can do no other:")
    tell("", f'adapter: dtypes = ("{dtype}",), and `harness doctor --dtype {dtype}`')
    return True


def _other_samples(judgement: Judgement, options: Options, tell: Tell) -> bool:
    """Tokens that are not the recipe's: no number can be the reference's then."""
    samples = next(result for result in judgement.results if result.check == "samples")
    for finding in samples.findings[:2]:
        tell("samples", sentence(finding))
    if samples.findings:
        from harness.onboarding import sample_orders  # with torch, which `harness --help` can do without

        for line in sample_orders.advice(load_trial(judgement.folder), *_of_adapter(judgement.case, options)):
            tell("", line)
    return bool(samples.findings)


def _of_adapter(case: Case, options: Options) -> tuple[str | None, str, str]:
    """Why it runs no case of another seed, its text, and its file."""
    other = replace(case, training=replace(case.training, seed=case.training.seed + 1))
    file = Path(options.trainer)
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return trainers.load(options.trainer).unsupported(other), text, options.trainer


def _another_order(judgement: Judgement, options: Options, tell: Tell) -> bool:
    """A model that is not the reference's rounds at other places. In recipes with noise that is tested by judging again, by
    what another order of operations leaves of the reference."""
    trial, broken = load_trial(judgement.folder), _broken(judgement.results)
    if trial.case.exact or trial.traits.own_model or not broken or not broken - {"golden"} <= BY_ORDER:
        return False
    folder = reference_folder(trial.case, options, (trial.case.golden_noise_key,))
    reference = replace(trial.reference, noise=load(folder / "reference.npz", ReferenceRun).noise)
    plan = replace(trial.plan, traits=replace(trial.traits, own_model=True))
    if _broken(judge(replace(trial, plan=plan, reference=reference))) - {"golden"}:
        return False
    tell("model", "its numbers are off by no more than another order of operations leaves of the reference's")
    tell("", "adapter: def traits(self, case): return TrainerTraits(own_model=True)")
    tell("", "from harness.spec.traits import TrainerTraits")
    tell("assuming this", f"{len(broken)} of {len(broken)} failing checks pass: {', '.join(sorted(broken))}")
    return True


def _another_model(judgement: Judgement, tell: Tell) -> bool:
    """What the model, or the schedule, has otherwise than the adapter and the case say."""
    trial = load_trial(judgement.folder)
    broken = {result.check for result in judgement.results if result.verdict is Verdict.FAIL}
    if not broken & {"loss", "update", "gradients"} or judgement.case.dims.world_size > 1:
        return False
    found = suppose(trial)
    rates = with_own_rates(trial).rates
    if not found:
        _off(trial, tell)
        return _diagnosed(judgement, tell)
    best = min(found, key=lambda one: len(_broken(one.results)))
    for each in best.suppositions:
        tell("model", each.says)
        tell("", each.line)
    if rates != trial.case.training.rates:
        _own_schedule(trial, rates or (), tell)
    _rest(best, broken, tell)
    return True


def _own_schedule(trial: Trial, rates: Sequence[float], tell: Tell) -> None:
    recipe = ", ".join(f"{trial.reference_step(n).lr:.4g}" for n in trial.case.steps)
    tell("schedule", f"its optimizer takes the rates {', '.join(f'{r:.4g}' for r in rates)}, requested {recipe}")
    tell("", "adapter: pass the recipe's schedule on; or, to keep its own, which is then not under test,")
    tell("", f"case: training: {{rates: [{', '.join(as_yaml(rate) for rate in rates)}]}}")


def _rest(best: Supposed, broken: set[str], tell: Tell) -> None:
    """What is left when all of that is assumed."""
    left = _broken(best.results) - {"golden"}  # which is of another recipe
    numbers = sorted(broken - left)
    if numbers:
        tell("assuming this", f"{len(numbers)} of {len(broken)} failing checks pass: {', '.join(numbers)}")
    results = [result for result in best.results if result.check != "golden"]
    found = diagnose(best.trial, results) if left else None
    if found:
        tell("left", f"{', '.join(sorted(left))}: {diagnosis_line(found)}")


def _broken(results: Sequence[Result]) -> set[str]:
    return {result.check for result in results if result.verdict is Verdict.FAIL}


def _off(trial: Trial, tell: Tell) -> None:
    """How far the first loss is off, where none of the usual explanations gives it."""
    loss, wanted = global_loss(trial, 1), trial.reference_step(1).loss
    if loss is None:
        return
    off = abs(loss - wanted) / abs(wanted)
    tell("loss", f"that of step 1 is off by {off:.1e}; none of the usual explanations of the model gives it")
    if off < FLOAT32 and trial.case.training.dtype == "float64":
        tell("", "so little is what arithmetic in float32 leaves: `harness doctor --dtype float32` tells, or")
        tell("", 'adapter: float64.preserve(case.training.dtype, "module that says torch.float32")')


def _diagnosed(judgement: Judgement, tell: Tell) -> bool:
    if judgement.diagnosis is None:
        return False
    tell("cause", diagnosis_line(judgement.diagnosis))
    if "averaged locally" in judgement.diagnosis.kinds:
        tell("", "if that is meant: case: training: {all_valid: true}, with which equal counts alone are under test")
    for label, text in evidence_rows(judgement.diagnosis.evidence):
        tell(f"  {label}", text)
    return True


def _unknown(judgement: Judgement, tell: Tell) -> bool:
    for result in judgement.results:
        if result.verdict is Verdict.UNKNOWN and result.check != "golden":
            tell(result.check, f"could not be judged: {result.note}")
    return True
