"""An adapter and its first cases, begun with what a script says of itself; the rest is left to a person."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from harness.onboarding.constructors import AMBIGUOUS, SIZES
from harness.onboarding.script_facts import Flag, ScriptFacts
from harness.onboarding.spellings import FLAGS, PARAMETERS, by_spelling
from harness.reference.config import ModelConfig

NO_DATA_SET = "TODO no Dataset was found."
SWITCHES = ("loss_parallel", "async_tp", "compile")  # as a case's features are called

WRAPPERS = {
    "fully_shard": ("fsdp2", "fsdp_2", "{dp_shard: 2}"),
    "DDP": ("ddp", "ddp_2", "{dp_replicate: 2}"),
    "DistributedDataParallel": ("ddp", "ddp_2", "{dp_replicate: 2}"),
    "FSDP": ("fsdp1", "fsdp_2", "{dp_shard: 2}"),
    "FullyShardedDataParallel": ("fsdp1", "fsdp_2", "{dp_shard: 2}"),
}
"""What is called -> the case's word for the wrapper, the name of the first case of two ranks, and its dims."""

MODULES = dict.fromkeys(("wq", "wk", "wv", "wo"), "attention.") | dict.fromkeys(("w1", "w2", "w3"), "feed_forward.")
"""Where in a layer the reference has them."""

USUAL = """name data all_valid global_batch seq_len steps optimizer beta1 beta2 eps weight_decay decay norm_eps rope_theta
    rates"""
"""What a script has written into it, or is handed; a case of cases/first.yaml requests what that is."""

ADAPTER = '''"""{stem}.py under the harness, unedited. Begun by `harness init`; `harness doctor` says what is still wrong.

{places}
"""

from __future__ import annotations

from pathlib import Path

from harness.spec.case import Case
from harness.spec.traits import TrainerTraits
from harness.trainers import Adapter, StartedTrainer
from harness.trainers.support.names import pairs, renamed
from harness.trainers.support.requests import beyond{import_rows}

SCRIPT = Path(__file__).with_name("{stem}.py")

# theirs=ours, a part of a name each; nothing after = leaves the part out.{unknown_names}
NAMES = pairs("""{names}""")

# What of a case this adapter passes on; a case that requests anything else is skipped, with that reason.
KNOWN = dict.fromkeys(
    """{known}""".split(),
    ...,
) | {{"wrapper": {wrappers}{written}}}


def arguments(case: Case) -> list[str]:
    """The command line that requests the case."""
    return [
{arguments}
    ]


class {name}(Adapter):
    name = "{stem}"
    reports = ()  # what it logs is not under test; its losses, gradients and updates are

    def traits(self, case: Case) -> TrainerTraits:
        return TrainerTraits(own_model=True)  # it is not the reference's, and in float32 it rounds at other places

    def unsupported(self, case: Case) -> str | None:
        return next(beyond(case, KNOWN, self.name), None)

    def fqn(self, name: str) -> str:
        return renamed(name, NAMES)
{rows}
    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        return ({replaced})

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return Started(case, weights)


class Started(StartedTrainer):
    """The script, run up to its first forward pass that trains."""

    def __init__(self, case: Case, weights: Path | None) -> None:
{import_data}        from harness.trainers.support.script import Script
        from harness.trainers.support.weights import load_weights

        self.script, self.metrics = Script(SCRIPT, case.training.dtype), []
{data}
        told = {{"fqn": adapter.fqn, "rows": adapter.rows(case), "fused": adapter.fused(case)}}
        model = self.script.set_up(arguments(case), lambda model: load_weights([model], case, weights, **told))
        self.model_parts = [model]

    def train(self, last_step: int) -> None:
        self.script.run()


adapter = {name}()
'''

ROWS = """
    def rows(self, case: Case) -> dict:
        return halves(case)  # its rotary embedding turns halves of a head, not neighbours; else leave this out
"""


