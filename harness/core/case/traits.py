"""Traits: what a trainer chose where a case leaves the choice to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.case import measured
from harness.core.case.allowance import Allowance
from harness.core.case.case import Case, CaseError, ExpectedFailure
from harness.core.case.measured import NOTHING_MEASURED, MeasuredTraits, Observed

OBSERVED = "observed"
"""Of FSDP2's units: they are judged as the wrappers claim them."""

BLOCK_RESULTS = ("attention", "wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""What a block computes that a policy may keep."""
CHOICES = {
    "fsdp_units": ("apart", "root", OBSERVED),
    "cp_heads": ("query", "key_value"),
    "attention": (None, "fused"),
    "zero_reduces_by": ("reduce_scatter", "all_reduce"),
    "tied_reduces_by": ("all_reduce", "send"),
}


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """How ZeRO lays parameters one after the other in the vector that it cuts in equal parts, one a rank."""

    order: tuple[tuple[str, ...], ...] = ()
    """Tensors in their order, each with its parts as an adapter's `fused` names them; empty for the reference's order."""
    reverse: bool = False
    """Whether the last tensor comes first."""
    starts: int = 1
    """Number of elements that each tensor's start is a multiple of."""
    parts: int = 1
    """Number of elements that each rank's part is a multiple of."""
    whole: int = 1
    """Number of elements that the vector is a multiple of."""


@dataclass(frozen=True, kw_only=True)
class TrainerTraits:
    """What this trainer chose where a case leaves the choice. The plan follows from the case and these."""

    wrapper: str | None = None
    """Wrapper that manages the data ranks; None: the one that Case.wrapper names."""
    fsdp_units: str = OBSERVED
    """FSDP2's units in addition to blocks: "apart" (embedding; norm with output), "root" (all the rest) or "observed" (as its
    wrappers claim)."""
    cp_heads: str = "query"
    """Heads of keys and values exchanged over cp: "query", after GQA expansion, or "key_value", before it."""
    cp_sends: bool = False
    """Whether the K/V exchange over cp sends to the next rank and receives from the previous one, instead of an all_to_all."""
    cp_gathers: bool = False
    """Whether attention gathers keys and values of all cp ranks once, and reduce-scatters their gradients, instead of passing
    them around a ring (Llama 3 herd of models, section 3.3.2)."""
    cp_cuts_rows: bool = False
    """Whether cp cuts a microbatch's samples laid end to end, so that a rank may receive whole ones, instead of each sample."""
    ac_early_stop: bool = True
    """Whether a block is recomputed only until backward has all it needs, instead of to its end."""
    defers_sync: bool | str = True
    """Whether accumulated gradients can wait for the last microbatch; "all_reduce": only the all-reduce over replicas waits."""
    own_model: bool = False
    """Whether its model is not the reference's, and so rounds at other places (docs/adapters.md)."""
    attention: str | None = None
    """Attention: "fused", one kernel does all of it; None: anything, the same in all layers."""
    op_keeps: tuple[str, ...] = ("attention", "wq", "wv", "w1", "w2")
    """Results that a block keeps whose other operators are recomputed ("op"), by the modules that they are of: by default
    attention and every second matmul."""
    loss_chunks: int = 1
    """Number of parts of a sequence that the loss applies the output to, one after the other. FSDP2 frees the output's unit
    after the last."""
    keeps_loss_unit: bool = False
    """Whether the unit that FSDP2 gathered for the loss is kept until the next forward pass."""
    loss_in_forward: bool = False
    """Whether the model computes the loss itself, with the sums over tensor parallel that it needs."""
    recomputes_output: bool = False
    """Whether the loss is checkpointed, so that backward applies the output again."""
    holds_output: bool = False
    """Whether an output that is its own FSDP2 unit is gathered once per loss (`unshard`, `reshard`), not once per chunk."""
    cuts_gathered: bool = False
    """Whether loss chunks are cut from the gathered sequence, so that its gradient is all_reduced under sequence parallel."""
    gathers_input_again: bool = False
    """Whether backward gathers the input of a column-parallel layer again under sequence parallel, instead of keeping it."""
    keeps_over_accumulation: bool = False
    """Whether FSDP2's units stay gathered behind backward until the last microbatch of an accumulation
    (`set_reshard_after_backward(False)`), so that only the first one's forward pass gathers them."""
    flat_order: tuple[str, ...] = ()
    """Fqns in the order of FSDP1's vectors; empty: as its wrappers claim it."""
    zero_layout: FlatLayout = FlatLayout()
    """Layout of ZeRO's vectors."""
    zero_reduces_by: str = "reduce_scatter"
    """Collective that reduces ZeRO's gradients: reduce_scatter, or all_reduce, of which each rank keeps its part."""
    zero_gathers_late: bool = False
    """Whether ZeRO-1 or 2 gathers updated parameters in the next forward pass."""
    master_weights: bool = False
    """Whether ZeRO's optimizer steps on a retained copy of the rank's part of the parameters."""
    muon_owner: bool = False
    """Whether Muon has one owner for each matrix, which orthogonalises it for all ranks, instead of every rank gathering it."""
    tied_reduces_by: str = "all_reduce"
    """Operator that sums the gradients of a tied weight over first and last stage: all_reduce, or "send", by which each gets
    the other's."""
    rates: tuple[float, ...] | None = None
    """Learning rate of each step, if the trainer keeps its own schedule, which then is not tested; None otherwise."""
    expected_failure: ExpectedFailure | None = None
    """What the trainer gets wrong in this case; a case's own entry takes precedence."""
    allow: tuple[Allowance, ...] = ()
    """What it retains, copies, moves or computes beyond the plan in every case, each with its reason."""
    measured: MeasuredTraits = NOTHING_MEASURED
    """What a launch showed of the trainer and nothing declares; an adapter leaves it empty."""

    def __post_init__(self) -> None:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key} {getattr(self, key)!r}: choose one of {', '.join(map(str, known))}")
        if unknown := [name for name in self.op_keeps if name not in BLOCK_RESULTS]:
            raise ValueError(f"op_keeps {unknown[0]!r}: choose of {', '.join(BLOCK_RESULTS)}")
        if self.loss_chunks < 1:
            raise ValueError(f"loss_chunks must be at least 1, got {self.loss_chunks}")

    @property
    def chunks_behind_forward(self) -> bool:
        """Return whether the model's forward is over when the loss applies the output."""
        return self.loss_chunks > 1 and not self.loss_in_forward

    def with_units(self, units: Observed | None) -> TrainerTraits:
        """Return the traits as if these units had been measured."""
        return dataclasses.replace(self, measured=dataclasses.replace(self.measured, units=units))

    def unit_policy(self, case: Case) -> str:
        """Return the name of the units in this case: "apart", "root" or "observed". The case's own word takes
        precedence over the trait.

        "observed" leaves the units open: the plan has those that the wrappers claim.
        """
        return case.features.fsdp_units or self.fsdp_units

    @property
    def vector_order(self) -> tuple[str, ...]:
        """Return the order of parameters in FSDP1's vectors, as declared or else as measured. Empty for the reference's."""
        return self.flat_order or self.measured.flat_order

    def noise_key(self, case: Case) -> str:
        """Return the key of the noise that judges this trainer: the golden's key if its model is not the reference's,
        else the case's.

        Another model rounds at other places, as another build of the reference may.
        """
        return case.golden_noise_key if self.own_model else case.noise_key


