"""Where things first go wrong, and what the wrong parameters have in common: all that is said of what nothing explains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from harness.diagnosis.assume import order_of_entries
from harness.diagnosis.differences import distance, expected_gradient, loss_off, seen_gradients, wrong_pairs
from harness.diagnosis.hypothesis import Broken, verdict_of
from harness.diagnosis.words import Pair, finding_line, in_order, in_parameters, on_ranks, rank_words, where_text
from harness.evidence.text import number_text, ranks_text
from harness.judge.assembly import misfits
from harness.judge.losses import global_loss, losses
from harness.judge.received_samples import received_samples
from harness.judge.result import Cause, Line, Lines, Verdict
from harness.judge.tolerance import NoBound
from harness.judge.trial import Trial

KIND = "not explained"
BY_ORDER = {"loss", "reported_loss", "gradients", "grad_norm"}
"""The checks whose bounds depend on whether the trainer's model is the reference's."""
SHARE = 4
"""Times the bound of a loss that one rank's part of it may be off by."""
OF_INPUTS = 4
"""Times the bound of the first loss that a mean square may be off by: right runs were seen to be off by up to 1.6 times."""
OTHER_ORDER = 30
"""Times the bound: with another order of operations gradients were seen to be off by up to 14 times what is measured without
(docs/float32.md, "parts" to "shares")."""


def localise(
    trial: Trial, broken: Broken, tried: int, held: frozenset[str] = frozenset(), *, rest: bool = False
) -> tuple[Cause, Lines]:
    """Of checks that nothing explains. tried: hypotheses that were put to the test. held: checks that pass. rest: of what
    something else does not explain."""
    cause = _first_wrong_number(trial, broken, held)
    first = next(iter(broken.values())).findings[0]
    none = f"none explains {'the rest' if rest else 'this'}"
    lines: list[Line] = [("tried", f"{tried} {'hypothesis' if tried == 1 else 'hypotheses'}, {none}")] * bool(tried)
    others = [*broken][1:]
    if cause is not None:
        lines += [finding_line(result) for result in itertools.islice(broken.values(), 2)]
        lines += _another_order(trial, broken)
    if others:
        lines.append(("also failing", ", ".join(others)))
    return cause or Cause(KIND, "", finding=first), tuple(lines)


def _another_order(trial: Trial, broken: Broken) -> Lines:
    """What a model of the trainer's own may leave by its order of operations, which was not measured for the reference's."""
    if trial.traits.own_model or not {*broken} <= BY_ORDER:
        return ()
    try:
        excess = max((one.excess for step in trial.case.steps for one in misfits(trial, step)[0]), default=math.inf)
    except NoBound:
        return ()
    if not excess <= OTHER_ORDER:
        return ()
    text = "whether a model of the trainer's own, which rounds at other places than the reference's, explains it"
    return (
        ("not tested", f"{text} (own_model in the adapter's `traits`): `harness doctor` with these options tests it"),
    )


def _first_wrong_number(trial: Trial, broken: Broken, held: frozenset[str]) -> Cause | None:
    """Of loss and gradients, in the first step in which they are wrong."""
    if not {"loss", "gradients"} & set(broken):
        return None
    findings = broken["update"].findings if "update" in broken else ()
    moved = {finding.step: finding for finding in reversed(findings) if finding.step}
    for step in trial.case.steps:
        if moved and min(moved) < step:
            right = ", gradients before clipping are right" * _saw_gradients(trial, min(moved))
            return Cause(KIND, f"the update is wrong{right}", finding=moved[min(moved)])
        off, wrong = loss_off(trial, step), wrong_pairs(trial, step)
        if off and wrong:
            return Cause(KIND, _forward(trial, _off(trial, step, off, held), step, held))
        if wrong:
            return _wrong_gradients(trial, step, wrong)
        as_a_whole = _off_as_a_whole(trial, step)
        if off:
            text, place = f"the loss of step {step} is off by {off:.1e}", _place(trial, step)
            close = f", its gradients match within the bound of {trial.bounds.gradient[step]:.1e}"
            if as_a_whole is None:
                return Cause(KIND, text + close * _saw_gradients(trial, step) + place)
            return replace(as_a_whole, observed=f"{text}{place}{'; ' if place else ', '}{as_a_whole.observed}")
        if as_a_whole is not None:
            return as_a_whole
    return None


def _since(trial: Trial, step: int, is_wrong: Callable[[int], bool]) -> str:
    """From a step on, if it is wrong in every later one as well; nothing of the first step."""
    if step == trial.first_step:
        return ""
    later = [other for other in trial.case.steps if other > step]
    return f" from step {step} on" if later and all(map(is_wrong, later)) else f" in step {step}"


def _saw_gradients(trial: Trial, step: int) -> bool:
    """Whether each rank's gradient of each parameter that it holds was seen, and could be compared."""
    held = ((rank, one.fqn) for rank, e in trial.ranks.items() for one in e.parameters if one.value.size)
    seen = {rank: seen_gradients(trial, rank, step) for rank in trial.ranks}
    return all(fqn in seen[rank] and expected_gradient(trial, rank, fqn, step) is not None for rank, fqn in held)