def adapter(facts: ScriptFacts) -> str:
    stem, known = facts.path.stem, _meanings(facts)
    names = [f"{name}={ours}" for name, ours in _names(facts)]
    passed = {_key(known[word]) for word in passed_on(facts)}
    passed |= {_word(flag) for flag in facts.flags if flag.is_switch and _word(flag) in SWITCHES}
    wrappers = tuple(dict.fromkeys(WRAPPERS[name][0] for name in sorted(facts.wrappers()) if name in WRAPPERS))
    return ADAPTER.format(
        stem=stem,
        name="".join(part.capitalize() for part in re.split(r"\W|_", stem)) or "Mine",
        places="\n".join(_places(facts)) or "Nothing of torch was found in it by name.",
        import_rows="\nfrom harness.trainers.support.rows import halves" if facts.turns_halves else "",
        rows=ROWS if facts.turns_halves else "",
        names=_folded(names),
        unknown_names="" if names else " No other than the reference's was found.",
        known=_folded(list(dict.fromkeys([*USUAL.split(), *_seed(facts), *sorted(passed), *_dims(facts)]))),
        wrappers=repr(wrappers),
        written="".join(f', "{key}": ({value},)' for key, value in written(facts).items()),
        arguments="\n".join(_arguments(facts)),
        replaced=_replaced(facts),
        data="\n".join(_data(facts)),
        import_data=_import_data(facts),
    )


def written(facts: ScriptFacts) -> dict[str, int]:
    """What a case has to request just so: sizes of the model that no flag tells, and the seed of a sampler that shuffles."""
    seed = facts.sampler["seed"] if _shuffles(facts) and facts.sampler else None
    return sizes(facts) | ({"seed": seed} if isinstance(seed, int) else {})


def sizes(facts: ScriptFacts) -> dict[str, int]:
    """Of the model, that no flag tells; none where there is no such model."""
    found = {field: size for field, size in facts.sizes.items() if not _is_passed(facts, field)}
    try:
        usual, own = ModelConfig(), ModelConfig(**found)  # type: ignore[arg-type]
    except ValueError:
        return {}
    return {field: found[field] for field in SIZES if getattr(own, field) != getattr(usual, field)}


def _is_passed(facts: ScriptFacts, field: str) -> bool:
    return field in {_key(_meanings(facts)[word]) for word in passed_on(facts)}


def _seed(facts: ScriptFacts) -> list[str]:
    """Of the samples alone, which are handed over, where its sampler does not shuffle them by a seed of its own."""
    return [] if _shuffles(facts) else ["seed"]


def _shuffles(facts: ScriptFacts) -> bool:
    if facts.sampler is not None:
        return facts.sampler["shuffle"] is not False
    return any("shuffle=False" not in place.text for place in facts.at("sampler"))


def _meanings(facts: ScriptFacts) -> dict[str, str]:
    """What flags are spelled like: a hidden size is the feed-forward's where another flag is the model's."""
    known, words = by_spelling(FLAGS), {_word(flag) for flag in facts.flags}
    said = {known.get(word) for word in words - {*AMBIGUOUS}}
    other = "model.dim" in said and "model.ffn_dim" not in said
    return known | dict.fromkeys(AMBIGUOUS if other else (), "model.ffn_dim")


def passed_on(facts: ScriptFacts) -> list[str]:
    """The flags that are spelled like something of a case."""
    return [word for flag in facts.flags if (word := _word(flag)) in _meanings(facts)]


def cases(facts: ScriptFacts) -> str:
    """One device, and the smallest case for each wrapper that the script uses."""
    recipe = ", ".join(f"{key}: {value}" for key, value in _recipe(facts).items())
    has = ", ".join(f"{key}: {value}" for key, value in sizes(facts).items())
    usual = "# model: {norm_eps: 1.0e-5, rope_theta: 500000.0}   what the script's model has, if it is another"
    model = f"model: {{{has}}}  # and norm_eps, rope_theta, if the script's model has others" if has else usual
    lines = [
        "# Begun by `harness init`. What the script has written into it, rather than as a flag, is requested here.",
        "",
        "defaults:",
        f"  training: {{{recipe}}}",
        f"  {model}",
        "",
        "cases:",
        "  single: {why: On one rank it must train as the reference does.}",
    ]
    named = sorted(facts.wrappers() & set(WRAPPERS))
    for kind, case, dims in dict.fromkeys(WRAPPERS[name] for name in named):
        wrapper = ", features: {wrapper: fsdp1}" if kind == "fsdp1" else ""
        lines.append(f"  {case}: {{dims: {dims}{wrapper}, why: Two ranks must do what one does.}}")
    if "parallelize_module" in facts.wrappers() or "tp" in _dims(facts):
        lines.append("  tp_2: {dims: {tp: 2}, why: Two ranks that share each matrix must do what one does.}")
    return "\n".join([*lines, ""])


