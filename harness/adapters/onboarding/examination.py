"""The examination of a new trainer: it runs on one rank, then its names, samples and model are examined, then two ranks.

Explanations are tried by judging the stored evidence again: none is printed that was not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.adapters.onboarding.names import known_line, remedies
from harness.adapters.onboarding.skeleton import as_yaml
from harness.adapters.onboarding.suppositions import judge_fitting_suppositions, with_own_rates
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.causes import diagnose
from harness.core.causes.localise import ORDER_CHECKS
from harness.core.checks import judge
from harness.core.evidence.reading import read_json
from harness.core.evidence.store import load_stored
from harness.core.judge.judgement import Judgement
from harness.core.judge.losses import global_loss
from harness.core.judge.result import EXPLAINS, Diagnosis, Result, Verdict
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.finding_text import finding_sentence
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
    """The result of an examination: verdicts of the cases of a new trainer."""

    judged: dict[str, Verdict]
    """Case -> verdict."""
    stopped: bool = False
    """Whether later cases were not run, as they may show the same."""
    unaccepted: tuple[Case, ...] = ()
    """The cases of whose reference no curve is accepted."""
    judgements: tuple[Judgement, ...] = ()
    """The judgements of the cases that ran."""


def examine(cases: Sequence[Case], options: Options, tell: Tell, judged: dict[str, Verdict]) -> Examination:
    """Run the cases, smallest first, and print verdicts by `tell`. After a case that does not pass, explain it and stop.

    Return the verdicts, for which the check `golden` does not count. Raises what `run_case` raises.
    judged: filled with the verdicts on the way, for an interruption.
    """
    unaccepted = list[Case]()
    judgements = list[Judgement]()
    for case in sorted(cases, key=lambda case: case.dims.world_size):
        judgement = _run_case_telling(case, options, tell)
        judgements.append(judgement)
        results = {result.check: result.verdict for result in judgement.results}
        if results.pop("golden", None) is Verdict.UNKNOWN:  # it says nothing of the trainer
            unaccepted.append(judgement.case)
        worst_first = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS)
        verdict = next((possible for possible in worst_first if possible in results.values()), Verdict.UNKNOWN)
        judged[case.name] = verdict
        tell(case.name, f"{verdict}: {_run_text(judgement)}")
        if verdict is not Verdict.PASS:
            for label, text in explanation(judgement, options):
                tell(label, text)
            return Examination(judged, stopped=len(judged) < len(cases), judgements=tuple(judgements))
    return Examination(judged, unaccepted=tuple(unaccepted), judgements=tuple(judgements))


def _run_case_telling(case: Case, options: Options, tell: Tell) -> Judgement:
    """Run the case and return its judgement. Raises what `run_case` raises.

    If the adapter does not pass an option on, the line to write is told first.
    """
    try:
        return run_case(case, options)
    except Unsupported as reason:
        field = str(reason).partition(" ")[0]
        records = (case.dims, case.features, case.training, case.model)
        values = [getattr(record, field) for record in records if hasattr(record, field)]
        if NOT_PASSED_ON in str(reason) and values:
            tell(case.name, known_line({field: values[0]}, options.trainer))
        raise


def _run_text(judgement: Judgement) -> str:
    """Return in words how many steps ran on how many ranks, and which checks pass and fail."""
    passing_count = sum(result.verdict is Verdict.PASS for result in judgement.results)
    failing_text = ", ".join(result.check for result in judgement.results if result.verdict is Verdict.FAIL)
    ranks = judgement.case.dims.world_size
    steps = judgement.case.training.steps
    broken_text = f", broken {failing_text}" if failing_text else ""
    ranks_text = f"{ranks} ranks" if ranks > 1 else f"{ranks} rank"
    return f"{steps} steps on {ranks_text}; {passing_count} checks pass{broken_text}"


def explanation(judgement: Judgement, options: Options) -> list[Line]:
    """Return lines (label, sentence) on why a case did not pass. Explanations are tried in order; the first with lines counts.

    Without any, the lines are those of the cause, else of the checks that could not be judged.
    """
    lines = list(_explain_exit(judgement, options))
    for explain in (_explain_dtype, _explain_samples, explain_order, _explain_model):
        lines = lines or list(explain(load_trial(judgement.folder), judgement, options))
    if judgement.diagnosis and not lines:
        lines = list(_cause_lines(judgement.diagnosis))
    if lines:
        return lines
    unknown = (result for result in judgement.results if result.verdict is Verdict.UNKNOWN and result.check != "golden")
    return [(result.check, f"could not be judged: {result.note}") for result in unknown]


def _explain_exit(judgement: Judgement, options: Options) -> Iterator[Line]:
    """Yield lines on a rank that raised, whose parameters do not fit, or that trained another number of steps.

    Nothing if all completed.
    """
    completed = next(result for result in judgement.results if result.check == "completed")
    path = judgement.folder / "run" / SHAPES_FILE
    requested_steps = len(judgement.case.steps)
    if completed.verdict is Verdict.PASS:
        return
    if path.exists():
        shapes = {name: tuple(shape) for name, shape in read_json(path).items()}
        yield from remedies(shapes, judgement.case, trainers.load_adapter(options.trainer), options.trainer)
        yield "", f"parameters are mapped by `fqn`, of NAMES: {options.trainer}"
        return
    ranks = load_trial(judgement.folder).ranks.values()
    trained_steps = {len(evidence.steps) for evidence in ranks} - {requested_steps}
    if len(trained_steps) == 1 and len(completed.findings) == len(ranks):  # what they did in these steps can be judged
        (steps,) = trained_steps
        yield "steps", f"it trained {steps} steps, requested {requested_steps}; if a flag of the script sets how many,"
        yield "", "adapter: pass case.training.steps on in `arguments`; else"
        yield "", f"case: training: {{steps: {steps}}}"
        return
    for finding in completed.findings[:2]:
        yield "stopped", finding_sentence(finding)
    yield "log", str(judgement.folder / "run" / "logs" / "rank_00.log")


def _explain_dtype(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Yield lines if parameters have another dtype than requested. Nothing if they do not."""
    requested = trial.case.training.dtype
    dtypes = set[str]()
    for evidence in trial.ranks.values():
        dtypes |= {tensor.dtype for tensor in evidence.parameters}
    for dtype in sorted(dtypes - {requested})[:1]:
        yield "dtype", f"its parameters are {dtype}, requested {requested}; if it can do no other:"
        yield "", f'adapter: dtypes = ("{dtype}",), and `harness doctor --dtype {dtype}`'


