"""Two recordings of one training by Muon, whose roundings to bfloat16 make an update jump."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from literal_numbers import rank, sums_of

from harness.recording.judged.judge_same_training import compare_numbers, why_no_noise
from harness.recording.judged.judge_sketched import Numbers, sum_sketches
from harness.recording.sketches import GRADIENT, WEIGHTS

MUON = ("AdamW(betas (0.9, 0.95))", "Muon(momentum 0.95)")
UP = "layers.0.up"


def of_muon(updates: Mapping[int, float] = {}, gradients: float = 0.0) -> Numbers:
    """Muon steps `up`. updates: by step, by how much its share is off; gradients: those of step 2 and 3 of all."""

    def change(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        if kind == WEIGHTS and fqn == UP:
            off = sum(1e-3 * by for at, by in updates.items() if at <= step)
            return sums + off * sums_of(0, "exp_avg", fqn)
        return sums * (1 + gradients * (kind == GRADIENT and step > 1))

    one = rank(change=change, optimizers=MUON)
    averages = {True: "momentum_buffer"}
    kinds = (replace(s, kind=averages.get(s.fqn == UP and s.kind == "exp_avg", s.kind)) for s in one.sketches)
    return sum_sketches([replace(one, sketches=tuple(kinds))])


def test_all_updates_of_muon_have_the_bound_of_the_largest_jump_that_noise_shows() -> None:
    noise = replace(of_muon({2: 0.05}), noise="float32")
    assert why_no_noise(of_muon(), noise) == ""
    assert not [one for one in compare_numbers(of_muon(), of_muon({1: 0.03}), noise).differences if one.is_wrong]
    wrong = [one for one in compare_numbers(of_muon(), of_muon({1: 0.4}), noise).differences if one.is_wrong]
    assert {one.key for one in wrong} == {(1, "update", UP)}


def test_noise_that_shows_no_jump_of_muons_roundings_is_refused() -> None:
    assert "record it with --noise bfloat16" in why_no_noise(of_muon(), replace(of_muon({1: 1e-5}), noise="float32"))


def test_without_noise_what_follows_of_muons_roundings_has_the_bound_of_bfloat16_and_the_first_gradient_has_not() -> (
    None
):
    other = of_muon({1: 0.05}, gradients=0.05)
    assert not [one for one in compare_numbers(of_muon(), other).differences if one.is_wrong]
    bounds = {one.key: one.bound for one in compare_numbers(of_muon(), other).differences}
    assert bounds[1, GRADIENT, UP] == 2e-3 and bounds[2, GRADIENT, UP] == bounds[1, "update", UP] == 0.15
    assert {one.key for one in compare_numbers(of_muon(), of_muon({1: 0.4})).differences if one.is_wrong} == {
        (1, "update", UP)
    }
