"""Recorder of a rank's numbers in recorded steps: sketches of gradients, weights and optimizer state, rows of samples,
norms.

Gradients are those that the optimizer is about to step with, before clipping by torch's functions. They are looked at
once after each forward pass: whoever clips or steps next uses them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from harness.core.probe.clipping import CLIP_BY_GIVEN_NORM, CLIP_FUNCTIONS, MAKE_NORM, observe_clipping
from harness.core.probe.clock import Account, Clock
from harness.core.probe.structure import local_tensor_of, sharded_parameters
from harness.recording.boxes import DeclaredSharding, LocalShard, local_shards_of, rows_between, shard_of_dtensor
from harness.recording.compiling import not_compiled
from harness.recording.digests import generator_digest, packed_digests, row_digests, tensor_digest, token_sum
from harness.recording.place import rank_and_world
from harness.recording.sketches import AFTER_PASS, BY_ROWS, GRADIENT, WEIGHTS, RankSketches, Sketch
from harness.recording.sketching import Sketcher, alter_by_rounding, columns_of

# ---- What loss scalers do: by what they multiply a loss, and which steps they leave out because a gradient is not finite


def watch_scalers(clock: Clock, note: Callable[[torch.Tensor], None]) -> None:
    """Replace torch's methods of loss scalers, so that `note` is called with each step's scale, and clock.skip_step
    with each update.

    Once a scaler is updated its optimizers have stepped, or will not: passes since the last step trained nothing then.
    A scaler that is turned off has no scale. Trap: FSDP1's scaler has an update of its own.
    """
    step = torch.amp.GradScaler.step

    @not_compiled
    @functools.wraps(step)
    def note_scale_and_step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, torch.Tensor):  # a scaler that is turned off has none
            note(scale)
        return step(scaler, *args, **kwargs)

    def watch_update(update: Any) -> Any:
        @not_compiled
        @functools.wraps(update)
        def skip_and_update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            clock.skip_step()
            return update(scaler, *args, **kwargs)

        return skip_and_update

    torch.amp.GradScaler.step = note_scale_and_step
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        kind.update = watch_update(kind.update)


# ---- Which parameters are others as a step begins than they were after the step before: no optimizer's step wrote them


class ChangedWeights:
    """Parameters that changed between two steps, looked at once a step. What is computed on a device is read at the end."""

    def __init__(self) -> None:
        self._has_changed_by_step: dict[int, dict[str, torch.Tensor]] = {}

    def compare_weights(
        self, step: int, parts: Sequence[nn.Module], digests_before: Mapping[str, torch.Tensor]
    ) -> None:
        """Compare weights with those after the step before, as the first pass of a step begins. Later calls of the step
        do nothing.

        digests_before: parameter -> digest after the step before; empty if unknown, then nothing is compared.
        """
        if digests_before and step not in self._has_changed_by_step:
            named_parameters = (
                (fqn, parameter) for fqn, parameter in sharded_parameters(parts) if fqn in digests_before
            )
            self._has_changed_by_step[step] = {
                fqn: tensor_digest(parameter) != digests_before[fqn] for fqn, parameter in named_parameters
            }

    @property
    def parameters_by_step(self) -> dict[int, tuple[str, ...]]:
        """Return, by step, the parameters that changed before it. A step without any is left out."""
        names_by_step: dict[int, tuple[str, ...]] = {}
        for step, has_changed in self._has_changed_by_step.items():
            if names := tuple(fqn for fqn, changed in has_changed.items() if bool(changed)):
                names_by_step[step] = names
        return names_by_step


# ---- the numbers of a rank


ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""By dtype, the distance of 1 from the next larger number."""
MOST_WRAPPERS = 16
"""Wrappers of one function that are looked through."""
MOST_PASSES = 64
"""Passes of a step after which accumulated gradients are looked at."""
INEXACT_FROM = 1 << 12
"""Elements from which on torch's norm on CPU may be off by more than sums in another order are."""
MOST_SAMPLES = 32
"""Digests of single samples that are kept of a step."""
TimedCall = Callable[..., Any]
SketchKey = tuple[int, str, str]
"""Step, kind, fqn."""


