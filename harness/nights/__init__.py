"""Many runs: what changed since earlier ones, which commit did it, and which cases a change can affect.

    affected/   which functions each case runs, and which cases a change can affect: `matrix --changed`.
    bisect/     which commit of a trainer, or version of a package, fails a check.
    cli/        nightly, bisect, and report and compare, which show what is stored of runs, nights and recordings.
    pages/      a run for a CI job: markdown, JUnit, pictures.

Ray's nodes run the cases of a matrix: ray_cluster.py.
"""
