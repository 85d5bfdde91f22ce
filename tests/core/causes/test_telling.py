"""What is said of an explanation: causes in their order, what else was seen, what could be meant, and what is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosed import NORM, fsdp_4
from literal import with_step, with_value

from harness.core.causes import telling
from harness.core.causes.engine import Explanation
from harness.core.causes.hypothesis import Fact, Hypothesis, Proof
from harness.core.causes.localise import UNEXPLAINED
from harness.core.causes.telling import build_diagnosis, weaker_test_lines
from harness.core.checks import judge
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Lines, Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import cause_line, evidence_rows

RIGHT = fsdp_4()


JUDGED_AGAIN = "if that is assumed, they pass, and no passing check fails"


def cause(name: str) -> Cause:
    return Cause(f"kind of {name}", name)


def proof(
    *names: str,
    explained: tuple[str, ...] = ("loss",),
    left: tuple[str, ...] = (),
    assumed: Trial = RIGHT,
    renumbers: bool = False,
) -> Proof:
    found = tuple(Hypothesis(cause(n), None, 1, ((n, f"seen of {n}"),), renumbers_ranks=renumbers) for n in names)
    return Proof(found, explained, left, assumed)


def fact(name: str, *checks: str, symptom: bool = False) -> Fact:
    return Fact(cause(name), checks, ((name, f"seen of {name}"),), symptom)


def result(name: str, verdict: Verdict = Verdict.FAIL, note: str = "") -> Result:
    findings = (Finding(check=name, ranks=(0,), expected=1, observed=2),) if verdict is Verdict.FAIL else ()
    return Result(name, verdict, 1, findings, note)


def said(found: Explanation, *broken: str, trial: Trial = RIGHT) -> tuple[list[str], Lines]:
    whole = build_diagnosis(trial, [*map(result, broken), result("update", Verdict.PASS)], found)
    return [one.observed for one in whole.causes], whole.evidence


def of(*names: str) -> Lines:
    return tuple((name, f"seen of {name}") for name in names)


def assuming(explained: int, broken: int, rest: str = "") -> tuple[str, str]:
    more = f"; seen, not proven: {rest}" if rest else ""
    return "explains", f"{explained} of {broken} failing checks: {JUDGED_AGAIN}{more}"


# ---- the order of causes


def test_what_did_not_complete_goes_first_then_what_is_proven_then_what_was_seen() -> None:
    facts = (fact("groups", "process_groups"), fact("hang", "completed", "collective_order"))
    causes, lines = said(
        Explanation((proof("factor"),), facts), "loss", "process_groups", "completed", "collective_order"
    )
    assert causes == ["hang", "factor", "groups"]
    assert lines == (assuming(1, 4, "process_groups, completed, collective_order"), *of("hang", "factor", "groups"))
    causes, _ = said(Explanation((proof("factor"),), facts[:1]), "loss", "process_groups")
    assert causes == ["factor", "groups"]


def test_of_two_hypotheses_the_one_that_a_check_has_not_seen_goes_behind() -> None:
    both = Explanation((proof("one", "two"),), (fact("two", "memory"),))
    causes, lines = said(both, "loss", "memory")
    assert causes == ["two", "one"]
    assert lines == (assuming(1, 2, "memory"), *of("two", "one"))


def test_checks_that_are_proven_or_hold_are_not_seen_besides() -> None:
    facts = (fact("groups", "process_groups", "loss", "update"),)
    _, lines = said(Explanation((proof("factor"),), facts), "loss", "process_groups")
    assert lines[0] == assuming(1, 2, "process_groups")
    assert said(Explanation((), facts), "loss")[1] == of("groups")
    assert said(Explanation((proof("factor"),)), "loss")[1][0] == assuming(1, 1)


def test_a_fact_that_is_a_finding_alone_is_not_said_beside_a_proven_cause_of_its_kind() -> None:
    finding = result("traffic").findings[0]
    alone = [Fact(Cause(kind, "", finding=finding), ("traffic",)) for kind in ("kind of factor", "another")]
    whole = build_diagnosis(
        RIGHT, [result("loss"), result("traffic")], Explanation((proof("factor"),), (*alone, fact("x", "traffic")))
    )
    assert [one.kind for one in whole.causes] == ["kind of factor", "another", "kind of x"]


def test_a_cause_that_repeats_an_earlier_ones_kind_and_what_is_observed_is_said_once() -> None:
    again = replace(cause("factor"), where="elsewhere")
    facts = (Fact(again, ("memory",)), Fact(replace(again, observed="other"), ("traffic",)))
    assert said(Explanation((proof("factor"),), facts), "loss", "memory", "traffic")[0] == ["factor", "other"]


@pytest.mark.parametrize(
    ("proofs", "named", "causes", "also"),
    [
        ((), False, ["memory"], False),
        ((), True, ["groups"], True),
        ((proof("factor"),), False, ["factor"], True),
    ],
)
def test_a_symptom_is_a_cause_only_where_there_is_no_other(
    proofs: tuple[Proof, ...], named: bool, causes: list[str], also: bool
) -> None:
    facts = (fact("memory", "memory", symptom=True), *[fact("groups", "process_groups")] * named)
    found, lines = said(Explanation(proofs, facts), "memory", "process_groups", "loss")
    assert found == causes
    assert (("also seen", "memory") in evidence_rows(lines)) is also and (
        ("memory", "seen of memory") in lines
    ) is not also


def test_other_explanations_are_said_once_each_and_never_the_first() -> None:
    proofs = (proof("one"), proof("two"), proof("one"), proof("three", "four"), proof("two"))
    _, lines = said(Explanation(proofs), "loss")
    rest = [("or else", "two"), ("or else", "three"), ("and", "four")]
    assert evidence_rows(lines) == [assuming(1, 1), *of("one"), *rest]


# ---- what is left


MEMORY = with_step(RIGHT, 1, 3, memory={"parameters": 1888, "optimizer_state": 944})
BOTH = with_value(MEMORY, 0, 1, "gradients", NORM, lambda g: 3 * g)
OF_MEMORY = "rank 1, step 3, parameters: expected 472 B, observed 1.888 kB (1888)"


def left_of(trial: Trial, *proofs: Proof, left: tuple[str, ...] = ("memory",)) -> tuple[list[str], dict[str, str]]:
    results = judge(trial)
    found = build_diagnosis(
        trial,
        results,
        Explanation(proofs, unexplained=left, tried_count=2, end_reason="the end", errors=("one", "two")),
    )
    assert found.evidence[-3:] == (("not tried", "one"), ("not tried", "two"), ("not searched further", "the end"))
    return [cause_line(one) for one in found.causes], dict(evidence_rows(found.evidence))


def test_what_nothing_explains_is_the_cause_where_it_first_goes_wrong() -> None:
    causes, lines = left_of(MEMORY)
    assert causes == [f"memory: {OF_MEMORY}"]
    assert (
        lines["tried"] == "2 hypotheses, none explains this" and not {"not explained", "still failing"} & lines.keys()
    )


def test_what_a_proven_cause_leaves_is_told_as_it_is_with_that_assumed() -> None:
    """The first finding of memory alone would be the gradient's, which is assumed."""
    first = proof("factor", explained=("gradients",), assumed=MEMORY)
    causes, lines = left_of(BOTH, first, proof("other", assumed=RIGHT, renumbers=True))
    assert causes == ["factor"]
    assert lines["still failing"] == f"memory: {OF_MEMORY}"
    assert lines["tried"] == "2 hypotheses, none explains the rest"
    less = with_step(BOTH, 1, 3, memory={"parameters": 944, "optimizer_state": 944})
    _, lines = left_of(less, proof("factor", assumed=MEMORY))
    assert lines["still failing"] == f"memory: {OF_MEMORY}"
    _, lines = left_of(less, proof("factor", assumed=RIGHT))
    assert lines["still failing"].endswith("expected 472 B, observed 944 B"), "as it was, where it holds under that"
    _, lines = left_of(less, proof("degree", assumed=MEMORY, renumbers=True), proof("other"))
    assert lines["not explained"].startswith("memory: ") and "observed 944 B" in lines["not explained"]


