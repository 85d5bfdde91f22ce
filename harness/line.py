"""The straight line: case -> launch -> evidence -> trial -> judgement. `run_case` acts, `judge_folder` only reads.

One folder holds all that is known of one run of a case and can be judged anywhere, later:

    case.json        the case            run/         the launch: job, logs, ranks/rank_00.npz, run.json
    reference.npz    the oracle          repeat/      the second launch, where the case asks for one
    report.txt       what was found      verdict.json the same, for programs
    saved_1 ..       earlier launches, each with what its checkpoint holds (checkpoint.npz)
    checkpoint/      what they saved, kept only if the case does not pass
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from harness import ROOT, golden, releases, trainers
from harness.case import Case, CaseError, ExpectedFailure, from_json, to_json
from harness.checks import judge
from harness.clipping import before_clipping
from harness.diagnose import diagnose
from harness.evidence import EvidenceError, Run, load, load_run, save_run, write_text
from harness.folders import folder_of, fresh_folder
from harness.format import version_of
from harness.launch import Exit, Job, launch
from harness.limits import too_much_memory
from harness.plan import make_plan
from harness.trial import Diagnosis, Result, Trial, Verdict, as_planned
from harness.units import observed_units
from reference.record import ReferenceRun

RANK_ENTRY = "harness.testify:rank"
CHECKPOINT = "checkpoint"
UNWATCHED_ENTRY = "harness.testify:unwatched"
CHECKPOINT_ENTRY = "harness.testify:checkpoint"
REFERENCE_ENTRY = "harness.testify:reference"
ORACLE_PACKAGES = ("torch", "numpy", "torchao")  # what the reference's numbers depend on, besides its sources
PATIENCE = 5  # with ranks that have to compile before their first step ends: times the time limit


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: but for `fault`, nothing here may change a verdict. timeout: seconds for one launch.

    torchrun_args: for several nodes, in place of "--standalone --nproc-per-node WORLD_SIZE"; `out` must be shared.
    """

    out: Path = Path("out")
    trainer: str = "llama3"
    launcher: str = "local"
    device: str = "cpu"
    timeout: float = 120.0
    fault: str | None = None
    torchrun_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    case: Case
    folder: Path
    results: tuple[Result, ...]
    diagnosis: Diagnosis | None
    seconds: float
    fault: str | None = None
    fired: bool | None = None
    trainer: str = "llama3"
    made: dict[str, str] = field(default_factory=dict)

    @property
    def replaced(self) -> list[str]:
        """What of the trainer did not run as its users run it."""
        return self.made.get("replaced", "").splitlines()

    @property
    def verdict(self) -> Verdict:
        """FAIL if any law is broken, else UNKNOWN if any could not be judged; a run in which nothing passed is UNKNOWN.

        A case that is expected to fail does so with exactly its laws and its cause, or is a FAIL; where nothing is broken and
        something could not be judged, nobody knows.
        """
        verdicts = {result.verdict for result in self.results}
        if (expected := self.expected_failure) is not None:
            if self._fails_as_expected(expected):
                return Verdict.XFAIL
            unknown = Verdict.UNKNOWN in verdicts and Verdict.FAIL not in verdicts
            return Verdict.UNKNOWN if unknown else Verdict.FAIL
        for verdict in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS):
            if verdict in verdicts:
                return verdict
        return Verdict.UNKNOWN

    @property
    def expected_failure(self) -> ExpectedFailure | None:
        """What is expected of this run: nothing of one with a fault, or on a torch that does not get it wrong."""
        expected = self.case.expected_failure
        if expected is None or self.fault is not None:
            return None
        on_this = not expected.torch or releases.holds(expected.torch, self.made.get("torch", ""))
        return expected if on_this else None

    def _fails_as_expected(self, expected: ExpectedFailure) -> bool:
        broken = {result.check for result in self.results if result.verdict is Verdict.FAIL}
        unknown = {result.check for result in self.results if result.verdict is Verdict.UNKNOWN}
        cause = self.diagnosis.cause if self.diagnosis else ""
        # Ranks that die leave nothing to judge the other laws by.
        return (
            broken == set(expected.laws.split()) and expected.named in cause and (not unknown or "completed" in broken)
        )


class Unsupported(Exception):
    """The trainer, or this machine, cannot run the case; the message is the reason. Not a verdict."""


