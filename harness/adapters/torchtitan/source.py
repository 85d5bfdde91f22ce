"""Finding torchtitan and its version, by what its files define and call."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.adapters.torchtitan import eras, expected, syntax
from harness.adapters.torchtitan.eras import Era
from harness.core.case import releases
from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.case.features import FEATURE_CHOICES
from harness.core.case.schedule import ZERO_BUBBLE
from harness.core.case.traits import TrainerTraits

FILES = ("/torchtitan/", "/train.py")  # of the repository, all that running it needs
STARTS_SPMD_TYPES = ">=2.15"  # releases of torch on which it was seen to start; not on 2.13, and 2.14 was not tried
LOSS_CHUNKS = 8  # torchtitan's own number
MANY_STAGES = tuple(range(1, 65))
OF_CLASSES = tuple(
    name for name in FEATURE_CHOICES["schedule"] if name != "DualPipeV"
)  # schedules that it looks up by name
HOW_TO_GET_IT = "`make titan` prepares an environment with it, or give --source a checkout of pytorch/torchtitan"


class NotThere(Exception):
    """No torchtitan where it was looked for. The message says how to get it."""


SCRIPTS = (  # what train.py has, and who it is then
    (syntax.a_function("main", "job_config"), eras.MAIN_FUNCTION),
    (syntax.a_class("Trainer"), eras.TRAIN_SPEC),
)
TRAINERS = (  # what trainer.py has, where there is no such train.py
    (syntax.a_field("num_pp_microbatches"), eras.TRAINER_CONFIG_OF_ROWS),
    (syntax.a_field("num_pipeline_parallel_microbatches"), eras.TRAINER_CONFIG),
    (lambda _: True, eras.TRAINER_CONFIG_OF_BATCHES),
)


@dataclass(frozen=True)
class Change:
    """A change of torchtitan: what can be requested from the commit on in whose `file` of the package the `fact` holds.

    era, features, traits: fields of the Era, of its features and of its traits that are replaced then.
    """

    file: str
    fact: syntax.Fact
    era: dict[str, object] = field(default_factory=dict)
    features: dict[str, tuple[object, ...]] = field(default_factory=dict)
    traits: dict[str, Any] = field(default_factory=dict)


CHANGES = (
    Change("distributed/context_parallel/api.py", syntax.an_attribute("spmd_backend"), {"cp_by_types": True}),
    Change("parallelisms/pipeline_llama.py", syntax.a_keyword("output_args"), {"shapes_by_example": True}),
    *(
        Change(
            file, syntax.a_call("get_schedule_class"), features={"schedule": OF_CLASSES, "stages_per_rank": MANY_STAGES}
        )
        for file in ("parallelisms/pipelining_utils.py", "parallelisms/pipeline.py", "distributed/pipeline.py")
    ),
    *(Change(file, syntax.a_name("local_avg_loss"), {"largest_of_whole": True}) for file in ("train.py", "trainer.py")),
    Change("components/lora.py", syntax.a_function("_make_frozen_config", "cfg"), {"adapts": True}),
    Change("distributed/flex_shard/dist_muon.py", syntax.a_class("DistMuon"), {"dist_muon": True}),
    Change("components/checkpoint.py", syntax.an_attribute("load_only"), {"resumes": True}),
    Change("hf_datasets/text_datasets.py", syntax.a_key("positions"), {"gives_positions": True}),
    Change("config_manager.py", syntax.an_option("--experimental.context_parallel_degree"), {"axes": AXES}),
    Change(
        "config_manager.py",
        syntax.an_option("--experimental.context_parallel_rotate_method"),
        features={"cp_rotation": ("alltoall",)},
    ),
    Change("train.py", syntax.a_parameter("input_dict"), {"inputs_by_name": True}),
    Change(
        "train.py",
        syntax.a_field("gradient_accumulation_steps"),
        features={"accumulation": tuple(range(1, 65)), "defer_sync": (False,)},
    ),
    Change("train.py", syntax.a_call("grad_norm.item"), {"reports": ("loss", "grad_norm")}),
    Change(
        "models/llama3/infra/parallelize.py",
        syntax.a_list("model.norm", "model.output"),
        traits={"fsdp_units": "apart"},
    ),
    Change(
        "models/llama3/parallelize.py",
        syntax.a_certain_call("apply_fsdp", "apply_fsdp_to_decoder"),
        {"wraps_alone": True, "replicates_by": "fsdp2"},
    ),
    Change("models/llama3/parallelize.py", syntax.a_call("apply_replicate"), {"replicates_by": "fsdp2"}),
    Change("distributed/activation_checkpoint.py", syntax.a_keyword("early_stop"), traits={"ac_early_stop": False}),
    Change(
        "distributed/pipeline_parallel.py",
        syntax.an_import("ScheduleDualPipeV"),
        features={"schedule": FEATURE_CHOICES["schedule"]},
    ),
    Change(
        "config/job_config.py",
        syntax.a_field("context_parallel_load_balancer"),
        features={"cp_load_balance": (False,)},
    ),
    Change(
        "config/configs.py",
        syntax.a_field("enable_sequence_parallel"),
        features={"sequence_parallel": (False,)},
    ),
    Change(
        "components/optimizer/optimizer.py",
        syntax.a_function("_resolve_optimizer_factory", "name"),
        {"training": (*eras.TRAINER_CONFIG.training, "optimizer")},
    ),
    Change(
        "components/loss.py",
        syntax.a_parameter("num_chunks"),
        {"chunks_loss": True},
        traits={"keeps_loss_unit": True},
    ),
    Change("components/loss.py", syntax.a_call("lm_head.unshard"), traits={"keeps_loss_unit": False}),
    Change("models/llama3/model/model.py", syntax.a_keyword("enable_gqa"), traits={"cp_heads": "key_value"}),
)


LOOKED_AT = dict.fromkeys(
    ("../train.py", "train.py", "trainer.py", "models/llama3/config_registry.py", *(each.file for each in CHANGES))
)
"""All files of the package by which it is known."""


def changed_era(era: Era, package: Path) -> Era:
    """Return the era with all changes of CHANGES whose fact holds in this package, applied in their order. Raises NotThere."""
    for change in CHANGES:
        if holds(change.fact, package / change.file):
            traits = dataclasses.replace(era.traits, **change.traits)
            merged = {"features": era.features | change.features, "traits": traits}
            era = dataclasses.replace(era, **change.era, **merged)  # type: ignore[arg-type]
    return era


def holds(fact: syntax.Fact, path: Path) -> bool:
    """Return whether a fact holds of a file. False if there is no such file. Raises NotThere if it is no Python."""
    try:
        return path.is_file() and syntax.holds(fact, path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise NotThere(f"{path}: cannot be parsed: {error.msg}, line {error.lineno}") from error


@dataclass(frozen=True)
class Source:
    """A torchtitan: its package, its era and how to run it.

    package: the folder `torchtitan` itself. Its parent goes to sys.path, in front of an installed one.
    script: its train.py, where that is what runs. spmd_backend, options: see Torchtitan.
    """

    package: Path
    era: Era
    script: Path | None = None
    spmd_backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.package.parent

    def traits(self, case: Case) -> TrainerTraits:
        """Return the traits of this era for a case: its wrapper, loss chunks, context parallel and expected failure among them.

        The wrapper is set for replicas without shards, and for a model without data ranks; else None.
        """
        era = self.era
        alone = "fsdp2" if era.wraps_alone else None
        replicas = case.dims.dp_replicate > 1 and case.shards == 1
        wrapper = era.replicates_by if replicas else alone if case.dims.dp * case.dims.cp == 1 else None
        return dataclasses.replace(
            era.traits,
            wrapper=wrapper,
            loss_chunks=chunks_of(case, era),
            cp_gathers=case.dims.cp > 1 and era.cp_by_types,
            cp_cuts_rows=case.dims.cp > 1 and era.flat,
            expected_failure=expected.expected_failure(case, era, types=is_by_types(case, era, self.spmd_backend)),
        )


def is_by_types(case: Case, era: Era, spmd_backend: str | None) -> bool:
    """Return whether torchtitan shards by spmd_types. spmd_backend: the one requested; None: the default, if it can start.

    It is the default since 2026-08-18. Versions before 0.3.0 have it only if requested.
    """
    if spmd_backend is not None or not era.fed_microbatches:
        return spmd_backend == "spmd_types"
    return not why_not_spmd_types(case, None, era)


def why_not_spmd_types(case: Case, spmd_backend: str | None, era: Era | None = None) -> str:
    """Return why "partial_dtensor" takes the place of torchtitan's default backend.

    Empty if it does not, or if spmd_backend is given.
    """
    if spmd_backend is not None:
        return ""
    if not releases.condition_holds(STARTS_SPMD_TYPES, importlib.metadata.version("torch")):
        return "torch 2.13 cannot shard its parameters"
    alone = era is not None and era.cp_by_types  # FlexAttention's mask then is cut by torch, and SDPA sees it whole
    return "which does context parallel with FlexAttention only" if case.dims.cp > 1 and not alone else ""


def why_not_largest(case: Case, era: Era) -> str:
    """Return why the largest loss that torchtitan reports is not judged. Empty if it is."""
    if era.largest_of_whole and case.dims.cp > 1:
        return (
            "each cp rank's is divided by the tokens of whole sequences, see upstream_bugs/torchtitan_largest_loss.py"
        )
    return ""


def chunks_of(case: Case, era: Era) -> int:
    """Return the number of chunks in which torchtitan's loss applies the output layer; 1 if not in chunks."""
    return LOSS_CHUNKS if era.chunks_loss and not reason_loss_is_whole(case, era) else 1


