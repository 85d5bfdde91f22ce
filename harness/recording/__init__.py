"""What any training job really does, recorded in its ranks while it runs: nothing in its script changes.

    injection     one variable of the environment brings the recorder into every Python process of a command.
    site          the folder that this variable names; Python runs the file in it when it starts.
    entry         what these processes call; it refuses a torch that lacks what the recorder relies on.
    judged/       a recording judged, by a declared layout or by a recording that is trusted; pages/: shown.
    traces/       profiler traces and Flight Recorder dumps, read as evidence of a job's ranks.
    cli/          what can be typed: record; and what other commands do with a recording.
    recorder      in a rank: the probe's observers, put on whatever model and optimizers the script turns out to have.
    digests       what a tensor holds, in one number, computed where the tensor lies.

In a rank it needs torch, numpy and the standard library.
"""

from __future__ import annotations

from harness.core.rings import Ring

RING = Ring(
    commands={"record": "run any training command, not edited, and record what its ranks do"},
    comparing=("initial_weights", "samples", "recipe", "gradients", "grad_norm", "optimizer_state", "update"),
    called={"same_training": "harness.recording.same_training:compare_commands"},
)
