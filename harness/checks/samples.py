"""In every step the data-parallel ranks partition the global batch of the recipe, and tp peers are fed the same.

Each rank is fed as many microbatches as accumulation asks for, all of one size.
Samples are recognised by their tokens, labels included; nothing that a data loader says is believed.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from harness.checks import verdict_of
from harness.evidence import StepEvidence
from harness.trial import Finding, Result, Trial

STAGE = "data"


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    for step, wanted in enumerate(trial.reference.samples, start=1):
        fed = fed_samples(trial, step)
        examined += sum(len(ids) for ids in fed.values())
        findings += _not_a_partition(trial, fed, step, wanted) + _wrong_microbatches(trial, step)
        findings += _strangers(fed, step) + _differing_peers(trial, fed, step) + _wrong_labels(trial, step)
    return verdict_of("samples", findings, examined)


def fed_samples(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """The sample ids each rank was fed in a step, in order; None for tokens that are no sample of the recipe."""
    known = {row.tobytes(): id_ for id_, row in zip(trial.reference.sample_ids, trial.reference.tokens, strict=True)}
    return {
        rank: [known.get(row.tobytes()) for microbatch in record.microbatches for row in microbatch.tokens]
        for rank, evidence in sorted(trial.ranks.items())
        for record in evidence.steps
        if record.step == step
    }


def _strangers(fed: dict[int, list[int | None]], step: int) -> list[Finding]:
    expected, found = "samples of the recipe's steps", "rows of tokens that are none of them"
    return [
        Finding(f"rank {rank}, step {step}", expected, f"{ids.count(None)} {found}")
        for rank, ids in fed.items()
        if None in ids
    ]


def _differing_peers(trial: Trial, fed: dict[int, list[int | None]], step: int) -> list[Finding]:
    findings = []
    for peers in trial.plan.groups.get("tp", ()):
        first = fed.get(peers[0])
        for rank in peers[1:]:
            if fed.get(rank) != first:
                expected = f"the samples of tp peer {peers[0]}: {first}"
                findings.append(Finding(f"rank {rank}, step {step}", expected, f"{fed.get(rank)}"))
    return findings


def _not_a_partition(
    trial: Trial, fed: dict[int, list[int | None]], step: int, wanted: tuple[int, ...]
) -> list[Finding]:
    counts = Counter(id_ for rank in trial.one_rank_per_share() for id_ in fed.get(rank, []) if id_ is not None)
    if counts == Counter(wanted):
        return []
    twice = sorted(id_ for id_, count in counts.items() if count > 1)
    never = sorted(set(wanted) - set(counts))
    foreign = sorted(set(counts) - set(wanted))
    parts = [("fed more than once", twice), ("fed to nobody", never), ("of another step", foreign)]
    observed = "; ".join(f"{len(ids)} {text} ({_some(ids)})" for text, ids in parts if ids)
    return [Finding(f"step {step}", f"each of {len(wanted)} samples fed to one dp rank", observed + _twins(trial, fed))]


def _twins(trial: Trial, fed: dict[int, list[int | None]]) -> str:
    shares = trial.one_rank_per_share()
    same = [rank for rank in shares[1:] if fed.get(rank) and fed[rank] == fed.get(shares[0])]
    return f"; ranks {[shares[0], *same]} were fed the same" if same else ""


def _wrong_microbatches(trial: Trial, step: int) -> list[Finding]:
    """Accumulation must leave a trace: the same batch in one piece gives the same gradient."""
    wanted = [trial.case.local_batch] * trial.case.features.accumulation
    findings = []
    for rank, evidence in sorted(trial.ranks.items()):
        for record in evidence.steps:
            sizes = [len(microbatch.tokens) for microbatch in record.microbatches]
            if record.step == step and sizes != wanted:
                findings.append(Finding(f"rank {rank}, step {step}", f"microbatches of {wanted} samples", f"{sizes}"))
    return findings


def _wrong_labels(trial: Trial, step: int) -> list[Finding]:
    """Where labels were seen, they are those of the sample."""
    reference = trial.reference
    labels_of = {row.tobytes(): labels for row, labels in zip(reference.tokens, reference.labels, strict=True)}
    findings = []
    for rank, evidence in sorted(trial.ranks.items()):
        wrong = sum(_count_wrong(record, labels_of) for record in evidence.steps if record.step == step)
        if wrong:
            findings.append(Finding(f"rank {rank}, step {step}", "each sample's own labels", f"{wrong} labels differ"))
    return findings


def _count_wrong(record: StepEvidence, labels_of: dict[bytes, np.ndarray]) -> int:
    wrong = 0
    for microbatch in record.microbatches:
        if microbatch.labels is not None:
            for row, labels in zip(microbatch.tokens, microbatch.labels, strict=True):
                wrong += int(np.sum(labels_of.get(row.tobytes(), labels) != labels))
    return wrong


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")


def shares_of_samples(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """What each data-parallel share was fed: fed_samples of the ranks at tp 0, by rank."""
    fed = fed_samples(trial, step)
    return {rank: fed[rank] for rank in trial.one_rank_per_share() if rank in fed}
