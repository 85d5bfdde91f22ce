"""Labels that are not those of the samples received: shifted, masked otherwise, of other samples, too few or too many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.checks.samples import misshapen_labels, wrong_labels
from harness.diagnosis.received import own_labels, paired_otherwise, received, shift_of
from harness.diagnosis.words import on_ranks
from harness.evidence.text import positions_text
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.stages import positions

MANY = 4  # labels, of which something in common is no chance
Wrong = dict[
    int, list[tuple[int, int, int]]
]  # by rank, of each wrong label: its place, the label, and the one of the sample


def mismatched_labels(trial: Trial, step: int) -> Cause | None:
    wrong = {rank: labels for rank, labels in wrong_labels(trial, step).items() if labels}
    if not wrong:
        return None
    once = (rank for rank in wrong if (first := trial.plan.peers(rank, "tp")[0]) == rank or first not in wrong)
    labels = [label for rank in once for label in wrong[rank]]  # those of a tp group are the same ones
    by = _shift(trial, step)
    if by:
        return _shifted(by)
    hint = ""
    if _only_at_the_ends(trial, step, wrong):
        hint = ": each is the last of a cp rank's part, as if labels were shifted after the sequence was cut"
    elif _cut_as_if_balanced_otherwise(trial, step):
        balance = trial.case.features.cp_load_balance
        hint = f": they are cut over cp as if cp_load_balance were {not balance}, the tokens as if it were {balance}"
    elif side := _mask_moved(trial, step):
        hint = f": the mask is one position {side}"
    elif all(label < 0 for _, label, _ in labels):  # a mask that is too wide or too narrow leaves all others alone
        hint = f": {_which(trial, step, wrong)}masked, but should be trained on"
    elif all(own < 0 for _, _, own in labels):
        hint = ": trained on, but should be masked"
    elif pair := paired_otherwise(trial, step):
        text = f"tokens and labels of different samples are paired: row {pair[0]} of tokens has the labels of row {pair[1]}"
        return Cause("wrong labels", f"{text} in step {step}{on_ranks(trial, wrong)}")
    some = f"1 label of step {step} is" if len(labels) == 1 else f"{len(labels)} labels of step {step} are"
    text = f"tokens are right, {some} not the samples'{hint}"
    return Cause("wrong labels", f"wrong labels{on_ranks(trial, wrong)}: {text}")


def _mask_moved(trial: Trial, step: int) -> str:
    """Whether all rows' labels are masked as those beside them should be. What moves in from outside may be either."""
    if (rows := received(trial, step)) is None or not rows.whole:
        return ""
    masked, own = rows.labels < 0, own_labels(trial, rows.tokens) < 0
    if (own == own[:, :1]).all():
        return ""
    sides = {"late": (masked[:, 1:], own[:, :-1]), "early": (masked[:, :-1], own[:, 1:])}
    return next((side for side, (seen, wanted) in sides.items() if np.array_equal(seen, wanted)), "")


def _which(trial: Trial, step: int, wrong: Wrong) -> str:
    """What the masked labels have in common."""
    labels = [label for of_rank in wrong.values() for label in of_rank]
    places, length = {place for place, _, _ in labels}, trial.case.seq_len(step)
    if len(labels) < MANY:
        return ""
    if len({own for _, _, own in labels}) == 1:
        return f"all of them are token {labels[0][2]}, "
    if (beyond := _beyond(trial, step, min(own for _, _, own in labels), max(own for _, _, own in labels))) != "":
        return beyond
    if places == {length - 1} or places == {0}:
        return f"the {'last' if length - 1 in places else 'first'} of each row is "
    if places == set(range(min(places), max(places) + 1)) and len(places) < length:
        return f"those at position{'s' * (len(places) > 1)} {positions_text(np.array(sorted(places)))} are "
    return ""


def _beyond(trial: Trial, step: int, least: int, largest: int) -> str:
    """Where exactly the labels above, or below, some token are masked: `least` and `largest` of those."""
    rows = received(trial, step)
    if rows is None or not (kept := rows.labels[rows.labels >= 0]).size:
        return ""
    if least > kept.max():
        return f"all from token {least} on are "
    return f"all up to token {largest} are " if largest < kept.min() else ""


def _only_at_the_ends(trial: Trial, step: int, wrong: Wrong) -> bool:
    """A label is the next token. At the end of a rank's part that is another rank's, and only there all are wrong."""
    for rank, labels in wrong.items():
        at = positions(trial.case, rank, trial.case.seq_len(step)).tolist()
        ends = {place for place, following in zip(at, [*at[1:], None], strict=True) if following != place + 1}
        if trial.case.dims.cp == 1 or not {place for place, _, _ in labels} <= ends:
            return False
    return True


def _cut_as_if_balanced_otherwise(trial: Trial, step: int) -> bool:
    """Each cp rank has the labels of the positions that it would have with, or without, load balance."""
    case, rows = trial.case, received(trial, step)
    if case.dims.cp == 1 or rows is None or not rows.whole:
        return False
    other = replace(case, features=replace(case.features, cp_load_balance=not case.features.cp_load_balance))
    own, length = own_labels(trial, rows.tokens), case.seq_len(step)
    cut = ((positions(case, rank, length), positions(other, rank, length)) for rank in trial.plan.groups["cp"][0])
    return all(np.array_equal(rows.labels[:, at], own[:, instead]) for at, instead in cut)


def lost_labels(trial: Trial, step: int) -> Cause | None:
    """Each label is right, there are fewer or more of them than tokens: a part of the loss is lost, or counted twice."""
    if not (found := misshapen_labels(trial, step)):
        return None
    if by := _shift(trial, step):
        return _shifted(by)
    return Cause("labels lost", "the loss is computed from too few or too many labels", finding=found[0])


def _shifted(by: int) -> Cause:
    far = "further" if by > 0 else "back"
    which = {-1: "itself", 1: "the token after the next"}.get(by, f"the token {abs(by)} places {far}")
    how = "not shifted" if by == -1 else f"shifted by {by} more"
    return Cause("labels shifted", f"labels are {how}: each token predicts {which}")


def _shift(trial: Trial, step: int) -> int | None:
    """By how many places all labels are those of later tokens, other than 0."""
    rows = received(trial, step)
    if rows is None:
        return None
    counted = np.flatnonzero((rows.labels >= 0).any(axis=0))
    unpadded = rows.labels[:, : counted[-1] + 1 if counted.size else 0]
    return shift_of(unpadded, own_labels(trial, rows.tokens)) or None