def reason_loss_is_whole(case: Case, era: Era) -> str:
    """Return why this adapter has the loss computed at once, not in chunks. Empty if chunks are possible."""
    together = case.local_batch if era.flat else 1
    if any(case.seq_len(step) // case.dims.cp * together % LOSS_CHUNKS for step in case.steps):
        return f"{LOSS_CHUNKS} chunks do not divide the sequence"
    if case.model.tied_embeddings:
        return "FSDP2 reduces the one weight's gradient for the output and again for the embedding"
    if case.dims.pp > 1 and case.dims.world_size > case.dims.pp:
        return "FSDP2 gathers and reduces what it uses once a microbatch of a pipeline, which is not planned"
    if case.features.validate_every:
        return "what an evaluated batch calls and gathers in chunks is not planned"
    if case.dims.pp > 1 and case.features.schedule in ZERO_BUBBLE:
        return "what FSDP2 frees behind it gets no gradient where a schedule computes weights' gradients later"
    return ""


def find_source(where: str | None) -> Source:
    """Return the torchtitan at `where`, or the installed one if that is None. Raises NotThere.

    Its files are looked at anew if they changed since.
    """
    package = _installed_package() if where is None else Path(where).resolve() / "torchtitan"
    return _source_of_package(package, tuple(_file_stamp(os.path.join(package, name)) for name in LOOKED_AT))


def _file_stamp(path: str) -> tuple[int, int, int] | None:
    """Return (time of change, size, inode) of a file, which differ when a bisect checks out another commit.

    None if it is not there.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@functools.lru_cache(maxsize=8)
def _source_of_package(package: Path, _stamps: tuple[tuple[int, int, int] | None, ...]) -> Source:
    """Return the source that a package's files are, by their syntax. Raises NotThere if it is none that this adapter runs.

    Cached by the files' stamps, because a rank asks hundreds of times: for the name of each parameter.
    """
    if not package.is_dir():
        raise NotThere(f"{package}: no torchtitan there; {HOW_TO_GET_IT}")
    for script in (package.parent / "train.py", package / "train.py"):
        if era := next((era for fact, era in SCRIPTS if holds(fact, script)), None):
            return Source(package, changed_era(era, package), script)
    trainer = package / "trainer.py"
    if (package / "models" / "llama3" / "config_registry.py").is_file() and trainer.is_file():
        return Source(package, changed_era(next(era for fact, era in TRAINERS if holds(fact, trainer)), package))
    raise NotThere(f"{package}: this adapter runs torchtitan from 2024-09 on, and nothing there looks like it")


def forget_another(package: Path) -> None:
    """Remove torchtitan's modules from sys.modules if they were imported from another package.

    The rank server has the installed one for all its ranks, and one of them may be a checkout's.
    """
    imported = sys.modules.get("torchtitan")
    if imported is None or package.resolve() in [Path(folder).resolve() for folder in imported.__path__]:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        del sys.modules[name]


def _installed_package() -> Path:
    """Return the folder of the installed torchtitan, without importing it. Raises NotThere."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        raise NotThere(f"torchtitan is not installed; {HOW_TO_GET_IT}")
    return Path(next(iter(spec.submodule_search_locations)))
