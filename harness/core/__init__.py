"""From a case in YAML to a verdict: whoever wants `pytest -k hsdp` reads this package, and no other.

    case/       what is requested: degrees, features, the recipe, the model.
    plan/       what must be true of it: groups, slices, traffic, memory, and what it costs.
    trainers/   the interface of an adapter, and the Llama 3 trainer that comes with the harness.
    launch/     ranks are started, watched and ended.
    probe/      what one rank observes about itself.
    evidence/   what was seen, and how it is stored.
    checks/     one check a file; judge/ has what several of them compute.
    causes/     why checks fail: an assumption is judged again, else the place is named.
    report/     verdicts as text, grid, JSON, pictures and pages.
    run/        one case, or a matrix of them, from its launch to its verdict.
    cli/        run, check, matrix and golden; plugin/: the same for pytest.

It imports no ring. What a ring brings it finds in rings.py, by name.
"""
