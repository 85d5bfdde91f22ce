"""Many runs: what changed since earlier ones, which commit did it, and which cases a change can affect.

    affected/   which functions each case runs, and which cases a change can affect: `matrix --changed`.
    bisect/     which commit of a trainer, or version of a package, fails a check.
    cli/        nightly, bisect, and report and compare, which show what is stored of runs, nights and recordings.
    pages/      a run for a CI job: markdown, JUnit, pictures.

Ray's nodes run the cases of a matrix: ray_cluster.py.
"""

from __future__ import annotations

from harness.core.rings import Ring

RING = Ring(
    commands={
        "report": "show what is stored: a case, a run, a recording, many nights",
        "compare": "say what differs between two runs, or two recorded jobs",
        "bisect": "find what failed a check: a commit of a trainer, or a version of a package",
        "nightly": "run the matrix, say what changed since earlier nights, and find the commits",
    },
    options={"matrix": "harness.nights.cli.changed_options:add"},
    run_options=("harness.nights.cli.work.changed_options:map_option",),
    selections=("harness.nights.cli.work.changed_options:select_changed",),
    machines=("harness.nights.cli.work.changed_options:cluster_of_options",),
    rank_wrappers={"record_functions_of": "harness.nights.affected.in_rank:recording_functions"},
    judged=("harness.nights.mapping:keep_map",),
)