def test_where_even_that_raises_the_first_finding_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def localise(*of: object, **more: object) -> None:
        raise KeyError("layers.7")

    monkeypatch.setattr(telling, "localise", localise)
    found = build_diagnosis(RIGHT, [result("loss"), result("update")], Explanation(unexplained=("loss", "update")))
    assert [(one.kind, cause_line(one)) for one in found.causes] == [
        (UNEXPLAINED, "loss: rank 0: expected 1, observed 2")
    ]
    assert found.evidence == (("not located", "KeyError: 'layers.7'"),)


# ---- what weaker tests say


def traffic_result(observed: int) -> Result:
    finding = Finding(check="traffic", ranks=(0,), expected=8, observed=observed, kind="collective", unit="bytes")
    return Result("traffic", Verdict.FAIL, 1, (finding,))


@pytest.mark.parametrize("failing", [result("placements"), traffic_result(0)])
def test_a_listing_of_groups_passes_where_placements_are_wrong_or_a_collective_did_not_run(failing: Result) -> None:
    groups = result("process_groups", Verdict.PASS)
    assert dict(weaker_test_lines([groups, failing])).keys() == {"groups"}
    assert weaker_test_lines([failing]) == ()


@pytest.mark.parametrize("failing", [result("memory"), result("shard_contents"), traffic_result(16)])
def test_a_listing_of_groups_is_not_mentioned_where_groups_are_not_the_question(failing: Result) -> None:
    assert weaker_test_lines([result("process_groups", Verdict.PASS), failing]) == ()


def test_a_passing_check_that_fails_under_what_is_assumed_is_told() -> None:
    aside = replace(proof("samples"), tolerated_failures=("reported_numbers",))
    _, lines = said(Explanation((aside,)), "loss")
    assert lines[0][1] == f"1 of 1 failing checks: {JUDGED_AGAIN} but reported_numbers, which is left aside"
