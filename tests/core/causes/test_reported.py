"""A reported number is one on record: whose, as data. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from diagnosed import LOW_CLIP, accumulating, dims, is_listed, reference_gradient, scaled
from literal import judged, tiny_case, trial_of, with_step
from literal_reference import clip

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.engine import explain, failing_checks
from harness.core.causes.reported import facts_of_wrong_reports, norm_sources, reports_of, wrong_reports
from harness.core.checks import judge
from harness.core.judge.contents import to_bfloat16
from harness.core.judge.norms import norm_of_slices
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial

FSDP_4, HSDP_8 = trial_of(tiny_case(dims(shard=4))), trial_of(tiny_case(dims(2, 4)))
LOSS, NORM, RATE = "reported_loss", "grad_norm", "reported_lr"
NAMES = {LOSS: "loss", NORM: "gradient norm", RATE: "learning rate"}
Value = Callable[[int, int], float | None]


def shows(trial: Trial, what: str, value: Value) -> Trial:
    """value(rank, step) is reported; where it is None, the right number."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            if (number := value(rank, step.step)) is not None:
                trial = with_step(trial, rank, step.step, **{what: number})
    return trial


def named(trial: Trial) -> Cause:
    """The only cause; where it says whose number it is, that is proven."""
    found = diagnose(trial, judge(trial))
    assert found is not None and len(found.causes) == 1 and is_listed(found.kinds[0]), found
    return found.causes[0]


def whose(trial: Trial, what: str) -> dict[str, object]:
    cause = named(trial)
    assert cause.kind == "wrong report"
    details = dict(cause.details)
    assert not details or details.pop("report") == NAMES[what]
    return details


def right(trial: Trial, what: str) -> dict[int, float]:
    return {step.step: getattr(step, {LOSS: "loss", RATE: "lr"}.get(what, what)) for step in trial.reference.steps}


@pytest.mark.slow("many of a kind; the first run in the same way", after=6)
@pytest.mark.parametrize("what", [LOSS, NORM])
@pytest.mark.parametrize(
    ("value", "details"),
    [
        (lambda known, step: known.get(step - 1), {"as that of 1 step": "before"}),
        (lambda known, step: known.get(max(step - 1, 1)), {"as that of 1 step": "before"}),
        (lambda known, step: known.get(step + 1), {"as that of 1 step": "later"}),
        (lambda known, step: known[1], {"of step": 1}),
        (lambda known, step: known[2], {"of step": 2}),
        (lambda known, step: sum(known[n] for n in range(1, step + 1)), {"as the sum of": "all steps so far"}),
        (lambda known, step: sum(known[n] for n in range(1, step + 1)) / step, {"as the mean of": "all steps so far"}),
        (lambda known, step: 4 * known[step], {"times": 4.0}),
        (lambda known, step: known[step] / 4, {"times": 0.25}),
        (lambda known, step: float(np.float32(known[step])), {"rounded to": "float32"}),
        (lambda known, step: 17.0 + step, {}),
    ],
)
def test_numbers_of_other_steps_and_multiples(
    what: str, value: Callable[[dict[int, float], int], float], details: dict[str, object]
) -> None:
    known = right(FSDP_4, what)
    assert whose(shows(FSDP_4, what, lambda rank, step: value(known, step)), what) == details


@pytest.mark.parametrize("kept", [0.5, 0.8, 0.9, 0.95, 0.98, 0.99])
def test_a_loss_that_is_a_running_mean(kept: float) -> None:
    shown: list[float] = []
    for loss in right(FSDP_4, LOSS).values():
        shown.append(kept * shown[-1] + (1 - kept) * loss if shown else loss)
    trial = shows(FSDP_4, LOSS, lambda rank, step: shown[step - 1])
    assert whose(trial, LOSS) == {"as a running mean that keeps": kept}


@pytest.mark.parametrize("trial", [FSDP_4, HSDP_8], ids=["fsdp_4", "hsdp_2x4"])
@pytest.mark.parametrize("again", [1, 2, 4])
def test_token_losses_that_are_never_set_back(trial: Trial, again: int) -> None:
    total, totals = 0.0, {}
    for step in trial.reference.steps:
        total = again * total + step.loss * step.valid_tokens
        totals[step.step] = total / step.valid_tokens
    assert [*whose(shows(trial, LOSS, lambda rank, step: totals[step]), LOSS).values()] == [again]


