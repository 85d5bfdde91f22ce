"""How often the first line names the right rank when one is killed at a random moment; and what remains of the harness's own
processes being killed.

    python benchmarks/kills.py ranks --times 100 --seed 1
    python benchmarks/kills.py server --times 10
    python benchmarks/kills.py harness --times 10
    python benchmarks/kills.py harness --times 10 --server resident
    python benchmarks/kills.py resident --times 10

The first argument says what gets a random signal at a random moment of its life:

    ranks              a random rank of a random case, all in one harness
    server, harness    the rank server of a separate `harness run`, or that command itself
    resident           the resident process, which must not harm the command under way

Linux only: it looks into /proc. A kill of a process that had already ended is not counted, and another is drawn.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT
from harness.core.case.case import Case
from harness.core.case.launching import SERVERS
from harness.core.case.loading import find_case, load_all
from harness.core.judge.result import Verdict
from harness.core.launch import default_server
from harness.core.launch.leftovers import find_leftovers
from harness.core.launch.local import LocalRanks
from harness.core.launch.resident_client import stop_servers
from harness.core.report.text import headline
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

CASES = ("fsdp_4", "tp_2", "cp_2", "pp_2", "hsdp_2x2")
FATAL = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV)
SIGNALS = {
    "ranks": (*FATAL, signal.SIGSTOP),
    "server": (*FATAL, signal.SIGSTOP),
    "resident": (*FATAL, signal.SIGSTOP),
    "harness": (*FATAL, signal.SIGINT),
}
LIMIT = 20.0  # seconds for a launch: what a stopped process costs
MARK = "KILLS_MARK"


@dataclass(frozen=True)
class Kill:
    """A kill and its result.

    number: the signal. where: what was killed, and when. told: the first line that the harness printed. right: the
    verdict named the rank, or the exit code is the one that is due. seconds: until the harness ended. left: the number
    of processes, or unfinished files, that were left.
    """

    number: signal.Signals
    where: str
    told: str
    right: bool
    seconds: float
    left: int


# ---- ranks


def kill_ranks(times: int, draw: random.Random, out: Path, jobs: int) -> Iterator[Kill]:
    """Yield so many kills of random ranks of random cases, `jobs` at a time. Kills that came too late are drawn again."""
    cases = [find_case(name, load_all()) for name in CASES]
    spans = {case.name: lifetime(case, out / "unharmed") for case in cases}
    seeds = iter(range(draw.randrange(10**6), 10**7))
    with ThreadPoolExecutor(jobs) as pool:
        done = 0
        while done < times:
            drawn = [random.Random(next(seeds)) for _ in range(min(jobs * 4, times - done))]
            found = pool.map(lambda each: kill_rank(cases, spans, each, out), drawn)
            for kill in filter(None, found):
                done += 1
                yield kill


def lifetime(case: Case, out: Path) -> float:
    """Return the seconds that the case's ranks live without any kill, the reference not counted.

    It runs the case twice.
    """
    run_case(case, Options(out=out))
    return run_case(case, Options(out=out)).seconds


def kill_rank(cases: list[Case], spans: dict[str, float], draw: random.Random, out: Path) -> Kill | None:
    """Run a random case and send a random signal to a random rank at a random moment. None if the rank had ended by then.

    spans: the lifetime of each case, in seconds.
    """
    case, number = draw.choice(cases), draw.choice(SIGNALS["ranks"])
    rank, moment = draw.randrange(case.dims.world_size), draw.uniform(0, spans[case.name])
    folder = Path(tempfile.mkdtemp(dir=out))
    (folder / ".reference").symlink_to((out / "unharmed" / ".reference").resolve())
    hit: list[float] = []
    killer = threading.Thread(target=shoot, args=(folder, rank, number, moment, hit))
    killer.start()
    began = time.monotonic()
    judgement = run_case(case, Options(out=folder, timeout=LIMIT))
    seconds = time.monotonic() - began
    killer.join()
    if not hit or judgement.verdict is Verdict.PASS:  # it had ended already
        return None
    told = headline(judgement).removeprefix(f"FAIL {case.name}").strip()
    named = "stopped" if number is signal.SIGSTOP else f"died by {number.name}"
    right = told.startswith(f"rank {rank} ") and named in told
    where = f"{case.name} rank {rank} after {moment:.2f} of {spans[case.name]:.2f} s"
    return Kill(number, where, told, right, seconds, len(list(folder.rglob("*.partial"))))


def shoot(folder: Path, rank: int, number: int, moment: float, hit: list[float]) -> None:
    """Wait until the rank has lived for `moment` seconds, send it the signal and append the time to `hit`.

    Nothing is sent if the rank has ended, or does not begin within a minute.
    """
    give_up = time.monotonic() + 60
    while (ranks := job_in(folder)) is None or rank not in ranks.pids:
        if time.monotonic() > give_up:
            return
        time.sleep(0.005)
    time.sleep(moment)
    if rank not in ranks.statuses and Path(f"/proc/{ranks.pids[rank]}").exists():
        os.kill(ranks.pids[rank], number)
        hit.append(time.monotonic())


def job_in(folder: Path) -> LocalRanks | None:
    """Return the job of this process's rank server whose files are in the folder; None if there is none."""
    jobs = list(default_server().jobs.values())
    return next((job for job in jobs if folder.resolve() in job.job_file.parents), None)


# ---- the harness's own processes


def kill_processes(what: str, kind: str, times: int, draw: random.Random, out: Path) -> Iterator[Kill]:
    """Yield so many kills of a process of the harness: "server", "harness" or "resident".

    Kills that came too late are drawn again.
    """
    done = 0
    while done < times:
        number, name = draw.choice(SIGNALS[what]), draw.choice(CASES)
        kill = kill_process(what, kind, name, number, draw.uniform(0, 1), out)
        if kill is not None:
            done += 1
            yield kill


