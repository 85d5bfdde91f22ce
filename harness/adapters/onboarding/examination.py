"""A trainer examined as it is brought in: it runs on one rank, then its names, its samples and its model, then two ranks.

Explanations are tried by judging the stored evidence again: none is printed that was not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.adapters.onboarding.names import remedies, to_known
from harness.adapters.onboarding.skeleton import as_yaml
from harness.adapters.onboarding.suppositions import suppose, with_own_rates
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.causes import diagnose
from harness.core.causes.localise import BY_ORDER
from harness.core.checks import judge
from harness.core.evidence.reading import read_json
from harness.core.evidence.store import load
from harness.core.judge.judgement import Judgement
from harness.core.judge.losses import global_loss
from harness.core.judge.result import Diagnosis, Result, Verdict
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.finding_text import sentence
from harness.core.run.options import Options, Unsupported
from harness.core.run.rank_main import SHAPES_FILE
from harness.core.run.reference_cache import reference_folder
from harness.core.run.run_case import run_case
from harness.reference.record import ReferenceRun

Line = tuple[str, str]
"""A label, and a sentence."""
Tell = Callable[[str, str], None]

FLOAT32 = 1e-5  # relative; what float32 arithmetic leaves of a loss, at most


@dataclass(frozen=True)
class Examination:
    judged: dict[str, Verdict]
    """How each case ended, by name."""
    stopped: bool = False
    """Whether later cases were not run, as they may show the same."""
    unaccepted: tuple[Case, ...] = ()
    """The cases of whose reference no curve is accepted."""
    judgements: tuple[Judgement, ...] = ()
    """The judgements of the cases that ran."""


def examine(cases: Sequence[Case], options: Options, tell: Tell, judged: dict[str, Verdict]) -> Examination:
    """Run one rank first, then the others; after a case that is wrong, none. judged: filled on the way, for an interruption.
    Raise what `run_case` raises."""
    unaccepted, judgements = list[Case](), list[Judgement]()
    for case in sorted(cases, key=lambda case: case.dims.world_size):
        judgement = _run(case, options, tell)
        judgements.append(judgement)
        results = {result.check: result.verdict for result in judgement.results}
        unaccepted += [judgement.case] * (
            results.pop("golden", None) is Verdict.UNKNOWN
        )  # it says nothing of the trainer
        worst = (one for one in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS) if one in results.values())
        judged[case.name] = verdict = next(worst, Verdict.UNKNOWN)
        tell(case.name, f"{verdict}: {_ran(judgement)}")
        if verdict is not Verdict.PASS:
            for label, text in explanation(judgement, options):
                tell(label, text)
            return Examination(judged, stopped=len(judged) < len(cases), judgements=tuple(judgements))
    return Examination(judged, unaccepted=tuple(unaccepted), judgements=tuple(judgements))


def _run(case: Case, options: Options, tell: Tell) -> Judgement:
    """Run the case. Raise what `run_case` raises; print the line for what an adapter is not known to pass on."""
    try:
        return run_case(case, options)
    except Unsupported as reason:
        field = str(reason).partition(" ")[0]
        records = (case.dims, case.features, case.training, case.model)
        values = [getattr(record, field) for record in records if hasattr(record, field)]
        if NOT_PASSED_ON in str(reason) and values:
            tell(case.name, to_known({field: values[0]}, options.trainer))
        raise


def _ran(judgement: Judgement) -> str:
    passing = sum(result.verdict is Verdict.PASS for result in judgement.results)
    wrong = ", ".join(result.check for result in judgement.results if result.verdict is Verdict.FAIL)
    ranks, steps = judgement.case.dims.world_size, judgement.case.training.steps
    broken = f", broken {wrong}" if wrong else ""
    return f"{steps} steps on {ranks} rank{'s' * (ranks > 1)}; {passing} checks pass{broken}"


def explanation(judgement: Judgement, options: Options) -> list[Line]:
    """Return why a case did not pass: the first of these that has something to say."""
    found = list(_died(judgement, options))
    for explain in (_another_dtype, _other_samples, in_another_order, _another_model):
        found = found or list(explain(load_trial(judgement.folder), judgement, options))
    if judgement.diagnosis and not found:
        found = list(_diagnosed(judgement.diagnosis))
    unknown = (one for one in judgement.results if one.verdict is Verdict.UNKNOWN and one.check != "golden")
    return found or [(one.check, f"could not be judged: {one.note}") for one in unknown]


def _died(judgement: Judgement, options: Options) -> Iterator[Line]:
    """Explain a rank that raised, perhaps for parameters that do not fit, or trained another number of steps."""
    completed = next(result for result in judgement.results if result.check == "completed")
    path, wanted = judgement.folder / "run" / SHAPES_FILE, len(judgement.case.steps)
    if completed.verdict is Verdict.PASS:
        return
    if path.exists():
        shapes = {name: tuple(shape) for name, shape in read_json(path).items()}
        yield from remedies(shapes, judgement.case, trainers.load(options.trainer), options.trainer)
        yield "", f"parameters are mapped by `fqn`, of NAMES: {options.trainer}"
        return
    ranks = load_trial(judgement.folder).ranks.values()
    trained = {len(evidence.steps) for evidence in ranks} - {wanted}
    if len(trained) == 1 and len(completed.findings) == len(ranks):  # what they did in these steps can be judged
        (steps,) = trained
        yield "steps", f"it trained {steps} steps, requested {wanted}; if a flag of the script sets how many,"
        yield "", "adapter: pass case.training.steps on in `arguments`; else"
        yield "", f"case: training: {{steps: {steps}}}"
        return
    yield from (("stopped", sentence(finding)) for finding in completed.findings[:2])
    yield "log", str(judgement.folder / "run" / "logs" / "rank_00.log")


def _another_dtype(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    wanted = trial.case.training.dtype
    for dtype in sorted({t.dtype for e in trial.ranks.values() for t in e.parameters} - {wanted})[:1]:
        yield "dtype", f"its parameters are {dtype}, requested {wanted}; if it can do no other:"
        yield "", f'adapter: dtypes = ("{dtype}",), and `harness doctor --dtype {dtype}`'


def _other_samples(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Explain tokens that are not the recipe's: no number can be the reference's then."""
    samples = next(result for result in judgement.results if result.check == "samples")
    yield from (("samples", sentence(finding)) for finding in samples.findings[:2])
    if samples.findings:
        from harness.adapters.onboarding import sample_orders  # with torch, which `harness --help` can do without

        file = Path(options.trainer)
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        lines = sample_orders.advice(trial, trainers.load(options.trainer), text, options.trainer)
        yield from (("", line) for line in lines)


