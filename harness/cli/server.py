"""`harness server`: the processes that stay after a command, with torch imported, and fork the ranks of the next ones."""

from __future__ import annotations

import argparse
from typing import Any

from harness.cli.exit_codes import PASSED
from harness.cli.options import add_command
from harness.launch import resident_client
from harness.report.output import say


def add(commands: Any) -> None:
    parser = add_command(
        commands, "server", command, "show or end the processes that stay to fork the next ranks", json=False
    )
    parser.add_argument("what", choices=("status", "stop"), metavar="status|stop")
    parser.add_argument("--all", action="store_true", help="stop also those of other environments, of this user")


def command(args: argparse.Namespace) -> int:
    """Of other environments' servers `stop` says that they stay."""
    stop = args.what == "stop"
    found = resident_client.stop(every=args.all) if stop else resident_client.status_of_all()
    lines = [line(server, stop=stop and (args.all or not server.get("stays"))) for server in found]
    if stop and not args.all and any(server.get("stays") for server in found):
        lines.append("what stays is of other environments; `harness server stop --all` ends it too")
    say(*(lines or ["no rank server stays here"]))
    return PASSED


def line(server: dict[str, Any], *, stop: bool) -> str:
    if "commands" not in server:
        ends = ": killed" if stop else "; `harness server stop` of its environment kills it"
        return f"pid {server['pid']} does not answer{ends}"
    served = f"{server['commands']} command{'s' * (server['commands'] != 1)}"
    if stop:
        state = f"ends with the {served} that it serves" if server["commands"] else "ended"
    elif server["commands"]:
        state = f"serves {served}"
    else:
        state = f"ends in {server['ends'] - server['idle']:.0f} s unless a command comes"
    return f"pid {server['pid']} {state}: torch {server['torch']}, harness of {server['root']}"
