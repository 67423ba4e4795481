"""How a run's policy sees messages: where images stand in them, at which size, and as how many tokens.

What comes here was given by environments and tools, whose images are bytes of files (observations.py): their sizes are bounded
before anything is decoded. Not for where images go (rollout/pictures.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.agents.environment import EnvironmentFailedError, Message
from megarl.agents.observations import IMAGE, TEXT, WANTED, check_size, is_shown, kind_of, shown_text
from megarl.core.errors import UserError
from megarl.core.types import Image, Prompt, TokenArray
from megarl.core.words import shortened
from megarl.data.chat import Tokenizer
from megarl.data.image_places import PLACE, in_squares, spellings
from megarl.data.images import Sight, image_of
from megarl.models.hf_config import load_model_config
from megarl.recipe.schema import Recipe
from megarl.rollout.pictures import Pictures

MOST_PIXELS = 2**26  # of an image before it is made smaller
UNSEEN = "[image]"  # what a tool's image is for a model that sees none
BLIND = "the model sees no images"


@dataclass(frozen=True)
class Observed:
    """messages: as chat templates have them. images: in the order of their places; None is the row's next."""

    messages: list[Message]
    images: tuple[Image | None, ...] = ()

    def sized(self, row: Prompt) -> list[Image]:
        """The images, with the row's in their places."""
        own = iter(row.images)
        return [next(own) if image is None else image for image in self.images]


class Observer:
    """How a run's policy sees messages. sight: of a model that sees. spelled: of its tokens of images, see `spellings`.

    blind: why images of environments cannot be shown; empty where they can.
    """

    def __init__(self, sight: Sight | None = None, spelled: Sequence[str] = (), blind: str = "") -> None:
        self._sight, self._spelled = sight, tuple(spelled)
        self.blind = blind or (BLIND if sight is None else "")

    @classmethod
    def open(cls, recipe: Recipe, tokenizer: Tokenizer, sight: Sight | None) -> Observer:
        """Of a recipe. sight: of its model, if that sees images."""
        return cls() if sight is None else cls(sight, spellings(tokenizer, sight), _blind(recipe))

    def pictures(self, prompt: Prompt) -> Pictures:
        """Of an attempt that came without any."""
        sight = self._sight
        return Pictures(prompt, None, None) if sight is None else Pictures(prompt, sight.image_token, sight.video_token)

    def first(self, messages: Sequence[Message], row: Prompt, where: str = "start") -> Observed:
        """An episode's first messages, in which each image of the row has a place: `<image>` in the text, or a part.

        Raises EnvironmentFailedError.
        """
        _check_parts(messages, where)
        placed = list(messages)
        if row.images:
            placed = [{**each, "content": _with_places(each["content"])} for each in messages]
        for text in (shown_text(each["content"]) for each in placed):
            if found := next((token for token in self._spelled if token in text), None):
                raise EnvironmentFailedError(
                    f"{where} gave text that spells {found}, which the model takes for a place of an image or a video. Leave it "
                    "out."
                )
        observed = self._observed(placed, where)
        if (count := observed.images.count(None)) != len(row.images):
            raise EnvironmentFailedError(
                f"{where} gave messages with {count} places of the row's images ({PLACE}, or parts "
                f'{{"type": "image"}}), and the row has {len(row.images)}: give what row.messages have'
            )
        return observed

    def later(self, messages: Sequence[Message], where: str = "step") -> Observed:
        """Messages of an environment or of tools, as they come in an episode. Raises EnvironmentFailedError."""
        _check_parts(messages, where)
        observed = self._observed(messages, where)
        if None in observed.images:
            raise EnvironmentFailedError(
                f'{where} gave a part {{"type": "image"}} without an image: put it there, as in {{"type": "image", "image": ...}}'
            )
        return observed

    def unfit(self, message: Message) -> str:
        """Why what a tool gave cannot be shown; empty where it can."""
        if isinstance(message["content"], str):
            return ""
        try:
            self.later([message], str(message.get("name")))
        except EnvironmentFailedError as error:
            return str(error)
        return ""

    def expanded(self, token_ids: TokenArray, images: Sequence[Image], where: str) -> TokenArray:
        """Token ids in which each image has one token, with as many as it has squares. Raises EnvironmentFailedError."""
        if self._sight is None or not images:
            return token_ids
        found = in_squares(token_ids, images, self._sight)
        if found is None:
            raise EnvironmentFailedError(
                f"{where} gave messages with {len(images)} images, and the model's chat template does not write each as start, "
                "image and end token: put images into messages of the user"
            )
        return found

    def first_place(self, token_ids: TokenArray) -> int | None:
        """The first token in these that stands for an image or a video; None where there is none, or the model sees none."""
        tokens = [] if self._sight is None else [self._sight.image_token, self._sight.video_token]
        return next((int(token) for token in token_ids if int(token) in tokens), None)

    def _observed(self, messages: Sequence[Message], where: str) -> Observed:
        images: list[Image | None] = []
        shown = []
        for number, message in enumerate(messages, 1):
            content = message["content"]
            if isinstance(content, list) and message["role"] == "tool" and self.blind:
                content = shown_text(content, UNSEEN)
            if isinstance(content, list):
                images += self._images(content, f"{where}, message {number}")
                content = [part if part["type"] == TEXT else {"type": IMAGE} for part in content]
                content = content if is_shown(content) else shown_text(content)
            shown.append({**message, "content": content})
        return Observed(shown, tuple(images))

    def _images(self, parts: Sequence[Mapping[str, Any]], where: str) -> list[Image | None]:
        found: list[Image | None] = []
        for part in (each for each in parts if each["type"] == IMAGE):
            if self.blind or self._sight is None:
                raise EnvironmentFailedError(f"{where}: there is an image in it, and {self.blind}")
            given = part.get("image")
            if given is None:
                found.append(None)
                continue
            _check_bytes(given, where)
            try:
                found.append(image_of(given, Path(), f"{where}, image {len(found) + 1}", self._sight, MOST_PIXELS))
            except UserError as error:
                raise EnvironmentFailedError(str(error)) from error
        return found


