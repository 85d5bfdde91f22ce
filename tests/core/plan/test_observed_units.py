"""FSDP2's units as the trainer's choice: what is planned of those observed, and wrappings that people use, on real ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from literal import judged, tiny_case, trial_of, with_rank
from literal_ranks import held_part
from literal_reference import reference_of

from harness import ROOT
from harness.adapters.support.requests import beyond
from harness.core import trainers
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import find_case, load_all
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.causes import diagnose
from harness.core.checks import all_checks, judge
from harness.core.evidence.records import Run
from harness.core.judge import stored_trial
from harness.core.judge.measured import with_measured_traits
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan
from harness.core.plan.traffic.flow import Flow
from harness.core.plan.units_text import modules_text, units_text
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.core.trainers import Adapter

FSDP_4 = ParallelDims(dp_shard=4)
TWO = replace(tiny_case("single").model, n_layers=2)


def open_trial(*, layout="fsdp_2", requested=None, **ran) -> Trial:
    """Units are left open; the trainer that ran wraps and keeps as these features say."""
    ran_case = tiny_case(layout, **ran)
    return trial_of(tiny_case(layout, fsdp_units="observed", **(requested or {})), ran_case)


def planned_again(units: tuple[Unit, ...], **features) -> set[Flow]:
    """What rank 0 of four gathers again in backward."""
    case = tiny_case(FSDP_4, fsdp_units="observed", **features)
    flows = make_plan(case, TrainerTraits().with_units(dict.fromkeys(range(4), units))).flows[0]
    return {flow for flow in flows if (flow.role, flow.phase) == ("parameters", "backward")}


def test_an_adapter_that_says_nothing_leaves_units_open_and_a_case_that_asks_for_some_does_not() -> None:
    def observed(case):
        traits = Adapter.traits(None, case)  # type: ignore[arg-type]
        return with_measured_traits(case, traits, Run("", 2, (), {})).measured.units

    assert observed(tiny_case("fsdp_2")) == {}
    for requested in ({"fsdp_units": "root"}, {"fsdp_units": "apart"}, {"wrapper": "fsdp1"}):
        assert observed(tiny_case("fsdp_2", **requested)) is None
    assert observed(tiny_case("ddp_2")) is None


def test_units_left_open_ask_nothing_of_a_trainer_and_others_do() -> None:
    known = {"dp_shard": ...}
    assert list(beyond(tiny_case("fsdp_2", fsdp_units="observed"), known, "mine")) == list(
        beyond(tiny_case("fsdp_2"), known, "mine")
    )
    assert any("fsdp_units root" in why for why in beyond(tiny_case("fsdp_2", fsdp_units="root"), known, "mine"))


def test_what_is_gathered_again_is_planned_by_what_each_unit_keeps() -> None:
    shapes = list(tiny_case(FSDP_4).model.parameter_shapes())
    units = (Unit(("norm.weight",), 1), Unit(("output.weight",), 2), Unit(tuple(shapes[:1]), 4))
    assert planned_again(units) == {
        Flow("post_forward_2", "parameters", "all_gather", "backward", 8 * 32),
        Flow("dp_shard", "parameters", "all_gather", "backward", 8 * 32),
    }
    assert {flow.bytes for flow in planned_again(units, reshard_after_forward="always")} == {8 * (4 + 32 + 32)}
    assert planned_again(units, reshard_after_forward="never") == set()
    assert {flow.axis for flow in planned_again(units, reshard_after_forward=2)} == {"post_forward"}


def test_an_embedding_that_backward_is_told_not_to_gather_is_not_planned_there() -> None:
    """By set_unshard_in_backward(False), as OLMo-core does."""
    embedding, output = "tok_embeddings.weight", "output.weight"
    gathered = planned_again((Unit((embedding,), 4), Unit((output,), 4)))
    assert planned_again((Unit((embedding,), 4, backward_gathers=False), Unit((output,), 4))) == {
        replace(flow, bytes=flow.bytes // 2) for flow in gathered
    }


@pytest.mark.parametrize("layout", ["fsdp_2", "hsdp_2x2", "fsdp_2_tp_2"])
@pytest.mark.parametrize("ran", [{}, {"fsdp_units": "root"}, {"reshard_after_forward": "always"}], ids=str)
def test_whatever_is_wrapped_and_kept_consistently_passes_every_check(layout: str, ran) -> None:
    results = judge(open_trial(layout=layout, **ran))
    assert {r.verdict for r in results} <= {Verdict.PASS, Verdict.NOT_APPLICABLE}, results
    assert len(results) == len(all_checks())


@pytest.mark.parametrize("policy", ["always", "never"])
def test_units_of_a_pipeline_are_planned_like_a_policy_that_says_the_same(policy: str) -> None:
    layout, ways = ParallelDims(pp=2, dp_shard=2), 2 if policy == "always" else 1
    case = tiny_case(layout, model=TWO, fsdp_units="observed", schedule="GPipe")
    units = tuple(Unit((fqn,), ways) for fqn in case.model.parameter_shapes())
    requested = make_plan(tiny_case(layout, model=TWO, reshard_after_forward=policy, schedule="GPipe"))
    observed = make_plan(case, TrainerTraits().with_units(dict.fromkeys(range(4), units)))
    assert [moved(observed, rank) for rank in range(4)] == [moved(requested, rank) for rank in range(4)]
    assert observed.after_forward == requested.after_forward


def moved(plan: Plan, rank: int) -> Counter[tuple[str, str, str]]:
    total = Counter[tuple[str, str, str]]()
    for flow in plan.flows[rank]:
        total[flow.axis, flow.op, flow.phase] += flow.bytes
    return total


def test_what_was_observed_is_said_in_the_report() -> None:
    assert judged("placements", open_trial()).note == (
        "3 FSDP units observed: tok_embeddings (1) freed; layers.0 (9) freed; norm, output (2) kept"
    )
    assert judged("placements", trial_of(tiny_case("fsdp_2"))).note == ""


def test_units_are_told_in_words() -> None:
    units = [Unit(("layers.0.attention.wq.weight",), 2), *[Unit(("norm.weight", "output.weight"), 4)] * 2]
    assert (
        units_text(units, 4, most_units=2)
        == "layers.0.attention.wq (1) over 2 ranks; norm, output (2) freed; and 1 more"
    )
    assert units_text(units[1:2], 1) == "norm, output (2) whole"
    blocks = [f"layers.{layer}.{part}.weight" for layer in range(6) for part in ("ffn_norm", "feed_forward.w1")]
    assert modules_text(blocks) == "layers.0 to layers.5"


def test_a_policy_that_is_requested_is_judged_though_units_are_left_open() -> None:
    trial = open_trial(requested={"reshard_after_forward": "always"}, reshard_after_forward="never")
    assert judged("reshard", trial).verdict is judged("traffic", trial).verdict is Verdict.FAIL
    found = diagnose(trial, judge(trial))
    assert found is not None and found.causes[0].details == (("reshard_after_forward", "never"),)


def test_a_unit_that_keeps_what_its_wrapper_says_it_frees_is_found() -> None:
    """Claims of the one, memory of the other."""
    trial, kept = open_trial(), open_trial(reshard_after_forward="never")
    for rank in (0, 1):
        trial = with_rank(trial, rank, steps=kept.ranks[rank].steps)
    first = judged("reshard", trial).findings[0]
    assert (first.ranks, first.step, first.name) == ((0,), 1, "tok_embeddings.weight")
    assert (first.expected, first.observed) == ("freed", "gathered")


def test_replicas_that_keep_different_units_are_found_and_named() -> None:
    trial, other = (open_trial(layout="hsdp_2x2", reshard_after_forward=policy) for policy in ("default", "always"))
    ranks = {rank: (other if rank > 1 else trial).ranks[rank] for rank in range(4)}
    trial = as_measured(replace(trial, run=replace(trial.run, ranks=ranks)))
    (finding,) = judged("placements", trial).findings
    assert (finding.ranks, finding.kind) == ((2, 3), "unit")
    assert (finding.expected, finding.observed) == ("norm, output (2) kept", "norm, output (2) freed")
    assert {judged(check, trial).verdict for check in ("reshard", "traffic")} == {Verdict.PASS}
    found = diagnose(trial, judge(trial))
    assert found is not None and found.kinds == ("ranks disagree on units",) and found.causes[0].ranks == (2, 3)


def with_structure(trial: Trial, change) -> Trial:
    """The claims of every rank, and the plan that follows from them."""
    for rank, evidence in trial.ranks.items():
        structure = {module: change(wrapper) for module, wrapper in evidence.structure.items()}
        trial = with_rank(trial, rank, structure=structure)
    return as_measured(trial)


def as_measured(trial: Trial) -> Trial:
    """With the plan that follows from what its ranks claim."""
    return replace(trial, plan=make_plan(trial.case, with_measured_traits(trial.case, trial.traits, trial.run)))


def test_a_parameter_of_no_unit_is_found() -> None:
    def without_norm(wrapper):
        return replace(wrapper, parameters=tuple(fqn for fqn in wrapper.parameters if fqn != "norm.weight"))

    trial = with_structure(open_trial(), without_norm)
    first = judged("placements", trial).findings[0]
    assert (first.ranks, first.name, first.expected, first.observed) == ((0,), "norm.weight", 1, 0)


def test_units_left_open_of_which_no_wrapper_tells_are_unknown() -> None:
    trial = with_structure(open_trial(), lambda wrapper: replace(wrapper, parameters=()))
    note = "no wrapper of rank 0 claims which parameters it gathers"
    for check in ("placements", "reshard", "traffic"):
        assert (judged(check, trial).verdict, judged(check, trial).note) == (Verdict.UNKNOWN, note)


# ---- on real ranks


def run_wrapped(tmp_path: Path, name: str, wrap: str, habit: str = "nothing"):
    file = tmp_path / "mine.py"
    told = f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\nfrom own_fsdp import Fsdp, {habit}\n"
    file.write_text(f"{told}adapter = Fsdp({wrap!r}, {habit})\n")
    return run_case(find_case(name, load_all()), Options(out=tmp_path, trainer=trainers.absolute_spec(str(file), None)))


@pytest.mark.slow("real ranks each; the first two are judged in the same way", after=2)
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("fsdp_2", "blocks"),
        ("fsdp_2", "model_only"),
        ("fsdp_2", "linears"),
        ("fsdp_4", "each_otherwise"),
        ("hsdp_2x2", "pairs_of_blocks"),
        ("fsdp_4_reshard_always", "all_freed"),
    ],
)
def test_wrappings_that_people_use_pass_all_checks(tmp_path: Path, name: str, wrap: str) -> None:
    judgement = run_wrapped(tmp_path, name, wrap)
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


def test_what_evaluation_leaves_gathered_by_the_wrappers_own_policy_fails_no_check(tmp_path: Path) -> None:
    judgement = run_wrapped(tmp_path, "fsdp_2", "blocks", "validates")
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis
    (note,) = (result.note for result in judgement.results if result.check == "reshard")
    assert note.startswith("evaluation leaves norm.weight, output.weight, tok_embeddings.weight gathered")


def test_what_evaluation_leaves_of_uneven_slices_fails_no_check(tmp_path: Path) -> None:
    judgement = run_wrapped(tmp_path, "fsdp_4_uneven", "outside_apart", "validates")
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


def test_what_the_root_keeps_by_default_is_not_always_freed(tmp_path: Path) -> None:
    judgement = run_wrapped(tmp_path, "fsdp_4_reshard_always", "blocks")
    assert judgement.diagnosis is not None
    (cause,) = judgement.diagnosis.causes
    assert cause.finding is not None
    assert (cause.finding.check, cause.finding.name, cause.finding.observed) == (
        "reshard",
        "tok_embeddings.weight",
        "gathered",
    )


# ---- FSDP1


def laid_out(claimed: bool) -> Run:
    """Of ranks whose modules have their parameters in the reverse of the reference's order; whether wrappers say so."""
    case = tiny_case("fsdp_2", wrapper="fsdp1")
    trial, order = trial_of(case), tuple(case.model.parameter_shapes())[::-1]
    slices = make_plan(case, TrainerTraits(flat_order=order)).slices
    for rank, evidence in trial.ranks.items():
        values = {fqn: trial.reference.weights[fqn][held_part(part)] for fqn, part in slices[rank].items()}
        held = tuple(replace(tensor, value=values[tensor.fqn]) for tensor in evidence.parameters)
        units = {at: replace(one, parameters=one.parameters[::-1]) for at, one in evidence.structure.items()}
        trial = with_rank(trial, rank, parameters=held, structure=units if claimed else evidence.structure)
    return trial.run


