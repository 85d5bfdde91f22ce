"""A feature requested did not take place, or one that nobody requested did. Told by its traces alone; numbers may be right."""

from __future__ import annotations

from dataclasses import replace

from harness.checks import features
from harness.diagnosis.words import Broken, finding_line, on_ranks, some
from harness.judge.result import Diagnosis, Verdict, one_cause
from harness.judge.trial import Trial


def wrong_masks(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Random numbers of a recomputation that are not those of forward. Told by the generator's state, seen from step 2 on."""
    steps = [step for evidence in trial.ranks.values() for step in evidence.steps]
    drawn = any(step.activity.random.get("backward") for step in steps)
    other = {fqn for step in steps for fqn in step.activity.other_states}
    if not (drawn and other and "gradients" in broken):
        return None
    blocks = sorted(fqn for fqn in other if not any(fqn.startswith(f"{outer}.") for outer in other))
    lost = "its masks are not those that the loss was computed with"
    cause = f"recomputation of {some(blocks, 4)} began with another random state than forward: {lost}"
    return one_cause(cause, (finding_line("gradients", broken["gradients"]),))


def wrong_features(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "features" not in broken:
        return None
    cause = _compile(trial) or _quantization(trial) or _reduction(trial) or _buckets(trial)
    cause = (
        cause or _checkpointing(trial) or _compiled_again(trial) or _hooks(trial) or _beside(trial) or _fallback(trial)
    )
    return one_cause(cause, (finding_line("features", broken["features"]),)) if cause else None


def _quantization(trial: Trial) -> str | None:
    """Modules that ran in 8 bits and should not, or that should and did not."""
    recipe, wanted = trial.case.training.quantize, set(trial.plan.quantized)
    keys = {key for evidence in trial.ranks.values() for step in evidence.steps for key in step.activity.quantized}
    ran = {key.fqn: key.format for key in sorted(keys)}
    if trial.case.features.compile or set(ran) == wanted:
        return None
    if not ran:
        return f"{recipe} is requested, no matmul ran in that format"
    if foreign := sorted(set(ran) - wanted):
        return f"{ran[foreign[0]]} matmuls of {some(foreign)}, which nobody requested"
    return f"{recipe} is requested, no matmul of {some(sorted(wanted - set(ran)))} ran in that format"


def _buckets(trial: Trial) -> str | None:
    """Larger ones than requested, or all gradients at once."""
    wrong = [finding for rank in sorted(trial.ranks) for finding in features.buckets_in_force(trial, rank) if finding]
    asked = f"bucket_mb {trial.case.features.bucket_mb} is requested"
    return f"{asked}, {wrong[0].observed} bytes are reduced at once" if wrong else None


def _reduction(trial: Trial) -> str | None:
    """Gradients added over the data ranks in another dtype."""
    wrong = [finding for rank in sorted(trial.ranks) for finding in features.reduced(trial, rank) if finding]
    return f"gradients are reduced in {wrong[0].observed}, requested {wrong[0].expected}" if wrong else None


def attended_too_often(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Attention is done more or less often in forward, and recomputation is right. In context parallel that follows from
    what else is wrong there, so this is asked last."""
    if "features" not in broken:
        return None
    for rank, step, _ in trial.steps():
        seen = step.activity.attention.get(features.FUSED, 0)
        layers = trial.case.passes * features.parts_attended(trial, rank) * len(features.layers_of(trial, rank))
        if seen not in (0, layers):
            often = f"{seen / layers:.4g} times in forward (rank {rank}, step {step.step})"
            cause = f"attention is computed {often}, once is needed"
            return one_cause(cause, (finding_line("features", broken["features"]),))
    return None


def _fallback(trial: Trial) -> str | None:
    """Fewer fused kernels than layers, and batched matmuls in their place."""
    if not features.attention_is_fused(trial):
        return None
    for rank, step, _ in trial.steps():
        seen, wanted = step.activity.attention.get(features.FUSED, 0), features.fused_in_forward(trial, rank)
        if seen < wanted and (batched := features.batched_matmuls(step)):
            text = f"{seen} fused kernels in forward, requested {wanted}, and {batched} batched matmuls"
            return f"attention falls back to plain matmuls: {text} (rank {rank}, step {step.step})"
    return None


def _beside(trial: Trial) -> str | None:
    """The first rank and step in which matmuls are neither forward's nor backward's."""
    for rank, step, _ in trial.steps():
        if count := features.beside(trial, rank, step):
            blocks = ", some in its blocks," if features.blocks_beside(step) else ""
            text = f"{count} matmuls{blocks} outside of forward and backward (rank {rank}, step {step.step})"
            return f"the model runs besides its training passes: {text}"
    return None


def _hooks(trial: Trial) -> str | None:
    owners = {rank: owner for rank, step, _ in trial.steps() for owner in features.foreign_hooks(step)}
    if not owners:
        return None
    what = "activations saved for backward go through"
    return f"{what} {some(sorted(set(owners.values())))}, which nobody requested{on_ranks(trial, owners)}"


def _compiled_again(trial: Trial) -> str | None:
    wrong = [finding for rank in sorted(trial.ranks) for finding in features.compiled_again(trial, rank) if finding]
    if not wrong:
        return None
    steps = sorted({finding.where.split(", ")[1] for finding in wrong}, key=lambda step: int(step.split()[1]))
    return (
        f"blocks are compiled anew in {some(steps, 3)} (graphs on {wrong[0].where.split(',')[0]}: {wrong[0].observed})"
    )


def _compile(trial: Trial) -> str | None:
    asked = trial.case.features.compile
    breaks = {key for evidence in trial.ranks.values() for key in evidence.compiler if key.startswith("graph break")}
    compiled = [rank for rank, evidence in trial.ranks.items() if evidence.compiler.get("graphs")]
    if breaks:
        return f"compiled blocks break into pieces: {some(sorted(breaks))}"
    if limits := {reason for rank in trial.ranks for reason in features.gave_up(trial, rank)}:
        return f"torch.compile gave up and leaves blocks to run eagerly: {some(sorted(limits))}"
    if asked and len(compiled) < len(trial.ranks):
        without = [rank for rank in trial.ranks if rank not in compiled]
        return f"compile is requested, no block ran compiled{on_ranks(trial, without)}"
    if compiled and not asked:
        return f"compiled code ran{on_ranks(trial, compiled)}, compile is not requested"
    return None


def _checkpointing(trial: Trial) -> str | None:
    """Another kind of checkpointing whose traces are those seen; else the blocks it is on."""
    asked, blocks = trial.case.features.activation_checkpointing, _recomputed(trial)
    for kind in ("none", "full", "layer", "op"):
        other = replace(trial.case, features=replace(trial.case.features, activation_checkpointing=kind))
        fits = features.check(replace(trial, case=other)).verdict is Verdict.PASS
        if fits and kind == "none":
            return f"activation checkpointing {asked} is requested, none took place"
        if fits:
            return f"activation checkpointing {asked} is requested, {kind} is observed"
    wanted = {rank: _asked(trial, rank) for rank in trial.ranks}
    wrong = [rank for rank in trial.ranks if blocks[rank] != wanted[rank]]
    if not wrong or trial.case.features.compile:
        return None
    found = some(sorted(blocks[wrong[0]]), 4) or "none"
    meant = some(sorted(wanted[wrong[0]]), 4) or "none"
    return (
        f"activation checkpointing {asked} is in the wrong place{on_ranks(trial, wrong)}:"
        f" recomputed are {found}, requested {meant}"
    )


def _recomputed(trial: Trial) -> dict[int, set[str]]:
    """The blocks that each rank called, or called a part of, inside backward, in any step."""
    found: dict[int, set[str]] = {}
    for rank, evidence in trial.ranks.items():
        called = {fqn for step in evidence.steps for fqn in features.recomputations(step)}
        found[rank] = {".".join(fqn.split(".")[:2]) for fqn in called if fqn.startswith("layers.")}
    return found


def _asked(trial: Trial, rank: int) -> set[str]:
    return {f"layers.{layer}" for layer in features.recomputed_layers(trial.case, rank)}
