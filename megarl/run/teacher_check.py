"""What can be refused of a teacher behind an address before a device is taken: its servers are asked."""

from __future__ import annotations

from megarl.core.errors import UserError
from megarl.core.types import TEACHER_TOP
from megarl.data.chat import load_tokenizer
from megarl.models.config import ModelConfig
from megarl.recipe.rollout_rules import longest_sample
from megarl.recipe.schema import Recipe
from megarl.recipe.scoring import served_columns
from megarl.rewards.check import read_key
from megarl.serving.server_flags import SPARE_TOKENS


def check_teacher(recipe: Recipe, model: ModelConfig, *, here: bool = True) -> tuple[float, ...]:
    """Whether the teacher's servers can be asked about samples; by what they say a teacher is known (`check_teachers`).

    model: the policy's. here: whether the run will be on this machine: elsewhere it may reach what is out of reach here, and
    nobody is asked. Raises UserError.
    """
    teacher, columns = recipe.teacher, served_columns(recipe)
    if teacher is None or teacher.servers is None:
        return ()
    top = recipe.algorithm.distill_top_k if TEACHER_TOP in columns else 0
    if top > model.vocab_size:
        raise UserError(
            f"algorithm.distill_top_k: {top} is more than the vocabulary of model.path, which has {model.vocab_size} tokens. "
            "Set it to at most that; 64 is common."
        )
    key = read_key(teacher.servers.key_env, "teacher.servers") or ""
    if not here:
        return ()
    from megarl.serving.external import probe_ids  # with a client, which takes a while to load
    from megarl.serving.teacher import Wanted, check_teachers

    probe = probe_ids(load_tokenizer(recipe.model.path).encode)
    return check_teachers(teacher.servers.urls, key, Wanted(probe, longest_sample(recipe) + SPARE_TOKENS, top))