def _wrong_gradients(trial: Trial, step: int, wrong: list[Pair]) -> Cause:
    """Of a step whose loss is right, or was not seen."""
    since = _since(trial, step, lambda other: bool(wrong_pairs(trial, other)))
    before = f"right in step {trial.first_step} and " * (bool(since) and _saw_gradients(trial, trial.first_step))
    largest = max(distance(trial, rank, fqn, step) for rank, fqn in wrong)
    by = f" by up to {largest:.0e} of the largest entry" * (step == 1 and largest < math.inf)
    where = where_text(trial, wrong) + one_group(trial, {rank for rank, _ in wrong})
    matches = f"; the loss of step {step} matches within {trial.bounds.loss[step]:.0e}"
    matches *= global_loss(trial, step) is not None
    more = in_common(trial, in_order(trial, (fqn for _, fqn in wrong)))
    return Cause(KIND, f"gradients are {before}wrong{by}{since}", f"{where}{more}{matches}")


BEFORE_FORWARD = ("samples", "positions", "initial_weights", "resume")
"""The checks of what goes into the forward pass, but for the update: where that is wrong earlier, it is told instead."""


def _forward(trial: Trial, off: str, step: int, held: frozenset[str]) -> str:
    """Blamed where all that goes into it is right: what is broken and what is not judged (`held`) may be the reason as well."""
    wrong = [check for check in BEFORE_FORWARD if check not in held and verdict_of(trial, check) is Verdict.FAIL]
    if wrong:
        return f"{off}; broken before the forward pass: {', '.join(wrong)}"
    since = _since(trial, step, lambda other: loss_off(trial, other) is not None)
    right = f"right in step {trial.first_step} and " * (
        bool(since) and global_loss(trial, trial.first_step) is not None
    )
    off_on = ranks_whose_losses_are_off(trial, step)
    on = on_ranks(trial, off_on) if off_on else ""
    return f"the forward pass is {right}wrong{on}{since}: {off}"


def ranks_whose_losses_are_off(trial: Trial, step: int) -> list[int]:
    """Return those whose samples have other losses than the reference.

    With noise, dropout, cp or pp, or where samples or losses are not known, no rank has an expected loss of its own."""
    case, received = trial.case, received_samples(trial, step)
    seen = {rank: losses(trial, rank, step) for rank in received}
    known = {id_ for ids in received.values() for id_ in ids} <= {*trial.reference.samples[step - 1]}
    if not case.exact or case.model.dropout or case.dims.cp * case.n_stages > 1 or not known or not all(seen.values()):
        return []
    from harness.reference.counterfactual import Otherwise, losses_of_rows

    before = {} if step == 1 else {"weights": trial.reference.steps[step - 2].parameters}
    otherwise = Otherwise(**(order_of_entries(trial) | before))
    rows = losses_of_rows(case.model, case.training, trial.reference, step, otherwise)
    of_sample = dict(zip(trial.reference.samples[step - 1], rows, strict=True))

    def is_off(rank: int) -> bool:
        wanted = math.fsum(of_sample[id_] for id_ in received[rank] if id_ is not None)
        return not abs(math.fsum(total for total, _ in seen[rank]) - wanted) <= SHARE * trial.bounds.loss[step] * wanted

    return list(filter(is_off, received))


def _off_as_a_whole(trial: Trial, step: int) -> Cause | None:
    """In recipes with noise: which gradients are off, though no entry is beyond its own bound."""
    try:
        wrong = [one for one in misfits(trial, step)[0] if not one.within]
    except NoBound:
        return None
    if not wrong:
        return None
    worst = max(wrong, key=lambda one: one.excess)
    text = f"by {worst.distance:.1e} of its norm in {worst.fqn}, noise explains {worst.distance_bound:.1e}"
    if worst.scaled:
        text = (
            f"{number_text(worst.fit, 4)} times the reference's by best fit in {worst.fqn} on {rank_words(worst.ranks)}"
        )
    fqns = in_order(trial, (one.fqn for one in wrong))
    hint = f"{text}; no single entry stands out{in_common(trial, fqns)}"
    no_factor = ", and no factor explains it" * (not any(one.scaled for one in wrong))
    return Cause(
        KIND,
        f"gradients are off{f' in step {step}' * (step > trial.first_step)}",
        in_parameters(trial, fqns) + no_factor,
        hint=hint,
    )


def _off(trial: Trial, step: int, off: float, held: frozenset[str]) -> str:
    text = f"the loss of step {step} is off by {off:.1e}"
    if step > 1:
        return text
    right = [what for check, what in (("initial_weights", "weights"), ("samples", "samples")) if check in held]
    though = f" though {' and '.join(right)} are right" if right else ""
    return text + though + _place(trial, step)


def _place(trial: Trial, step: int) -> str:
    """Return the module at which step 1 first goes wrong; of a later step no inputs are known."""
    return first_wrong_input(trial) + _what_keeps_it(trial) if step == 1 else ""


