"""One rank's trainer: its start-up, its step, its loop.

The check of the loss: the sum over all valid tokens of a step (every microbatch, every data-parallel rank) over their
number. Averages of averages are something else as soon as ranks have uneven valid-token counts.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.core.case.case import Case
from harness.core.trainers import Metrics
from harness.core.trainers.llama3 import (
    checkpoint,
    clip,
    context,
    data,
    export,
    parallelize,
    pipeline,
    quantize,
    recipe,
    recompute,
    shown_numbers,
    tied,
)
from harness.core.trainers.support import process_group
from harness.core.trainers.support.weights import load_weights
from harness.reference.data import IGNORED
from harness.reference.model import Llama, at_least_float32, seed_masks


class Microbatch(NamedTuple):
    """A microbatch as this rank computes it.

    tokens, labels: int64 [local_batch, s], s the step's length over cp. positions: int64 [s], None for 0 .. s-1, or
    [local_batch, s] where they count anew in each document. documents: int64 [local_batch, s * cp], the number of each
    token's document in its row, under cp of the whole row; None without a document mask.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None


# ---- joining


def join(case: Case, device: str) -> torch.device:
    """Enter the process group that RANK, WORLD_SIZE and INIT_METHOD describe; return this rank's device.

    Raises ValueError if the world is not the case's. Without RANK in the environment this is a world of one.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size != case.dims.world_size:
        raise ValueError(
            f"case {case.name!r}: {case.dims} = {case.dims.world_size} ranks, but WORLD_SIZE is {world_size};"
            f" start it with torchrun --nproc-per-node {case.dims.world_size}"
        )
    rank_device = torch.device(device)
    if rank_device.type == "cuda":
        rank_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(rank_device)
        torch.use_deterministic_algorithms(case.runs > 1)  # else kernels of GPUs may add up in any order
    if case.training.tf32:
        torch.set_float32_matmul_precision("high")
    if "RANK" in os.environ:
        process_group.join(process_group.backend_for(rank_device.type))
    return rank_device


# ---- the model and its weights


def build_parts(case: Case, mesh: DeviceMesh | None, weights: Path | None, device: torch.device) -> list[nn.Module]:
    """Return the models of this rank's pipeline stages, with their weights.

    Without a pipeline that is the whole model alone.
    """
    stages = pipeline.stages_here(case, mesh)
    parts = [build_model(case, mesh, weights, device, stage) for stage in stages]
    tied.share_embedding(parts, stages, case)
    return parts


def build_model(
    case: Case, mesh: DeviceMesh | None, weights: Path | None, device: torch.device, stage: int = 0
) -> nn.Module:
    """Return the model of a stage, with its weights, sharded and wrapped. weights: a file; None means the seed's.

    First come shapes on the meta device, then parallelism, then memory for this rank's slices only, then the weights.
    """
    with torch.device("meta"):
        model = Llama(case.model).to(parallelize.DTYPES[case.training.dtype])
    quantize.convert(model, case, device)
    pipeline.cut_to_stage(model, stage, case)
    parallelize.shard(model, mesh, case)
    model.to_empty(device=device)
    load_weights([model], case, weights, recompute.plain)
    return parallelize.replicate(model, mesh, case)


# ---- one step


def sequence_part(tokens: Tensor, labels: Tensor, mesh: DeviceMesh | None, case: Case) -> Microbatch:
    """Return the part of a microbatch that this rank computes: the whole one, or under cp this rank's positions."""
    documents = data.document_indices(tokens) if case.training.document_mask else None
    if mesh is None or "cp" not in parallelize.axes_of(mesh):
        return Microbatch(tokens, labels, documents=documents)
    balance = case.features.cp_load_balance
    tokens, labels, positions = context.shard_sequence(tokens, labels, mesh["cp"], load_balance=balance)
    if documents is not None:  # they count anew in each, as packed batches mostly do
        positions = context.within_documents(documents)[:, positions]
    return Microbatch(tokens, labels, positions, documents)


def count_valid(microbatches: list[Microbatch], mesh: DeviceMesh | None, device: torch.device) -> int:
    """Return the number of tokens that the step's loss is averaged over.

    They are those of all microbatches of all ranks that see different tokens.
    """
    count = own_valid_tokens(microbatches)
    return int(parallelize.sum_over_data_ranks(torch.tensor(count, device=device), mesh))


def own_valid_tokens(microbatches: list[Microbatch]) -> int:
    """Return the number of this rank's tokens that have a label."""
    return sum(int((part.labels != IGNORED).sum()) for part in microbatches)