def kill_process(what: str, kind: str, name: str, number: signal.Signals, moment: float, out: Path) -> Kill | None:
    """Start `harness run` on a case and send the signal to one of its processes, `moment` * 2 seconds after ranks have
    begun.

    None if the command or its ranks had ended by then.
    """
    folder, mark = Path(tempfile.mkdtemp(dir=out)), f"{MARK}={time.time_ns()}"
    command = [sys.executable, "-m", "harness", "run", name, "--out", str(folder), "--timeout", str(LIMIT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kind == "own":
        environment |= dict([mark.split("=")])  # another mark would be another environment, so another resident
    with open(folder / "output.txt", "w") as output:
        run = subprocess.Popen(
            [*command, "--server", kind], env=environment, stdout=output, stderr=output, cwd=ROOT, preexec_fn=heed
        )
    pid = victim(what, run.pid, folder)
    time.sleep(moment * 2)
    if pid is None or run.poll() is not None:
        run.wait()
        return None
    began = time.monotonic()
    os.kill(pid, number)
    code = run.wait()
    seconds = time.monotonic() - began
    time.sleep(3.0)  # what is left may see by itself that it is alone
    due = {"server": 2, "resident": 0}.get(what, 130 if number is signal.SIGINT else -number)
    printed = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
    if what != "resident" and printed and printed[0].startswith("PASS"):  # its ranks had ended already
        return None
    told = f"exit code {code}: {printed[0] if printed else ''}"
    left = alive_with(mark) if kind == "own" else alive_of_residents(folder)
    return Kill(number, f"{what} of {name}", told, code == due, seconds, len(left))


def alive_of_residents(folder: Path) -> list[int]:
    """Return the pids of living ranks, their children, and servers of commands, all but the resident servers, which
    lead sessions."""
    found = {each.pid for launch in folder.glob("*/job.json") for each in find_leftovers(launch.parent, range(16))}
    found |= {each.pid for launch in folder.glob("*/*/job.json") for each in find_leftovers(launch.parent, range(16))}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = os.environ["XDG_RUNTIME_DIR"].encode() in (process / "cmdline").read_bytes()
            if ours and os.getsid(int(process.name)) != int(process.name):
                found.add(int(process.name))
        except OSError:  # it ended as we looked
            continue
    return sorted(found)


def heed() -> None:
    """Let Ctrl-C end the process, also where it is a shell's background job, which ignores Ctrl-C.

    Called in the child.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def victim(what: str, harness: int, folder: Path) -> int | None:
    """Return the pid of the process to kill, once ranks of the case have begun.

    None if they, or the command, have ended.
    """
    give_up = time.monotonic() + 120
    while not (ranks := forked_in(folder)):
        if time.monotonic() > give_up or Path(f"/proc/{harness}/stat").read_text().split()[2] == "Z":
            return None
        time.sleep(0.02)
    try:
        server = parent_of(ranks[0])
        return {"harness": harness, "server": server, "resident": parent_of(server)}[what]
    except OSError:  # they have ended
        return None


def forked_in(folder: Path) -> list[int]:
    """Return the pids of the living ranks of the first launch in the folder."""
    launches = [path.parents[1] for path in folder.glob("*/run/inflight/*.groups")]
    found = [each for launch in launches[:1] for each in find_leftovers(launch, range(16))]
    return [each.pid for each in found if each.command == "forked from the rank"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive_with(mark: str) -> list[int]:
    """Return the pids of the processes whose environment has this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it ended as we looked
            continue
    return found


# ---- the table


def table(kills: list[Kill]) -> str:
    """Return a table of kills by signal, and of all: their number, how many were right, median and longest seconds, and
    left."""
    lines = [f"{'signal':<10}{'kills':>6}{'right':>7}{'median s':>10}{'longest s':>11}{'left':>6}"]
    for number, count in sorted(Counter(kill.number for kill in kills).items()):
        some = [kill for kill in kills if kill.number is number]
        lines.append(row(number.name, count, some))
    return "\n".join([*lines, row("all", len(kills), kills)])


def row(name: str, count: int, kills: list[Kill]) -> str:
    seconds, right = sorted(kill.seconds for kill in kills), sum(kill.right for kill in kills)
    left = sum(kill.left for kill in kills)
    return f"{name:<10}{count:>6}{right:>7}{seconds[len(seconds) // 2]:>10.1f}{seconds[-1]:>11.1f}{left:>6}"


def main() -> None:
    """Make the kills, print those that were not right or left something, and the table."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(SIGNALS))
    parser.add_argument("--server", choices=SERVERS, default="own", help="for kills of server and harness")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, help="kills of ranks at the same time")
    parser.add_argument("--out", type=Path, default=None, help="kept there; else in a temporary folder, deleted")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_RUNTIME_DIR"] = temporary  # residents of this run's own
        out = args.out or Path(temporary, "out")
        out.mkdir(parents=True, exist_ok=True)
        kind = "resident" if args.what == "resident" else args.server
        found = (
            kill_ranks(args.times, draw, out, args.jobs)
            if args.what == "ranks"
            else kill_processes(args.what, kind, args.times, draw, out)
        )
        kills = []
        for kill in found:
            kills.append(kill)
            if not kill.right or kill.left:
                print(f"{kill.number.name}, {kill.where}, left {kill.left}: {kill.told}", flush=True)
        print(table(kills))
        stop_servers()


if __name__ == "__main__":
    main()
