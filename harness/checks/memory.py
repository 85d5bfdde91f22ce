"""Between steps a rank keeps the bytes of its slices and no more: parameters, gradients and optimizer state.

The plan allows the padding of uneven chunks. Gradients may be freed; AdamW's state is two numbers a parameter.
"""

from __future__ import annotations

from harness.checks import verdict_of
from harness.trial import Finding, Result, Trial, bytes_text

STAGE = "structure"

COPIES = {"adamw": 2, "sgd": 0}


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    copies = COPIES[trial.case.training.optimizer]
    for rank, evidence in sorted(trial.ranks.items()):
        least, most = trial.plan.parameter_bytes[rank]
        wanted = {"parameters": (least, most), "gradients": (0, most)}
        wanted["optimizer_state"] = (copies * least, copies * most)
        for step in evidence.steps:
            for kind, (low, high) in wanted.items():
                examined += 1
                held = step.memory.get(kind, 0)
                if not low <= held <= high:
                    planned = bytes_text(low) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
                    findings.append(Finding(f"rank {rank}, step {step.step}, {kind}", planned, bytes_text(held)))
    return verdict_of("memory", findings, examined)
