"""What a rank leaves of numbers in recorded steps: sketches of gradients, weights and optimizer state, rows of samples, norms.

Gradients are those that the optimizer is about to step with, before clipping by torch's functions. They are looked at once
after each forward pass: whoever clips or steps next uses them.
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

from harness.core.probe.clock import Account, Clock
from harness.core.probe.structure import local, sharded_parameters
from harness.core.probe.values import CLIP_FUNCTIONS
from harness.recording.boxes import Held, Sharded, held_parameters, of_dtensor, rows_between
from harness.recording.compiling import not_compiled
from harness.recording.digests import digest, generators, packed_digests, row_digests, token_sum
from harness.recording.place import place_of
from harness.recording.sketches import AFTER_PASS, BY_ROWS, GRADIENT, WEIGHTS, RankSketches, Sketch
from harness.recording.sketching import Sketcher, alter, width_of

# ---- What loss scalers do: by what they multiply a loss, and which steps they leave out because a gradient is not finite


def see_scalers(clock: Clock, note: Callable[[torch.Tensor], None]) -> None:
    """Call note with each step's scale. Once a scaler is updated its optimizers have stepped, or will not: passes since the
    last step trained nothing then. Trap: FSDP1's scaler has an update of its own."""
    step = torch.amp.GradScaler.step

    @not_compiled
    @functools.wraps(step)
    def stepped(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, torch.Tensor):  # a scaler that is turned off has none
            note(scale)
        return step(scaler, *args, **kwargs)

    def seen(update: Any) -> Any:
        @not_compiled
        @functools.wraps(update)
        def updated(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            clock.skip()
            return update(scaler, *args, **kwargs)

        return updated

    torch.amp.GradScaler.step = stepped
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        kind.update = seen(kind.update)


# ---- Which parameters are others as a step begins than they were after the step before: no optimizer's step wrote them


class Changed:
    """Looks once a step. What is computed on a device is read at the end."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, torch.Tensor]] = {}

    def look(self, step: int, parts: Sequence[nn.Module], before: Mapping[str, torch.Tensor]) -> None:
        """Look as the first pass of a step begins. before: parameter -> digest after the step before; empty if unknown."""
        if before and step not in self._found:
            every = ((fqn, parameter) for fqn, parameter in sharded_parameters(parts) if fqn in before)
            self._found[step] = {fqn: digest(parameter) != before[fqn] for fqn, parameter in every}

    @property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Return, by step, the parameters."""
        found = {step: tuple(fqn for fqn, is_so in of.items() if bool(is_so)) for step, of in self._found.items()}
        return {step: names for step, names in found.items() if names}


# ---- the numbers of a rank


ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""By dtype, the distance of 1 from the next larger number."""
WRAPPERS = 16
"""Wrappers of one function that are looked through."""
MOST_PASSES = 64
"""Passes of a step after which accumulated gradients are looked at."""
MANY = 1 << 12
"""Elements from which on torch's norm on CPU may be off by more than sums in another order are."""
CLIPS_BY_NORM, MAKES_NORM = "clip_grads_with_norm_", "get_total_norm"
"""The function that is given a norm to clip by, and the one that makes a norm, of a rank's own gradients if these are plain."""
MOST_SAMPLES = 32
"""Digests of single samples that are kept of a step."""
Timed = Callable[..., Any]
Key = tuple[int, str, str]
"""Step, kind, fqn."""


@dataclass
class Fed:
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
class Numbers:
    """Fills what one rank leaves. timed: calls what it is given in chosen steps only, and counts the time."""

    clock: Clock
    noise: str = ""
    """Dtype by one rounding of which first weights are altered; "compute": of the forward pass; empty: they are not."""
    sharded: tuple[Sharded, ...] = ()
    """What the person who records declared of plain tensors."""
    blocks: int = 0
    """Blocks of rows of which each gradient's are sketched one by one; 0 for none."""
    sketcher: Sketcher = field(default_factory=Sketcher)
    found: dict[Key, tuple[Held, torch.Tensor] | Sketch] = field(default_factory=dict)
    """What was looked at; once it is read, without the tensor."""
    fed: list[Fed] = field(default_factory=list)
    norms: dict[int, Any] = field(default_factory=dict)
    changed: Changed = field(default_factory=Changed)
    norms_off: dict[int, float] = field(default_factory=dict)
    scales: dict[int, torch.Tensor] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    plain: dict[str, None] = field(default_factory=dict)
    unplaced: dict[str, str] = field(default_factory=dict)
    computes_in: str = ""
    tp: tuple[int, ...] = ()
    _normed: tuple[int, int] = (-1, -1)
    _fresh: set[str] = field(default_factory=set)
    _held: tuple[int, list[Held]] = (-1, [])
    _altered: set[str] = field(default_factory=set)
    _rounded: str = ""

    def install(self, timed: Timed, parts: Callable[[], Sequence[nn.Module]]) -> None:
        """See torch's clipping functions: gradients before them, and the norm that they return."""
        owners = [(owner, name) for owner in (torch.nn.utils, torch.nn.utils.clip_grad) for name in CLIP_FUNCTIONS]
        for owner, name in (*owners, (FullyShardedDataParallel, "clip_grad_norm_")):
            if (original := getattr(owner, name, None)) is not None:
                setattr(owner, name, self._seen(original, name, timed, parts))
        self._see_autocast(timed)
        see_scalers(self.clock, lambda scale: timed(self.note_scale, scale))

    def note_scale(self, scale: torch.Tensor) -> None:
        self.scales[self.clock.step] = scale.clone()

    def _see_autocast(self, timed: Timed) -> None:
        """A forward pass may enter autocast itself. It is seen then, after the first weights were altered."""
        enter = torch.autocast.__enter__

        @not_compiled
        @functools.wraps(enter)
        def entered(mode: Any) -> Any:
            if not self.computes_in and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                timed(self._note_autocast, mode)
            return enter(mode)

        torch.autocast.__enter__ = entered

    def _note_autocast(self, mode: Any) -> None:
        self.computes_in = _dtype_of(mode)

    def _seen(
        self, original: Callable[..., Any], name: str, timed: Timed, parts: Callable[[], Sequence[nn.Module]]
    ) -> Any:
        @not_compiled
        @functools.wraps(original)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            timed(self.gradients, parts())
            timed(self.note_norms_off, parts())
            returned = original(*args, **kwargs)
            norm = _given_norm(*args, **kwargs) if name == CLIPS_BY_NORM else returned
            if name != MAKES_NORM:
                timed(self._note_norm, norm)
            return returned

        return seen

    def _note_norm(self, norm: Any) -> None:
        whole = torch.is_tensor(norm) and not any(p.is_partial() for p in getattr(norm, "placements", ()))
        if whole and local(norm).numel() == 1:
            self.norms[self.clock.step] = local(norm).clone()

    def note_norms_off(self, parts: Sequence[nn.Module]) -> None:
        """Note how well torch's own norms, of which clipping makes the whole one, hold for these gradients. Functions that clip
        call one another."""
        if self._normed == (self.clock.step, len(self.fed)):
            return
        self._normed = self.clock.step, len(self.fed)
        owners = {id(held.owner): local(held.owner.grad) for held in self._all(parts) if held.owner.grad is not None}
        for gradient in owners.values():
            if gradient.device.type == "cpu" and gradient.numel() > MANY and gradient.is_floating_point():
                exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
                off = abs(float(torch.linalg.vector_norm(gradient)) - exact) / (exact or 1.0)
                self.norms_off[self.clock.step] = max(off, self.norms_off.get(self.clock.step, 0.0))

    # ---- tensors

    def start(self, parts: Sequence[nn.Module]) -> None:
        """Look at the weights before training, and alter them where that is wanted."""
        new = [held for held in held_parameters(parts, self.sharded) if (0, WEIGHTS, held.fqn) not in self.found]
        for held in new:
            self.shapes[held.fqn] = held.shape
            self.dtypes[held.fqn] = _name(held.owner.dtype)
            self.tp = self.tp or held.tp
            self.plain |= {held.fqn: None} if held.plain else {}
            self._note(0, WEIGHTS, held, held.owner)
        self.computes_in = self.computes_in or compute_dtype_of(parts)
        if self.noise:
            self._alter(new)

    def _alter(self, new: Iterable[Held]) -> None:
        dtype = self.noise if self.noise != "compute" else self.computes_in
        self._rounded = self._rounded or dtype or "own"
        for held in new:
            tensor, own = held.of(held.owner.data), dtype or self.dtypes[held.fqn]
            if not held.why and held.fqn not in self._altered and own in ROUNDING:
                self._altered.add(held.fqn)
                alter(tensor, held.fqn, held.boxes, width_of(held.shape), ROUNDING[own])
                self._note(0, WEIGHTS, held, held.owner)

    def pass_begins(
        self, parts: Sequence[nn.Module], inputs: torch.Tensor | None, begins: torch.Tensor | None = None
    ) -> None:
        """Look at the samples of a pass; gradients that come now are other ones. Whether it trains shows later.
        begins: where samples do that lie end to end in one row. bool [tokens]
        Trap: a pipeline calls its stages once to see shapes; that is of step 0."""
        self._fresh.clear()
        self._note_accumulated(parts)
        if inputs is None or not inputs.dim():
            return
        integers = not (inputs.is_floating_point() or inputs.is_complex())
        if integers or inputs.dim() >= 2:
            tokens = token_sum(inputs) if integers else None
            whole = inputs if inputs.dim() >= 2 else inputs.unsqueeze(0)
            rows = row_digests(whole) if begins is None or not integers else packed_digests(inputs, begins)
            self.fed.append(Fed(self.clock.account, rows, generators(), tokens))

    def pass_ends(self) -> None:
        if self.fed and self.fed[-1].generators_after is None:
            self.fed[-1].generators_after = generators()

    def _note_accumulated(self, parts: Sequence[nn.Module]) -> None:
        """Look at what earlier passes of the step left in gradients, where one process trains and no reduction changes it."""
        passes = sum(one.account.step == self.clock.step for one in self.fed) if self.clock.step else 0
        if 0 < passes < MOST_PASSES and place_of()[1] == 1:
            for held in self._all(parts):
                if held.owner.grad is not None:
                    self._note(self.clock.step, f"{AFTER_PASS}{passes}", held, held.owner.grad)

    def _all(self, parts: Sequence[nn.Module]) -> list[Held]:
        """Return what this rank holds, looked for once a step."""
        if self._held[0] != self.clock.step:
            self._held = self.clock.step, [*held_parameters(parts, self.sharded)]
        return self._held[1]

    def gradients(self, parts: Sequence[nn.Module], owned: set[int] | None = None) -> None:
        """Look at those of all parameters, or of those with these ids, if no look was taken since the last forward pass."""
        for held in self._all(parts):
            wanted = owned is None or id(held.owner) in owned
            if wanted and held.fqn not in self._fresh and held.owner.grad is not None:
                self._fresh.add(held.fqn)
                self._note(self.clock.step, GRADIENT, held, held.owner.grad)

    def stepped(self, parts: Sequence[nn.Module], owned: set[int], states: Sequence[Any], rate: float | None) -> None:
        """Look at the weights that optimizers stepped on, and at the state that these keep. owned: ids of parameters."""
        if rate is not None:
            self.rates[self.clock.step] = rate
        for held in self._all(parts):
            if id(held.owner) not in owned:
                continue
            self._note(self.clock.step, WEIGHTS, held, held.owner)
            for state in states:
                for key, value in state.get(held.owner, {}).items():
                    if torch.is_tensor(value) and local(value).numel() == local(held.owner).numel() and value.dim():
                        self._note(self.clock.step, key, held, value)

    def _note(self, step: int, kind: str, held: Held, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or local(tensor).layout is not torch.strided:
            held = Held(held.fqn, held.shape, held.owner, why=f"its {kind} has no dense elements")
        elif getattr(tensor, "placements", None) not in (None, getattr(held.owner, "placements", None)):
            held = of_dtensor(held.fqn, tensor)
        values = local(tensor).new_empty(0) if held.why else held.of(tensor)
        if not held.why and values.numel() != held.elements:
            held = Held(
                held.fqn, held.shape, held.owner, why=f"{values.numel()} elements lie in {held.elements} places"
            )
        if held.why:
            self.unplaced[held.fqn] = held.why
        elif values.is_floating_point():
            self.found[step, kind, held.fqn] = held, self.sketcher.sketch(values, held.boxes)
            if kind == GRADIENT and self.blocks and not held.addend:
                self._note_rows(step, held, values)

    def _note_rows(self, step: int, held: Held, values: torch.Tensor) -> None:
        """Sketch a gradient's blocks of rows."""
        total = held.shape[0] if held.shape else 1
        edges = [total * number // self.blocks for number in range(self.blocks + 1)]
        for start, stop in itertools.pairwise(dict.fromkeys(edges)):
            taken, boxes = rows_between(values, held.boxes, start, stop)
            if taken:
                part = dataclasses.replace(held, boxes=tuple(boxes))
                self.found[step, f"{BY_ROWS}{start}:{stop}", held.fqn] = (
                    part,
                    self.sketcher.sketch(torch.cat(taken), boxes),
                )

    # ---- what is left behind

    @property
    def samples(self) -> dict[int, tuple[int, ...]]:
        """Return, by step, digests of the single samples that a rank was fed: the same choice of them on each rank."""
        found = defaultdict[int, set[int]](set)
        for one in self.fed:
            if one.account.step and one.account.kind == "training":
                found[one.account.step].update(one.rows[0].tolist())
        return {step: tuple(sorted(of)[:MOST_SAMPLES]) for step, of in found.items()}

    def _read(self) -> None:
        """Read all that is new at once: each single one would be waited for."""
        new = {key: one for key, one in self.found.items() if not isinstance(one, Sketch)}
        if not new:
            return
        device = next(iter(new.values()))[1].device
        read = torch.stack([sums.to(device) for _, sums in new.values()]).cpu().numpy()
        for (key, (held, _)), sums in zip(new.items(), read, strict=True):
            self.found[key] = Sketch(*key, held.place, held.elements, float(sums[0]), sums[1:])

    def left(self, rank: int, world: int, launch: str, optimizers: tuple[str, ...]) -> RankSketches:
        """Return all of it, read from where it lies."""
        self._read()
        passes, tokens, bare = defaultdict[int, list[tuple[int, ...]]](list), dict[int, int](), dict[int, int]()
        drawn: dict[int, tuple[int, int]] = {}
        with_tokens = {one.account.step for one in self.fed if one.tokens is not None}
        for one in self.fed:
            step = one.account.step
            made_of_samples = one.tokens is None and step in with_tokens  # by a stage before it
            if step and one.account.kind == "training" and not made_of_samples:
                whole, without_end = one.rows.tolist()
                if one.generators_after is not None:
                    drawn.setdefault(step, (int(one.generators), int(one.generators_after)))
                passes[step].append(tuple(whole))
                bare |= zip(whole, without_end, strict=True)
                if one.tokens is not None:
                    tokens[step] = (tokens.get(step, 0) + int(one.tokens)) % 2**64
        return RankSketches(
            rank=rank,
            world=world,
            launch=launch,
            shapes=self.shapes,
            dtypes=self.dtypes,
            sketches=tuple(one for one in self.found.values() if isinstance(one, Sketch)),
            passes={step: tuple(of) for step, of in passes.items()},
            tokens=tokens,
            norms={step: float(norm) for step, norm in self.norms.items()},
            norms_off=self.norms_off,
            scales={step: float(scale) for step, scale in self.scales.items()},
            rates=self.rates,
            optimizers=optimizers,
            computes_in=self.computes_in,
            noise=self._rounded if self._altered else "",
            plain=tuple(self.plain),
            unplaced=self.unplaced,
            bare=bare,
            drawn=drawn,
            changed=self.changed.names,
            tp=self.tp,
        )


def _given_norm(parameters: Any = None, max_norm: Any = None, total_norm: Any = None, *_: Any, **__: Any) -> Any:
    """Return the norm that torch's function is given, by its names of arguments."""
    return total_norm


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute_dtype_of(parts: Sequence[nn.Module]) -> str:
    """Return the dtype to which autocast or FSDP's policy casts parameters; empty where neither is known to."""
    for device in {p.device.type for part in parts for p in part.parameters()}:
        if torch.is_autocast_enabled(device):
            return _name(torch.get_autocast_dtype(device))
    wrapped = (_dtype_of(mode) for part in parts for module in part.modules() for mode in _autocasts(module.forward))
    if dtype := next(filter(None, wrapped), ""):
        return dtype
    policies = (_policy(module) for part in parts for module in part.modules())
    return next((_name(dtype) for dtype in policies if dtype is not None), "")


def _dtype_of(mode: Any) -> str:
    """Return what an autocast casts to; empty where it is turned off."""
    dtype = getattr(mode, "fast_dtype", None)
    return _name(dtype) if getattr(mode, "_enabled", False) and isinstance(dtype, torch.dtype) else ""


def _autocasts(function: Any) -> Iterator[torch.autocast]:
    """Yield those that a function is wrapped in, as accelerate wraps a model's forward."""
    for _ in range(WRAPPERS):
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # of a cell that is still empty
                if isinstance(cell.cell_contents, torch.autocast):
                    yield cell.cell_contents
        if (function := getattr(function, "__wrapped__", None)) is None:
            return


def _policy(module: nn.Module) -> torch.dtype | None:
    if isinstance(module, FullyShardedDataParallel):
        found = getattr(module.mixed_precision, "param_dtype", None)
    else:
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        found = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
    return found if isinstance(found, torch.dtype) else None
