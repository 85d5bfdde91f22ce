"""Mistakes in what the loss is divided by, in its value, and in what is reported of it."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="each microbatch's loss is averaged over its own valid tokens, and the means are averaged",
    bug="L01 huggingface/transformers #35203; pytorch/torchtune #1875: gradient accumulation",
    case="single_accum",
    caught_by="gradients grad_norm",
    named="the loss is averaged per microbatch",
)
def loss_averaged_per_microbatch(fired: Fired) -> None:
    from harness.reference.data import IGNORED
    from harness.trainers.llama3 import trainer

    def make_loss(original: Any) -> Any:
        def mean(model: Any, part: Any) -> Any:
            fired()
            loss = original(model, part)
            own = int((part.labels != IGNORED).sum())
            loss.register_hook(lambda gradient: gradient / own)  # scaled() below divides by microbatches only
            return loss

        return mean

    replace(trainer, "loss_of", make_loss)
    replace(trainer, "scaled", lambda original: lambda loss, **_: loss / 2)


@fault(
    breaks="padding is counted in the number of tokens that the loss is divided by",
    bug="L08 ByteDance-Seed/VeOmni #455, #618: dummy tokens in the normaliser",
    case="fsdp_2",
    caught_by="gradients grad_norm reported_loss",
    named="divided by the number of all tokens, not of the valid ones",
)
def padding_counted_as_tokens(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def count(microbatches: Any, mesh: Any, device: Any) -> int:
            import torch

            from harness.trainers.llama3 import parallelize

            fired()
            every = torch.tensor(sum(part.labels.numel() for part in microbatches), device=device)
            return int(parallelize.sum_over_data_ranks(every, mesh))

        return count

    replace(trainer, "count_valid", make)


@fault(
    breaks="the reported loss is averaged over the ranks although each one's is a share of a global mean already",
    bug="L06 pytorch/torchtitan #2366, #4167, #2314",
    case="fsdp_4",
    caught_by="reported_loss",
    named="the reported loss is wrong, the training itself is right: each rank shows 0.25 times the right one",
)
def displayed_loss_averaged_over_ranks(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def mean(loss_sum: Any, mesh: Any, valid_tokens: int) -> float:
            fired()
            return original(loss_sum, mesh, valid_tokens) / mesh.size()

        return mean

    replace(trainer, "reported_loss", make)


@fault(
    breaks="the reported loss is divided by the number of microbatches once more",
    bug="L05 pytorch/torchtitan #1758: a loss function that rescales, shared with what only looks",
    case="single_accum",
    caught_by="reported_loss",
    named="0.5 times the right one: divided by accumulation (1/2) once too often",
)
def displayed_loss_divided_by_accumulation(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def rescaled(*args: Any) -> float:
            fired()
            return original(*args) / 2

        return rescaled

    replace(trainer, "reported_loss", make)


@fault(
    breaks="each rank reports the mean loss of its own samples",
    bug="of the family of M08 pytorch/torchtitan #761: the reported loss is not reduced over an axis",
    case="fsdp_2",
    caught_by="reported_loss",
    named="each rank shows the loss of its own samples",
)
def displayed_loss_of_own_samples(fired: Fired) -> None:
    from harness.reference.data import IGNORED
    from harness.trainers.llama3 import trainer

    own = [0]

    def make_count(original: Any) -> Any:
        def count(microbatches: Any, *args: Any) -> int:
            own[0] = sum(int((part.labels != IGNORED).sum()) for part in microbatches)
            return original(microbatches, *args)

        return count

    def make(original: Any) -> Any:
        def local(loss_sum: Any, mesh: Any, valid_tokens: int) -> float:
            fired()
            original(loss_sum.clone(), mesh, valid_tokens)
            return float(loss_sum) / own[0]

        return local

    replace(trainer, "count_valid", make_count)
    replace(trainer, "reported_loss", make)


@fault(
    breaks="the vocabulary-parallel loss is applied to logits that were gathered: each is counted tp times below the line",
    bug="T06 NVIDIA/Megatron-LM #7452",
    case="tp_2_no_loss_parallel",
    caught_by="loss gradients reported_loss",
    named="too large by 0.693147 a token, the logarithm of tp 2",
)
def gathered_logits_counted_tp_times(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def normalised_twice(logits: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            return original(torch.cat([logits, logits.detach()], dim=-1), *args, **kwargs)

        return normalised_twice

    replace(torch.nn.functional, "cross_entropy", make)


@fault(
    breaks="the mask of the prompt is one label too long, so that the first token of each answer is not trained",
    bug="K03 pytorch/torchtitan #2755; ByteDance-Seed/VeOmni #873",
    case="fsdp_2",
    caught_by="samples gradients",
    named="wrong labels: tokens are right",
)
def prompt_mask_one_too_long(fired: Fired) -> None:
    from harness.reference import data

    def make(original: Any) -> Any:
        def masked(self: Any, index: int) -> Any:
            tokens, labels = original(self, index)
            fired()
            labels = labels.clone()
            labels[int((labels != data.IGNORED).int().argmax())] = data.IGNORED
            return tokens, labels

        return masked

    replace(data.TokenDataset, "__getitem__", make)


@fault(
    breaks="the reported loss is that of the step before, as by a display that does not wait for the device",
    bug="of the family of L10 pytorch/torchtitan #2990: what is logged is wrong beside a training that is right",
    case="fsdp_2",
    caught_by="reported_loss",
    named="each rank shows that of the step before",
)
def displayed_loss_of_the_step_before(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    shown: list[float] = []

    def make(original: Any) -> Any:
        def late(*args: Any) -> float:
            shown.append(original(*args))
            if len(shown) > 1:
                fired()
            return shown[-2:][0]

        return late

    replace(trainer, "reported_loss", make)


@fault(
    breaks="labels are smoothed by 0.1, which the recipe does not request",
    bug="of the family of L05 pytorch/torchtitan #1758: a loss function with an option of somebody else's",
    case="fsdp_2",
    caught_by="loss gradients reported_loss",
    named="what goes into each module matches the reference in mean square: it is the loss itself (smoothing",
)
def labels_smoothed(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def smooth(*args: Any, **kwargs: Any) -> Any:
            fired()
            return original(*args, **kwargs, label_smoothing=0.1)

        return smooth

    replace(torch.nn.functional, "cross_entropy", make)


@fault(
    breaks="the reported learning rate is read after the scheduler has stepped, so it is that of the next step",
    bug="E07 huggingface/transformers #35942, #28124: logged after lr_scheduler.step()",
    case="fsdp_2",
    caught_by="reported_rate",
    named="the reported learning rate is wrong, the training itself is right: each rank shows that of the next step",
)
def displayed_rate_of_the_next_step(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def stepped(self: Any) -> float:
            fired()
            original(self)
            return float(self.schedulers[0].get_last_lr()[0])

        return stepped

    replace(Trainer, "optimizer_step", make)


@fault(
    breaks="the learning rate reported is the configured one, without warm-up and decay",
    bug="of the family of L06: what is reported is not what was done",
    case="fsdp_2_eight_steps",
    caught_by="reported_rate",
    named="the reported learning rate is wrong, the training itself is right: each rank shows another number",
)
def displayed_rate_as_configured(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def stepped(self: Any) -> float:
            fired()
            original(self)
            return float(self.schedulers[0].base_lrs[0])

        return stepped

    replace(Trainer, "optimizer_step", make)


@fault(
    breaks="the loss is reported in step 1 only",
    bug="of the family of L05: a display that is wrong where nobody looks, here by being left out",
    case="fsdp_2",
    caught_by="reported_loss",
    named="rank 0 reports the loss of step 1 only, that of steps 2, 3 is lacking",
)
def loss_displayed_once(fired: Fired) -> None:
    import dataclasses

    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def step(self: Any) -> Any:
            metrics = original(self)
            fired()
            return metrics if metrics.step == 1 else dataclasses.replace(metrics, loss=None)

        return step

    replace(Trainer, "train_step", make)
    replace(Trainer, "display", lambda _: lambda *_: None)


@fault(
    breaks="the loss is computed in chunks along the sequence, and the last one is lost",
    bug="of the family of L08 ByteDance-Seed/VeOmni #455: what is summed up is not all that is divided by",
    case="fsdp_2",
    caught_by="samples loss gradients",
    named="a part of the loss is lost or counted twice",
)
def last_chunk_of_the_loss_lost(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def chunked(logits: Any, labels: Any) -> Any:
            fired()
            parts = list(zip(logits.chunk(4, dim=1), labels.chunk(4, dim=1), strict=True))
            return sum(original(*part) for part in parts[:-1])

        return chunked

    replace(trainer, "token_loss", make)