@dataclass
class PassInput:
    """What a forward pass was called with."""

    account: Account
    """Its step, and whether the pass trains, once that is known."""
    rows: torch.Tensor
    """Two digests of each row of samples. int64 [2, rows]"""
    generators: torch.Tensor
    """A digest of torch's generators as it begins. int64 []"""
    tokens: torch.Tensor | None
    """One number for all tokens. int64 []; None where inputs are no integers"""
    generators_after: torch.Tensor | None = None
    """The same as it ends."""


@dataclass
class NumbersRecorder:
    """Recorder of the numbers that one rank leaves."""

    clock: Clock
    noise: str = ""
    """Dtype by one rounding of which first weights are altered; "compute": of the forward pass; empty: they are not."""
    sharded: tuple[DeclaredSharding, ...] = ()
    """What the person who records declared of plain tensors."""
    blocks: int = 0
    """Blocks of rows of which each gradient's are sketched one by one; 0 for none."""
    sketcher: Sketcher = field(default_factory=Sketcher)
    sketched: dict[SketchKey, tuple[LocalShard, torch.Tensor] | Sketch] = field(default_factory=dict)
    """What was looked at; once it is read, without the tensor."""
    pass_inputs: list[PassInput] = field(default_factory=list)
    """Passes of recorded steps, in order."""
    norms: dict[int, Any] = field(default_factory=dict)
    """Step -> the norm that torch's clipping returned last."""
    changed: ChangedWeights = field(default_factory=ChangedWeights)
    """Parameters that changed between two steps."""
    norms_off: dict[int, float] = field(default_factory=dict)
    """Step -> by which part torch's own norm of one gradient was off, at most."""
    scales: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step -> what a loss scaler multiplied the loss by."""
    rates: dict[int, float] = field(default_factory=dict)
    """Step -> learning rate."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> shape of the whole one."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Parameter -> its dtype."""
    plain: dict[str, None] = field(default_factory=dict)
    """Parameters that are plain tensors and not declared to be cut, in order."""
    unplaced: dict[str, str] = field(default_factory=dict)
    """Parameter -> why it is not known which elements this rank holds."""
    computes_in: str = ""
    """Dtype to which parameters are cast in the forward pass; empty while none is known."""
    tp: tuple[int, ...] = ()
    """Ranks among which a parameter is cut for tensor parallelism; empty where none is."""
    _norms_noted_at: tuple[int, int] = (-1, -1)
    """Step, and number of passes, as norms were compared last."""
    _noted_since_pass: set[str] = field(default_factory=set)
    """Parameters whose gradients were looked at since the last pass began."""
    _shards_of_step: tuple[int, list[LocalShard]] = (-1, [])
    """A step, and this rank's local shards in it."""
    _altered: set[str] = field(default_factory=set)
    """Parameters whose first weights were altered."""
    _rounding_dtype: str = ""
    """Dtype by one rounding of which weights are altered; "own" for each parameter's own."""

    def install(self, timed: TimedCall, parts: Callable[[], Sequence[nn.Module]]) -> None:
        """Wrap torch's clipping functions: gradients are looked at before them, and the norm that they return is noted.

        timed: calls a function in chosen steps only, and counts the time. parts: returns the models.
        """
        observe_clipping(lambda name, original: self._with_norm_noted(original, name, timed, parts), CLIP_FUNCTIONS)
        self._watch_autocast(timed)
        watch_scalers(self.clock, lambda scale: timed(self.note_scale, scale))

    def note_scale(self, scale: torch.Tensor) -> None:
        """Note the scale of the loss in this step."""
        self.scales[self.clock.step] = scale.clone()

    def _watch_autocast(self, timed: TimedCall) -> None:
        """Replace torch.autocast.__enter__, so that the dtype of the first autocast with gradients is noted in
        `computes_in`.

        A forward pass may enter one itself. It is then seen after the first weights were altered.
        """
        enter = torch.autocast.__enter__

        @not_compiled
        @functools.wraps(enter)
        def note_and_enter(mode: Any) -> Any:
            if not self.computes_in and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                timed(self._note_autocast, mode)
            return enter(mode)

        torch.autocast.__enter__ = note_and_enter

    def _note_autocast(self, mode: Any) -> None:
        """Note the dtype of an autocast; empty if it is turned off."""
        self.computes_in = _dtype_of(mode)

    def _with_norm_noted(
        self, original: Callable[..., Any], name: str, timed: TimedCall, parts: Callable[[], Sequence[nn.Module]]
    ) -> Any:
        """Return a clipping function that looks at gradients, calls the original, and notes the norm. While torch
        compiles it only calls.
        """

        @not_compiled
        @functools.wraps(original)
        def note_and_clip(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            timed(self.note_gradients, parts())
            timed(self.note_norms_off, parts())
            returned = original(*args, **kwargs)
            norm = _total_norm_argument(*args, **kwargs) if name == CLIP_BY_GIVEN_NORM else returned
            if name != MAKE_NORM:
                timed(self._note_norm, norm)
            return returned

        return note_and_clip

    def _note_norm(self, norm: Any) -> None:
        """Note a norm in `norms` if it is one number and no DTensor's part. Whatever else clipping returns is not
        noted.
        """
        is_complete = torch.is_tensor(norm) and not any(
            placement.is_partial() for placement in getattr(norm, "placements", ())
        )
        if is_complete and local_tensor_of(norm).numel() == 1:
            self.norms[self.clock.step] = local_tensor_of(norm).clone()

    def note_norms_off(self, parts: Sequence[nn.Module]) -> None:
        """Note by which part torch's own norm of a gradient is off, the largest of the step. Only gradients on CPU with
        many elements are.

        It looks once after each pass, for functions that clip call one another.
        """
        if self._norms_noted_at == (self.clock.step, len(self.pass_inputs)):
            return
        self._norms_noted_at = self.clock.step, len(self.pass_inputs)
        gradients = {
            id(shard.owner): local_tensor_of(shard.owner.grad)
            for shard in self._local_shards(parts)
            if shard.owner.grad is not None
        }
        for gradient in gradients.values():
            if gradient.device.type == "cpu" and gradient.numel() > INEXACT_FROM and gradient.is_floating_point():
                exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
                relative_error = abs(float(torch.linalg.vector_norm(gradient)) - exact) / (exact or 1.0)
                self.norms_off[self.clock.step] = max(relative_error, self.norms_off.get(self.clock.step, 0.0))

    # ---- tensors

    def note_first_weights(self, parts: Sequence[nn.Module]) -> None:
        """Look at the weights before training, each parameter once; with `noise`, alter them in place and look again."""
        new_shards = [
            shard for shard in local_shards_of(parts, self.sharded) if (0, WEIGHTS, shard.fqn) not in self.sketched
        ]
        for shard in new_shards:
            self.shapes[shard.fqn] = shard.shape
            self.dtypes[shard.fqn] = _dtype_name(shard.owner.dtype)
            self.tp = self.tp or shard.tp
            if shard.plain:
                self.plain[shard.fqn] = None
            self._note_tensor(0, WEIGHTS, shard, shard.owner)
        self.computes_in = self.computes_in or compute_dtype_of(parts)
        if self.noise:
            self._alter(new_shards)

    def _alter(self, shards: Iterable[LocalShard]) -> None:
        """Alter first weights in place by one rounding of the dtype that `noise` names, each once.

        Parameters whose place is not known, and those of a dtype that ROUNDING lacks, are left as they are.
        """
        dtype = self.noise if self.noise != "compute" else self.computes_in
        self._rounding_dtype = self._rounding_dtype or dtype or "own"
        for shard in shards:
            tensor = shard.elements_of(shard.owner.data)
            rounding_dtype = dtype or self.dtypes[shard.fqn]
            if not shard.why and shard.fqn not in self._altered and rounding_dtype in ROUNDING:
                self._altered.add(shard.fqn)
                alter_by_rounding(tensor, shard.fqn, shard.boxes, columns_of(shard.shape), ROUNDING[rounding_dtype])
                self._note_tensor(0, WEIGHTS, shard, shard.owner)

    def pass_begins(
        self, parts: Sequence[nn.Module], inputs: torch.Tensor | None, begins: torch.Tensor | None = None
    ) -> None:
        """Look at the samples of a pass, and at gradients that earlier passes accumulated; gradients that come now are
        other ones.

        No samples are noted of None, of a single number, and of floating-point numbers in one row. Whether the pass
        trains shows later. begins: where samples begin that lie end to end in one row, bool [tokens]. Trap: a pipeline
        calls its stages once to see shapes; that is of step 0.
        """
        self._noted_since_pass.clear()
        self._note_accumulated(parts)
        if inputs is None or not inputs.dim():
            return
        integers = not (inputs.is_floating_point() or inputs.is_complex())
        if integers or inputs.dim() >= 2:
            tokens = token_sum(inputs) if integers else None
            rows_of_inputs = inputs if inputs.dim() >= 2 else inputs.unsqueeze(0)
            rows = row_digests(rows_of_inputs) if begins is None or not integers else packed_digests(inputs, begins)
            self.pass_inputs.append(PassInput(self.clock.account, rows, generator_digest(), tokens))

    def pass_ends(self) -> None:
        """Note the state of torch's generators as the last pass on record ends. A second call for it does nothing."""
        if self.pass_inputs and self.pass_inputs[-1].generators_after is None:
            self.pass_inputs[-1].generators_after = generator_digest()

    def _note_accumulated(self, parts: Sequence[nn.Module]) -> None:
        """Sketch what earlier passes of the step left in gradients, where one process trains and no reduction changes
        it.

        Nothing before the first step, and after MOST_PASSES passes of a step.
        """
        passes = (
            sum(forward_pass.account.step == self.clock.step for forward_pass in self.pass_inputs)
            if self.clock.step
            else 0
        )
        if 0 < passes < MOST_PASSES and rank_and_world()[1] == 1:
            for shard in self._local_shards(parts):
                if shard.owner.grad is not None:
                    self._note_tensor(self.clock.step, f"{AFTER_PASS}{passes}", shard, shard.owner.grad)

    def _local_shards(self, parts: Sequence[nn.Module]) -> list[LocalShard]:
        """Return this rank's local shards, collected once a step."""
        if self._shards_of_step[0] != self.clock.step:
            self._shards_of_step = self.clock.step, [*local_shards_of(parts, self.sharded)]
        return self._shards_of_step[1]

    def note_gradients(self, parts: Sequence[nn.Module], owned: set[int] | None = None) -> None:
        """Sketch gradients that were not looked at since the last forward pass. Parameters without one are left out.

        owned: ids of parameters; None for all.
        """
        for shard in self._local_shards(parts):
            is_wanted = owned is None or id(shard.owner) in owned
            if is_wanted and shard.fqn not in self._noted_since_pass and shard.owner.grad is not None:
                self._noted_since_pass.add(shard.fqn)
                self._note_tensor(self.clock.step, GRADIENT, shard, shard.owner.grad)

    def note_step(self, parts: Sequence[nn.Module], owned: set[int], states: Sequence[Any], rate: float | None) -> None:
        """Sketch the weights that optimizers stepped on, and the state of their shape that these keep; note the rate if
        there is one.

        owned: ids of parameters.
        """
        if rate is not None:
            self.rates[self.clock.step] = rate
        for shard in self._local_shards(parts):
            if id(shard.owner) not in owned:
                continue
            self._note_tensor(self.clock.step, WEIGHTS, shard, shard.owner)
            for state in states:
                for key, value in state.get(shard.owner, {}).items():
                    if (
                        torch.is_tensor(value)
                        and local_tensor_of(value).numel() == local_tensor_of(shard.owner).numel()
                        and value.dim()
                    ):
                        self._note_tensor(self.clock.step, key, shard, value)

    def _note_tensor(self, step: int, kind: str, shard: LocalShard, tensor: torch.Tensor) -> None:
        """Sketch a tensor that lies as a shard's owner does. If its place is not known, note why in `unplaced`.

        A tensor of integers is left out.
        """
        if tensor.device.type == "meta" or local_tensor_of(tensor).layout is not torch.strided:
            shard = LocalShard(shard.fqn, shard.shape, shard.owner, why=f"its {kind} has no dense elements")
        elif getattr(tensor, "placements", None) not in (None, getattr(shard.owner, "placements", None)):
            shard = shard_of_dtensor(shard.fqn, tensor)
        values = local_tensor_of(tensor).new_empty(0) if shard.why else shard.elements_of(tensor)
        if not shard.why and values.numel() != shard.elements:
            shard = LocalShard(
                shard.fqn, shard.shape, shard.owner, why=f"{values.numel()} elements lie in {shard.elements} places"
            )
        if shard.why:
            self.unplaced[shard.fqn] = shard.why
        elif values.is_floating_point():
            self.sketched[step, kind, shard.fqn] = shard, self.sketcher.sketch(values, shard.boxes)
            if kind == GRADIENT and self.blocks and not shard.addend:
                self._note_rows(step, shard, values)

    def _note_rows(self, step: int, shard: LocalShard, values: torch.Tensor) -> None:
        """Sketch each block of rows of a gradient of which this rank has some."""
        total = shard.shape[0] if shard.shape else 1
        edges = [total * number // self.blocks for number in range(self.blocks + 1)]
        for start, stop in itertools.pairwise(dict.fromkeys(edges)):
            row_slices, boxes = rows_between(values, shard.boxes, start, stop)
            if row_slices:
                shard_rows = dataclasses.replace(shard, boxes=tuple(boxes))
                self.sketched[step, f"{BY_ROWS}{start}:{stop}", shard.fqn] = (
                    shard_rows,
                    self.sketcher.sketch(torch.cat(row_slices), boxes),
                )

    # ---- what is left behind

    @property
    def samples(self) -> dict[int, tuple[int, ...]]:
        """Return, by step, digests of single samples that this rank received: at most MOST_SAMPLES, the smallest ones.

        So each rank makes the same choice of them.
        """
        digests_by_step = defaultdict[int, set[int]](set)
        for forward_pass in self.pass_inputs:
            if forward_pass.account.step and forward_pass.account.kind == "training":
                digests_by_step[forward_pass.account.step].update(forward_pass.rows[0].tolist())
        return {step: tuple(sorted(digests)[:MOST_SAMPLES]) for step, digests in digests_by_step.items()}

    def _read_sketches(self) -> None:
        """Read all new sketches from the device at once, since each single read would wait for the device."""
        unread = {key: entry for key, entry in self.sketched.items() if not isinstance(entry, Sketch)}
        if not unread:
            return
        device = next(iter(unread.values()))[1].device
        sums_of_all = torch.stack([sums.to(device) for _, sums in unread.values()]).cpu().numpy()
        for (key, (shard, _)), sums in zip(unread.items(), sums_of_all, strict=True):
            self.sketched[key] = Sketch(*key, shard.slice_text, shard.elements, float(sums[0]), sums[1:])

    def build_sketches(self, rank: int, world: int, launch: str, optimizers: tuple[str, ...]) -> RankSketches:
        """Return all numbers of this rank. What lies on a device is read first, and waited for.

        Left out are passes that trained nothing, those before the first step, and those of later pipeline stages, whose
        inputs are no samples.
        """
        self._read_sketches()
        passes = defaultdict[int, list[tuple[int, ...]]](list)
        tokens: dict[int, int] = {}
        bare: dict[int, int] = {}
        drawn: dict[int, tuple[int, int]] = {}
        with_tokens = {
            forward_pass.account.step for forward_pass in self.pass_inputs if forward_pass.tokens is not None
        }
        for forward_pass in self.pass_inputs:
            step = forward_pass.account.step
            made_of_samples = forward_pass.tokens is None and step in with_tokens  # by a stage before it
            if step and forward_pass.account.kind == "training" and not made_of_samples:
                row_digests_whole, row_digests_bare = forward_pass.rows.tolist()
                if forward_pass.generators_after is not None:
                    drawn.setdefault(step, (int(forward_pass.generators), int(forward_pass.generators_after)))
                passes[step].append(tuple(row_digests_whole))
                bare |= zip(row_digests_whole, row_digests_bare, strict=True)
                if forward_pass.tokens is not None:
                    tokens[step] = (tokens.get(step, 0) + int(forward_pass.tokens)) % 2**64
        return RankSketches(
            rank=rank,
            world=world,
            launch=launch,
            shapes=self.shapes,
            dtypes=self.dtypes,
            sketches=tuple(entry for entry in self.sketched.values() if isinstance(entry, Sketch)),
            passes={step: tuple(digests) for step, digests in passes.items()},
            tokens=tokens,
            norms={step: float(norm) for step, norm in self.norms.items()},
            norms_off=self.norms_off,
            scales={step: float(scale) for step, scale in self.scales.items()},
            rates=self.rates,
            optimizers=optimizers,
            computes_in=self.computes_in,
            noise=self._rounding_dtype if self._altered else "",
            plain=tuple(self.plain),
            unplaced=self.unplaced,
            bare=bare,
            drawn=drawn,
            changed=self.changed.parameters_by_step,
            tp=self.tp,
        )


def _total_norm_argument(
    parameters: Any = None, max_norm: Any = None, total_norm: Any = None, *_: Any, **__: Any
) -> Any:
    """Return the norm that torch's function is given, by its names of arguments."""
    return total_norm


def _dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def compute_dtype_of(parts: Sequence[nn.Module]) -> str:
    """Return the dtype to which autocast or FSDP's policy casts parameters; empty where neither is known to."""
    parameters = itertools.chain.from_iterable(part.parameters() for part in parts)
    for device in {parameter.device.type for parameter in parameters}:
        if torch.is_autocast_enabled(device):
            return _dtype_name(torch.get_autocast_dtype(device))
    if dtype := next(filter(None, _autocast_dtypes(parts)), ""):
        return dtype
    policies = (_policy_dtype(module) for module in _modules_of(parts))
    return next((_dtype_name(dtype) for dtype in policies if dtype is not None), "")


def _modules_of(parts: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield all modules of these models."""
    return itertools.chain.from_iterable(part.modules() for part in parts)


def _autocast_dtypes(parts: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the dtypes of the autocasts that forward methods of these models are wrapped in; empty of one that is off."""
    for module in _modules_of(parts):
        for mode in _autocasts(module.forward):
            yield _dtype_of(mode)


def _dtype_of(mode: Any) -> str:
    """Return the dtype that an autocast casts to; empty if it is turned off or has none."""
    dtype = getattr(mode, "fast_dtype", None)
    return _dtype_name(dtype) if getattr(mode, "_enabled", False) and isinstance(dtype, torch.dtype) else ""


def _autocasts(function: Any) -> Iterator[torch.autocast]:
    """Yield the autocasts that a function is wrapped in, as accelerate wraps a model's forward; at most MOST_WRAPPERS
    wrappers deep.
    """
    for _ in range(MOST_WRAPPERS):
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # of a cell that is still empty
                if isinstance(cell.cell_contents, torch.autocast):
                    yield cell.cell_contents
        if (function := getattr(function, "__wrapped__", None)) is None:
            return


def _policy_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of parameters in a module's mixed-precision policy of FSDP, None without one."""
    if isinstance(module, FullyShardedDataParallel):
        dtype = getattr(module.mixed_precision, "param_dtype", None)
    else:
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None