def _explain_samples(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Yield lines if the model received tokens that are not the recipe's: no number can be the reference's then.

    Nothing if they are.
    """
    samples = next(result for result in judgement.results if result.check == "samples")
    for finding in samples.findings[:2]:
        yield "samples", finding_sentence(finding)
    if samples.findings:
        from harness.adapters.onboarding import sample_orders  # with torch, which `harness --help` can do without

        file = Path(options.trainer)
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        for line in sample_orders.advice_lines(trial, trainers.load_adapter(options.trainer), text, options.trainer):
            yield "", line


def explain_order(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Yield lines if all failing checks pass with the noise of another order of operations: then the model rounds at
    other places.

    Nothing if they do not, or if other checks fail. Loads the reference's noise, which may be trained for that.
    """
    broken = _failing_checks(judgement.results)
    if trial.case.has_derived_bounds or trial.traits.own_model or not broken or not broken <= ORDER_CHECKS:
        return
    folder = reference_folder(trial.case, options, (trial.case.golden_noise_key,))
    reference = replace(trial.reference, noise=load_stored(folder / "reference.npz", ReferenceRun).noise)
    plan = replace(trial.plan, traits=replace(trial.traits, own_model=True))
    if not _failing_checks(judge(replace(trial, plan=plan, reference=reference))):
        yield "model", "its numbers are off by no more than another order of operations leaves of the reference's"
        yield "", "adapter: def traits(self, case): return TrainerTraits(own_model=True)"
        yield "", "from harness.core.case.traits import TrainerTraits"
        yield EXPLAINS, f"{len(broken)} of {len(broken)} failing checks: {', '.join(sorted(broken))}"


def _explain_model(trial: Trial, judgement: Judgement, options: Options) -> Iterator[Line]:
    """Yield lines on how the model, or the schedule, differs from what adapter and case say, found by supposing usual mistakes.

    Nothing unless loss, update or gradients fail on a single rank.
    """
    broken = _failing_checks(judgement.results)
    if not broken & {"loss", "update", "gradients"} or trial.case.dims.world_size > 1:
        return
    supposed_trials = judge_fitting_suppositions(trial)
    if not supposed_trials:
        yield from _loss_error_lines(trial)
        return
    best_supposed = min(supposed_trials, key=lambda supposed: len(_failing_checks(supposed.results)))
    if best_supposed.suppositions:
        yield "model", "the loss of step 1 is that of a model with"
    for supposition in best_supposed.suppositions:
        yield "", supposition.line
    rates = with_own_rates(trial).rates
    if rates and rates != trial.case.training.rates:
        requested_text = ", ".join(f"{trial.reference_step(step).lr:.4g}" for step in trial.case.steps)
        rates_text = ", ".join(f"{rate:.4g}" for rate in rates)
        yield "schedule", f"its optimizer takes the rates {rates_text}, requested {requested_text}"
        yield "", "adapter: pass the recipe's schedule on; or, to keep its own, which is then not under test,"
        yield "", f"case: training: {{rates: [{', '.join(as_yaml(rate) for rate in rates)}]}}"
    still_failing = _failing_checks(best_supposed.results)
    if numbers := sorted(broken - still_failing):
        yield EXPLAINS, f"{len(numbers)} of {len(broken)} failing checks: {', '.join(numbers)}"
    if not still_failing:
        return
    remaining_results = [result for result in best_supposed.results if result.check != "golden"]
    if remaining_diagnosis := diagnose(best_supposed.trial, remaining_results):
        yield "left", f"{', '.join(sorted(still_failing))}: {diagnosis_line(remaining_diagnosis)}"


def _failing_checks(results: Sequence[Result]) -> set[str]:
    """Return the failing checks; golden is left out, as it may be of another recipe."""
    return {result.check for result in results if result.verdict is Verdict.FAIL} - {"golden"}


def _loss_error_lines(trial: Trial) -> Iterator[Line]:
    """Yield lines on how far the loss of step 1 is off. Nothing if the trainer has no such loss."""
    loss = global_loss(trial, 1)
    expected = trial.reference_step(1).loss
    if loss is None:
        return
    error = abs(loss - expected) / abs(expected)
    yield "loss", f"that of step 1 is off by {error:.1e}; none of the usual explanations of the model gives it"
    if error < FLOAT32 and trial.case.training.dtype == "float64":
        yield "", "so little is what arithmetic in float32 leaves: `harness doctor --dtype float32` shows it, or"
        yield "", 'adapter: float64.preserve(case.training.dtype, "module that says torch.float32")'


def _cause_lines(diagnosis: Diagnosis) -> Iterator[Line]:
    """Yield (label, text) of the cause that diagnosis named, and of its evidence.

    For counts that are averaged locally, a line says how to allow that.
    """
    yield "cause", diagnosis_line(diagnosis)
    if "averaged locally" in diagnosis.kinds:
        yield "", "if that is meant: case: training: {all_valid: true}, with which equal counts alone are under test"
    for label, text in evidence_rows(diagnosis.evidence):
        yield f"  {label}", text
