"""The rules that `check.py` holds recipes to, as data: keys that nothing reads, and values that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megarl.recipe.agent_rules import AGENT_CONTRADICTIONS, AGENT_UNREAD, score_names
from megarl.recipe.algorithm_rules import ALGORITHM_CONTRADICTIONS, ALGORITHM_UNREAD
from megarl.recipe.dataset import is_set
from megarl.recipe.functions import Asked
from megarl.recipe.group_rules import GROUP_CONTRADICTIONS, GROUP_UNREAD
from megarl.recipe.held_out_rules import HELD_OUT_CONTRADICTIONS, HELD_OUT_UNREAD
from megarl.recipe.keep_rules import KEEP_CONTRADICTION
from megarl.recipe.report_rules import REPORT_CONTRADICTIONS
from megarl.recipe.reward import Rule
from megarl.recipe.role_rules import ROLE_CONTRADICTIONS, ROLE_UNREAD
from megarl.recipe.rollout_rules import SERVER_CONTRADICTIONS, SERVER_UNREAD, longest_served, served_parts
from megarl.recipe.rule import RL, Contradiction, Unread
from megarl.recipe.sampling_rules import SAMPLING_CONTRADICTIONS, SAMPLING_UNREAD
from megarl.recipe.schema import Recipe
from megarl.recipe.speculation_rules import SPECULATION_CONTRADICTIONS
from megarl.recipe.stores import STORES
from megarl.recipe.supervised import SftRecipe
from megarl.recipe.supervised_rules import SUPERVISED_CONTRADICTIONS, SUPERVISED_UNREAD
from megarl.recipe.sync_rules import SYNC_CONTRADICTIONS, SYNC_UNREAD

# What a search decides, by role.
SEARCHED_KEYS = (
    ("placement.pools",),
    ("actor.parallel", "actor.recompute", "actor.recompute_num_layers", "actor.offload"),
    ("reference.parallel", "reference.offload"),
    ("critic.parallel", "critic.recompute", "critic.recompute_num_layers", "critic.offload"),
    ("reward_model.parallel", "reward_model.offload"),
    ("teacher.parallel", "teacher.offload"),
    ("rollout.servers", "rollout.tp", "rollout.offload"),
)


def _placed_by_hand(section: str) -> Callable[[Recipe, Asked], bool]:
    return lambda recipe, _: recipe.placement.name is None or getattr(recipe, section) is None


def may_rewind(recipe: Recipe) -> bool:
    """Whether anything in the recipe goes back to a checkpoint."""
    asked = [recipe.actor.optimizer.on_bad_gradient, recipe.algorithm.on_logprob_diff]
    asked += [recipe.critic.optimizer.on_bad_gradient] if recipe.critic is not None else []
    return "rewind" in asked


_NO_SET = "names a file, and files have neither configurations nor splits: name a data set"
DATA_UNREAD = (
    Unread(("data.train_split", "data.config"), lambda r, _: is_set(r.data.train), f"data.train {_NO_SET}"),
    Unread(
        ("data.eval_split", "data.eval_config"),
        lambda r, _: is_set(r.data.eval),
        f"data.eval is not given, or {_NO_SET}",
    ),
)
UNREAD_RULES: tuple[Unread, ...] = (
    *AGENT_UNREAD,
    *ALGORITHM_UNREAD,
    *GROUP_UNREAD,
    *HELD_OUT_UNREAD,
    *SUPERVISED_UNREAD,
    *ROLE_UNREAD,
    *DATA_UNREAD,
    *SAMPLING_UNREAD,
    *SERVER_UNREAD,
    *SYNC_UNREAD,
    *(
        Unread(
            keys,
            _placed_by_hand(keys[0].partition(".")[0]),
            "placement.name decides it: remove that one to place the run by hand",
            RL,
        )
        for keys in SEARCHED_KEYS
    ),
    Unread(
        ("train.epochs",),
        lambda r, _: r.train.steps == 0,
        "train.steps says how long the run is: remove that one, or set it to 0",
    ),
    Unread(
        ("train.async_save",),
        lambda r, _: r.train.save_every is not None,
        "the only checkpoint is that of the last step, beside which nothing goes on: set train.save_every",
    ),
    Unread(
        ("train.max_rewinds",),
        lambda r, _: may_rewind(r),
        "nothing in this recipe goes back to a checkpoint: set on_bad_gradient of an optimizer, or algorithm.on_logprob_diff, to "
        "rewind",
        RL,
    ),
    Unread(
        ("train.journal_keep",),
        lambda r, _: r.train.journal,
        "train.journal is false, and nothing is written down: set it to true",
        RL,
    ),
    Unread(
        ("reward.fn",),
        lambda r, _: not r.reward.graders,
        "reward.graders is given, and only they grade: make it one of them, with kind: rule",
        RL,
    ),
    Unread(
        ("train.keep_best",),
        lambda r, _: r.data.eval is not None and bool(r.eval.every and r.train.save_every),
        "no step before the last is both saved and evaluated: set data.eval, eval.every and train.save_every",
    ),
    Unread(
        ("data.max_image_pixels",),
        lambda r, _: r.data.images_key is not None or getattr(r, "agent", None) is not None,  # episodes may show others
        "data.images_key is null, and no image is read: name the field of images",
        (*RL, SftRecipe),
    ),
    Unread(
        ("data.mix_key",),
        lambda r, _: bool(r.data.mix),
        "it names the sets that data.mix gives shares to: set that, such as data.mix={math: 3, code: 1}",
    ),
    Unread(
        ("reward.workers", "reward.timeout_s"),
        lambda r, _: any(isinstance(grader, Rule) for grader in r.reward.by_name().values()),
        "only rules grade in processes of the run, and reward.graders has none: give it one with kind: rule",
        RL,
    ),
)

# SGLang's own bounds of what a request asks for (sampling/sampling_params.py).
MOST_STOPS, LEAST_TEMPERATURE = 32, 1e-6

OUTLIVES = "nothing: what it stores outlives a weight sync, and was computed with the weights before"

# Flags of SGLang that megarl sets itself, or that a server would be of no use with; to the recipe's key that decides them.
OWNED_FLAGS: Mapping[str, str] = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--tp-size": "rollout.tp",
    "--tp": "rollout.tp",
    "--tensor-parallel-size": "rollout.tp",
    "--max-running-requests": "rollout.max_running_requests",
    "--max-total-tokens": "rollout.kv_tokens",
    "--random-seed": "run.seed",
    "--weight-version": "nothing: the driver counts the versions",
    "--host": "nothing: servers listen on the cluster's interface only",
    "--port": "nothing: a free port is chosen",
    "--api-key": "nothing: a key is made for each run",
    "--admin-api-key": "nothing: the run's key is for everything",
    "--context-length": "rollout.max_response_tokens",
    "--tokenizer-path": "model.path",
    "--preferred-sampling-params": "rollout.temperature",
    "--config": "nothing: the flags of such a file go into rollout.server_args, where they are checked",
    # A server of more devices than it was given, or of others.
    "--nnodes": "rollout.tp",
    "--node-rank": "rollout.tp",
    "--dist-init-addr": "rollout.tp",
    "--nccl-init-addr": "rollout.tp",
    "--base-gpu-id": "nothing: its place decides",
    "--gpu-id-step": "nothing: its place decides",
    "--device": "cluster.platform",
    "--pp-size": "nothing: rollout.tp alone cuts a server",
    "--pipeline-parallel-size": "nothing: rollout.tp alone cuts a server",
    "--use-ray": "nothing: megarl starts the servers' processes",
    # A server that answers in another way than it is asked.
    "--grpc-mode": "nothing: servers answer HTTP",
    "--smg-grpc-mode": "nothing: servers answer HTTP",
    "--ssl-keyfile": "nothing: servers answer HTTP on the cluster's interface, with a key",
    "--ssl-certfile": "nothing: servers answer HTTP on the cluster's interface, with a key",
    "--fastapi-root-path": "nothing: servers are asked without a path before SGLang's",
    "--is-embedding": "nothing: servers generate",
    "--encoder-only": "nothing: servers generate",
    "--disaggregation-mode": "nothing: every server reads prompts and answers them",
    **dict.fromkeys(STORES, OUTLIVES),
    # The folder is the user's own, and a server that starts anew reads it again.
    "--delete-ckpt-after-loading": "nothing: the model's folder is read again",
}


def _owned_flags(recipe: Recipe) -> list[str]:
    return [flag for word in recipe.rollout.server_args if (flag := word.partition("=")[0]) in OWNED_FLAGS]


def _decided(flag: str) -> str:
    """A flag and why it is not the recipe's to give."""
    key, nothing, why = OWNED_FLAGS[flag].partition("nothing: ")
    return f"{flag} ({why})" if nothing else f"{flag} (decided by {key})"