def run_case(case: Case, options: Options) -> Judgement:
    """The whole line. Raises Unsupported, CaseError, EvidenceError, LaunchError; a failing rank is a finding, not an error."""
    reason = unsupported(case, options)
    if reason:
        raise Unsupported(reason)
    case = owned(case, trainers.load(options.trainer))
    for launched in case.launches.values():
        make_plan(launched)
    started = time.monotonic()
    cached = reference_folder(case, options)
    folder = folder_of(case, options)
    with _only_one(options.out / ".locks" / f"{folder.name}.lock"):
        fresh_folder(folder)
        write_text(folder / "case.json", json.dumps(to_json(case), indent=1))
        _link(cached / "reference.npz", folder / "reference.npz")
        _launch_all(case, folder, cached / "weights.npz", options)
        judgement = judge_folder(folder, seconds=time.monotonic() - started)
        store_report(judgement)
        if judgement.verdict is Verdict.PASS:  # both sides of every checkpoint are in the ranks' evidence
            shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    return judgement


def _launch_all(case: Case, folder: Path, weights: Path, options: Options) -> None:
    """One launch after the other; none after one that failed, for it would have nothing to resume from."""
    launches = case.launches | ({"repeat": case} if case.runs > 1 else {})
    failed = ""
    for name, launched in launches.items():
        if failed:
            exits = tuple(
                Exit(rank, "lost", error=f"not started: {failed} failed") for rank in range(launched.dims.world_size)
            )
            save_run(
                Run(
                    str(folder / name),
                    launched.dims.world_size,
                    exits,
                    {},
                    fault=options.fault,
                    trainer=options.trainer,
                    made=_made(case, options),
                )
            )
        elif not _testify(launched, folder / name, weights, options) and launched.last_step is not None:
            failed = name


def judge_folder(folder: Path, seconds: float | None = None) -> Judgement:
    """Judges stored evidence: reads and computes; starts nothing, writes nothing. Raises EvidenceError."""
    trial = load_trial(folder)
    results = judge(trial)
    return Judgement(
        case=trial.case,
        folder=folder,
        results=results,
        diagnosis=diagnose(trial, results),
        seconds=sum(launched.run.seconds for launched in trial.launches) if seconds is None else seconds,
        fault=trial.run.fault,
        fired=_fired(trial, folder),
        trainer=trial.run.trainer,
        made=trial.run.made,
    )


def _fired(trial: Trial, folder: Path) -> bool | None:
    """Whether the fault's code ran on some rank, even one that died of it; None without a fault."""
    if trial.run.fault is None:
        return None
    told = (evidence.fault for launched in trial.launches for evidence in launched.ranks.values())
    return any(told) or any(folder.glob("*/ranks/*.fired"))


def displayed_losses(case: Case, options: Options, folder: Path, *, steps: int) -> tuple[float, ...]:
    """What rank 0 displays in the last steps of a longer run of the case that nobody watches, resumed like the case; of a
    step that two launches train the first. Nothing if a rank failed."""
    most = max(steps, case.training.steps) if case.resume and case.resume[-1].after >= steps else steps
    longer = replace(case, training=replace(case.training, steps=most))
    weights = reference_folder(case, options) / "weights.npz"
    losses: dict[int, float] = {}
    for name, launched in longer.launches.items():
        exits = _launch_ranks(launched, folder / name, weights, options, entry=UNWATCHED_ENTRY)
        if any(exit.how != "ok" for exit in exits):
            return ()
        losses = dict(json.loads((folder / name / "losses.json").read_text(encoding="utf-8"))) | losses
    return tuple(losses[step] for step in sorted(losses)[-steps:])


def load_trial(folder: Path) -> Trial:
    """Raises EvidenceError if the folder is not one that `harness run` wrote."""
    path = folder / "case.json"
    try:
        case = from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise EvidenceError(f"{path}: no such file; `harness check` wants a folder that `harness run` wrote") from error
    except CaseError as error:
        raise EvidenceError(f"{path}: not a case of this version of the harness ({error}); run it again") from error
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: damaged ({error}); run the case again") from error
    accepted, problem = None, ""
    try:
        accepted = golden.load(case)
    except golden.GoldenError as error:
        problem = str(error)
    reference = load(folder / "reference.npz", ReferenceRun)
    trials: list[Trial] = []
    for name, launched in case.launches.items():
        run = load_run(folder / name)
        trial = Trial(
            case=launched,
            plan=make_plan(launched, observed_units(launched, run.ranks), torch=torch_of(run)),
            run=run,
            reference=reference,
            repeat=load_run(folder / "repeat") if launched.runs > 1 else None,
            golden=accepted,
            golden_problem=problem,
            saved=tuple(trials),
        )
        trials.append(before_clipping(as_planned(trial)))
    return trials[-1]


