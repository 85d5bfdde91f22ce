"""`python -m harness`: the same as the script `harness`."""

import os
import sys


def main() -> int:
    """Run the harness's command line and return its exit code.

    2, with a message, if standard output is closed or Python removes docstrings; 130 for Ctrl-C while it imports.
    """
    if sys.stderr is None:  # it was closed: without a stream, messages would go to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        print("harness: standard output is closed, so nothing can be shown; nothing was done", file=sys.stderr)
        return 2
    if sys.flags.optimize > 1:
        print(
            "harness: PYTHONOPTIMIZE=2 and -OO remove docstrings, in which checks are stated; unset it", file=sys.stderr
        )
        return 2
    try:
        from harness.core.cli import main as command_line
    except KeyboardInterrupt:
        return 130
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
