"""Mistakes of context parallel: who receives which positions, the K/V exchange, and what is reduced over cp."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="FSDP is applied only where dp_shard is above 1, so with cp alone nothing reduces gradients over cp",
    bug="M03 pytorch/torchtitan #685",
    case="cp_2",
    caught_by="shard_contents placements traffic gradients replica_agreement",
    named="gradient reduction missing over cp",
)
def fsdp_left_out_with_cp_alone(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def keep_whole(model: Any, mesh: Any, case: Any) -> None:
        fired()

    replace(parallelize, "apply_fsdp", lambda original: keep_whole)


@fault(
    breaks="fully_shard gets the mesh of dp_shard alone, so cp ranks hold equal shards and never reduce their gradients",
    bug="of the family of M03: sharded over dp_shard where dp_shard x cp was meant",
    case="fsdp_2_cp_2",
    caught_by="shard_contents placements traffic gradients replica_agreement",
    named="gradient reduction missing over cp",
)
def fsdp_over_dp_shard_without_cp(fired: Fired) -> None:
    _shard_over(fired, lambda mesh: mesh["dp_shard"])


@fault(
    breaks="fully_shard gets (dp_shard, cp) unfolded and takes it for HSDP's (replicate, shard)",
    bug="M02 NVIDIA-NeMo/Automodel #2768: a native 2-D slice handed to fully_shard",
    case="fsdp_2_cp_2",
    caught_by="shard_contents placements traffic memory",
    named="FSDP ran as HSDP: parameters are sharded over 2 ranks along cp and replicated 2 times",
)
def dp_shard_and_cp_not_folded(fired: Fired) -> None:
    _shard_over(fired, lambda mesh: mesh["dp_shard", "cp"])


def _shard_over(fired: Fired, choose: Any) -> None:
    from harness.trainers.llama3 import parallelize

    def chosen(mesh: Any) -> Any:
        fired()
        return choose(mesh)

    replace(parallelize, "data_parallel_mesh", lambda original: chosen)


@fault(
    breaks="the reported loss is summed over the dp ranks and not over cp",
    bug="M08 pytorch/torchtitan #761",
    case="fsdp_2_cp_2",
    caught_by="reported_loss",
    named="the reported loss is wrong, the training itself is right: it is not reduced over cp",
)
def displayed_loss_not_reduced_over_cp(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize, trainer

    def make(original: Any) -> Any:
        def over_dp_only(loss_sum: Any, mesh: Any, valid_tokens: int) -> float:
            import torch.distributed as dist

            fired()
            for axis in parallelize.DATA_AXES:
                if axis in parallelize.axes_of(mesh):
                    dist.all_reduce(loss_sum, group=mesh.get_group(axis))
            return float(loss_sum) / valid_tokens

        return over_dp_only

    replace(trainer, "reported_loss", make)


@fault(
    breaks="every cp rank divides by the valid tokens of its own part of the sequence",
    bug="L02 NVIDIA/Megatron-LM #7513; volcengine/verl #5993: the denominator is the count of the cp rank",
    case="cp_2",
    caught_by="gradients grad_norm reported_loss",
    named="the loss is averaged per cp rank",
)
def loss_averaged_per_cp_rank(fired: Fired) -> None:
    from harness.reference.data import IGNORED
    from harness.trainers.llama3 import trainer

    def make(_: Any) -> Any:
        def own_count(microbatches: Any, mesh: Any, device: Any) -> int:
            fired()
            return mesh.size() * sum(int((part.labels != IGNORED).sum()) for part in microbatches)

        return own_count

    replace(trainer, "count_valid", make)


@fault(
    breaks="gradients are scaled by the number of dp ranks, but averaged over dp and cp ranks",
    bug="G09 NVIDIA/Megatron-LM 3bdcbbbe5d; SkyRL #1420: scaling by the size of dp without cp",
    case="cp_2",
    caught_by="gradients grad_norm",
    named="divided by cp (1/2) once too often",
)
def gradients_scaled_without_cp(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def by_dp(loss: Any, *, ranks: int, **kwargs: Any) -> Any:
            fired()
            return original(loss, ranks=ranks // 2, **kwargs)  # the case has cp 2

        return by_dp

    replace(trainer, "scaled", make)


@fault(
    breaks="the gradients of keys and values that come back round the ring are dropped, each rank keeps its own",
    bug="of the family of X02: forward exact, backward wrong (as in T03 and G21), at the ring's rotation",
    case="cp_2",
    caught_by="traffic gradients grad_norm",
    named="no exchange of K/V gradients over cp",
)
def gradients_of_keys_and_values_stay_local(fired: Fired) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    def make(original: Any) -> Any:
        class Kept(original):
            def exchange_buffers(self, buffer: Any) -> None:
                self._kept = buffer

            def next_buffer(self) -> Any:
                fired()
                return self._kept

        return Kept

    replace(ring, "_AllToAllRotater", make)


# ---- positions


@fault(
    breaks="every cp rank counts positions from 0, so rotary angles restart with each part of the sequence",
    bug="X04 pytorch/torchtitan #792; VeOmni #448: RoPE positions not those of the rank's own tokens",
    case="cp_2_contiguous",
    caught_by="positions loss gradients",
    named="rotary positions restart at 0 on each cp rank: rank 1 receives positions 0-15 for its tokens at 16-31",
)
def rope_restarts_on_each_cp_rank(fired: Fired) -> None:
    _alter_parts(fired, lambda tokens, labels, positions, rank: (tokens, labels, positions - positions[0]))


@fault(
    breaks="rotary positions are sliced contiguously while tokens are balanced head with tail",
    bug="X04 pytorch/torchtitan #2780: RoPE contiguous, tokens zig-zag",
    case="cp_2",
    caught_by="positions loss gradients",
    named="wrong rotary positions: rank 0 receives positions 0-15 for its tokens at 0-7 and 24-31",
)
def rope_contiguous_under_load_balancing(fired: Fired) -> None:
    _alter_parts(fired, lambda tokens, labels, at, rank: (tokens, labels, _counting(at, rank)))


def _counting(positions: Any, rank: int) -> Any:
    return positions.argsort() + rank * len(positions)


@fault(
    breaks="only the first pipeline stage is given the positions of its cp rank, later ones count from 0",
    bug="X04 pytorch/torchtitan #792: of all model parts, only the first one's rotary table was sliced",
    case="pp_2_cp_2_contiguous",
    caught_by="positions loss gradients",
    named="later pipeline stages turn queries and keys by other positions than the first: rank 3 receives positions 0-15",
)
def rope_of_later_stages_not_sliced(fired: Fired) -> None:
    import torch

    from harness.trainers.llama3 import pipeline

    def make(original: Any) -> Any:
        def first_stage_only(schedule: Any, tokens: Any, labels: Any, *, positions: Any, **rest: Any) -> Any:
            if not pipeline.has_first_stage(schedule):
                fired()
                positions = torch.arange(len(positions))
            return original(schedule, tokens, labels, positions=positions, **rest)

        return first_stage_only

    replace(pipeline, "run", make)


def _alter_parts(fired: Fired, change: Any) -> None:
    from harness.trainers.llama3 import context

    def make(original: Any) -> Any:
        def altered(tokens: Any, labels: Any, mesh: Any, **kwargs: Any) -> Any:
            fired()
            return change(*original(tokens, labels, mesh, **kwargs), mesh.get_local_rank())

        return altered

    replace(context, "shard_sequence", make)


# ---- what a cp rank receives


@fault(
    breaks="the batch is never cut: every cp rank computes whole sequences, with attention of its own",
    bug="X01 pytorch/torchtitan #1880: the context is never entered (wrong indentation), cp silently off",
    case="cp_2",
    caught_by="samples traffic",
    named="CP not applied: every cp rank receives whole sequences",
)
def context_parallel_never_entered(fired: Fired) -> None:
    from harness.trainers.llama3 import context

    def whole(tokens: Any, labels: Any, mesh: Any, **kwargs: Any) -> Any:
        fired()
        return tokens, labels, None

    replace(context, "shard_sequence", lambda original: whole)
    replace(context, "apply_context_parallel", lambda original: lambda model, mesh, case: None)


@fault(
    breaks="load balancing is requested and the sequence is cut contiguously, with attention to match: slow, not wrong",
    bug="of the family of X01: a performance option without effect",
    case="cp_2",
    caught_by="samples positions",
    named="cp_load_balance True is requested, False is observed",
)
def load_balancer_not_applied(fired: Fired) -> None:
    from harness.trainers.llama3 import context

    def make(original: Any) -> Any:
        def contiguous(tokens: Any, labels: Any, mesh: Any, *, load_balance: bool) -> Any:
            fired()
            return original(tokens, labels, mesh, load_balance=False)

        return contiguous

    replace(context, "shard_sequence", make)


@fault(
    breaks="tokens are balanced head with tail, and the ring masks as if they were cut contiguously",
    bug="of the family of X04: torch notes in a global whether the batch was balanced; one cut elsewhere leaves it wrong",
    case="cp_2",
    caught_by="loss gradients",
    named="the forward pass is wrong: the loss of step 1 is off",
)
def ring_unaware_of_load_balancing(fired: Fired) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    def forget(*parts: Any) -> Any:
        fired()
        ring._cp_options.enable_load_balance = False
        return parts[:3]

    _alter_parts(lambda: None, forget)


@fault(
    breaks="cp ranks draw samples of their own, as if cp divided the batch",
    bug="of the family of D06: the data loader's rank counts cp",
    case="fsdp_2_cp_2",
    caught_by="samples",
    named="cp peers receive different samples",
)
def cp_ranks_read_different_samples(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def counting_cp(mesh: Any) -> int:
            fired()
            return (original(mesh) + mesh.get_local_rank("cp")) % 2  # two dp shares

        return counting_cp

    replace(parallelize, "data_parallel_rank", make)


# ---- attention


@fault(
    breaks="attention of each cp rank looks at its own part of the sequence only",
    bug="of the family of X01: forms of cp that patch a function are lost on attention that imported it by name",
    case="cp_2_contiguous",
    caught_by="traffic loss gradients",
    named="no K/V exchange over cp: attention sees its own part of the sequence only",
)
def attention_stays_local(fired: Fired) -> None:
    from harness.trainers.llama3 import context

    def left_out(model: Any, mesh: Any, case: Any) -> None:
        fired()

    replace(context, "apply_context_parallel", lambda original: left_out)


@fault(
    breaks="the rotation requested is never set, so torch's default is used",
    bug="of the family of X01: a performance option without effect",
    case="cp_2_alltoall",
    caught_by="traffic",
    named="cp_rotation alltoall is requested, allgather is observed",
)
def rotation_never_set(fired: Fired) -> None:
    from harness.trainers.llama3 import context

    replace(context, "set_rotate_method", lambda original: lambda method: fired())


@fault(
    breaks="the ring merges the partial results of attention in float32, whatever the model's dtype",
    bug="of the family of N03: torch's default for ring attention (_cp_options.convert_to_f32), whatever the model's dtype",
    case="cp_2",
    caught_by="traffic loss gradients",
    named="no more than arithmetic in float32 rounds, requested float64",
)
def ring_merges_in_float32(fired: Fired) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    from harness.trainers.support import cpu_attention

    def make(original: Any) -> Any:
        def rounded(case: Any) -> None:
            fired()
            original(case)
            ring._cp_options.convert_to_f32 = True

        return rounded

    replace(cpu_attention, "support_ring", make)


@fault(
    breaks="labels are shifted on each cp rank after the sequence was cut: the last token of each part has none",
    bug="of the family of K04 pytorch/torchtitan #4075: the last token of a piece has another piece's label, or none",
    case="cp_2",
    caught_by="samples loss gradients",
    named="each is the last of a cp rank's part, as if labels were shifted after the sequence was cut",
)
def labels_shifted_after_the_cut(fired: Fired) -> None:
    import torch

    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def shifted(*args: Any) -> Any:
            part = original(*args)
            fired()
            following = torch.nn.functional.pad(part.tokens[:, 1:], (0, 1), value=-100)
            return part._replace(labels=torch.where(part.labels < 0, part.labels, following))

        return shifted

    replace(trainer, "sequence_part", make)
