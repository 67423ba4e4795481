"""Where a plan takes the sizes of a recipe's models from: their folders, or what is known of models that are not here."""

from __future__ import annotations

from pathlib import Path

from megarl.core.errors import UserError
from megarl.hub.fetch import config_here
from megarl.hub.names import hub_name
from megarl.models.config import ModelConfig
from megarl.models.known_configs import known_config, known_names
from megarl.placement.workload import read_model
from megarl.recipe.schema import Recipe


class PlannedModels:
    """Reads the models that a recipe names. notes: what was taken in the place of a folder that is not there."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.notes: list[str] = []
        self.policy = self(recipe.model.path)

    def __call__(self, path: Path) -> ModelConfig:
        """The model at a path. Raises UserError where nothing is known of it."""
        if path.is_dir() or config_here(path) is not None:
            return read_model(path)
        known = known_config(path)
        if known is not None:
            name = f"{known.parent.parent.name}/{known.parent.name}"
            self._note(f"There is no folder {path}: planned with the published sizes of {name}.")
            return read_model(known.parent)
        scores = self._recipe.reward_model
        if scores is not None and path == scores.path and path != self._recipe.model.path:
            self._note(f"There is no folder {path}: the reward model is planned with the policy's sizes.")
            return self.policy
        said = ""
        if hub_name(path, "model") is not None:
            try:
                return read_model(path)
            except UserError as error:
                said = f" As a name on the hub: {error}"
        raise UserError(
            f"There is no model folder {path}, and it is named after none of the models whose sizes are known: "
            f"{', '.join(known_names())}. A plan needs the model's config.json, and nothing else of it: set model.path to a "
            f"folder that has one, or to one of these names.{said}"
        )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