def in_another_order(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Test whether the model rounds at other places than the reference's, with the noise of another order of operations."""
    broken = _broken(judgement.results)
    if trial.case.exact or trial.traits.own_model or not broken or not broken <= BY_ORDER:
        return
    folder = reference_folder(trial.case, options, (trial.case.golden_noise_key,))
    reference = replace(trial.reference, noise=load(folder / "reference.npz", ReferenceRun).noise)
    plan = replace(trial.plan, traits=replace(trial.traits, own_model=True))
    if not _broken(judge(replace(trial, plan=plan, reference=reference))):
        yield "model", "its numbers are off by no more than another order of operations leaves of the reference's"
        yield "", "adapter: def traits(self, case): return TrainerTraits(own_model=True)"
        yield "", "from harness.core.case.traits import TrainerTraits"
        yield "assuming this", f"{len(broken)} of {len(broken)} failing checks pass: {', '.join(sorted(broken))}"


def _another_model(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Explain how the model, or the schedule, differs from what the adapter and the case say."""
    broken = _broken(judgement.results)
    if not broken & {"loss", "update", "gradients"} or trial.case.dims.world_size > 1:
        return
    found = suppose(trial)
    if not found:
        yield from _off(trial)
        return
    best = min(found, key=lambda one: len(_broken(one.results)))
    if best.suppositions:
        yield "model", "the loss of step 1 is that of a model with"
    yield from (("", each.line) for each in best.suppositions)
    rates = with_own_rates(trial).rates
    if rates and rates != trial.case.training.rates:
        recipe = ", ".join(f"{trial.reference_step(n).lr:.4g}" for n in trial.case.steps)
        yield "schedule", f"its optimizer takes the rates {', '.join(f'{r:.4g}' for r in rates)}, requested {recipe}"
        yield "", "adapter: pass the recipe's schedule on; or, to keep its own, which is then not under test,"
        yield "", f"case: training: {{rates: [{', '.join(as_yaml(rate) for rate in rates)}]}}"
    left = _broken(best.results)
    if numbers := sorted(broken - left):
        yield "assuming this", f"{len(numbers)} of {len(broken)} failing checks pass: {', '.join(numbers)}"
    if left and (why := diagnose(best.trial, [result for result in best.results if result.check != "golden"])):
        yield "left", f"{', '.join(sorted(left))}: {diagnosis_line(why)}"


def _broken(results: Sequence[Result]) -> set[str]:
    """Return the failing checks; golden is left out, as it may be of another recipe."""
    return {result.check for result in results if result.verdict is Verdict.FAIL} - {"golden"}


def _off(trial: Trial) -> Iterator[Line]:
    """Say how far the first loss is off, if none of the usual explanations gives it."""
    loss, wanted = global_loss(trial, 1), trial.reference_step(1).loss
    if loss is None:
        return
    off = abs(loss - wanted) / abs(wanted)
    yield "loss", f"that of step 1 is off by {off:.1e}; none of the usual explanations of the model gives it"
    if off < FLOAT32 and trial.case.training.dtype == "float64":
        yield "", "so little is what arithmetic in float32 leaves: `harness doctor --dtype float32` shows it, or"
        yield "", 'adapter: float64.preserve(case.training.dtype, "module that says torch.float32")'


def _diagnosed(found: Diagnosis) -> Iterator[Line]:
    yield "cause", diagnosis_line(found)
    if "averaged locally" in found.kinds:
        yield "", "if that is meant: case: training: {all_valid: true}, with which equal counts alone are under test"
    yield from ((f"  {label}", text) for label, text in evidence_rows(found.evidence))