USUAL_TRAITS = TrainerTraits()
"""Of a trainer that says nothing."""
MEGATRON_TRAITS = TrainerTraits(master_weights=True, cp_heads="key_value")
"""Of Megatron in bfloat16, as far as a plan asks."""


def with_trainer_choices(case: Case, traits: Mapping[str, TrainerTraits]) -> Case:
    """Return the case with the trainer's choices in every launch, and with its learning rates where it keeps its own
    schedule.

    traits: by the names of Case.launches. Raises CaseError for a schedule that has too few rates.
    """
    case = with_own_schedule(case, traits["run"].rates)
    launches = {name: with_choices(launched, traits[name]) for name, launched in case.launches.items()}
    *earlier, last = launches.values()
    resume = tuple(
        dataclasses.replace(saved, features=launch.features) for saved, launch in zip(case.resume, earlier, strict=True)
    )
    return dataclasses.replace(last, resume=resume)


def with_own_schedule(case: Case, rates: tuple[float, ...] | None) -> Case:
    """Return the case with these learning rates, one a step; the case itself if they are None or the case declares its own.

    With them it is the case of no file, for a file's goldens are of the recipe's schedule. Raises CaseError if they do
    not fit.
    """
    if rates is None or case.training.rates is not None:
        return case
    try:
        return dataclasses.replace(case, training=dataclasses.replace(case.training, rates=rates), file="")
    except ValueError as error:
        raise CaseError(f"case {case.name!r}: the adapter's traits: {error}") from error


