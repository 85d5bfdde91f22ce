"""The text of an adapter and of its first cases, begun with the facts observed about a script."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.adapters.onboarding.matching import Match, match, name_table
from harness.adapters.onboarding.observed import CASE, Facts, Flag
from harness.adapters.onboarding.spellings import flag_expression
from harness.core.case.case import Case
from harness.reference.config import ModelConfig, TrainingConfig

NO_DATA_SET = "TODO nothing that makes samples was found."
ANY = "name data all_valid global_batch seq_len steps optimizer beta1 beta2 eps weight_decay decay norm_eps rope_theta rates"
"""Fields that are written into a script or handed over; first.yaml requests what they are."""
LAUNCHED = ("resume", "save_to", "saved_step")
AMBIGUOUS = ("--hidden", "--hidden-size", "--width", "--hidden_size")

ADAPTER = '''"""{script} under the harness, unedited. Begun by `harness init`; `harness doctor` says what is wrong.{seen}"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.adapter import Case, ScriptAdapter, checkpoints, halves, in_one, pairs

# theirs=ours, a part of a name each; nothing after = leaves the part out.
NAMES = pairs("""{names}""")

# What of a case this adapter passes on; a case that requests anything else is skipped, with that reason.
KNOWN = dict.fromkeys("""{known}""".split(), ...)
KNOWN |= {{{written}}}


class {name}(ScriptAdapter):
    name, names, known = "{stem}", NAMES, KNOWN
    script = Path(__file__).parent / "{script}"{attributes}

    def arguments(self, case: Case, device: str) -> list[str]:
        return [
{arguments}
        ]

    def samples(self, script: Any, case: Case, rank: int) -> None:
        import torch

        from harness.adapter import RecipeSamples, RecipeStream, recipe_batches

{data}
{methods}

