"""What a trainer chose where a case leaves the choice to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.spec.allowance import Allowance
from harness.spec.case import Case, CaseError, ExpectedFailure

OBSERVED = "observed"
"""Of FSDP2's units: they are judged as the wrappers claim them."""

CHOICES = {
    "fsdp_units": ("apart", "root", OBSERVED),
    "cp_heads": ("query", "key_value"),
    "attention": (None, "fused"),
    "zero_reduces_by": ("reduce_scatter", "all_reduce"),
}


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """How ZeRO lays parameters one after the other in the vector that it cuts in equal parts, one a rank.

    order: the tensors as they follow, each with its parts, as an adapter's `fused` names those of one that is fused, and of
    these what a tp rank has; empty for the reference's parameters in their order. reverse: the last tensor comes first.
    starts: a tensor begins at a multiple of so many elements. parts: each rank's part has a multiple of so many. whole: the
    vector has a multiple of so many.
    """

    order: tuple[tuple[str, ...], ...] = ()
    reverse: bool = False
    starts: int = 1
    parts: int = 1
    whole: int = 1


@dataclass(frozen=True, kw_only=True)
class TrainerTraits:
    """A case says what is requested, this how the trainer does the rest. Both make the plan.

    wrapper: who looks after the data ranks; None: who Case.wrapper says. fsdp_units: what FSDP2 gathers together besides
    each block: "apart", the embedding, and norm with output; "root", all the rest, and by default only the last block
    stays whole after forward; "observed", whatever it wraps, and what it keeps by default. cp_heads: keys and values are
    exchanged over cp after GQA expansion ("query") or before it. cp_sends: what goes round over cp is sent to the next
    rank and received from the one before, rather than moved by an all_to_all. ac_early_stop: a block is recomputed only
    until backward has all it needs, rather than to its end. defers_sync: gradients of an accumulation can wait for the
    last microbatch, rather than be reduced after each whatever a case says; "all_reduce": over replicas only. own_model: it
    is not the reference's, and rounds at other places, which recipes with noise show (docs/float32.md).
    attention: "fused", one kernel does all of it; None: as the trainer has it, but all of its layers alike. loss_chunks: in
    how many parts of a sequence the loss applies the output, one after the other; with FSDP2 the output's unit is freed behind
    the last, and gathered again for the final norm's backward, unless the model's forward has the loss. keeps_loss_unit: what
    FSDP2 gathered for that loss is kept until the next forward pass. loss_in_forward: the model computes the loss itself, and
    what tensor parallel sums for it. recomputes_output: the loss is checkpointed: backward applies the output again.
    holds_output: an output that is an FSDP2 unit of its own is gathered once for all chunks of a loss, each of which has its
    backward at once, as torchtitan's loss does it by `unshard` and `reshard`, rather than as FSDP2 does it, for each chunk.
    cuts_gathered: under sequence parallel these chunks are cut from the gathered sequence, as `chunk` of a DTensor does it, so
    that its gradient is all_reduced, rather than each from the rank's own part.
    gathers_input_again: under sequence parallel backward gathers the input of a column-parallel layer once more, for the
    gradient of its weight, rather than to keep it.
    flat_order: of parameters in FSDP1's vectors, where it is not the reference's; empty: as its wrappers claim it.
    zero_layout: of ZeRO's vectors. zero_reduces_by: by an all_reduce each rank receives whole gradients and keeps its part.
    zero_gathers_late: what ZeRO-1's or 2's optimizers made of parameters is gathered in the next step's forward pass.
    master_weights: an optimizer under ZeRO steps on a copy of the rank's part of the parameters, which it keeps.
    rates: the learning rate of each step, of a trainer that keeps its own schedule, which then is not under test.
    expected_failure: what it gets wrong in this case, as a case says what torch does; of a case that says so itself, that.
    allow: what it keeps, copies, moves or computes besides what the plan knows, in every case, each with its reason.
    """

    wrapper: str | None = None
    fsdp_units: str = OBSERVED
    cp_heads: str = "query"
    cp_sends: bool = False
    ac_early_stop: bool = True
    defers_sync: bool | str = True
    own_model: bool = False
    attention: str | None = None
    loss_chunks: int = 1
    keeps_loss_unit: bool = False
    loss_in_forward: bool = False
    recomputes_output: bool = False
    holds_output: bool = False
    cuts_gathered: bool = False
    gathers_input_again: bool = False
    flat_order: tuple[str, ...] = ()
    zero_layout: FlatLayout = FlatLayout()
    zero_reduces_by: str = "reduce_scatter"
    zero_gathers_late: bool = False
    master_weights: bool = False
    rates: tuple[float, ...] | None = None
    expected_failure: ExpectedFailure | None = None
    allow: tuple[Allowance, ...] = ()

    def __post_init__(self) -> None:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key} {getattr(self, key)!r}: choose one of {', '.join(map(str, known))}")
        if self.loss_chunks < 1:
            raise ValueError(f"loss_chunks must be at least 1, got {self.loss_chunks}")

    @property
    def chunks_behind_forward(self) -> bool:
        """The model's forward is over when the loss applies the output."""
        return self.loss_chunks > 1 and not self.loss_in_forward

    def units_of(self, case: Case) -> str:
        """A case that requests units has them; "observed" in a case leaves them open, as None does."""
        return case.features.fsdp_units or self.fsdp_units

    def noise_key(self, case: Case) -> str:
        """Under which the noise is kept that this trainer is judged by: another model rounds as another build may."""
        return case.golden_noise_key if self.own_model else case.noise_key