def with_choices(case: Case, traits: TrainerTraits) -> Case:
    """Return a launch with the trainer's wrapper and expected failure where the case names none, and as it defers
    reductions.

    Whatever the case says, a trainer that cannot defer reduces after each microbatch, or defers HSDP's all-reduce
    alone. A pipeline's `defer_sync` stays as it is: it reduces after every pass of its schedule.
    """
    case = with_wrapper(case, traits.wrapper)
    case = dataclasses.replace(case, expected_failure=case.expected_failure or traits.expected_failure)
    features = case.features
    if traits.defers_sync is True or features.accumulation == 1 or case.dims.pp > 1 or case.wrapper is None:
        return case
    hybrid = case.wrapper == "fsdp2" and case.data_dims.replicas > 1 < case.data_dims.shards
    return dataclasses.replace(case, features=dataclasses.replace(features, defer_sync=hybrid and traits.defers_sync))


def with_wrapper(case: Case, wrapper: str | None) -> Case:
    """Return a launch with this wrapper. The case itself if it names one, if this one is its default, or if `wrapper`
    is None.

    A failure that is expected with the default wrapper is not expected with another one, and is dropped.
    """
    if case.features.wrapper is not None or wrapper in (None, case.wrapper):
        return case
    expected = case.expected_failure if case.wrapper is None else None
    features = dataclasses.replace(case.features, wrapper=wrapper)
    return dataclasses.replace(case, features=features, expected_failure=expected)


def to_json(traits: TrainerTraits) -> dict[str, Any]:
    declared = dataclasses.replace(traits, measured=NOTHING_MEASURED)
    return dataclasses.asdict(declared) | {"measured": measured.to_json(traits.measured)}


def from_json(record: Mapping[str, Any]) -> TrainerTraits:
    """Return the traits that to_json turned into plain values. Fields that are missing have their defaults, except
    `measured`.

    Raises KeyError, TypeError or ValueError for a record of something else.
    """
    allow = tuple(Allowance(**entry) for entry in record.get("allow", ()))
    layout = FlatLayout(**record.get("zero_layout", {}))
    layout = dataclasses.replace(layout, order=tuple(tuple(parts) for parts in layout.order))
    rates = record.get("rates")
    rates = None if rates is None else tuple(rates)
    expected = record.get("expected_failure")
    parts: dict[str, Any] = {
        "allow": allow,
        "rates": rates,
        "zero_layout": layout,
        "flat_order": tuple(record.get("flat_order", ())),
        "op_keeps": tuple(record.get("op_keeps", USUAL_TRAITS.op_keeps)),
    }
    if "measured" not in record:
        raise ValueError("nothing says what was measured")
    parts["measured"] = measured.from_json(record["measured"])
    return TrainerTraits(**{**record, **parts, "expected_failure": expected and ExpectedFailure(**expected)})
