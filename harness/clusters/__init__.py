"""Pre-flight: some ranks of a layout, each run alone, without data, memory or peers, before a cluster is spent on it.

world.py         torch's process groups that lead nowhere, of any size.
imagined.py      patches with which torch works on tensors without memory.
neighbours.py    the shapes that the other stages of a pipeline would have sent.
lone_rank.py     the work of one process.
unable.py        why a rank could not run, where that says nothing of the trainer.
chosen.py        which ranks are run.
commands.py      instead of a trainer with an adapter, a user's command; scripted.py is in its processes.
config_file.py   torchtitan's options as a case; config_function.py: as a user's function returns them.
launches.py      a process each, as many at a time as there are cores.
judging.py       the trial of those ranks, for the same checks.
figures.py       the bytes that ranks hold, move and need at the most, in a few lines.
text.py          the verdict, of how many ranks it is proven, and of which it is not.
"""

from __future__ import annotations

from harness.core.rings import Ring

RING = Ring(
    commands={
        "plan": "show what a case's layout must look like, and what it costs",
        "preflight": "judge a large layout on this machine: some ranks, each alone",
    },
    called={"layout_of_traces": "harness.clusters.request:layout_of_traces"},
)