def _names(facts: ScriptFacts) -> Iterator[tuple[str, str]]:
    """Projections that lie in the block itself, beside its norms or other modules, have the reference's module before them."""
    known, ours = by_spelling(PARAMETERS), dict[str, str]()
    for names in facts.names:
        spelled = {name: known.get(name, name) for name in names}
        flat = _is_block(set(spelled.values()))
        for name, part in spelled.items():
            module = MODULES.get(part, "") if flat else ""
            if f"{module}{part}" != name:
                ours.setdefault(name, f"{module}{part}")
    yield from ((name, part) for name, part in ours.items() if part.rpartition(".")[2] in PARAMETERS)


def _is_block(parts: set[str]) -> bool:
    """A class whose parts are those of a layer, not of its attention or feed-forward alone."""
    both = all(any(MODULES.get(part) == module for part in parts) for module in ("attention.", "feed_forward."))
    return both or bool(parts & {"attention", "feed_forward", "attention_norm", "ffn_norm"})


def _folded(words: list[str], indent: str = "    ", width: int = 100) -> str:
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return f"\n{indent}".join([*lines, line])


def _word(flag: Flag) -> str:
    return flag.name.lstrip("-").replace("-", "_").lower()


def _key(expression: str) -> str:
    """The field that an expression of a case is about."""
    if expression == "local_batch":
        return "global_batch"
    return expression.rpartition(".")[2]


def _dims(facts: ScriptFacts) -> list[str]:
    """The axes that its wrappers speak of; degrees that no flag tells follow from the number of ranks."""
    of = {"fully_shard": "dp_shard", "FSDP": "dp_shard", "FullyShardedDataParallel": "dp_shard"}
    of |= {"DDP": "dp_replicate", "DistributedDataParallel": "dp_replicate", "parallelize_module": "tp"}
    flags = {_meanings(facts).get(_word(flag), "") for flag in facts.flags}
    told = [key for key in ("dp_replicate", "dp_shard", "tp") if f"dims.{key}" in flags]
    return list(dict.fromkeys([*told, *(of[name] for name in sorted(facts.wrappers()) if name in of)]))


def _arguments(facts: ScriptFacts) -> Iterator[str]:
    known = _meanings(facts)
    for flag in facts.flags:
        if flag.is_switch and _word(flag) in SWITCHES:
            yield f'        *(["{flag.name}"] if case.features.{_word(flag)} else []),'
        elif _word(flag) not in known:
            yield f"        # {flag.name}{' is a switch' if flag.is_switch else ''}: left at {flag.default}"
        else:
            yield _argument(flag, known)


def _argument(flag: Flag, known: Mapping[str, str]) -> str:
    """Of a flag that is spelled like something of a case, or says that it counts over all ranks."""
    expression = "training.global_batch" if "global" in flag.help else known[_word(flag)]
    value = f"case.{expression}" + (" or 0.0" if expression == "training.max_norm" else "")
    look = "  # of one rank and microbatch; TODO is it?" if expression == "local_batch" else ""
    if expression == "training.dtype" and flag.choices and "float64" not in flag.choices:
        value, look = (
            "'float32' if case.training.dtype == 'float64' else case.training.dtype",
            "  # Script widens it",
        )
    return f'        f"{flag.name}={{{value}}}",{look}'


def _places(facts: ScriptFacts) -> Iterator[str]:
    for what in dict.fromkeys(place.what for place in facts.places):
        found = facts.at(what)
        shown = "; ".join(f"{place.file}:{place.line} {place.text}" for place in found[:2])
        yield f"{what}: {shown}" + (f"; and {len(found) - 2} more" if len(found) > 2 else "")
    if facts.models:
        yield f"model: class {', '.join(facts.models[:3])}"
    yield from (f"unlike the reference: {phrase}" for phrase in facts.unlike)


