"""What servers that guess tokens ahead (speculative decoding) ask of the other keys. Only CUDA's can: see `core/platform`."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.words import did_you_mean, last_value
from megarl.recipe.rule import RL, Contradiction
from megarl.recipe.schema import Recipe

ALGORITHM, THRESHOLD = "--speculative-algorithm", "--speculative-accept-threshold-"
ADAPTIVE = "--speculative-adaptive"
OF_OWN_LAYERS = ("NEXTN", "EAGLE")  # where no draft is named
OF_A_FOLDER = ("EAGLE3", "STANDALONE", "DFLASH", "DSPARK")  # whose draft has to be named
DRAFTLESS = "NGRAM"  # guesses from the text so far; all others have a draft, with weights of its own
WAYS_OUT = f"Remove {ALGORITHM}, or set it to {DRAFTLESS}, which has no draft"


def guesses(words: Sequence[str]) -> str | None:
    """The algorithm by which servers with these flags guess; None where they do not."""
    found = last_value(words, ALGORITHM)
    return None if found is None else found.upper()


def has_draft(words: Sequence[str]) -> bool:
    """Whether servers with these flags have a second model, or layers, that guess: nobody trains them, and no sync sends them."""
    return guesses(words) not in (None, DRAFTLESS)


def _has_draft(recipe: Recipe) -> bool:
    return has_draft(recipe.rollout.server_args)


def _is_unknown(recipe: Recipe) -> bool:
    return guesses(recipe.rollout.server_args) not in (None, DRAFTLESS, *OF_OWN_LAYERS, *OF_A_FOLDER)


def _refused(given: str | None) -> str:
    known = (DRAFTLESS, *OF_OWN_LAYERS, *OF_A_FOLDER)
    why = "gives no log-probs" if given == "UNO" else "is none that megarl knows"
    return f"{ALGORITHM} {given} {why}. Allowed are {', '.join(known)}.{did_you_mean(given, known)}"


def _thresholds(recipe: Recipe) -> list[str]:
    return [word for word in recipe.rollout.server_args if word.startswith(THRESHOLD)]


SPECULATION_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.server_args", lambda r, _: _is_unknown(r), lambda r: _refused(guesses(r.rollout.server_args)), RL
    ),
    Contradiction(
        "rollout.server_args",
        lambda r, _: any(word.startswith(ADAPTIVE) for word in r.rollout.server_args),
        lambda r: (
            f"with {ADAPTIVE} a pass gives at one time more tokens than at another, and those of the last pass of an answer "
            "that is cut off, which the server did not look at, could not be told. Remove it"
        ),
        RL,
    ),
    Contradiction(
        "sync.lora",
        lambda r, _: r.sync.lora == "adapters" and guesses(r.rollout.server_args) == "STANDALONE",
        lambda r: f"SGLang computes no adapters beside {ALGORITHM} STANDALONE. {WAYS_OUT}; or set this to merged",
        RL,
    ),
    Contradiction(
        "rollout.server_args",
        lambda r, _: bool(_thresholds(r)),
        lambda r: (
            f"with {', '.join(_thresholds(r))} servers keep guesses more often than the policy would draw them, and say the "
            "log-probs that the policy has: what is trained on would not be its own samples. Remove that: by SGLang's "
            "default, 1.0, tokens are drawn as without guesses"
        ),
        RL,
    ),
    Contradiction(
        "actor.routing_replay",
        lambda r, _: r.actor.routing_replay and guesses(r.rollout.server_args) is not None,
        lambda r: (
            f"with {ALGORITHM} in rollout.server_args SGLang does not say for every token which experts it chose. Remove "
            "that, or set this to false"
        ),
        RL,
    ),
    Contradiction(
        "sync.transport",
        lambda r, _: r.sync.transport == "disk" and _has_draft(r),
        lambda r: (
            f"with {ALGORITHM} {guesses(r.rollout.server_args)} in rollout.server_args a server would load the policy's files "
            "into its draft as well: of an update from files SGLang lets nobody say whom it is for. "
            f"{WAYS_OUT}; or set this to auto, broadcast or shared_memory"
        ),
        RL,
    ),
    Contradiction(
        "rollout.quantization",
        lambda r, _: r.rollout.quantization is not None and _has_draft(r),
        lambda r: (
            f"with {ALGORITHM} {guesses(r.rollout.server_args)} in rollout.server_args a server in FP8 has a draft in FP8, "
            f"and begins with random weights, which are all that a draft would ever have. {WAYS_OUT}; or set this to null"
        ),
        RL,
    ),
)
