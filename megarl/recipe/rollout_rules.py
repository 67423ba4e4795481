"""What servers ask of the other keys: those that keep an answer independent of its neighbours (`rollout.deterministic`), and
those that somebody else started (`rollout.servers.urls`)."""

from __future__ import annotations

from operator import itemgetter

from megarl.core.platform import Platform, get_platform
from megarl.recipe.held_out import Eval
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.schema import Recipe

# Flags of SGLang that choose what a request's numbers are computed with by what else is in the batch.
UNDOING = (
    "--speculative-",
    "--enable-mixed-chunk",
    "--enable-torch-compile",
    "--sampling-backend",
    "--rl-on-policy-target",
)
ATTENTION, CHUNKS = "--attention-backend", "--chunked-prefill-size"


def longest_sample(recipe: Recipe) -> int:
    """Most tokens of one sample: prompt and response."""
    return recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens


def longest_answer(recipe: Recipe) -> int:
    """Most tokens of one held-out answer, of whatever set."""
    return max(_answer_tokens(recipe, each) for each in recipe.eval.by_key().values())


def longest_served(recipe: Recipe) -> int:
    """Most tokens of one sequence at a server: held-out answers may be longer than those that are trained on."""
    answer = longest_answer(recipe) if recipe.data.eval is not None else 0
    return max(longest_sample(recipe), recipe.data.max_prompt_tokens + answer)


def served_parts(recipe: Recipe) -> str:
    """What the longest sequence at a server is made of, for messages."""
    longer = longest_served(recipe) > longest_sample(recipe)
    key, most = "rollout", recipe.rollout.max_response_tokens
    if longer:
        key, most = max(
            ((key, _answer_tokens(recipe, each)) for key, each in recipe.eval.by_key().items()), key=itemgetter(1)
        )
    return f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + {key}.max_response_tokens {most}"


def _answer_tokens(recipe: Recipe, asked: Eval) -> int:
    return asked.max_response_tokens or recipe.rollout.max_response_tokens


def _platform(recipe: Recipe) -> Platform:
    return get_platform(recipe.cluster.platform)


def _wanted_cache(recipe: Recipe) -> int:
    """Tokens of a cache that never runs full."""
    return min(recipe.rollout.max_running_requests, recipe.rollout.most_in_flight) * longest_served(recipe)


def _may_run_full(recipe: Recipe) -> bool:
    tokens = recipe.rollout.kv_tokens
    if tokens is None:
        return not _platform(recipe).needs_kv_tokens  # where it is needed, it is by default as large as is wanted
    return tokens < _wanted_cache(recipe)


def _undoing_flags(recipe: Recipe) -> list[str]:
    """Words of rollout.server_args that would undo it."""
    platform, words = _platform(recipe), recipe.rollout.server_args
    decided = (CHUNKS,) if CHUNKS in platform.deterministic_server_args else ()
    found = [word for word in words if word.startswith((*UNDOING, *decided))]
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        value = value or next(iter(words[index + 1 : index + 2]), "")
        if name == ATTENTION and value not in platform.deterministic_attention:
            found.append(f"{ATTENTION} {value}")
    return found


def _refused(recipe: Recipe) -> list[str]:
    """Words of rollout.server_args with which no server comes up on the platform, and why."""
    platform = _platform(recipe)
    adapters = platform.lora_server_args if recipe.actor.lora is not None and recipe.sync.lora == "adapters" else ()
    words = (*adapters, *recipe.rollout.server_args)
    return [f"{', '.join(hits)} ({each.why})" for each in platform.refused_server_args if (hits := each.found(words))]


def _too_large(recipe: Recipe) -> bool:
    most = _platform(recipe).most_deterministic_tp
    return most is not None and recipe.rollout.tp > most


DETERMINISTIC_CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.deterministic",
        lambda r, _: r.rollout.deterministic and r.rollout.external is None and _may_run_full(r),
        lambda r: (
            "a server whose cache runs full drops a request and computes it again as one long prompt, which gives other bits. "
            f"Set rollout.kv_tokens to {_wanted_cache(r)} or more (rollout.max_running_requests "
            f"{r.rollout.max_running_requests}, at most rollout.concurrency {r.rollout.most_in_flight}, times "
            f"{longest_served(r)} tokens of a longest sample), or rollout.max_running_requests to less"
        ),
        RL,
    ),
    Contradiction(
        "rollout.deterministic",
        lambda r, _: r.rollout.deterministic and _too_large(r),
        lambda r: (
            f"on {_platform(r).name} the sum over more than {_platform(r).most_deterministic_tp} ranks is taken in an order that "
            f"depends on the batch. Set rollout.tp to at most {_platform(r).most_deterministic_tp} (it is {r.rollout.tp}), and "
            "rollout.servers to more"
        ),
        RL,
    ),
    Contradiction(
        "rollout.deterministic",
        lambda r, _: r.rollout.deterministic and bool(_undoing_flags(r)),
        lambda r: (
            f"rollout.server_args would undo it: {', '.join(_undoing_flags(r))}. Remove that; attention backends that are "
            f"deterministic on {_platform(r).name}: {', '.join(_platform(r).deterministic_attention)}"
        ),
        RL,
    ),
)

SERVER_UNREAD: tuple[Unread, ...] = (
    Unread(
        ("rollout.tp", "rollout.max_running_requests", "rollout.kv_tokens", "rollout.server_args", "rollout.offload"),
        lambda r, _: r.rollout.external is None,
        "rollout.servers.urls names servers that somebody else started: say it by the flags that they are started with "
        "(docs/rollout.md)",
        RL,
    ),
    Unread(
        ("sync.folder",),
        lambda r, _: r.sync.transport == "disk",
        "weights go through files with sync.transport: disk alone",
        RL,
    ),
)

SERVER_CONTRADICTIONS: tuple[Contradiction, ...] = (
    *DETERMINISTIC_CONTRADICTIONS,
    Contradiction(
        "rollout.server_args",
        lambda r, _: bool(_refused(r)),
        lambda r: f"on {_platform(r).name} no server comes up with these flags. Remove {'; '.join(_refused(r))}",
        RL,
    ),
    Contradiction(
        "rollout.deterministic",
        lambda r, _: r.rollout.deterministic and r.rollout.external is not None,
        lambda r: (
            "rollout.servers.urls names servers that somebody else started, and whether their answers depend on what else they "
            "answer, or on the size of their cache, is not the run's to say. Set it to false, or rollout.servers to a number"
        ),
        RL,
    ),
)
