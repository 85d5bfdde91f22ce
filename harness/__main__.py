"""`python -m harness`: the same as the script `harness`."""

import sys


def main() -> int:
    try:
        from harness.cli import main as command_line
    except KeyboardInterrupt:
        return 130
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