def torch_of(run: Run) -> str:
    """The release that the ranks ran, as they tell; without any evidence of theirs, what was installed where they started."""
    told = (evidence.environment.get("torch", "") for evidence in run.ranks.values())
    return next(filter(None, told), run.made.get("torch", ""))


def owned(case: Case, trainer: trainers.Adapter) -> Case:
    """The case with the trainer's choices in every launch."""
    earlier = (trainer.own(launched).features for launched in case.launches.values())
    resume = tuple(
        dataclasses.replace(saved, features=features) for saved, features in zip(case.resume, earlier, strict=False)
    )
    return dataclasses.replace(trainer.own(case), resume=resume)


def unsupported(case: Case, options: Options) -> str | None:
    """Why the case cannot run here: the trainer's reason, or the machine's."""
    adapter = trainers.load(options.trainer)
    for name, launched in case.launches.items():
        if reason := other_dtype(launched, adapter) or adapter.unsupported(launched):
            return reason if name == "run" else f"{name}: {reason}"
    if case.resume and options.torchrun_args:
        return "resume means several launches, and other nodes join one (--torchrun-args); run it on one node"
    if case.runs > 1 and options.torchrun_args:
        return "runs 2 means two launches, and other nodes join one (--torchrun-args); run it on one node"
    if reason := too_much_memory(case) or _too_few_descriptors(case):
        return reason
    on_cp = any(launched.dims.cp > 1 for launched in case.launches.values())
    if options.device == "cuda" and on_cp and case.training.dtype == "float64":
        return "float64 with cp on GPUs: no fused attention kernel takes float64, and torch's ring attention needs one"
    if options.device == "cuda" and options.launcher == "local":
        visible = visible_gpus()
        wanted = max(launched.dims.world_size for launched in case.launches.values())
        if wanted > visible:
            return f"needs {wanted} GPUs, {visible} visible (CUDA_VISIBLE_DEVICES or more machines)"
    return None


def other_dtype(case: Case, adapter: trainers.Adapter) -> str | None:
    """Why a trainer cannot compute in the case's dtype, and the command with which it is judged in one that it can."""
    if case.training.dtype in adapter.dtypes:
        return None
    known = " and ".join(adapter.dtypes)
    return f"dtype {case.training.dtype}: {adapter.name} computes in {known} only; add --dtype {adapter.dtypes[0]}"


def _too_few_descriptors(case: Case) -> str:
    """16 ranks were seen to use 53 each. Below the limit a rank dies in a socket, which reads like the trainer's mistake."""
    most = max(launched.dims.world_size for launched in case.launches.values())
    needed, allowed = 32 + 8 * most, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        return f"{most} ranks may need {needed} file descriptors each, {allowed} are allowed; `ulimit -n {needed}`"
    return ""


def visible_gpus() -> int:
    """Counted without touching CUDA, which ranks forked from here could not use any more."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


# ---- folders


def _link(source: Path, target: Path) -> None:
    """A hard link where the file system has them, so that ten cases of one recipe share one file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# ---- the reference, computed once for a recipe


def reference_folder(case: Case, options: Options, noise: Sequence[str] | None = None) -> Path:
    """Where the recipe's reference lies, computed now if it was not: keyed by recipe, reference sources and versions.

    noise: what to measure besides, by Case.noise_key; None: what this case needs and no golden can tell.
    """
    noise = _unknown_noise(case, options) if noise is None else noise
    measured = "".join(f"-{key.replace(' ', '-')}" for key in noise)
    folder = options.out / ".reference" / f"{golden.recipe_name(case)}-{_oracle_key(case)}-{options.device}{measured}"
    with _only_one(folder.with_suffix(".lock")):
        if not (folder / "reference.npz").exists():
            _launch_reference(case, folder, options, noise)
    return folder


def _unknown_noise(case: Case, options: Options) -> tuple[str, ...]:
    """Goldens hold the noise of the recipes in cases/ on CPU; another recipe, seed or device has its own, measured once."""
    known = options.device == "cpu" and (case.file or _golden_knows(case))
    return () if case.exact or known else (case.noise_key,)


def _golden_knows(case: Case) -> bool:
    """A recipe of no file may be that of one all the same."""
    try:
        noise = golden.load(case).noise.get(case.noise_key)
    except golden.GoldenError:
        return False
    return noise is not None and set(noise.distance) == set(case.model.parameter_shapes())


def _oracle_key(case: Case) -> str:
    digest = hashlib.sha256()
    for source in sorted((ROOT / "reference").glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(version_of(ReferenceRun).encode())
    for package in ORACLE_PACKAGES:
        digest.update(f"{package} {_version(package)}".encode())
    if case.training.data is not None and Path(case.training.data).exists():
        stat = Path(case.training.data).stat()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:8]


