"""torchtitan's configuration as a function returns it (since 2026-04), as a case: read as its file of options is.

The model's sizes are those of the returned configuration. Parts of it that this pre-flight does not run, such as an
attention of another kind or 8 bits, are set aside and listed.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.adapters.torchtitan import source
from harness.clusters import config_file
from harness.clusters.config_file import OPTIONS_OF_NUMBERS, READ_OPTIONS, CaseFromFile
from harness.core.case.case import Case, CaseError
from harness.reference.config import ModelConfig, RopeScaling

ALSO_READ = (
    *("enable_sequence_parallel", "context_parallel_load_balancer", "spmd_backend"),
    *("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
)
GPU_OPTIONS = ("disable_cuda_graphs", "gc_debug", "expert_parallel_degree")  # the last has no effect on a Llama
RUN_PARTS = (
    *("Llama3Model", "Llama3TransformerBlock", "Embedding", "Linear", "RMSNorm", "FeedForward"),
    *("GQAttention", "QKVLinear", "ScaledDotProductAttention", "ComplexRoPE"),
)
"""Parts of a model that are run as they are."""
RECOMPUTATION_WORDS = {"NoneType": ("none", ""), "FullAC": ("full", ""), "SelectiveAC": ("selective", "op")}


def case_from_function(function_path: str, world: int, where: str | None = None) -> CaseFromFile:
    """Return the case of the configuration that a function returns.

    Raises CaseError, also for errors in the user's module. function_path: MODULE:FUNCTION or FILE.py:FUNCTION. where: a
    checkout of torchtitan; None for the installed one.
    """
    try:
        return case_of_config(function_path, call_config_function(function_path, source.find_source(where)), world)
    except CaseError:
        raise
    except Exception as error:  # of somebody's module
        raise CaseError(f"--config {function_path}: {type(error).__name__}: {error}") from error


def call_config_function(function_path: str, checkout: source.Source) -> Any:
    """Call the function with torchtitan from `checkout` and return its configuration; no GPU is needed.

    It changes sys.path and torchtitan's modules: they are prepared for CPU and take 8 bits to be available.
    """
    from torch.utils._triton import has_triton

    from harness.adapters.torchtitan import cpu

    has_triton()  # torch keeps this answer; after the next line it would take triton to be there
    cpu.before_import()
    sys.path[:0] = [str(checkout.folder), str(Path.cwd())]
    module, _, function = function_path.rpartition(":")
    make_config = getattr(_load_module(module), function)
    for loaded in [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]:
        if "has_cuda_capability" in vars(loaded):  # a configuration of 8 bits is refused where no GPU has them
            loaded.has_cuda_capability = lambda *_: True  # type: ignore[attr-defined]
    return make_config()


def _load_module(name: str) -> Any:
    """Import a module by its name, or run a FILE.py as one."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None  # of a .py there is one
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case_of_config(function_path: str, config: Any, world: int) -> CaseFromFile:
    """Return the case of a configuration of torchtitan's llama3, and the parts of it that are not run.

    Raises CaseError.
    """
    if not hasattr(config, "parallelism") or getattr(config.model_spec, "name", None) != "llama3":
        raise CaseError(f"--config {function_path}: returns no configuration of torchtitan's llama3")
    if not getattr(config.model_spec.model, "layers", None):
        raise CaseError(
            f"--config {function_path}: the layers of its model are not spelled out, as they are since 2026-04"
        )
    sections = {"training": options_of_section(config.training), "parallelism": options_of_section(config.parallelism)}
    recomputed = {"activation_checkpoint": recomputation_section(config.activation_checkpoint)}
    read_options: dict[str, dict[str, Any]] = {}
    for key, section in sections.items():
        read_options[key] = {name: value for name, value in section.items() if name in READ_OPTIONS}
    model = model_sizes(config.model_spec)
    from_file = config_file.case_of_titan_options(function_path, read_options | recomputed, model, world)
    all_options = sections["training"] | sections["parallelism"]
    case = with_function_options(from_file.case, all_options)
    return CaseFromFile(case, (*parts_not_run(config), *_unsupported_backend(case, all_options)))