adapter = {name}()
'''
ROWS = """
    def rows(self, case: Case) -> dict:
        return halves(case)  # its rotary embedding turns halves of a head, not neighbours; else leave this out
"""
FUSED = """
    def fused(self, case: Case) -> dict:
        return in_one(case, {declared})
"""
CASES = """# Begun by `harness init`. What the script has written into it, rather than as a flag, is requested here.

defaults:"""
DATA = {
    "samples": "RecipeSamples(case{shuffled}{form})",
    "stream": "RecipeStream(case, rank, case.dims.dp{form})",
    "generator": "recipe_batches(case, rank, case.dims.dp)",
    "function": "next(trained if torch.is_grad_enabled() else evaluated)",
}


def adapter_text(path: Path, facts: Facts, file: Path) -> str:
    """Return the Python text of an adapter for the script at `path`. file: where the adapter will lie."""
    stem = path.stem
    match_of_shapes = match_facts(facts)
    data = facts.data
    declared = ", ".join(f'"{declaration}"' for declaration in match_of_shapes.declarations)
    replaces_text = f"samples: {data[0]} by the recipe's, which the script brings to its ranks" if data else ""
    saves = facts.saves[0] if facts.saves else "TODO"
    attributes = f'\n    replaces = ("{replaces_text}",)' if data else ""
    if _resume_flags(facts):
        attributes += f'\n    saves = "{saves}"'
    return ADAPTER.format(
        stem=stem,
        name="".join(part.capitalize() for part in re.split(r"\W|_", stem)) or "Mine",
        script=os.path.relpath(path, file.parent),
        seen="".join(f"\n\nUnlike the reference: {part}." for part in other_parts(facts)),
        names=_folded_text([f"{theirs}={ours}" for theirs, ours in name_table(match_of_shapes.names).items()]),
        known=_folded_text(
            list(dict.fromkeys([*ANY.split(), *_seed_field(facts), *_passed_on_fields(facts), *_script_axes(facts)]))
        ),
        written=", ".join(f'"{key}": {value!r}' for key, value in _written_values(facts).items()),
        attributes=attributes,
        arguments="\n".join(f"            {line}" for line in _argument_lines(facts)),
        data="\n".join(f"        {line}" for line in _data_lines(facts)),
        methods=(ROWS if facts.halves else "") + (FUSED.format(declared=declared) if declared else ""),
    )


def cases_text(facts: Facts) -> str:
    """Return the YAML text of first cases: one device, and the smallest case of each wrapper and option that the script has."""
    written = {key: value for key, (value,) in _written_model_sizes(facts).items()}
    written |= {key: value for key, value in facts.sizes.items() if value != getattr(CASE.model, key)}
    lines = [
        f"  training: {{{_yaml_text(_written_recipe(facts))}}}",
        f"  model: {{{_yaml_text(written)}}}",
        "",
        "cases:",
    ]
    lines += [f"  single: {{why: {CASE.why}}}"]

    def add(name: str, dims_text: str, why: str) -> None:
        lines.append(f"  {name}: {{dims: {dims_text}, why: {why}}}")

    for wrapper, name in facts.wrappers.items():
        features_text = ", features: {wrapper: fsdp1}" if wrapper == "fsdp1" else ""
        two_ranks = ("{dp_replicate: 2}" if wrapper == "ddp" else "{dp_shard: 2}") + features_text
        add(name, two_ranks, "Two ranks must do what one does.")
        if name == "fsdp_2" and "dp_replicate" in _passed_on_fields(facts):
            dims_text = f"{{dp_replicate: 2, dp_shard: 2}}{features_text}"
            add("hsdp_2x2", dims_text, "Replicas of shards must do what one rank does.")
        if _resume_flags(facts):
            resume_text = f"{two_ranks}, resume: [{{after: 1, dims: {two_ranks}}}]"
            add(f"{name}_resumes", resume_text, "A run that resumes must do what one run does.")
    if "tp" in _script_axes(facts):
        left_out = dict.fromkeys(_missing_options(facts), False)
        features_text = f", features: {{{_yaml_text(left_out)}}}" if left_out else ""
        add("tp_2", f"{{tp: 2}}{features_text}", "Two ranks that share each matrix must do what one does.")
    return "\n".join([CASES, *lines, ""])


def match_facts(facts: Facts) -> Match:
    """Return the match of the script's parameters to the reference's."""
    return match(facts.shapes, facts.heads or CASE.model.n_heads)


def other_parts(facts: Facts) -> list[str]:
    """Return a phrase for each part of the model that Llama 3 does not have. Empty if there is none."""
    unmatched = [name for name in facts.shapes if name not in match_facts(facts).names]
    return list(facts.other_parts(unmatched))


# ---- flags


def flag_expressions(facts: Facts) -> dict[str, str]:
    """Return, by flag, the expression of a case that its value is: "--lr" -> "training.lr".

    Flags that mean nothing are left out. A hidden size is the feed-forward's if another flag is the model's. Flags of
    checkpoints count only if the script has one to save and one to resume.
    """
    expressions = {flag.name: expression for flag in facts.flags if (expression := flag_expression(flag.name))}
    unambiguous = {expression for name, expression in expressions.items() if name not in AMBIGUOUS}
    if "model.dim" in unambiguous and "model.ffn_dim" not in unambiguous:
        expressions |= {name: "model.ffn_dim" for name in AMBIGUOUS if name in expressions}
    if "resume" not in expressions.values() or "save_to" not in expressions.values():
        expressions = {name: expression for name, expression in expressions.items() if expression not in LAUNCHED}
    return expressions


def command_line(facts: Facts, case: Case) -> list[str]:
    """Return the words that the adapter's `arguments` would return for a case, on CPU."""
    return eval(f"[{chr(10).join(_argument_lines(facts))}\n]", {"case": case, "device": "cpu"})


def passed_on_flags(facts: Facts) -> list[str]:
    """Return the names of the flags by which the adapter requests something of a case."""
    return [
        flag.name for flag, line in zip(facts.flags, _argument_lines(facts), strict=True) if not line.startswith("#")
    ]


def _argument_lines(facts: Facts) -> Iterator[str]:
    """Yield the line of `arguments` for each flag, in their order; a comment for a flag that means nothing to a case."""
    known = flag_expressions(facts)
    for flag in facts.flags:
        yield _argument_line(flag, known.get(flag.name, ""))


def _argument_line(flag: Flag, expression: str) -> str:
    """Return the line of code for a flag. expression: of a case, which the flag means; empty if none: then the line is
    a comment.
    """
    name = flag.name
    part = expression.partition(".")[0]
    sharded = next((choice for choice in flag.choices if "fsdp" in choice), "")
    if expression in LAUNCHED:
        value = "" if flag.switch else "={case.saved_step}" if expression == "saved_step" else "={checkpoints.folder()}"
        condition = {"resume": "case.resume", "save_to": "case.saved_step or case.resume"}.get(
            expression, "case.saved_step"
        )
        return f'*([f"{name}{value}"] if {condition} else []),'
    if sharded and "ddp" in flag.choices:
        return f"f\"{name}={{'ddp' if case.wrapper == 'ddp' else '{sharded}'}}\","
    if flag.switch and part in ("features", "dims") and expression != "dims.tp":
        switch_conditions = {
            "dims.dp_replicate": "case.wrapper == 'ddp'",
            "dims.dp_shard": "case.wrapper in ('fsdp1', 'fsdp2')",
        }
        return f'*(["{name}"] if {switch_conditions.get(expression, f"case.{expression}")} else []),'
    if flag.switch or not expression:
        switch_text = " is a switch" if flag.switch else ""
        required_text = "; TODO it is required" if flag.required else ""
        return f"# {name}{switch_text}: left at {flag.default}{required_text}"
    if expression == "local_batch" and "global" in flag.help:
        expression = "training.global_batch"
    comment = "  # of one rank and microbatch; TODO is it?" if expression == "local_batch" else ""
    if expression == "training.dtype" and "float64" not in flag.choices:
        dtype_expression = "'float32' if case.training.dtype == 'float64' else case.training.dtype"
        comment = "  # Script widens it"
        return f'f"{name}={{{dtype_expression}}}",{comment}'
    value_expression = expression if expression == "device" else f"case.{expression}"
    return f'f"{name}={{{value_expression}}}",{comment}'


def _resume_flags(facts: Facts) -> list[str]:
    """Return the names of the flags by which the script resumes. Empty if it cannot."""
    return [name for name, expression in flag_expressions(facts).items() if expression == "resume"]


# ---- what the adapter passes on, and what is written into the script


def _passed_on_fields(facts: Facts) -> list[str]:
    """Return the fields of a case that flags pass on, sorted. Switches of parallel degrees are left out."""
    switches = {flag.name for flag in facts.flags if flag.switch}
    expressions = set()
    for name, expression in flag_expressions(facts).items():
        if not (name in switches and expression.startswith("dims.")):
            expressions.add(expression)
    fields = {re.split(r"\W", expression.partition(".")[2] or expression)[0] for expression in expressions}
    return sorted(fields - {*LAUNCHED, "device", "local_batch"})


def _script_axes(facts: Facts) -> list[str]:
    """Return the axes of the script's wrappers and of tensor parallel, each once.

    Degrees without a flag follow from the number of ranks.
    """
    axis_of_wrapper = {"ddp": "dp_replicate", "fsdp2": "dp_shard", "fsdp1": "dp_shard"}
    axes = [axis_of_wrapper[wrapper] for wrapper in facts.wrappers]
    if "parallelize_module" in facts.words:
        axes.append("tp")
    return list(dict.fromkeys(axes))


def _missing_options(facts: Facts) -> list[str]:
    """Return the options of tensor parallel whose names in torch the script never uses. Empty without tensor parallel."""
    if "parallelize_module" not in facts.words:
        return []
    words_by_option = {"sequence_parallel": "SequenceParallel", "loss_parallel": "loss_parallel"}
    return [option for option, word in words_by_option.items() if word not in facts.words]


def _written_model_sizes(facts: Facts) -> dict[str, tuple[Any]]:
    """Return (size,) by field for the model's sizes that are not the smallest case's, in the order of ModelConfig."""
    sizes = match_facts(facts).other_sizes(CASE.model)
    return {key: (sizes[key],) for key in vars(ModelConfig()) if key in sizes}


def _written_values(facts: Facts) -> dict[str, Any]:
    """Return the entries of KNOWN, by key the values allowed, for what is written into the script and passed on by no flag."""
    recipe = {key: value for key, value in _written_recipe(facts).items() if key in ("seed", "max_norm")}
    fixed = {key: (value,) for key, value in recipe.items() if key not in _passed_on_fields(facts)}
    left_out = {key: (False,) for key in _missing_options(facts)}
    return {"wrapper": tuple(facts.wrappers)} | _written_model_sizes(facts) | fixed | left_out


def _seed_field(facts: Facts) -> list[str]:
    """Return ["seed"], or nothing if the script's sampler shuffles: then its seed is its own."""
    return [] if facts.sampler and facts.sampler[0] else ["seed"]


def _written_recipe(facts: Facts) -> dict[str, Any]:
    """Return the recipe's values that the script's optimizer and sampler have, by field, without those that are usual."""
    seed = {"seed": facts.sampler[1]} if facts.sampler and facts.sampler[0] and facts.sampler[1] is not None else {}
    recipe = facts.recipe | ({} if "max_norm" in facts.recipe or not facts.optimizer else {"max_norm": None})
    recipe = {"optimizer": "sgd" if facts.optimizer == "SGD" else "adamw"} | recipe | seed
    defaults = vars(TrainingConfig())
    return {"all_valid": True} | {key: value for key, value in recipe.items() if value != defaults[key]}


def _yaml_text(values: dict[str, Any]) -> str:
    """Return the values as YAML's "key: value, .."."""
    texts = {key: as_yaml(value) if isinstance(value, float) else json.dumps(value) for key, value in values.items()}
    return ", ".join(f"{key}: {text}" for key, text in texts.items())


def as_yaml(value: float) -> str:
    """Return a number as YAML reads a float, always with a point: 1e-05 becomes 1.0e-05."""
    text = repr(float(value))
    return text if "." in text else text.replace("e", ".0e")


def _data_lines(facts: Facts) -> Iterator[str]:
    """Yield the lines of code that put the recipe's samples into the script's own loader; comments with a TODO if none
    was found.
    """
    if not facts.data:
        yield f"# {NO_DATA_SET} A data set is replaced by RecipeSamples(case), a stream by"
        yield "# RecipeStream(case, rank, case.dims.dp), a generator by recipe_batches(case, rank, case.dims.dp):"
        yield '# script.replace("ITS_NAME", lambda *_, **__: ..)'
        return
    name, kind, form = facts.data
    keys = form.split()
    shuffled = ", shuffled=True" if facts.sampler and facts.sampler[0] else ""
    forms = {"pair": "", "joined": ", form=lambda tokens, labels: torch.cat([tokens, labels[-1:]])"}
    other_form = f', form=lambda tokens, labels: {{"{keys[0]}": tokens, "{keys[-1]}": labels}}'
    if kind == "function":
        yield "trained, evaluated = (recipe_batches(case, rank, case.dims.dp) for _ in range(2))"
    replacement = DATA[kind].format(shuffled=shuffled, form=forms.get(form, other_form))
    yield f'script.replace("{name}", lambda *_, **__: {replacement})'


def _folded_text(words: list[str], width: int = 100) -> str:
    """Return the words joined by spaces, with an indented new line after about `width` characters."""
    lines = [""]
    for word in words:
        lines += [""] if len(lines[-1]) + len(word) > width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n    ".join(lines)