USUAL = TrainerTraits()
"""Of a trainer that says nothing."""


def settled(case: Case, traits: Mapping[str, TrainerTraits]) -> Case:
    """The case with the trainer's choices in every launch, and its schedule where it keeps its own.

    traits: by the names of Case.launches. Raises CaseError for a schedule that has too few rates.
    """
    case = with_own_schedule(case, traits["run"].rates)
    launches = {name: with_choices(launched, traits[name]) for name, launched in case.launches.items()}
    *earlier, last = launches.values()
    resume = tuple(
        dataclasses.replace(saved, features=one.features) for saved, one in zip(case.resume, earlier, strict=True)
    )
    return dataclasses.replace(last, resume=resume)


def with_own_schedule(case: Case, rates: tuple[float, ...] | None) -> Case:
    """It is no longer the case of any file, for its goldens are of the recipe's schedule."""
    if rates is None or case.training.rates is not None:
        return case
    try:
        return dataclasses.replace(case, training=dataclasses.replace(case.training, rates=rates), file="")
    except ValueError as error:
        raise CaseError(f"case {case.name!r}: the adapter's traits: {error}") from error


def with_choices(case: Case, traits: TrainerTraits) -> Case:
    """One launch, with the trainer's wrapper where it leaves that open, reductions as often as the trainer does them, and what
    the trainer gets wrong.

    A pipeline reduces after every pass of its schedule, as it is.
    """
    case = with_wrapper(case, traits.wrapper)
    case = dataclasses.replace(case, expected_failure=case.expected_failure or traits.expected_failure)
    features = case.features
    if traits.defers_sync is True or features.accumulation == 1 or case.dims.pp > 1 or case.wrapper is None:
        return case
    hybrid = case.wrapper == "fsdp2" and case.dims.dp_replicate > 1 < case.data_dims.dp_shard * case.data_dims.cp
    return dataclasses.replace(case, features=dataclasses.replace(features, defer_sync=hybrid and traits.defers_sync))


def with_wrapper(case: Case, wrapper: str | None) -> Case:
    """One launch. What is expected to fail with the wrapper of other trainers is not with this one's own."""
    if case.features.wrapper is not None or wrapper in (None, case.wrapper):
        return case
    expected = case.expected_failure if case.wrapper is None else None
    features = dataclasses.replace(case.features, wrapper=wrapper)
    return dataclasses.replace(case, features=features, expected_failure=expected)


def to_json(traits: TrainerTraits) -> dict[str, Any]:
    return dataclasses.asdict(traits)


def from_json(record: Mapping[str, Any]) -> TrainerTraits:
    """The inverse. Raises TypeError or ValueError for what is not one."""
    allow = tuple(Allowance(**one) for one in record.get("allow", ()))
    layout = FlatLayout(**record.get("zero_layout", {}))
    layout = dataclasses.replace(layout, order=tuple(tuple(parts) for parts in layout.order))
    rates, expected = record.get("rates"), record.get("expected_failure")
    rates = None if rates is None else tuple(rates)
    parts = {"allow": allow, "rates": rates, "zero_layout": layout, "flat_order": tuple(record.get("flat_order", ()))}
    return TrainerTraits(**{**record, **parts, "expected_failure": expected and ExpectedFailure(**expected)})