def _what_keeps_it(trial: Trial) -> str:
    """What may still be wrong before the module that is said."""
    right, wrong = inputs_that_differ(trial)
    if right and not wrong:
        return "; the output or the loss may be computed otherwise, or something that keeps it"
    return ", where a wrong rotation of queries and keys would not show" * right.endswith("inner_attention")


def first_wrong_input(trial: Trial) -> str:
    """The first module in forward's order into which something of another length goes, and the last before it."""
    right, wrong = inputs_that_differ(trial)
    if wrong:
        no = f"{_input_words(trial, wrong)} does not{_apart_over_tp(trial, wrong)}"
        before = f"{_input_words(trial, right)} matches the reference in mean square, but {no}" if right else ""
        return f": {before or no + ' match the reference in mean square'}"
    return ": the input of every module matches the reference in mean square" if right else ""


def inputs_that_differ(trial: Trial) -> tuple[str, str]:
    """The last module before the first one into which something of another length goes, and that one; empty where none is."""
    right, close = "", 1e-9 if trial.case.exact else OF_INPUTS * trial.bounds.loss[1]
    for fqn, mean in trial.reference.inputs.items():
        seen = [step.activity.inputs[fqn] for _, step, _ in trial.steps() if fqn in step.activity.inputs]
        expected = mean * sum(count for _, count in seen)
        if seen and not math.isclose(sum(squares for squares, _ in seen), expected, rel_tol=close):
            return right, fqn
        right = fqn if seen else right
    return right, ""


def _apart_over_tp(trial: Trial, fqn: str) -> str:
    """Without sequence parallel the ranks of a tp group have one sum of what each computes of attention and feed-forward."""
    whole = fqn.endswith(("_dropout", "norm")) and not trial.case.features.sequence_parallel
    for group in trial.plan.groups.get("tp", ()) if whole else ():
        if not _alike(trial, group, fqn):
            masks = fqn.endswith("norm") and trial.case.model.dropout and _dropped_alike(trial, group, fqn)
            why = "as if their dropout masks did" if masks else "which should have the same sum"
            return f", and differs among tp ranks {ranks_text(group)}, {why}"
    return ""


def _dropped_alike(trial: Trial, group: tuple[int, ...], fqn: str) -> bool:
    """Whether these have the same before the dropout behind which they differ."""
    order = [*trial.reference.inputs]
    before = order[order.index(fqn) - 1]
    return before.endswith("_dropout") and _alike(trial, group, before)


def _alike(trial: Trial, group: tuple[int, ...], fqn: str) -> bool:
    """Whether into a module goes of one length on each of these ranks that has it."""
    inputs = [trial.ranks[rank].steps[0].activity.inputs for rank in group]
    seen = [of_rank[fqn][0] for of_rank in inputs if fqn in of_rank]
    return all(math.isclose(squares, seen[0], rel_tol=1e-6) for squares in seen)


def _input_words(trial: Trial, fqn: str) -> str:
    """Without dropout there is no such module: what would go into it is what the part of the block before it gives."""
    block, _, name = fqn.rpartition(".")
    part = {"attention_dropout": "attention", "ffn_dropout": "feed_forward"}.get(name)
    return f"the output of {block}.{part}" if part and not trial.case.model.dropout else f"the input of {fqn}"


def one_group(trial: Trial, ranks: set[int]) -> str:
    """ ", one group of dp_replicate": what these ranks have in common."""
    for axis, groups in trial.plan.groups.items():
        if len(ranks) < len(trial.ranks) and ranks in [set(group) for group in groups]:
            return f", one group of {axis}"
    return ""


def in_common(trial: Trial, fqns: list[str]) -> str:
    """ ", all norm weights": the one property that these parameters have and no other has."""
    for text, members in _properties(trial).items():
        if fqns == members and len(fqns) > 1:
            return f"; all {text} are wrong, no others"
    return ""


def _properties(trial: Trial) -> dict[str, list[str]]:
    """By name, the parameters: of kinds of modules, of layers, and all that lie before or behind one."""
    order, shapes = list(trial.plan.shapes), trial.case.model.parameter_shapes()
    found = {
        "norm weights": [fqn for fqn in order if fqn.endswith("norm.weight")],
        "matrices": [fqn for fqn in order if len(shapes[fqn]) == 2],
        "K/V projections": [fqn for fqn in order if fqn.endswith((".wk.weight", ".wv.weight"))],
    }
    for fqn in order:
        if (parts := fqn.split("."))[0] == "layers":
            layer, module, name = ".".join(parts[:2]), ".".join(parts[:3]), ".".join(parts[2:])
            found[f"weights of {layer}"] = [other for other in order if other.startswith(f"{layer}.")]
            found[f"weights of {module}"] = [other for other in order if other.startswith(f"{module}.")]
            found[f"{name} of every layer"] = [other for other in order if other.endswith(f".{name}")]
            found[f"{parts[2]} weights of every layer"] = [other for other in order if f".{parts[2]}." in other]
    for place, fqn in enumerate(order[1:], start=1):
        found |= {f"parameters before {fqn}": order[:place], f"parameters from {fqn} on": order[place:]}
    return found
