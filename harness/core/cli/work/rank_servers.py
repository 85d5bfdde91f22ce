"""The processes that stay after a command, with torch imported, and fork the ranks of the next commands."""

from __future__ import annotations

from typing import Any

from harness.core.cli.run import END_ALL, SHOW
from harness.core.launch import resident_client
from harness.core.report.output import say


def shown_or_ended(what: str) -> None:
    """Print a line for each of this user's servers. `end` leaves those of other environments, and says so."""
    every, stop = what == END_ALL, what != SHOW
    found = resident_client.stop(every=every) if stop else resident_client.status_of_all()
    lines = [line(server, stop=stop and (every or not server.get("stays"))) for server in found]
    if stop and not every and any(server.get("stays") for server in found):
        lines.append("what is left is of other environments; `harness run --server end-all` ends it too")
    say(*(lines or ["no rank server is here"]))


def line(server: dict[str, Any], *, stop: bool) -> str:
    if "commands" not in server:
        ends = ": killed" if stop else "; `harness run --server end` of its environment kills it"
        return f"pid {server['pid']} does not answer{ends}"
    served = f"{server['commands']} command{'s' * (server['commands'] != 1)}"
    if stop:
        state = f"ends with the {served} that it serves" if server["commands"] else "ended"
    elif server["commands"]:
        state = f"serves {served}"
    else:
        state = f"ends in {server['ends'] - server['idle']:.0f} s unless a command comes"
    return f"pid {server['pid']} {state}: torch {server['torch']}, harness of {server['root']}"
