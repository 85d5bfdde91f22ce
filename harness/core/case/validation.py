"""Validation of a case: which degrees, sizes and options fit together. Every refusal names file, case, key and remedy."""

from __future__ import annotations

import fnmatch
import itertools
import math
from typing import Any

from harness.core.case import case_files, schedule
from harness.core.case.case import Case, CaseError, ExpectedFailure
from harness.core.case.features import ZERO, Features
from harness.reference.config import is_trainable

LESS_LAYERS = ("first_stage_less_layers", "last_stage_less_layers")


def validate_resume(case: Case, location: str) -> None:
    """Raise CaseError unless each launch has something to train, and is a case that could be run by itself."""
    if any(saved.model_only for saved in case.resume[:-1]):
        raise CaseError(f"{location}: resume: model_only is allowed in the last entry only")
    ends = [0, *(saved.after for saved in case.resume), case.last_step or case.training.steps]
    ends = ends if case.model_of is None else ends[:-1]
    if any(end <= begin for begin, end in itertools.pairwise(ends)):
        raise CaseError(
            f"{location}: resume: launches end after steps {', '.join(map(str, ends[1:]))}; each must train at least one step"
        )
    for saved in case.resume:
        key, last = ("until", saved.until) if saved.until else ("after", saved.after)
        if last > case.training.steps:
            raise CaseError(f"{location}: resume: {key} {last} is beyond the {case.training.steps} steps of the recipe")
    for name, launch in list(case.launches.items())[:-1]:
        validate(launch, None, f"{location}: resume: {name}")


def validate(case: Case, world_size: Any, location: str) -> None:
    """Raise CaseError if the degrees do not fit the world, the model, the batch and the sequence, or features do not
    fit together.

    These are the refusals that no single part of a case can make. world_size: the number of ranks that the file says;
    None if none.
    """
    dims = case.dims
    model = case.model
    training = case.training
    if world_size is not None and world_size != dims.world_size:
        raise CaseError(f"{location}: {dims} = {dims.world_size} ranks, but world_size says {world_size!r}")
    for key in ("n_heads", "n_kv_heads"):
        if getattr(model, key) % dims.tp:
            raise CaseError(
                f"{location}: {key} {getattr(model, key)} is not divisible by tp {dims.tp};"
                f" request a tp of {_divisors_text(math.gcd(model.n_heads, model.n_kv_heads))}"
            )
    shares = dims.dp * case.features.accumulation * case.microbatches
    if training.global_batch % shares:
        of_pp = f" x microbatches {case.microbatches}" if dims.pp > 1 else ""
        raise CaseError(
            f"{location}: global_batch {training.global_batch} is not divisible by dp_replicate {dims.dp_replicate}"
            f" x dp_shard {dims.dp_shard} x accumulation {case.features.accumulation}{of_pp} = {shares};"
            f" request {_nearest_multiples(training.global_batch, shares)}"
        )
    _validate_last_batch(case, location)
    _validate_trainable(case, location)
    halves = 2 if dims.cp > 1 and case.features.cp_load_balance else 1
    length = case.seq_len(2)
    degree = dims.tp if case.features.sequence_parallel else 1
    parts = dims.cp * math.lcm(halves, degree)
    if length % parts:
        balanced = " x 2 (load balance)" if halves == 2 else ""
        half = " of every second step" if training.variable_length else ""
        raise CaseError(
            f"{location}: seq_len {length}{half} is not divisible by cp {dims.cp}{balanced} x tp {dims.tp} (sequence parallel);"
            f" request {_nearest_multiples(training.seq_len, parts * (training.seq_len // length))}"
        )
    _validate_stages(case, location)
    _validate_features(case, location)
    _validate_blocks(case, location)
    if case.runs not in (1, 2) or not isinstance(case.runs, int) or isinstance(case.runs, bool):
        raise CaseError(f"{location}: runs must be 1, or 2 to compare a repeat, got {case.runs!r}")


def _divisors_text(number: int) -> str:
    """Return the divisors of a number, ascending: "1, 2 or 4"; "1" of 1."""
    *others, last = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f"{', '.join(others)} or {last}" if others else last


