"""Megatron's training step and loop, as pretrain_gpt.py's forward_step and loss_func and megatron.training's train_step
have them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import Tensor, nn

from harness.adapters.megatron import Megatron, checkpoint
from harness.adapters.megatron.model import build_chunks, build_config
from harness.adapters.megatron.shards import Ranges
from harness.adapters.support import float64
from harness.core.case.case import Case
from harness.core.probe.losses import note_loss
from harness.core.probe.pipeline import note_action, pass_of_schedule
from harness.core.probe.shards import note_shards
from harness.core.probe.values import note_gradients, note_update, reducing_gradients
from harness.core.trainers import Metrics, StartedTrainer
from harness.core.trainers.support import process_group
from harness.core.trainers.support.samples import dataset_of, rank_samples
from harness.reference.data import IGNORED, document_indices
from harness.reference.train import lr_factor

CASTING = """utils optimizer.clip_grads optimizer.optimizer optimizer.distrib_optimizer tensor_parallel.cross_entropy
    models.common.embeddings.rotary_pos_embedding"""


class MegatronTrainer(StartedTrainer):
    """The started trainer of one rank: model, optimizer and data, ready for the first step.

    `late`: the chunks whose parameters are gathered in the next step's forward pass. `done`: the last finished step.
    """

    def __init__(self, case: Case, weights: Path | None, device: str, adapter: Megatron) -> None:
        self.case = case
        self.metrics = list[Metrics]()
        self.device = _join_group(case, device)
        float64.preserve(case.training.dtype, *(f"megatron.core.{name}" for name in CASTING.split()))
        config = build_config(case, device)
        self.model_parts: list[nn.Module] = build_chunks(case, config, weights, adapter)
        self.late: list[Any] = [chunk for chunk in self.model_parts if chunk.use_forward_hook]
        for chunk in self.late:
            chunk.disable_forward_pre_hook(param_sync=False)
        self.optimizer = get_megatron_optimizer(_optimizer_config(case), self.model_parts)
        self.run = get_forward_backward_func()
        self.dataset = dataset_of(case)
        self.schedule = contextlib.ExitStack()
        self.done = 0
        config.finalize_model_grads_func = self.finalize
        config.no_sync_func = [chunk.no_sync for chunk in self.model_parts]
        config.no_sync_func = config.no_sync_func if len(self.model_parts) > 1 else config.no_sync_func[0]
        _note_reductions()
        _note_clipping(self.optimizer)
        _note_shards(self.model_parts, self.optimizer)
        self.actions = Actions(case.dims.pp)
        if case.dims.pp > 1:
            self.actions.install()

    def train(self, last_step: int) -> None:
        """Train up to and with this step, and append the metrics of each.

        Parameters that are gathered late are gathered as in megatron.training: not in the first step, and all after the
        last one.
        """
        for step in range(self.done + 1, last_step + 1):
            self.metrics.append(self.train_step(step))
            if step == 1:
                for chunk in self.late:
                    chunk.enable_forward_pre_hook()
            self.done = step
        for chunk in self.late:
            chunk.disable_forward_pre_hook()
        if self.late:
            note_update()

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.done, self.model_parts, self.optimizer)

    def resume(self, folder: Path) -> None:
        self.done = checkpoint.load(folder, self.model_parts, self.optimizer)

    def train_step(self, step: int) -> Metrics:
        """Train one step: zero gradients, forward and backward, set rates, optimizer step. Return its metrics.

        Reports to the probe when parameters are updated: at once, or after the next step's forward pass if they are
        gathered late.
        """
        for chunk in self.model_parts:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.forward_backward(step)
        if self.late and step > 1:
            note_update(step - 1)
        rate = self.set_rates(step)
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        if not self.late:
            note_update()
        return Metrics(step, self.mean_loss(losses), norm, rate)

    def forward_backward(self, step: int) -> list[dict[str, Tensor]]:
        """Run Megatron's schedule for one step. Return the loss sums of each microbatch that this rank computed.

        With pp, the probe's pass of the schedule ends in `finalize`, where Megatron reduces gradients inside the same
        function.
        """
        several = len(self.model_parts) > 1
        batches = [list(self.batches(step)) for _ in self.model_parts]
        self.actions.begun.clear()
        with self.schedule:
            if self.case.dims.pp > 1:
                self.schedule.enter_context(pass_of_schedule())
            return self.run(
                forward_step_func=self.forward_step,
                data_iterator=[iter(batches_of_chunk) for batches_of_chunk in batches] if several else iter(batches[0]),
                model=self.model_parts if several else self.model_parts[0],
                num_microbatches=len(batches[0]),
                seq_length=self.case.training.seq_len,
                micro_batch_size=self.case.local_batch,
                forward_only=False,
            )

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tokens, labels) of each microbatch of this data-parallel rank in the step, both int64 [local_batch, s]."""
        rank_and_size = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        tokens, labels = rank_samples(self.case, self.dataset, step, *rank_and_size)
        size = self.case.local_batch
        yield from zip(tokens.to(self.device).split(size), labels.to(self.device).split(size), strict=True)

    def forward_step(self, batches: Any, model: Any) -> Any:
        """Call a chunk with its next microbatch. Return its output, and the function that computes the loss from an output.

        The first stage gets tokens, the last labels, as get_batch_on_this_tp_rank has it. No positions are passed: they
        are for a learned embedding.
        """
        tokens, labels = next(batches)
        stage = model.module
        output = model(
            input_ids=tokens if stage.pre_process else None,
            position_ids=None,
            attention_mask=self.mask(tokens),
            labels=labels.clamp(min=0) if stage.post_process else None,
        )
        return output, functools.partial(_loss, labels)

    def mask(self, tokens: Tensor) -> Tensor:
        """Return the attention mask, bool [1 or b, 1, s, s]: True where a position must not see another.

        With a document mask positions of other documents are masked too.
        """
        length = tokens.shape[1]
        later = torch.ones(1, 1, length, length, dtype=torch.bool, device=self.device).triu(1)
        if not self.case.training.document_mask:
            return later
        which = document_indices(tokens)[:, None]
        return later | (which[..., :, None] != which[..., None, :])

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """End the probe's pass of the schedule, then reduce gradients by Megatron's finalize_model_grads."""
        self.schedule.close()
        finalize_model_grads(*args, **kwargs)

    def set_rates(self, step: int) -> float:
        """Set rate and weight decay of each parameter group by the recipe's schedule, as OptimizerParamScheduler does.

        Return the rate. With `decay: all` all parameters decay, also those that Megatron exempts.
        """
        recipe = self.case.training
        for group in self.optimizer.param_groups:
            group["lr"] = rate = recipe.lr * lr_factor(step, recipe)
            group["weight_decay"] = recipe.weight_decay * (group["wd_mult"] if recipe.decay == "matrices" else 1.0)
        return rate

    def mean_loss(self, losses: list[dict[str, Tensor]]) -> float | None:
        """Return the step's mean loss per valid token over all data ranks, as training_log reports it.

        None but on the last stage.
        """
        if not ps.is_pipeline_last_stage(ignore_virtual=True):
            return None
        total = torch.stack([loss_and_count["lm loss"] for loss_and_count in losses]).sum(0)
        dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))
        return float(total[0] / total[1])