CONTRADICTIONS: tuple[Contradiction, ...] = (
    *AGENT_CONTRADICTIONS,
    *ALGORITHM_CONTRADICTIONS,
    *GROUP_CONTRADICTIONS,
    *HELD_OUT_CONTRADICTIONS,
    *ROLE_CONTRADICTIONS,
    *SERVER_CONTRADICTIONS,
    *SAMPLING_CONTRADICTIONS,
    *SUPERVISED_CONTRADICTIONS,
    *SPECULATION_CONTRADICTIONS,
    *SYNC_CONTRADICTIONS,
    Contradiction(
        "rollout.top_k",
        lambda r, _: r.rollout.top_k == 0 or r.rollout.top_k < -1,
        lambda r: f"got {r.rollout.top_k}; set it to -1 (off)",
        RL,
    ),
    Contradiction(
        "rollout.stop",
        lambda r, _: "" in r.rollout.stop,
        lambda r: "an empty stop string ends every response at once. Remove it from the list",
        RL,
    ),
    Contradiction(
        "rollout.stop",
        lambda r, _: len(r.rollout.stop) > MOST_STOPS,
        lambda r: (
            f"SGLang takes {MOST_STOPS} stop strings, and got {len(r.rollout.stop)}: it would refuse every request. Drop some"
        ),
        RL,
    ),
    Contradiction(
        "rollout.temperature",
        lambda r, _: r.rollout.temperature < LEAST_TEMPERATURE,
        lambda r: (
            f"below {LEAST_TEMPERATURE:g} SGLang takes the likeliest token and tells its log-prob at 1, where the trainer "
            f"divides by {r.rollout.temperature:g}. Set it to more: 1.0 is common"
        ),
        RL,
    ),
    Contradiction(
        "rollout.kv_tokens",
        lambda r, _: r.rollout.kv_tokens is not None and r.rollout.kv_tokens < longest_served(r),
        lambda r: (
            f"a server's cache of {r.rollout.kv_tokens} tokens does not hold one sample of {served_parts(r)} tokens. "
            f"Set it to {longest_served(r)} or more"
        ),
        RL,
    ),
    Contradiction(
        "rollout.server_args",
        lambda r, _: bool(_owned_flags(r)),
        lambda r: (
            "some of these flags are megarl's to decide. Remove "
            + ", ".join(_decided(flag) for flag in _owned_flags(r))
        ),
        RL,
    ),
    Contradiction(
        "reward.graders",
        lambda r, _: (
            (r.reward_model is None or r.reward_model.weight == 0)
            and len(score_names(r)) == len(r.reward.by_name()) > 0
            and all(each.weight == 0 for each in r.reward.by_name().values())
        ),
        lambda r: (
            "all that grades has weight 0, so that every reward would be 0. Give a grader, or the reward model, another weight"
        ),
        RL,
    ),
    Contradiction(
        "train.steps",
        lambda r, _: r.train.steps == 0 and r.train.epochs is None,
        lambda _: "nothing says how long the run is. Set it, or train.epochs, to more than 0",
    ),
    KEEP_CONTRADICTION,
    *REPORT_CONTRADICTIONS,
    Contradiction(
        "data.mix",
        lambda r, _: bool(r.data.mix) and not any(r.data.mix.values()),
        lambda _: "all of its shares are 0, so that no row would be trained on. Give a set more",
    ),
)