def _version(package: str) -> str:
    """Empty where it is not installed: torchao is needed by recipes in 8 bits only."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """One process and one thread at a time; the kernel releases the lock of a process that died."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "w", encoding="utf-8")  # noqa: SIM115 - held while the caller works
    except OSError as error:
        raise EvidenceError(f"{lock.parent}: cannot be written: {error.strerror}; choose another --out") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _launch_reference(case: Case, folder: Path, options: Options, noise: Sequence[str]) -> None:
    fresh = folder.with_name(folder.name + ".partial")
    if fresh.exists():
        shutil.rmtree(fresh)
    wanted = {"case": to_json(case), "directory": str(fresh.resolve()), "device": options.device, "noise": noise}
    job = Job(fresh, 1, REFERENCE_ENTRY, wanted, timeout=max(options.timeout, 600.0), device=options.device)
    exits = launch(job)
    if exits[0].how != "ok":
        problem = f"{exits[0].error or exits[0].signal}\n{exits[0].stack}".rstrip()
        raise EvidenceError(f"the reference run of case {case.name!r} failed, nothing can be judged: {problem}")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _testify(case: Case, folder: Path, weights: Path, options: Options) -> bool:
    """Whether all ranks ended well."""
    started, made = time.monotonic(), _made(case, options)
    exits = _launch_ranks(case, folder, weights, options, entry=RANK_ENTRY)
    run = Run(
        str(folder),
        case.dims.world_size,
        tuple(exits),
        {},
        seconds=time.monotonic() - started,
        fault=options.fault,
        trainer=options.trainer,
        made=made,
    )
    save_run(run)
    ended_well = all(exit.how == "ok" for exit in exits)
    if ended_well and case.saved_step is not None:
        launch(Job(folder / CHECKPOINT, 1, CHECKPOINT_ENTRY, _wanted(case, folder, weights, options)))
    return ended_well


def _made(case: Case, options: Options) -> dict[str, str]:
    name, _, source = options.trainer.partition("@")
    own = str(Path(name).parent) if name.endswith(".py") else str(ROOT)
    replaced = trainers.load(options.trainer).replaced(case, options.device)
    return {
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "torch": importlib.metadata.version("torch"),
        "commit": commit_of(source or own),
        "device": options.device,
        "launcher": options.launcher,
        **({"replaced": "\n".join(replaced)} if replaced else {}),
    }


def commit_of(source: str) -> str:
    """Of the trainer's sources, "-dirty" if they were changed since; empty where git knows of none: a release that pip laid
    into OUT is not of the commit around it."""
    if ".environments" in Path(source).parts:
        return ""
    words = ("git", "-C", source, "describe", "--always", "--dirty", "--exclude=*")
    try:
        return subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", check=False
        ).stdout.strip()
    except OSError:
        return ""


def _wanted(case: Case, folder: Path, weights: Path, options: Options) -> dict[str, object]:
    """What the entries of testify.py are told."""
    return {
        "case": to_json(case),
        "trainer": options.trainer,
        "weights": str(weights.resolve()),
        "device": options.device,
        "fault": options.fault,
        "compile_cache": str((options.out / ".inductor").resolve()) if case.features.compile else None,
        "directory": str(folder.resolve()),
        "checkpoints": str(folder.resolve().with_name(CHECKPOINT)),
    }


def _launch_ranks(case: Case, folder: Path, weights: Path, options: Options, *, entry: str) -> list[Exit]:
    timeout = options.timeout * (PATIENCE if case.features.compile else 1)
    job = Job(
        folder,
        case.dims.world_size,
        entry,
        _wanted(case, folder, weights, options),
        timeout=timeout,
        device=options.device,
        group_timeout=max(10.0, timeout / 2),
        torchrun_args=options.torchrun_args,
    )
    return launch(job, options.launcher)


def store_report(judgement: Judgement) -> None:
    """Leaves report.txt and verdict.json beside the evidence. Raises EvidenceError where that cannot be written."""
    from harness.report import case_report

    write_text(judgement.folder / "report.txt", case_report(judgement) + "\n")
    record = {
        "case": judgement.case.name,
        "verdict": judgement.verdict,
        "cause": judgement.diagnosis.cause if judgement.diagnosis else None,
        "fault": judgement.fault,
        "fired": judgement.fired,
        "replaced": judgement.replaced,
        "results": [dataclasses.asdict(result) for result in judgement.results],
    }
    write_text(judgement.folder / "verdict.json", json.dumps(record, indent=1))
