"""What the probe says was computed, of a model that it knows nothing of, in this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from harness.core.evidence.step import Activity, Attention, Call, Matmul, SavedTensorsHook
from harness.core.probe.activity import ActivityRecorder
from harness.core.probe.clock import Clock
from harness.core.probe.compiler import CompilerRecorder, compiler_counts
from harness.core.probe.optimizer_steps import OptimizerSteps
from harness.core.probe.samples import SampleRecorder
from harness.core.probe.saved_tensors import SavedTensorsRecorder
from harness.core.probe.settings import SettingsRecorder
from harness.core.probe.settings import read_settings as settings_now


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(self.up(x), 0.5))


@pytest.fixture
def recorder() -> Iterator[ActivityRecorder]:
    clock = Clock()
    samples, found = SampleRecorder(clock), ActivityRecorder(clock)
    found.install()
    found.samples = samples  # whose hooks tell the clock of forward passes
    yield found
    samples.remove()
    found.remove()


def seen(recorder: ActivityRecorder, model: nn.Module, passes: int = 1) -> Activity:
    recorder.attach([model])
    recorder.samples.attach([model])
    for _ in range(passes):
        model(torch.ones(2, 4)).sum().backward()
    return recorder.activity_of(1)


def test_a_block_that_is_computed_again_is_called_inside_backward(recorder: ActivityRecorder) -> None:
    activity = seen(recorder, nn.Sequential(nn.Linear(4, 4, bias=False), checkpoint_wrapper(Block())))
    assert activity.calls == {
        **{
            Call("forward", ""): 1,
            Call("forward", "0"): 1,
            Call("forward", "1"): 1,
            Call("forward", "1.up"): 1,
            Call("forward", "1.down"): 1,
        },
        **{Call("backward", "1"): 1, Call("backward", "1.up"): 1, Call("backward", "1.down"): 1},
    }
    # forward three; backward one for each weight and each input that needs a gradient, and `up` again
    assert activity.matmuls == {Matmul("forward", "float32"): 3, Matmul("backward", "float32"): 5 + 1}
    assert activity.random == {"forward": 1, "backward": 1}


@pytest.mark.parametrize(("received", "rows"), [(8, (2, 4)), (6, (1, 6))])
def test_samples_that_lie_end_to_end_in_one_row_are_cut_at_the_recipes_length(
    received: int, rows: tuple[int, int]
) -> None:
    samples = SampleRecorder(Clock(), row_length=lambda step: 4 * step)
    embedding = nn.Embedding(8, 2)
    samples.attach([embedding])
    embedding(torch.arange(received))
    samples.remove()
    (part,) = samples.microbatches(1)
    assert part.tokens is not None and part.tokens.shape == rows


def test_a_recomputation_that_draws_other_random_numbers_is_noticed(recorder: ActivityRecorder) -> None:
    model = nn.Sequential(checkpoint_wrapper(Block(), preserve_rng_state=False), nn.Linear(4, 4))
    activity = seen(recorder, model, passes=2)
    assert activity.other_states["0"] == 2


def test_one_that_restores_the_state_is_not(recorder: ActivityRecorder) -> None:
    activity = seen(recorder, nn.Sequential(checkpoint_wrapper(Block()), nn.Linear(4, 4)), passes=2)
    assert activity.random == {"forward": 2, "backward": 2}


def test_removed_it_sees_nothing_any_more(recorder: ActivityRecorder) -> None:
    model = nn.Sequential(Block())
    before = seen(recorder, model)
    recorder.remove()
    told = dict(before.calls), dict(before.matmuls)
    model(torch.ones(2, 4)).sum().backward()
    assert (recorder.activity_of(1).calls, recorder.activity_of(1).matmuls) == told


KERNELS_OF_GPUS = ("flash", "efficient", "cudnn")


@pytest.mark.parametrize("kind", KERNELS_OF_GPUS)
def test_each_fused_attention_of_gpus_is_seen_by_its_operator(recorder: ActivityRecorder, kind: str) -> None:
    """None has a kernel on CPU; the probe has seen the call by then."""
    q = torch.ones(1, 2, 4, 8)
    given = {"flash": (q, q, q), "efficient": (q, q, q, None, False), "cudnn": (q, q, q, None, False)}[kind]
    with pytest.raises(NotImplementedError):
        getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")(*given)
    assert hasattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")
    assert recorder.activity_of(0).attention == {Attention("other", "attention"): 1}


# ---- what belongs to a step


def test_a_pass_of_the_bare_model_between_steps_counts_only_if_it_records_gradients(recorder: ActivityRecorder) -> None:
    inner = Block()
    seen(recorder, nn.Sequential(inner))
    recorder._clock.leave_optimizer()
    with torch.no_grad():
        inner(torch.ones(2, 4))
    assert not any(key.phase == "other" for key in recorder.activity_of(1).calls | recorder.activity_of(1).matmuls)
    inner(torch.ones(2, 4))
    activity = recorder.activity_of(1)
    assert (activity.calls[Call("other", "0")], activity.matmuls[Matmul("other", "float32")]) == (1, 2)


def test_before_the_optimizer_a_pass_of_the_bare_model_counts_in_any_case(recorder: ActivityRecorder) -> None:
    inner = Block()
    seen(recorder, nn.Sequential(inner))
    with torch.no_grad():
        inner(torch.ones(2, 4))
    assert recorder.activity_of(1).matmuls[Matmul("other", "float32")] == 2


# ---- who hooks saved tensors


class Elsewhere:
    """A hook of a library's own that goes to torch's function directly."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_who_puts_hooks_on_saved_tensors_is_known_by_name_whichever_way_it_goes() -> None:
    clock, x = Clock(), torch.ones(2, 4, requires_grad=True)
    recorder = SavedTensorsRecorder(clock)
    recorder.install()
    with torch.autograd.graph.save_on_cpu():
        (x * x).sum().backward()
    torch._C._autograd._push_saved_tensors_default_hooks(Elsewhere().keep, Elsewhere().keep)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    checkpoint(Block(), x, use_reentrant=False).sum().backward()
    recorder.remove()
    with torch.autograd.graph.save_on_cpu():
        pass
    assert recorder.hooks_of(0) == {
        SavedTensorsHook("other", "torch.autograd.graph", "save_on_cpu"): 1,
        SavedTensorsHook("other", __name__, "Elsewhere"): 1,
        SavedTensorsHook("other", "torch.utils.checkpoint", "_checkpoint_hook"): 1,
        SavedTensorsHook("backward", "torch.utils.checkpoint", "_recomputation_hook"): 1,
    }


