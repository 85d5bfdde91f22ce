"""Which names are offered for one that does not exist."""

import pytest

from harness.core.evidence.near_names import did_you_mean, near_names

CASES = ["fsdp_2", "hsdp_2x2", "hsdp_2x2_tp_2", "hsdp_2x8", "hsdp_4x2", "muon_single"]
TRAINING_KEYS = ["steps", "global_batch", "seq_len", "quantize", "max_norm", "lr"]


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("hsdp", CASES, ["hsdp_2x2", "hsdp_2x8", "hsdp_4x2"]),
        ("hsdp_2x3", CASES, ["hsdp_2x2", "hsdp_2x8"]),
        ("nonsense", CASES, []),
        ("", CASES, []),
        ("batch_size", TRAINING_KEYS, ["global_batch"]),
        ("max_nrom", TRAINING_KEYS, ["max_norm"]),
        ("['lr']", TRAINING_KEYS, ["lr"]),
        ("--bis", ["--bisect", "--json"], ["--bisect"]),
        ("--", ["--bisect", "--json"], []),
        ("dq", ["dp", "tp"], ["dp"]),
        ("x", [], []),
    ],
)
def test_near_names_are_those_that_begin_alike_or_are_spelled_alike_or_share_a_part(word, known, near):
    assert near_names(word, known) == near


def test_the_question_names_all_near_names():
    assert did_you_mean("hsdp", CASES) == " (did you mean 'hsdp_2x2', 'hsdp_2x8' or 'hsdp_4x2'?)"
    assert did_you_mean("max_nrom", TRAINING_KEYS) == " (did you mean 'max_norm'?)"
    assert did_you_mean("nonsense", CASES) == ""