def _blind(recipe: Recipe) -> str:
    """Who beside the policy is given an episode's tokens, and sees no images; empty where nobody is."""
    if recipe.agent is not None and recipe.agent.rewritten == "split":
        return "with agent.rewritten: split none is shown"
    if recipe.teacher is not None and recipe.teacher.servers is not None:
        return "a teacher behind an address (teacher.servers) is asked about text alone"
    sections = {"critic": recipe.critic, "reward_model": recipe.reward_model, "teacher": recipe.teacher}
    for role, section in sections.items():
        folder = section.path if section is not None else None
        if folder is not None and load_model_config(folder).vision is None:
            return f"{role}.path {folder} is a model that sees none"
    return ""


def _with_places(content: Any) -> Any:
    """Content with a part in the place of each `<image>`."""
    parts = [{"type": TEXT, "text": content}] if isinstance(content, str) else content
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != TEXT:
            found.append(part)
            continue
        for number, text in enumerate(part["text"].split(PLACE)):
            found += [{"type": IMAGE}] if number else []
            found += [{"type": TEXT, "text": text}] if text else []
    return found if is_shown(found) else content


def _check_parts(messages: Sequence[Message], where: str) -> None:
    """Raises EnvironmentFailedError for content that `sendable` does not give, whoever sent it."""
    for number, message in enumerate(messages, 1):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if not (kind_of(part) == TEXT and isinstance(part.get("text"), str)) and kind_of(part) != IMAGE:
                raise EnvironmentFailedError(
                    f"{where}, message {number}: a part of it is {shortened(repr(part), 120)}; {WANTED}"
                )


def _check_bytes(given: Any, where: str) -> None:
    """Of what came from an environment's process, whatever that has become. Raises EnvironmentFailedError."""
    if not isinstance(given, bytes):
        raise EnvironmentFailedError(f"{where}: an image came as {type(given).__name__}, and not as bytes")
    try:
        check_size(len(given))
    except ValueError as error:
        raise EnvironmentFailedError(f"{where}: {error}") from error