# ---- switches


def test_a_switch_that_is_on_in_backward_only_is_seen(recorder: ActivityRecorder) -> None:
    settings = SettingsRecorder(recorder._clock)
    settings.install()
    recorder.on_phase = settings.note_settings
    model = nn.Sequential(Block())
    recorder.samples.attach([model])
    with warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(False):
        loss = model(torch.ones(2, 4)).sum()
        torch.autograd.set_detect_anomaly(True)
        loss.backward()
    assert settings.settings_at_start["autograd anomaly detection"] == "off"
    assert settings.settings_of(1)["autograd anomaly detection"] == ("off", "on")
    assert settings.settings_of(1)["default dtype"] == ("float32",)
    assert settings.settings_of(2) == {}


def test_kernels_and_small_numbers_that_are_switched_off_are_seen() -> None:
    before = settings_now()
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        switched = settings_now()
    assert {name for name in before if before[name] != switched[name]} == {"mkldnn", "cudnn"}
    if torch.set_flush_denormal(True):  # False where the processor cannot
        flushed = settings_now()["denormal numbers"]
        torch.set_flush_denormal(False)
        assert (before["denormal numbers"], flushed) == ("kept", "flushed to 0")
    assert settings_now() == before


def test_every_switch_has_one_value_in_words() -> None:
    assert all(isinstance(value, str) and value for value in settings_now().values())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert settings_now()["deterministic algorithms"] == "warn only"
    finally:
        torch.use_deterministic_algorithms(False)


def test_tf32_is_seen_by_whichever_setting_it_came() -> None:
    """Torch refuses to tell the older settings once the newer one says more."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert settings_now()["TF32 in CUDA matmuls"] == "on"
        assert settings_now()["float32 matmul precision"] == "tf32, set by fp32_precision"
    finally:
        matmul.fp32_precision = before
    assert settings_now()["float32 matmul precision"] == "highest"


# ---- the compiler


def test_graphs_are_counted_as_optimizers_step() -> None:
    clock = Clock()
    compiled = CompilerRecorder(clock)
    steps = OptimizerSteps(clock, before=(), after=(compiled.after_optimizer,))
    steps.install()
    block = nn.Linear(4, 4)
    forward, optimizer = torch.compile(block, backend="eager"), torch.optim.SGD(block.parameters(), lr=0.1)
    before = compiler_counts().get("graphs", 0)
    for clock.step in (1, 2):
        forward(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    steps.remove()
    assert [compiled.graphs_after(step) for step in (1, 2, 3)] == [before + 1, before + 1, None]


def test_a_batch_of_one_matrix_is_a_matmul_and_an_outer_product_is_none(recorder: ActivityRecorder) -> None:
    x, weight = torch.ones(2, 3, 4), torch.ones(5, 4, requires_grad=True)
    torch.einsum("bsd,vd->bsv", x, weight).sum().backward()
    torch.bmm(torch.ones(1, 3, 1), torch.ones(1, 1, 5))
    torch.baddbmm(torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    seen = recorder.activity_of(0)
    assert sum(seen.matmuls.values()) == 2
    assert seen.attention == {Attention("other", "batched matmul"): 2}