def loss_over(trial: Trial, ranks: tuple[int, ...], step: int, last: bool = False) -> tuple[float, int]:
    parts = [one for rank in ranks for one in trial.ranks[rank].steps[step - 1].microbatches[-1 if last else 0 :]]
    return sum(one.loss_sum for one in parts), sum(one.valid_tokens for one in parts)


@pytest.mark.parametrize(
    ("layout", "axes", "peers"),
    [
        (dims(shard=4), ("dp_shard",), lambda rank: (rank,)),
        (dims(2, 2), ("dp_replicate",), lambda rank: (rank // 2 * 2, rank // 2 * 2 + 1)),
        (dims(2, 2), ("dp_shard",), lambda rank: (rank % 2, rank % 2 + 2)),
        (dims(2, 2), ("dp_replicate", "dp_shard"), lambda rank: (rank,)),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_that_is_not_reduced_over_axes(
    layout: ParallelDims, axes: tuple[str, ...], peers: Callable[[int], tuple[int, ...]], whole: bool
) -> None:
    trial = trial_of(tiny_case(layout))

    def value(rank: int, step: int) -> float:
        total, tokens = loss_over(trial, peers(rank), step)
        return total / (trial.reference_step(step).valid_tokens if whole else tokens)

    details = {"not reduced over": axes} | ({"over the tokens of": "the step"} if whole else {})
    assert whose(shows(trial, LOSS, value), LOSS) == details


def test_a_loss_of_one_rank_for_all() -> None:
    parts = {step: loss_over(FSDP_4, (2,), step) for step in FSDP_4.case.steps}
    trial = shows(FSDP_4, LOSS, lambda rank, step: parts[step][0] / parts[step][1])
    assert whose(trial, LOSS) == {"of rank": 2}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_a_loss_of_the_last_microbatch_alone(own: bool, whole: bool, factor: float) -> None:
    trial = accumulating()

    def value(rank: int, step: int) -> float:
        total, tokens = loss_over(trial, (rank,) if own else (0, 1), step, last=True)
        return factor * total / (trial.reference_step(step).valid_tokens if whole else tokens)

    details = whose(shows(trial, LOSS, value), LOSS)
    assert details.pop("times", 1.0) == factor and ("over the tokens of" in details) == whole
    assert details["of microbatch"] == 2 and ("not reduced over" in details) == own


@pytest.mark.parametrize(("chosen", "said"), [(slice(2), "1-2"), (slice(2, None), "3-4"), (slice(3), "1-3")])
def test_a_loss_of_the_first_or_last_microbatches(chosen: slice, said: str) -> None:
    trial = trial_of(tiny_case("single", accumulation=4))

    def value(rank: int, step: int) -> float:
        parts = trial.ranks[0].steps[step - 1].microbatches[chosen]
        return float(sum(part.loss_sum for part in parts) / trial.reference_step(step).valid_tokens)

    details = whose(shows(trial, LOSS, value), LOSS)
    assert details == {"of microbatches": said, "over the tokens of": "the step"}


@pytest.mark.parametrize(("trial", "of"), [(FSDP_4, "ranks"), (accumulating(), "microbatches")])
def test_a_loss_that_is_a_mean_of_means(trial: Trial, of: str) -> None:
    def value(rank: int, step: int) -> float:
        parts = [one for evidence in trial.ranks.values() for one in evidence.steps[step - 1].microbatches]
        return float(np.mean([one.loss_sum / one.valid_tokens for one in parts]))

    assert whose(shows(trial, LOSS, value), LOSS) == {"as a mean of means of": of}


@pytest.mark.parametrize(
    ("layout", "axes", "peers"),
    [
        ("fsdp_2", ("dp_shard",), lambda rank: (rank,)),
        ("fsdp_2_tp_2", ("tp",), lambda rank: (rank % 2, rank % 2 + 2)),
        ("fsdp_2_tp_2", ("dp_shard", "tp"), lambda rank: (rank,)),
    ],
)
def test_a_norm_that_is_not_reduced_over_axes(
    layout: str, axes: tuple[str, ...], peers: Callable[[int], tuple[int, ...]]
) -> None:
    trial = trial_of(tiny_case(layout))
    wrong = shows(trial, NORM, lambda rank, step: norm_of_slices(trial, step, peers(rank)))
    assert whose(wrong, NORM) == {"not reduced over": axes}


@pytest.mark.parametrize("by", [lambda norm: min(norm, 0.25), lambda norm: clip(norm, LOW_CLIP) * norm])
def test_a_norm_of_what_clipping_left(by: Callable[[float], float]) -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    known = right(trial, NORM)
    wrong = shows(trial, NORM, lambda rank, step: by(known[step]))
    assert whose(wrong, NORM) == {"after clipping to": 0.25}
    alone = shows(trial, NORM, lambda rank, step: by(known[step]) if rank and step < 3 else None)
    assert (whose(alone, NORM), named(alone).where) == ({"after clipping to": 0.25}, "on rank 1 in step 1, 2")


def test_another_kind_of_number_and_one_that_stands_still() -> None:
    known, trial = right(FSDP_4, NORM), FSDP_4
    assert whose(shows(trial, LOSS, lambda rank, step: known[step]), LOSS) == {"as the": "gradient norm"}
    assert whose(shows(trial, LOSS, lambda rank, step: 0.0), LOSS) == {"always as": 0.0}
    rates = right(trial, RATE)
    peak = shows(trial, RATE, lambda rank, step: trial.case.training.lr)
    assert whose(peak, RATE) == {"always as": trial.case.training.lr}
    assert whose(shows(trial, RATE, lambda rank, step: rates.get(step - 1)), RATE) == {"as that of 1 step": "before"}
    assert whose(shows(trial, RATE, lambda rank, step: 3 * rates[step]), RATE) == {"times": 3.0}


def test_numbers_of_one_rank_in_one_step() -> None:
    known = right(FSDP_4, NORM)
    odd = with_step(FSDP_4, 2, 1, grad_norm=known[2])
    assert (whose(odd, NORM), named(odd).where) == ({"of step": 2}, "on rank 2 in step 1")
    for value in (1.0, math.nan):
        cause = named(with_step(FSDP_4, 3, 2, reported_loss=value))
        assert (cause.kind, cause.ranks, cause.steps, cause.details) == ("wrong report", (3,), (2,), ())


def test_a_norm_is_compared_with_that_of_the_ranks_own_replica() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    for rank, by in ((0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0)):
        for step in trial.ranks[rank].steps:
            before = by * trial.reference.steps[max(step.step - 2, 0)].grad_norm
            gradients = {fqn: by * gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, grad_norm=before, gradients=gradients)
    (one,) = wrong_reports(trial, {NORM: judged(NORM, trial)})
    assert one.cause.details[1:] == (("as that of 1 step", "before"),)


# ---- beside a training that is wrong


def test_a_report_that_repeats_what_is_wrong_is_not_blamed() -> None:
    trial = scaled("fsdp_2", 2.0)
    result = {NORM: judged(NORM, trial)}
    assert not [*wrong_reports(trial, result)] and not [*facts_of_wrong_reports(trial, result)]
    odd = shows(FSDP_4, NORM, lambda rank, step: 17.0 + step)
    worse = with_step(odd, 0, 1, gradients={f: 1.5 * g for f, g in odd.ranks[0].steps[0].gradients.items()})
    found = diagnose(worse, judge(worse))
    assert found is not None and "wrong report" not in found.kinds


def test_a_report_is_wrong_beside_a_wrong_rate() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, lr=2 * step.lr, reported_lr=step.lr)
    found = explain(trial, judge(trial), (wrong_reports,), ())
    assert [(proof.explained, proof.hypotheses[0].cause.details[1:]) for proof in found.proofs] == [
        (("reported_rate",), (("times", 0.5),))
    ]


def test_reports_that_are_lacking_and_a_largest_loss_below_the_mean() -> None:
    lacking = shows(FSDP_4, NORM, lambda rank, step: 1.0)
    cause = named(with_step(lacking, 1, 2, grad_norm=None))
    assert cause.kind == "report lacking" and cause.finding is not None
    cause = named(with_step(FSDP_4, 1, 2, reported_largest=0.5))
    assert (cause.kind, cause.ranks, cause.steps) == ("wrong report", (1,), (2,))


def test_no_norm_is_known_where_a_gradient_is_of_no_planned_parameter() -> None:
    trial = shows(FSDP_4, NORM, lambda rank, step: 2.0 * right(FSDP_4, NORM)[step])
    assert reports_of(trial, "grad_norm") is not None
    own = trial.ranks[0].steps[0].gradients
    trial = with_step(trial, 0, 1, gradients={**own, "copied.weight": next(iter(own.values()))})
    assert reports_of(trial, "grad_norm") is None


@pytest.mark.parametrize("steps", [(2,), (2, 3)])
def test_a_multiple_in_one_step_is_no_meaning_of_a_report(steps: tuple[int, ...]) -> None:
    norms = right(FSDP_4, NORM)
    trial = shows(FSDP_4, NORM, lambda rank, step: norms[step] * (3.3 if step in steps else 1))
    found = list(wrong_reports(trial, failing_checks(judge(trial))))
    assert bool(found) is (len(steps) > 1)


def test_reports_that_are_all_of_a_coarser_format() -> None:
    shown = {step: float(to_bfloat16(np.array([norm * 1.01]))[0]) for step, norm in right(FSDP_4, NORM).items()}
    assert len({*shown.values()}) > 1
    assert "numbers of bfloat16" in named(shows(FSDP_4, NORM, lambda rank, step: shown[step])).observed


# ---- norms


def length(*gradients: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(entry) ** 2 for gradient in gradients for entry in gradient.ravel()))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_norms_are_of_the_gradients_that_their_details_say(dtype: type) -> None:
    trial = trial_of(tiny_case(dims(shard=2, tp=2)))
    for rank, step, _ in [*trial.steps_with_reference()]:
        narrow = {fqn: g.astype(np.float32).astype(dtype) for fqn, g in step.gradients.items()}
        trial = with_step(trial, rank, step.step, gradients=narrow)
    of = {fqn: reference_gradient(trial, fqn).astype(np.float32).astype(np.float64) for fqn in trial.plan.shapes}
    vectors, ends = {fqn for fqn in of if "norm" in fqn}, {"tok_embeddings.weight", "output.weight"}
    entries = [abs(float(entry)) for gradient in of.values() for entry in gradient.ravel()]
    wanted = {
        ("with replicas counted along", "tp"): length(*of.values(), *(of[fqn] for fqn in vectors)),
        ("with replicas counted along", "dp_shard"): length(*of.values()),
        ("of norm type", math.inf): max(entries),
        ("of norm type", 1.0): math.fsum(entries),
        ("added up over", "parameters"): math.fsum(length(gradient) for gradient in of.values()),
        ("of", "norm weights"): length(*(of[fqn] for fqn in vectors)),
        ("without", "norm weights"): length(*(of[fqn] for fqn in of if fqn not in vectors)),
        ("of", "embedding and output"): length(*(of[fqn] for fqn in ends)),
        ("without", "embedding and output"): length(*(of[fqn] for fqn in of if fqn not in ends)),
        ("to the power of", 2): length(*of.values()) ** 2,
        ("with", "norm.weight counted twice"): length(*of.values(), of["norm.weight"]),
        ("with", "output.weight left out"): length(*(of[fqn] for fqn in of if fqn != "output.weight")),
        ("with", "layers.*.attention.wq.weight left out"): length(*(of[fqn] for fqn in of if ".wq." not in fqn)),
        ("with", "output.weight counted on rank 0 of tp alone"): length(
            *(of[fqn] if fqn != "output.weight" else np.split(of[fqn], 2)[0] for fqn in of)
        ),
    }
    found = {details[0]: number for details, number in norm_sources(trial)}
    for detail, value in wanted.items():
        assert [found[detail](rank, 1) for rank in trial.ranks] == pytest.approx([value] * 4, rel=1e-12), detail