def loss_of(model: nn.Module, part: Microbatch) -> Tensor:
    """Return the sum of the valid tokens' negative log-likelihoods, in at least float32 []. 0 for a microbatch without
    any."""
    return token_loss(model(part.tokens, part.positions, part.documents), part.labels)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the valid tokens' negative log-likelihoods. logits: [b, s, vocab]. labels: int64 [b, s]."""
    logits = at_least_float32(logits)  # [b, s, vocab]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def forward_backward(
    model: nn.Module, microbatches: list[Microbatch], *, case: Case, mesh: DeviceMesh | None, valid_tokens: int
) -> Tensor:
    """Leave in .grad the gradient of the global mean loss; return this rank's sum of token losses, float64 []."""
    total = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens.device)
    for index, part in enumerate(microbatches):
        last = index == len(microbatches) - 1 or not case.features.defers_replica_reduction
        with parallelize.gradient_sync(model, case.features, last=last), parallelize.loss_context(mesh, case.features):
            loss = loss_of(model, part)
            scale_loss(loss, ranks=case.dims.dp * case.dims.cp, valid_tokens=valid_tokens).backward()
        total += plain_loss(loss.detach())
    parallelize.settle_gradients(list(model.parameters()))
    return total


class PipelineLoss:
    """The loss function of the last stage, called once per microbatch.

    `total`: this rank's sum of token losses, float64 [].
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.ranks = case.dims.dp * case.dims.cp
        self.device = device
        self.begin(valid_tokens=1)

    def begin(self, *, valid_tokens: int) -> None:
        """Begin a step, with the number of valid tokens that its loss is averaged over: `total` is 0 again."""
        self.valid_tokens = valid_tokens
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = token_loss(logits, labels)
        self.total += plain_loss(loss.detach())
        return scale_loss(loss, ranks=self.ranks, valid_tokens=self.valid_tokens)


def run_pipeline(
    schedule: Any,
    loss: PipelineLoss,
    batches: list[Microbatch],
    *,
    case: Case,
    mesh: DeviceMesh | None,
    valid_tokens: int,
) -> Tensor:
    """Do what forward_backward does, on all stages of this rank; return its sum of token losses, float64 [].

    Only ranks of the last stage have a loss; on others the sum is 0.
    """
    loss.begin(valid_tokens=valid_tokens)
    for part in batches:
        with parallelize.loss_context(mesh, case.features):
            pipeline.run(schedule, part.tokens, part.labels, positions=part.positions, documents=part.documents)
    return loss.total


def scale_loss(loss: Tensor, *, ranks: int, valid_tokens: int) -> Tensor:
    """Return the loss times ranks over valid_tokens, which this rank differentiates.

    DDP and FSDP2 average gradients over dp and cp; the factor `ranks` makes that a sum.
    """
    return loss * ranks / valid_tokens


def reported_loss(loss_sum: Tensor, mesh: DeviceMesh | None, valid_tokens: int) -> float:
    """Return the global mean loss, from every rank's own sum, which is changed. Under pp only last stages have one."""
    if "pp" in parallelize.axes_of(mesh):
        assert mesh is not None
        dist.all_reduce(loss_sum, group=mesh.get_group("pp"))
    return float(parallelize.sum_over_data_ranks(loss_sum, mesh)) / valid_tokens


def plain_loss(value: Tensor) -> Tensor:
    """Return the loss as a plain tensor. Under loss parallel it is a replicated DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def count_tokens(microbatches: list[Microbatch], case: Case) -> int:
    """Return the number of all tokens of the step, those without a label included. case: as it is in this step.

    Every rank along dp and cp has as many, but for a last batch that is not divided evenly."""
    if case.training.global_batch % case.dims.dp:
        return case.training.global_batch * microbatches[0].tokens.shape[1]
    return sum(part.tokens.numel() for part in microbatches) * case.dims.dp * case.dims.cp


def evaluate_loss(model: nn.Module, parts: list[Microbatch], mesh: DeviceMesh | None, case: Case) -> float:
    """Return the global mean loss of these microbatches, computed without gradients and in eval mode.

    Train mode is set afterwards.
    """
    model.eval()
    with torch.no_grad(), parallelize.loss_context(mesh, case.features):
        losses = [plain_loss(loss_of(model, part)) for part in parts]
    model.train()
    return mean_over_ranks(torch.stack(losses).sum(), count_valid(parts, mesh, losses[0].device), mesh)


def mean_over_ranks(loss_sum: Tensor, valid_tokens: int, mesh: DeviceMesh | None) -> float:
    """Return the mean loss over all data ranks. loss_sum: this rank's, which is changed. valid_tokens: of all ranks."""
    return float(parallelize.sum_over_data_ranks(loss_sum, mesh)) / valid_tokens