def options_of_section(section: Any) -> dict[str, Any]:
    """Return the fields of a section, a dataclass, by name."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def recomputation_section(checkpoint_config: Any) -> dict[str, str]:
    """Return the recomputation as the section of a configuration file: "mode" and "selective_ac_option".

    Raises CaseError.
    """
    kind = _kind(checkpoint_config)
    if kind not in RECOMPUTATION_WORDS:
        raise CaseError(f"activation_checkpoint {kind}: FullAC, SelectiveAC and None are known here")
    mode, selection = RECOMPUTATION_WORDS[kind]
    return {"mode": mode, "selective_ac_option": selection}


def model_sizes(spec: Any) -> ModelConfig:
    """Return the sizes of a model that torchtitan specifies.

    CaseError if its layers differ, or its rope scaling is unknown.
    """
    shapes = {_layer_sizes(layer) for layer in spec.model.layers}
    if len(shapes) > 1:
        raise CaseError("layers of one model have different sizes")
    heads, kv_heads, ffn_dim, eps = shapes.pop()
    rope = spec.model.layers[0].attention.rope
    return ModelConfig(
        name=spec.flavor,
        dim=spec.model.dim,
        n_layers=len(spec.model.layers),
        n_heads=heads,
        n_kv_heads=kv_heads,
        vocab_size=spec.model.vocab_size,
        ffn_dim=ffn_dim,
        norm_eps=eps,
        rope_theta=float(rope.theta),
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=spec.model.enable_weight_tying,
    )


def _layer_sizes(layer: Any) -> tuple[int, int, int, float]:
    """Return a layer's number of heads, of key-value heads, width of the feed-forward part, and the norm's eps."""
    heads = layer.attention.n_heads
    return heads, layer.attention.n_kv_heads or heads, layer.feed_forward.w1.out_features, layer.attention_norm.eps


def _rope_scaling(rope: Any) -> RopeScaling | None:
    """Return the scaling of rotary embeddings; None without one. CaseError for a kind other than "llama"."""
    if rope.scaling == "none":
        return None
    if rope.scaling != "llama":
        raise CaseError(f"rope scaling {rope.scaling}: none and llama are known here")
    original = rope.original_max_position_embeddings
    return RopeScaling(rope.scaling_factor, rope.low_freq_factor, rope.high_freq_factor, original)


def with_function_options(case: Case, options: Mapping[str, Any]) -> Case:
    """Return the case with the options that a file does not have: sequence parallel, cp's load balance, layers of the
    end stages."""
    features = dataclasses.replace(
        case.features,
        sequence_parallel=options.get("enable_sequence_parallel", True),
        cp_load_balance=options.get("context_parallel_load_balancer") is not None or case.dims.cp == 1,
        first_stage_less_layers=_layers_less(case, options, "first"),
        last_stage_less_layers=_layers_less(case, options, "last"),
    )
    return dataclasses.replace(case, features=features)


def _layers_less(case: Case, options: Mapping[str, Any], first_or_last: str) -> int:
    """Return how many layers fewer the first or last stage of a pipeline has: 1 by default, as in torchtitan; 0 without
    pp."""
    return options.get(f"pipeline_parallel_{first_or_last}_stage_less_layers", 1) if case.dims.pp > 1 else 0


def parts_not_run(config: Any) -> Iterator[str]:
    """Yield the names of options and model parts that the pre-flight does not run."""
    if config.compile.enable:
        yield "torch.compile"
    if getattr(config.compile, "enable_async_tensor_parallel", False):
        yield "enable_async_tensor_parallel"
    known_options = (*READ_OPTIONS, *ALSO_READ, *OPTIONS_OF_NUMBERS, *GPU_OPTIONS)
    for section in (config.training, config.parallelism, config.activation_checkpoint):
        yield from (name for name in _changed_options(section) if name not in known_options)
    if (balancer := getattr(config.parallelism, "context_parallel_load_balancer", None)) not in (None, "headtail"):
        yield f"context_parallel_load_balancer {balancer}"
    yield from sorted({kind for kind in _part_kinds(config.model_spec.model) if kind not in RUN_PARTS})


def _unsupported_backend(case: Case, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the SPMD backend, if it is another than the one that this case is run with."""
    why = source.why_not_spmd_types(case, None)
    if (backend := options.get("spmd_backend")) and backend != ("partial_dtensor" if why else "spmd_types"):
        yield f"spmd_backend {backend}" + (f" ({why})" if backend == "spmd_types" else "")


def _changed_options(section: Any) -> Iterator[str]:
    """Yield the names of a section's options that differ from torchtitan's defaults; nothing for None."""
    if section is None:
        return
    for field in dataclasses.fields(section):
        make_default = field.default_factory
        default = field.default if make_default is dataclasses.MISSING else make_default()
        if getattr(section, field.name) != default:
            yield field.name


def _part_kinds(model: Any) -> Iterator[str]:
    """Yield the kinds of a model's configuration and of all parts in it, with repeats: `Linear` of `Linear.Config`."""
    yield _kind(model)
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        parts = value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            if dataclasses.is_dataclass(part) and type(part).__qualname__.endswith(".Config"):
                yield from _part_kinds(part)


def _kind(config: Any) -> str:
    """Return the kind of a configuration: `Linear` of `Linear.Config`."""
    return type(config).__qualname__.removesuffix(".Config")