@pytest.mark.parametrize("claimed", [True, False])
def test_parameters_lie_in_the_vectors_of_fsdp1_as_its_wrappers_claim_and_bytes_tell(
    claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, run = tiny_case("fsdp_2", wrapper="fsdp1"), laid_out(claimed)
    monkeypatch.setattr(
        stored_trial, "load_case", lambda folder: (case, {"run": with_measured_traits(case, TrainerTraits(), run)})
    )
    monkeypatch.setattr(stored_trial, "load_stored", lambda *_: reference_of(case))
    monkeypatch.setattr(stored_trial, "load_run", lambda folder: run)
    trial = stored_trial.load_trial(Path())
    assert judged("placements", trial).verdict is Verdict.PASS
    assert judged("shard_contents", trial).verdict is (Verdict.PASS if claimed else Verdict.FAIL)


def test_an_order_that_the_adapter_tells_goes_before_that_of_the_wrappers() -> None:
    told, case = TrainerTraits(flat_order=("norm.weight",)), tiny_case("fsdp_2", wrapper="fsdp1")
    run = laid_out(True)
    assert with_measured_traits(case, told, run).vector_order == ("norm.weight",)
    claimed = [fqn for one in run.ranks[0].structure.values() for fqn in one.parameters]
    assert with_measured_traits(case, TrainerTraits(), run).vector_order == tuple(claimed) != ()
    assert with_measured_traits(case, TrainerTraits(), replace(run, ranks={})).vector_order == ()
    assert with_measured_traits(tiny_case("fsdp_2"), TrainerTraits(), run).vector_order == ()