def _replaced(facts: ScriptFacts) -> str:
    if not facts.data_sets:
        return f'"batches: {facts.batches[0]} by the recipe\'s",' if facts.batches else ""
    return f""""data set: {facts.data_sets[0][1]} by the recipe's samples, which its own loader brings to the ranks","""


def _import_data(facts: ScriptFacts) -> str:
    indent, samples = " " * 8, "RecipeSamples" if _is_map(facts) else "RecipeStream, recipe_batches"
    samples = "recipe_batches" if not facts.data_sets and facts.batches else samples
    lines = "".join(_data(facts))
    imported = [module for module, used in (("os", "os.environ"), ("torch", "torch.")) if used in lines]
    first = "".join(f"{indent}import {module}\n" for module in imported) + "\n" * bool(imported)
    return f"{first}{indent}from harness.trainers.support.samples import {samples}\n"


def _is_map(facts: ScriptFacts) -> bool:
    return bool(facts.data_sets) and facts.data_sets[0][2] != "an iterator"


def _data(facts: ScriptFacts) -> Iterator[str]:
    """How the recipe's samples get into the trainer's own loader."""
    indent = " " * 8
    if not facts.data_sets and facts.batches:
        name = facts.batches[0]
        yield f"{indent}# TODO does {name} answer tokens and labels of a microbatch? These are of this data-parallel rank:"
        yield f'{indent}rank = int(os.environ["RANK"]) // (case.dims.cp * case.dims.tp) % case.dims.dp'
        yield f"{indent}trained, evaluated = (recipe_batches(case, rank, case.dims.dp) for _ in range(2))"
        yield f"{indent}answer = (lambda *_, **__: next(trained if torch.is_grad_enabled() else evaluated))"
        yield f'{indent}self.script.replace("{name}", answer)'
        return
    if not facts.data_sets:
        yield f"{indent}# {NO_DATA_SET} What makes its batches may answer next(recipe_batches(case, rank,"
        yield f'{indent}# degree)), tokens and labels of a microbatch: self.script.replace("ITS_NAME", ..)'
        return
    _, name, answers = facts.data_sets[0]
    yield f"{indent}# {name} answers {answers or 'what was not found'}"
    if not _is_map(facts):
        yield f"{indent}# TODO with the data-parallel rank and degree as it is given them"
        yield f'{indent}self.script.replace("{name}", lambda *_, **__: RecipeStream(case, dp_rank, dp_degree))'
        return
    shuffled = ", shuffled=True" if _shuffles(facts) else ""
    yield f'{indent}self.script.replace("{name}", lambda *_, **__: RecipeSamples(case{shuffled}{_form(answers)}))'


def _form(answers: str) -> str:
    """What the harness' samples have to look like, so that the loader's user finds what it expects."""
    keys = re.findall(r"['\"](\w+)['\"]:", answers)
    if len(keys) >= 2:
        return f', form=lambda tokens, labels: {{"{keys[0]}": tokens, "{keys[1]}": labels}}'
    if answers and "," not in re.sub(r"\[.*?\]|\(.*\)$", "", answers) and not answers.startswith("("):
        return ", form=lambda tokens, labels: torch.cat([tokens, labels[-1:]])"
    return ""


def _recipe(facts: ScriptFacts) -> dict[str, object]:
    """Literals of the optimizer's call, torch's own where it is left out, and a mean over all tokens."""
    found, recipe = facts.optimizer, dict[str, object](all_valid="true")
    recipe |= {"seed": seed} if (seed := written(facts).get("seed")) is not None else {}
    recipe |= {"decay": "matrices"} if facts.spares_vectors else {}
    if found is None or found["optimizer"] != "adamw":
        return recipe | ({"optimizer": "sgd"} if found else {})
    betas, eps = found.get("betas", (0.9, 0.999)), found.get("eps", 1e-8)
    told = facts.spares_vectors or "training.weight_decay" in {_meanings(facts).get(word) for word in passed_on(facts)}
    decay = found.get("weight_decay", None if told else 0.01)
    recipe |= {"beta1": betas[0], "beta2": betas[1]} if isinstance(betas, tuple) and betas != (0.9, 0.95) else {}
    recipe |= {"weight_decay": decay} if decay not in (None, 0.1) else {}
    recipe |= {"eps": f"{eps:.1e}"} if isinstance(eps, float) and eps != 1e-8 else {}
    return recipe