def _join_group(case: Case, device: str) -> torch.device:
    """Join the process group, set up Megatron's parallel groups and seed its random state. Return the device.

    Raises ValueError if WORLD_SIZE is not the case's.
    """
    dims = case.dims
    if int(os.environ.get("WORLD_SIZE", 1)) != dims.world_size:
        raise ValueError(f"case {case.name!r}: {dims} = {dims.world_size} ranks, but WORLD_SIZE is another")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    process_group.join(process_group.backend_for(device))
    ps.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=case.stages_per_rank if case.stages_per_rank > 1 else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(case.training.seed)
    return torch.device(device)


def _optimizer_config(case: Case) -> OptimizerConfig:
    """Return Megatron's optimizer configuration with the values of the case's recipe."""
    recipe = case.training
    return OptimizerConfig(
        optimizer="adam" if recipe.optimizer == "adamw" else "sgd",
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        adam_eps=recipe.eps,
        sgd_momentum=0.0,
        clip_grad=recipe.max_norm or 0.0,
        params_dtype=getattr(torch, recipe.dtype),
        use_distributed_optimizer=case.wrapper == "zero1",
    )


def _loss(labels: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (sum of the losses of valid tokens, their number, both as "lm loss" for the log). output: [b, s], loss of
    each token.

    The losses are reported to the probe.
    """
    mask = (labels != IGNORED).view(-1).float()
    losses = output.view(-1).float() * mask
    note_loss(labels, losses, reduction="none")
    total = losses.sum()
    count = mask.sum().clone().detach().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.clone().detach(), count])}


# ---- what the probe needs


def _note_reductions() -> None:
    """Patch Megatron's DDP so that the probe knows when it reduces gradients, after backward.

    With overlap_grad_reduce Megatron reduces there only in the first step.
    """
    original = DistributedDataParallel.finish_grad_sync

    @functools.wraps(original)
    def finish_grad_sync(*args: Any, **kwargs: Any) -> None:
        with reducing_gradients():
            original(*args, **kwargs)

    DistributedDataParallel.finish_grad_sync = finish_grad_sync


def _note_clipping(optimizer: Any) -> None:
    """Patch each optimizer so that the probe copies gradients after prepare_grads, just before Megatron clips them."""
    for inner_optimizer in _inner_optimizers(optimizer):
        inner_optimizer.prepare_grads = _note_after(inner_optimizer.prepare_grads)


def _note_shards(chunks: list[nn.Module], optimizer: Any) -> None:
    """Report to the probe the intervals of the distributed optimizer, for each chunk that has one."""
    for chunk in (chunk for chunk in chunks if chunk.ddp_config.use_distributed_optimizer):
        (inner_optimizer,) = _inner_optimizers(optimizer)
        shards = Ranges(chunk, inner_optimizer)
        note_shards(chunk, shards, shards.starts())


def _inner_optimizers(optimizer: Any) -> Any:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _note_after(prepare: Any) -> Any:
    """Return `prepare`, changed to have the probe copy gradients after it. Its result, whether it succeeded, is passed on."""

    @functools.wraps(prepare)
    def prepared() -> bool:
        succeeded: bool = prepare()
        note_gradients()
        return succeeded

    return prepared


class Actions:
    """A recorder of each forward and backward of a chunk in Megatron's pipeline schedules, for the probe.

    A forward is of its chunk's next microbatch in this pass, a backward of the microbatch whose output it gets.
    `degree`: of pp. `begun`: forwards in this pass, by stage. `places`: (stage, microbatch) by the id of an output.
    """

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.begun = Counter[int]()
        self.places = dict[int, tuple[int, int]]()

    def install(self) -> None:
        """Patch Megatron's schedules so that both functions are recorded."""
        schedules.forward_step = self.around_forward(schedules.forward_step)
        schedules.backward_step = self.around_backward(schedules.backward_step)

    def around_forward(self, original: Any) -> Any:
        """Return Megatron's forward_step, changed to report the action first and to remember whose output it returns."""

        @functools.wraps(original)
        def forward_step(func: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = getattr(model.module, "vp_stage", None) or 0
            stage = ps.get_pipeline_model_parallel_rank() + self.degree * chunk
            note_action(stage, "F", self.begun[stage])
            result = original(func, iterator, model, *args, **kwargs)
            self.places[id(_first_tensor(result[0]))] = stage, self.begun[stage]
            self.begun[stage] += 1
            return result

        return forward_step

    def around_backward(self, original: Any) -> Any:
        """Return Megatron's backward_step, changed to report the action first."""

        @functools.wraps(original)
        def backward_step(given: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            stage, microbatch = self.places.pop(id(_first_tensor(output)))
            note_action(stage, "B", microbatch)
            return original(given, output, *args, **kwargs)

        return backward_step


def _first_tensor(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors
