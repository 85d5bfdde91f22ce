"""The needs of checks, as plain words, and the words that a kind of evidence provides.

A check lists in its NEEDS the words without which it cannot judge. Evidence lists the words that it lacks, each with a reason.
If this kind of evidence never has the word, the check is NOT APPLICABLE. If it was not observed here, the check is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

WORDS = {
    "ends": "how each rank ended",
    "reference": "the same training on one device, and the samples of each step",
    "values": "what is in parameters, gradients and optimizer state, and the losses",
    "checkpoint": "what is in the checkpoint that was left, and in the one that was read",
    "declared": "a case: recipe, features, steps. Without one the plan says what is moved at least and what is held at most",
    "claims": "somebody who says where parameters lie: wrappers, DTensors",
    "slices": "which part of each parameter a rank should hold",
    "flows": "which bytes of parameters and gradients should move",
    "sizes": "all models of the job: their bytes, held and moved",
    "contents": "what parameters hold after a step, as values or as digests",
    "samples": "what ranks are fed, as tokens or as digests",
    "groups": "all process groups that each rank is a member of",
    "members": "the ranks of every process group that something moves over",
    "uses": "over which groups each rank moves something, in one step at least",
    "structure": "parameters, wrappers, groups, collectives and memory of each rank, in every step judged",
    "moment": "the process groups of all ranks, listed at one moment",
}
"""All words. Where several are lacking, the first one here is reported."""


@dataclass(frozen=True)
class Lack:
    """The reason why evidence does not provide a word."""

    why: str
    """The reason, as a person reads it."""
    unknown: bool = False
    """Whether it would be there and was not seen; else this kind of evidence has none."""


@dataclass(frozen=True)
class Provided:
    """The words that a kind of evidence provides: all that are not lacking."""

    lacking: Mapping[str, Lack] = field(default_factory=dict)
    """Word -> why it is not there."""
    partly: Mapping[str, str] = field(default_factory=dict)
    """Word -> what of it was not seen: what is there may break a check, and proves none."""
    singly: frozenset[str] = frozenset()
    """Words that each rank has by itself: those that left it are judged, though others left nothing."""

    def __contains__(self, word: str) -> bool:
        return word not in self.lacking

    def find_lack(self, needs: Iterable[str]) -> Lack | None:
        """Return the reason why a check with these needs cannot judge. None if it can.

        A word that this kind of evidence never has comes first.
        """
        lacks = [self.lacking[word] for word in WORDS if word in needs and word in self.lacking]
        for lack in lacks:
            if not lack.unknown:
                return lack
        return lacks[0] if lacks else None

    def reason_of_doubt(self, needs: Iterable[str]) -> str:
        """Return the reason why the evidence cannot prove that a check with these needs passes; empty if it can."""
        return next((self.partly[word] for word in WORDS if word in needs and word in self.partly), "")

    def lacking_words(self, words: Iterable[str], why: str, *, unknown: bool = False) -> Provided:
        """Return the same with these words lacking. A word that lacks already keeps its reason."""
        return replace(self, lacking={**dict.fromkeys(words, Lack(why, unknown)), **self.lacking})

    def with_doubt_about(self, words: Iterable[str], why: str) -> Provided:
        """Return the same with these words provided only in part. A word that is in part already keeps its reason."""
        return replace(self, partly={**dict.fromkeys(words, why), **self.partly})

    def without_complete_evidence(self, why: str) -> Provided:
        """Return the words that remain if some rank or step is not there: the ends, and words that each rank has by itself."""
        return self.lacking_words(WORDS.keys() - {"ends"} - self.singly, why, unknown=True)


EVERYTHING = Provided()
_NO_REFERENCE = "needs a reference: an adapter brings it"
_NO_DATA = "needs numbers: ranks alone have no data"

RECORDED = (
    Provided(singly=frozenset({"contents", "samples", "members", "uses"}))
    .lacking_words(("reference", "values", "checkpoint"), _NO_REFERENCE)
    .lacking_words(("declared",), "needs a recipe and features: a command declares none")
    .lacking_words(("moment",), "ranks are recorded at different moments")
)
"""A recording of any command, judged by a layout."""

_NO_TENSORS = "needs tensors: a trace has those of no rank"

TRACED = (
    Provided(singly=RECORDED.singly)
    .lacking_words(("reference", "values", "checkpoint", "claims", "slices", "flows", "sizes", "contents"), _NO_TENSORS)
    .lacking_words(("samples",), "needs what ranks are fed: a trace does not have it")
    .lacking_words(("ends",), "needs how ranks ended: a trace does not say it")
    .lacking_words(("declared",), "needs a recipe and features: a trace declares none")
    .lacking_words(("moment",), "ranks are traced at different moments")
)
"""A profiler's traces of a job's ranks, judged by a layout."""

SINGLE_RANKS = EVERYTHING.lacking_words(("reference", "values", "checkpoint", "contents", "samples"), _NO_DATA)
"""Single ranks, each run without the others and without data."""


def provided_by_single_ranks(provided: Provided) -> Provided:
    """Return the words that remain for single ranks, each run without the others and without data."""
    return replace(provided, lacking={**provided.lacking, **SINGLE_RANKS.lacking}, singly=frozenset())