# ---- the loop


class Trainer:
    """One rank's trainer.

    `step` counts finished optimizer steps; each part of the model has an optimizer and a scheduler.
    """

    def __init__(
        self, case: Case, *, weights: Path | None, device: torch.device, batches: type[data.Shapes] | None = None
    ) -> None:
        """weights: a file; None means the seed's.

        batches: the class of microbatches in place of those of the recipe's data.
        """
        self.case = case
        self.device = device
        self.mesh = parallelize.build_mesh(case, device.type)
        self.model_parts = build_parts(case, self.mesh, weights, device)
        self.loss = PipelineLoss(case, device)
        self.schedule = pipeline.build_schedule(self.model_parts, self.loss, case, self.mesh, device)
        self.ends = tied.group_of_ends(case, self.mesh)
        self.optimizers = [recipe.build_optimizer(part, case.training) for part in self.model_parts]
        tied.drop_repeated_parameters(self.optimizers)
        self.schedulers = [recipe.build_scheduler(optimizer, case.training) for optimizer in self.optimizers]
        rank = parallelize.data_parallel_rank(self.mesh)
        self.microbatches = (batches or data.Microbatches)(case, rank)
        self.saving_group = (
            dist.new_group(backend="gloo") if case.features.async_save and dist.is_initialized() else None
        )
        self.written: Future[Any] | None = None  # of the last checkpoint
        self.metrics: list[Metrics] = []
        self.step = self.tokens_seen = 0

    def train(
        self, last_step: int | None = None, *, checkpoints: Path | None = None, checkpoint_every: int | None = None
    ) -> None:
        """Train up to `last_step`, by default the recipe's, adding to `metrics`.

        The schedule is the recipe's in either case. checkpoints: the folder in which one is saved every
        `checkpoint_every` steps; none are saved if either is None.
        """
        last_step = self.case.training.steps if last_step is None else last_step
        for step in range(self.step + 1, last_step + 1):
            started = time.perf_counter()
            metrics = self.train_step()
            seconds = time.perf_counter() - started
            shown = self.display(metrics, seconds) or {}
            handed_over = self.handed_over(seconds)
            self.metrics.append(replace(metrics, numbers=shown_numbers.with_meanings(shown, handed_over)))
            if checkpoints and checkpoint_every and step % checkpoint_every == 0:
                self.save(checkpoints)

    def save(self, folder: Path) -> Path | Future[Any]:
        """Write a checkpoint into the folder and return its path; its future, if the case saves in the background."""
        if not self.case.features.async_save:
            return checkpoint.save(self.parts(), self.counters(), folder)
        if self.written is not None:
            self.written.result()
        self.written = checkpoint.save_async(self.parts(), self.counters(), folder, self.saving_group)
        return self.written

    def export(self, folder: Path) -> None:
        export.export(self.model_parts[0], self.case, folder)

    def resume(self, folder: Path) -> None:
        """Load the latest complete checkpoint, with optimizer, schedule and data position.

        Raises ValueError if there is none. Where the case requests only weights (`model_of`), all else stays new.
        """
        if self.case.model_of is not None:
            checkpoint.load_model(self.parts(), checkpoint.latest(folder))
            return
        self.step, samples = checkpoint.resume(self.parts(), checkpoint.latest(folder))
        self.microbatches.seek(samples)
        self.tokens_seen = sum(map(self.case.seq_len, range(1, self.step + 1))) * self.case.training.global_batch

    def train_step(self) -> Metrics:
        """Run the next optimizer step and return its metrics, without `numbers`."""
        microbatches = [
            sequence_part(tokens.to(self.device), labels.to(self.device), self.mesh, self.case)
            for tokens, labels in self.microbatches.step(self.case.seq_len(self.step + 1))
        ]
        self.own_samples = sum(len(part.tokens) for part in microbatches) / self.case.dims.cp
        valid_tokens = count_valid(microbatches, self.mesh, self.device)
        self.tokens = count_tokens(microbatches, self.case.with_batch_of_step(self.step + 1))
        self.own_valid_tokens = own_valid_tokens(microbatches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for part in self.model_parts:
            seed_masks(part, self.case.training.seed, self.step + 1)
        loss_sum = self.forward_backward(microbatches, valid_tokens)
        copies = tied.tied_weight_copies(self.model_parts, self.ends)
        grad_norm = clip.clip_gradients(self.parameters(), self.case.training.max_norm, self.groups(), copies)
        lr = self.optimizer_step()
        self.step += 1
        self.tokens_seen += self.tokens
        loss = reported_loss(loss_sum, self.mesh, valid_tokens)
        return Metrics(step=self.step, loss=loss, grad_norm=grad_norm, lr=lr)

    def forward_backward(self, microbatches: list[Microbatch], valid_tokens: int) -> Tensor:
        """Compute the gradients of a step, with or without a pipeline; return this rank's sum of token losses, float64
        []."""
        if self.schedule is None:
            return forward_backward(
                self.model_parts[0], microbatches, case=self.case, mesh=self.mesh, valid_tokens=valid_tokens
            )
        total = run_pipeline(
            self.schedule, self.loss, microbatches, case=self.case, mesh=self.mesh, valid_tokens=valid_tokens
        )
        parallelize.settle_gradients(self.parameters())
        tied.sum_gradients(self.model_parts, self.ends)
        return total

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all parts, each once."""
        parameters: dict[nn.Parameter, None] = {}
        for part in self.model_parts:
            parameters |= dict.fromkeys(part.parameters())
        return list(parameters)

    def optimizer_step(self) -> float:
        """Step all optimizers and schedulers; return the learning rate that this step was made with."""
        lr = float(self.schedulers[0].get_last_lr()[0])
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        return lr

    def validate(self) -> float:
        """Return the mean loss of the held-out batch: the sum over all ranks' valid tokens over their number."""
        batches = [(tokens.to(self.device), labels.to(self.device)) for tokens, labels in self.microbatches.held_out()]
        parts = [sequence_part(*batch, self.mesh, self.case) for batch in batches]
        return evaluate_loss(self.model_parts[0], parts, self.mesh, self.case)

    def display(self, metrics: Metrics, seconds: float) -> dict[str, float]:
        """Print a step on rank 0, and return the numbers shown beside loss, norm and rate, by the names of
        shown_numbers.MEANINGS.

        Validation runs in steps that `validate_every` divides. Numbers that cost communication come with the recipe's
        last step.
        """
        every = self.case.features.validate_every
        shown: dict[str, float] = {
            "tokens per second": self.tokens / seconds,
            "tokens seen": self.tokens_seen,
            "own valid tokens": self.own_valid_tokens,
            "epochs": self.microbatches.epochs(),
        }
        if every and metrics.step % every == 0:
            shown["validation loss"] = self.validate()
        if metrics.step == self.case.training.steps:
            sum_and_count = torch.tensor(
                [self.own_valid_tokens, self.own_samples], dtype=torch.float64, device=self.device
            )
            mean = shown_numbers.mean_over_ranks(sum_and_count, self.mesh)
            shown |= {"parameter norm": self.parameter_norm(), "valid tokens per sample": mean}
        if int(os.environ.get("RANK", 0)) == 0:
            print(
                f"step {metrics.step}  loss {metrics.loss:.6f}  grad norm {metrics.grad_norm:.6f}  lr {metrics.lr:.3e}",
                *(f"{name} {value:.6g}" for name, value in shown.items()),
                sep="  ",
                flush=True,
            )
        return shown

    def parameter_norm(self) -> float:
        """Return the norm of the parameters that optimizers step, and of frozen ones, over all ranks; copies of a tied
        weight once.

        The model's own parameters would not do: a unit that stays gathered does not show the stepped ones.
        """
        stepped: list[nn.Parameter] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                stepped += group["params"]
        frozen = [parameter for parameter in self.parameters() if not parameter.requires_grad]
        every = dict.fromkeys([*stepped, *frozen])
        copies = {*map(id, tied.tied_weight_copies(self.model_parts, self.ends))}
        counted = [parameter for parameter in every if id(parameter) not in copies]
        return shown_numbers.parameter_norm(counted, self.groups())

    def handed_over(self, seconds: float) -> dict[str, dict[str, Any]]:
        """Return by name of a number the fields of Number that MEANINGS lacks, as they depend on the step.

        Names that the step does not show are there, too. total: this rank's valid tokens; count: its samples, a
        fraction under cp. seconds: duration of the step.
        """
        return {
            "tokens per second": {"seconds": seconds},
            "epochs": {"data_size": self.microbatches.size},
            "valid tokens per sample": {"total": self.own_valid_tokens, "count": self.own_samples},
        }

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that hold other elements, where no DTensor says so: over pp, and FSDP1's.

        Empty if neither is used.
        """
        groups = [pipeline.group_of(self.mesh), parallelize.flat_group(self.mesh, self.case)]
        return [group for group in groups if group is not None]

    def parts(self) -> list[checkpoint.Part]:
        return list(map(checkpoint.Part, self.model_parts, self.optimizers, self.schedulers))

    def counters(self) -> checkpoint.Counters:
        return checkpoint.Counters(self.step, self.microbatches.samples)
