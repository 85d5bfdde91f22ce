"""`harness server`: the processes that stay after a command, with torch imported, and fork the ranks of the next ones."""

from __future__ import annotations

import argparse
from typing import Any

from harness.cli.exit_codes import PASSED
from harness.cli.options import add_command
from harness.launch.resident_client import status_of_all, stop_all
from harness.report.output import say


def add(commands: Any) -> None:
    parser = add_command(commands, "server", command, "show or end the processes that stay to fork the next ranks")
    parser.add_argument("what", choices=("status", "stop"), metavar="status|stop")


def command(args: argparse.Namespace) -> int:
    stop = args.what == "stop"
    found = stop_all() if stop else status_of_all()
    say(*([line(server, stop) for server in found] or ["no rank server stays here"]))
    return PASSED


def line(server: dict[str, Any], stop: bool) -> str:
    if "commands" not in server:
        return f"pid {server['pid']} does not answer" + (": killed" if stop else "; `harness server stop` kills it")
    served = f"{server['commands']} command{'s' * (server['commands'] != 1)}"
    if stop:
        state = f"ends with the {served} that it serves" if server["commands"] else "ended"
    elif server["commands"]:
        state = f"serves {served}"
    else:
        state = f"ends in {server['ends'] - server['idle']:.0f} s unless a command comes"
    return f"pid {server['pid']} {state}: torch {server['torch']}, harness of {server['root']}"