def _nearest_multiples(number: int, divisor: int) -> str:
    """Return the nearest multiples of the divisor in words: "8 or 12"; the divisor alone if the number is smaller."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def _validate_stages(case: Case, location: str) -> None:
    """Raise CaseError if there are more stages than layers, or if an end of the pipeline would have a negative number
    of layers.

    A stage in the middle has a layer. The first may have the embedding alone, and the last norm and output alone.
    """
    less = case.features.first_stage_less_layers, case.features.last_stage_less_layers
    shared = case.model.n_layers + sum(less)
    of_ends = f", and {sum(less)} that its ends have less" if any(less) else ""
    if case.n_stages > shared:
        raise CaseError(
            f"{location}: pp {case.dims.pp} x stages_per_rank {case.stages_per_rank} = {case.n_stages} stages,"
            f" but the model has only {case.model.n_layers} layers{of_ends};"
            f" request n_layers {case.n_stages - sum(less)} or more, or fewer stages"
        )
    share = shared // case.n_stages
    for key, fewer in zip(LESS_LAYERS, less, strict=True):
        if fewer > share:
            raise CaseError(
                f"{location}: {key} {fewer}: an even share of {case.model.n_layers} layers{of_ends},"
                f" over {case.n_stages} stages is {share}"
            )


def _validate_blocks(case: Case, location: str) -> None:
    """Raise CaseError if sizes are not divisible into the blocks that mxfp8 scales.

    They are blocks of 32 along what a product sums over: features and, for weights' gradients, tokens. A block must lie in one
    sample and on one tp rank. If it did not, each layout would compute something else.
    """
    if case.training.quantize != "mxfp8":
        return
    model = case.model
    tp = case.dims.tp
    sums = {"dim": (model.dim, tp), "ffn_dim": (model.ffn_dim, tp)}
    sums |= {"n_kv_heads * head_dim": (model.n_kv_heads * model.head_dim, tp), "seq_len": (case.seq_len(2), 1)}
    for name, (size, degree) in sums.items():
        if size % (32 * degree):
            raise CaseError(
                f"{location}: mxfp8 has blocks of 32, which {name} {size} over tp {degree} does not hold whole"
            )


def _validate_trainable(case: Case, location: str) -> None:
    """Raise CaseError if a pattern of `trainable` fits no parameter, if LoRA trains no adapter, or if LoRA meets 8-bit
    matmuls.

    What no pattern fits is frozen, so that a slip of the pen would freeze the model.
    """
    names = case.model.parameter_shapes()
    for pattern in case.training.trainable or ("",):
        if not fnmatch.filter(names, pattern):
            raise CaseError(
                f"{location}: trainable {pattern!r} fits no parameter; names are such as {list(names)[1]!r}"
            )
    if case.model.lora is None:
        return
    if not any(is_trainable(case.training, fqn) for fqn in names if ".lora_" in fqn):
        raise CaseError(
            f"{location}: lora: trainable {list(case.training.trainable)} fits no adapter; add '*.lora_?.weight'"
        )
    if case.training.quantize:
        raise CaseError(
            f"{location}: lora with quantize {case.training.quantize}: not supported:"
            " it is undefined which matmuls run in 8 bits"
        )


def _validate_last_batch(case: Case, location: str) -> None:
    """Raise CaseError unless the last batch is whole microbatches on each rank, or one smaller microbatch. None is
    always fine.

    Some ranks may have more samples than others, or none, where data is all that ranks divide. No pipeline has a last
    batch.
    """
    last = case.training.last_batch
    ranks = case.dims.dp
    if last is None:
        return
    samples_per_rank = last // ranks
    if last % ranks and case.features.accumulation == 1:
        if ranks < case.dims.world_size:
            raise CaseError(
                f"{location}: last_batch {last} is not divisible by {ranks} data ranks, and other axes are above 1"
            )
    elif last % ranks or (samples_per_rank > case.local_batch and samples_per_rank % case.local_batch):
        raise CaseError(
            f"{location}: last_batch {last} over {ranks} data ranks: neither one microbatch of at most {case.local_batch}"
            f" samples a rank, nor several of {case.local_batch}"
        )
    if case.dims.pp > 1:
        raise CaseError(
            f"{location}: last_batch with pp {case.dims.pp}: a schedule always cuts a batch in as many parts"
        )


def _validate_features(case: Case, location: str) -> None:
    """Raise CaseError for features that mean nothing on an axis of degree 1, that contradict each other, or that no
    plan covers."""
    dims = case.dims
    features = case.features
    usual = Features()
    for keys, axis in (
        (("schedule", "microbatches", "stages_per_rank", *LESS_LAYERS), "pp"),
        (("cp_rotation", "cp_load_balance"), "cp"),
        (("async_tp", "sequence_parallel", "loss_parallel"), "tp"),
    ):
        for key in keys:
            if getattr(dims, axis) == 1 and getattr(features, key) != getattr(usual, key):
                raise CaseError(
                    f"{location}: {key} {getattr(features, key)!r} means nothing with {axis} 1; leave it out"
                )
    if features.async_save and case.last_step is None:
        raise CaseError(f"{location}: async_save belongs in the features of an entry of `resume`; leave it out here")
    if features.wrapper not in (None, "fsdp2") and dims.dp * dims.cp == 1:
        raise CaseError(f"{location}: wrapper {features.wrapper!r} needs dp_replicate, dp_shard or cp above 1")
    if features.wrapper in ("ddp", "replicate") and dims.dp_shard > 1:
        raise CaseError(f"{location}: wrapper {features.wrapper!r} shards nothing, but dp_shard {dims.dp_shard}")
    if features.wrapper == "fsdp1" and dims.tp > 1:
        raise CaseError(
            f"{location}: wrapper 'fsdp1' with tp {dims.tp}: flattened parts of what tp cuts are not planned"
        )
    if case.training.optimizer == "muon" and features.wrapper in ("fsdp1", *ZERO):
        raise CaseError(
            f"{location}: muon with wrapper {features.wrapper!r}: matrices that are cut as vectors are not planned"
        )
    if not features.shards_over_cp and (case.wrapper != "fsdp2" or dims.cp == 1 or dims.dp_shard == 1):
        raise CaseError(f"{location}: shards_over_cp false means something with wrapper fsdp2, cp and dp_shard above 1")
    _validate_zero(case, location)
    _validate_wrapper_options(case, location)
    numbers = features.schedule, dims.pp, case.stages_per_rank, case.microbatches
    if dims.pp > 1 and (reason := schedule.why_schedule_refused(*numbers)):
        raise CaseError(f"{location}: {reason}")


def _validate_zero(case: Case, location: str) -> None:
    """Raise CaseError for what ZeRO is not planned with.

    ZeRO cuts over dp_shard, and over nothing else. ZeRO-1 also cuts over cp, and what a pipeline's stage and a tensor parallel
    rank has.
    """
    if case.wrapper not in ZERO:
        return
    planned = ("dp_shard", "pp", "tp", "cp") if case.wrapper == "zero1" else ("dp_shard",)
    beyond_plan = [f"{axis} {degree}" for axis, degree in vars(case.dims).items() if axis not in planned and degree > 1]
    if beyond_plan or case.dims.dp_shard * case.dims.cp == 1:
        problem = f"with {beyond_plan[0]}" if beyond_plan else "with dp_shard 1"
        raise CaseError(f"{location}: wrapper {case.wrapper!r} {problem}: ZeRO is planned over dp_shard ranks alone")
    if case.model.vocab_size % case.dims.tp:
        sizes = f"vocab_size {case.model.vocab_size} is not divisible by tp {case.dims.tp}"
        raise CaseError(f"{location}: wrapper {case.wrapper!r}: {sizes}: vectors of unequal ranks are not planned")
    if case.dims.pp > 1 and case.model.tied_embeddings:
        sizes = f"tied_embeddings with pp {case.dims.pp}"
        raise CaseError(
            f"{location}: wrapper {case.wrapper!r}: {sizes}: a weight in the vectors of two stages is not planned"
        )
    if case.wrapper != "zero1" and not case.features.defer_sync:
        raise CaseError(
            f"{location}: defer_sync false: {case.wrapper} reduces after each microbatch anyway; leave it out"
        )


def _validate_wrapper_options(case: Case, location: str) -> None:
    """Raise CaseError for options that the wrapper does not have, or that mean nothing where parameters are not sharded."""
    features = case.features
    usual = Features()
    for keys, wrappers, owner in (
        (("reshard_after_forward", "cpu_offload"), ("fsdp1", "fsdp2"), "FSDP's"),
        (("bucket_mb",), ("ddp", "replicate"), "DDP's and replicate's"),
    ):
        for key in keys:
            if case.wrapper not in wrappers and getattr(features, key) != getattr(usual, key):
                raise CaseError(
                    f"{location}: {key} is {owner}, and this case has wrapper {case.wrapper or 'none'}; leave it out"
                )
    degree = case.data_dims.shards
    policy = features.reshard_after_forward
    if degree == 1 and policy != "default":
        raise CaseError(
            f"{location}: reshard_after_forward {policy!r} means nothing with dp_shard 1 and cp 1; leave it out"
        )
    if isinstance(policy, int) and degree % policy:
        raise CaseError(
            f"{location}: reshard_after_forward {policy} does not divide the {degree} ranks of a shard group"
        )
    if features.defer_sync is not True and (features.accumulation == 1 or case.wrapper is None):
        missing = "wrapper none" if case.wrapper is None else "accumulation 1"
        value = str(features.defer_sync).lower()
        raise CaseError(f"{location}: defer_sync {value} means nothing with {missing}; leave it out")
    if features.defer_sync == "all_reduce" and not (case.wrapper == "fsdp2" and degree > 1 < case.data_dims.replicas):
        raise CaseError(
            f"{location}: defer_sync all_reduce is of HSDP: it takes wrapper fsdp2, dp_replicate and dp_shard above 1"
        )


def refuse_missing_script(expected: ExpectedFailure | None, file: str, location: str) -> None:
    """Raise CaseError if the minimal program of an expected failure is not in the repository of the case's file.

    None passes.
    """
    if expected and not (case_files.repository_folder(file) / expected.script).is_file():
        raise CaseError(
            f"{location}: expected_failure: script {expected.script!r} not found in "
            f"{case_files.repository_folder(file)}; write the minimal program"
        )
