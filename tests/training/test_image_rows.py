"""A step of rows with images, from a file to a gradient: what transformers computes of the same files by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.errors import UserError
from megarl.core.types import Column, Shard
from megarl.data.pack import assemble
from megarl.data.pack_rows import pack_pairs, pack_sft, pack_unpaired
from megarl.data.pairs import load_pairs
from megarl.data.sft import load_demonstrations
from megarl.data.unpaired import load_unpaired, mismatched
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import names_of_text
from megarl.recipe.supervised import Dpo, Kto, PairData, SftData, UnpairedData
from megarl.training.rank import Rank
from megarl.training.spec import DpoObjective, KtoObjective, RewardObjective
from tests.support.tolerances import Tolerance
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_MOE, experts_apart, png, with_score, write_tiny_vision_model
from tests.training.pairs import preference_loss
from tests.training.seeing import seeing_spec, transformers_model

PLACE = {"type": "image"}
USER, ASSISTANT = "<|im_start|>user ", "<|im_end|><|im_start|>assistant "
END = "<|im_end|>"
# Each row of the file, and by hand its text, with what of it is learned in every second place.
ROWS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"prompt": "<image>+<image>", "response": "12", "images": ["a.png", "b.png"]},
        [f"{USER}<>+<>{ASSISTANT}", f"12{END}"],
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [PLACE, {"type": "text", "text": "1+1"}]},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "+<image>"},
                {"role": "assistant", "content": "34"},
            ],
            "images": ["b.png", "c.png"],
        },
        [f"{USER}<>1+1{ASSISTANT}", f"2{END}", f"{USER}+<>{ASSISTANT}", f"34{END}"],
    ),
    ({"prompt": "1+2", "response": "3"}, [f"{USER}1+2{ASSISTANT}", f"3{END}"]),
    ({"prompt": "5+6", "response": "11", "images": "c.png"}, [f"{USER}<>5+6{ASSISTANT}", f"11{END}"]),
]
SIZES = {"a": (60, 90), "b": (130, 50), "c": (64, 64)}


Shown = tuple[list[str], list[str]]  # images, and a text with what of it is learned in every second place
CHATS: list[Shown] = [
    (each if isinstance(each := row.get("images", []), list) else [each], texts) for row, texts in ROWS
]
# Each pair of a file, its images, and the text before its two answers.
PAIRS: list[tuple[dict[str, Any], list[str], str]] = [
    (
        {"prompt": [{"role": "user", "content": [PLACE, {"type": "text", "text": "+"}, PLACE]}], "chosen": "12"}
        | {
            "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "3"}]}],
            "images": ["a.png", "b.png"],
        },
        ["a.png", "b.png"],
        f"{USER}<>+<>{ASSISTANT}",
    ),
    ({"prompt": "1+2", "chosen": "3", "rejected": "4444"}, [], f"{USER}1+2{ASSISTANT}"),
    (
        {"prompt": "5+6", "chosen": "11", "rejected": "1+1+1", "images": "c.png", "margin": 0.3},
        ["c.png"],
        f"{USER}<>5+6{ASSISTANT}",
    ),
]


ANSWERS = (("12", "3"), ("3", "4444"), ("11", "1+1+1"))


class Whole:
    """A model of transformers', which resizes images by itself."""

    def __init__(self, folder: Path, images: Path) -> None:
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self._names: dict[str, str] = {}
        self._folder, self._images, self._model = folder, images, transformers_model(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._process = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def scored(self, head: Tensor) -> None:
        """Give the model this head of one score."""
        self._names = {"lm_head.weight": "score.weight"}
        self._model.lm_head = torch.nn.Linear(head.shape[1], 1, bias=False)
        self._model.lm_head.weight = torch.nn.Parameter(head)

    def score(self, shown: Shown) -> Tensor:
        """That of the last token."""
        return self._read(shown)[0][0, -1, 0]

    def says(self, shown: Shown) -> Tensor:
        """Log-probs of the tokens that are learned: [n]."""
        logits, tokens, learned = self._read(shown)
        each = -torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
        return each[torch.tensor(learned[1:]) == 1]

    def _read(self, shown: Shown) -> tuple[Tensor, Tensor, list[int]]:
        """Logits, [1, L, n], of the tokens, [1, L]; and which of these are learned."""
        names, texts = shown
        opened = [Image.open(self._images / name) for name in names]
        pictures: dict[str, Any] = dict(self._process(images=opened, return_tensors="pt")) if opened else {}
        squares = iter([int(g.prod()) // self._process.merge_size**2 for g in pictures.get("image_grid_thw", ())])
        ids: list[int] = []
        learned: list[int] = []
        for place, text in enumerate(texts):
            first, *others = text.split("<>")
            whole = first + "".join(
                f"<|vision_start|>{'<|image_pad|>' * next(squares)}<|vision_end|>{other}" for other in others
            )
            ids += self._tokenizer(whole, add_special_tokens=False)["input_ids"]
            learned += [place % 2] * (len(ids) - len(learned))
        tokens, mark = torch.tensor([ids]), self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        logits = self._model(input_ids=tokens, mm_token_type_ids=(tokens == mark).int(), **pictures).logits
        return logits, tokens, learned

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Of the loss, by the text part's names."""
        loss.backward()  # type: ignore[no-untyped-call]
        named = {name: parameter.grad for name, parameter in self._model.named_parameters()}
        names = names_of_text(named, self._folder).items()
        found = {text: grad for text, name in names if (grad := named[name]) is not None}
        return experts_apart({self._names.get(text, text): grad for text, grad in found.items()})


def write(root: Path, rows: list[dict[str, Any]]) -> Path:
    for name, size in SIZES.items():
        (root / f"{name}.png").write_bytes(png(*size, seed=ord(name)))
    file = root / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def assert_step(
    rank: Rank,
    role: str,
    shard: Shard,
    columns: dict[str, Column],
    group: str,
    loss: Tensor,
    whole: Whole,
    bounds: Tolerance,
    kl: float = 0.0,
) -> None:
    """Loss and gradients of a step are those of transformers."""
    assert len(shard.mini_batches[0].micro_batches) > 1
    metrics = rank.update(role, shard, columns, kl)
    found = {name: tensor.cpu() for bucket in rank.engine(role).gradients(1 << 16) for name, tensor in bucket}
    gradients = whole.gradients(loss)
    assert metrics[f"{group}/loss"] == pytest.approx(loss.item(), rel=bounds.loss)
    assert found.keys() == gradients.keys()
    apart = {
        name: (found[name] - each).abs().max() / each.abs().max().clamp(min=1e-12) for name, each in gradients.items()
    }
    assert {name: each for name, each in apart.items() if not each < bounds.gradient} == {}


@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3, QWEN3_MOE])
def test_loss_and_gradients_of_rows_are_those_of_transformers(
    rank: Rank, architecture: Any, tmp_path: Path, bounds: Tolerance
) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", architecture, seed=5)
    file = write(tmp_path, [row for row, _ in ROWS])
    rows = load_demonstrations(file, folder, SftData(train=file), load_model_config(folder).vision).rows
    sizes = [(each.width, each.height) for each in rows[0].images]
    assert sizes != [SIZES["a"], SIZES["b"]], "these are resized"
    [(plan, block)] = pack_sft(rows, num_shards=1, micro_batch_tokens=96)
    rank.build("actor", seeing_spec(folder))
    whole = Whole(folder, tmp_path)
    loss = -torch.cat([whole.says(each) for each in CHATS]).mean()
    assert_step(rank, "actor", assemble(plan, [block]), {}, "sft", loss, whole, bounds)


@pytest.fixture(scope="module", params=[QWEN2_5, QWEN3])
def two_models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy, and a reference that says something else."""
    root = tmp_path_factory.mktemp("two")
    policy, other = (write_tiny_vision_model(root / str(seed), request.param, seed=seed) for seed in (5, 6))
    return policy, other


@pytest.mark.parametrize(
    "settings",
    [
        Dpo(beta=0.3, label_smoothing=0.1, sft_coef=0.5),
        Dpo(beta=0.3, loss="robust", label_smoothing=0.2),
        Dpo(beta=0.3, loss="hinge", margin=0.2),
        Dpo(beta=0.3, loss="ipo", length_normalized=True),
        Dpo(beta=0.3, loss="apo_zero"),
        Dpo(beta=0.3, loss="apo_down"),
        Dpo(beta=2.0, margin=0.5, loss="simpo"),
        Dpo(beta=0.3, loss="orpo"),
    ],
    ids=lambda settings: settings.loss,
)
def test_every_loss_of_pairs_is_that_of_transformers_and_a_reference_that_sees(
    rank: Rank, two_models: tuple[Path, Path], settings: Dpo, tmp_path: Path, bounds: Tolerance
) -> None:
    folder, other = two_models
    file = write(tmp_path, [row for row, _, _ in PAIRS])
    pairs = load_pairs(file, folder, PairData(train=file), load_model_config(folder).vision).rows
    [(plan, block)] = pack_pairs(pairs, num_shards=1, micro_batch_tokens=96, scored=False)
    shard = assemble(plan, [block])
    rank.build("actor", replace(seeing_spec(folder), objective=DpoObjective(settings)))
    rank.build("reference", replace(seeing_spec(other), optimizer=None, objective=None))
    column = rank.logprobs("reference", shard)
    assert column is not None
    whole, reference = Whole(folder, tmp_path), Whole(other, tmp_path)

    def said(names: list[str], text: str, answer: str) -> tuple[Tensor, Tensor]:
        shown = (names, [text, f"{answer}{END}"])
        return whole.says(shown), reference.says(shown).detach()

    losses = []
    for (row, names, text), answers in zip(PAIRS, ANSWERS, strict=True):
        each = (said(names, text, answer) for answer in answers)
        losses.append(preference_loss(settings, *each, margin=row.get("margin", 0.0)))
    loss = torch.stack(losses).mean()
    columns = {"ref_logprobs": column} if settings.with_reference else {}
    assert_step(rank, "actor", shard, columns, "dpo", loss, whole, bounds)


def test_the_loss_of_labelled_answers_is_that_of_transformers_and_so_is_its_kl(
    rank: Rank, two_models: tuple[Path, Path], tmp_path: Path, bounds: Tolerance
) -> None:
    """The KL is of each prompt, with its images, before the answer of the next row."""
    folder, other = two_models
    settings = Kto(beta=0.3, desirable_weight=1.5)
    given = [row | {"completion": row["chosen"], "label": at != 1} for at, (row, _, _) in enumerate(PAIRS)]
    file = write(tmp_path, [{key: row[key] for key in row if key not in ("chosen", "rejected")} for row in given])
    data = UnpairedData(train=file)
    rows = load_unpaired(file, folder, data, load_model_config(folder).vision).rows
    sizes = {"num_shards": 1, "micro_batch_tokens": 64}
    [(plan, block)] = pack_unpaired(rows, **sizes)
    [(their_plan, their_block)] = pack_unpaired(mismatched(rows, data.max_tokens), **sizes)
    shard, others = assemble(plan, [block]), assemble(their_plan, [their_block])
    rank.build("actor", replace(seeing_spec(folder), objective=KtoObjective(settings)))
    rank.build("reference", replace(seeing_spec(other), optimizer=None, objective=None))
    column, their_column = (rank.logprobs("reference", each) for each in (shard, others))
    assert column is not None and their_column is not None
    whole, reference = Whole(folder, tmp_path), Whole(other, tmp_path)

    def ratio(at: int, answered: int) -> Tensor:
        shown = (PAIRS[at][1], [PAIRS[at][2], f"{given[answered]['completion']}{END}"])
        return (whole.says(shown) - reference.says(shown).detach()).sum()

    apart = torch.stack([ratio(at, (at + 1) % 3) for at in range(3)]).mean().item()
    found = rank.evaluate("actor", others, {"ref_logprobs": their_column})["kto/log_ratio"]
    assert found == pytest.approx(apart, rel=bounds.loss)
    kl = 0.4  # in place of the estimate, which may be 0
    rewards = [settings.beta * (ratio(at, at) - kl) for at in range(3)]
    losses = [
        1.5 * (1 - torch.sigmoid(reward)) if row["label"] else 1 - torch.sigmoid(-reward)
        for reward, row in zip(rewards, given, strict=True)
    ]
    loss = torch.stack(losses).mean()
    assert_step(rank, "actor", shard, {"ref_logprobs": column}, "kto", loss, whole, bounds, kl)


def test_the_loss_of_a_reward_model_that_sees_is_that_of_transformers_and_a_head(
    rank: Rank, two_models: tuple[Path, Path], tmp_path: Path, bounds: Tolerance
) -> None:
    folder = with_score(two_models[0], tmp_path / "scored")
    file = write(tmp_path, [row for row, _, _ in PAIRS])
    pairs = load_pairs(file, folder, PairData(train=file), load_model_config(folder).vision).rows
    [(plan, block)] = pack_pairs(pairs, num_shards=1, micro_batch_tokens=96, scored=True)
    rank.build("rm", replace(seeing_spec(folder), objective=RewardObjective(0.05), head="score"))
    whole = Whole(folder, tmp_path)
    whole.scored(load_file(folder / "model.safetensors")["score.weight"])
    losses = []
    for (row, names, text), answers in zip(PAIRS, ANSWERS, strict=True):
        better, worse = (whole.score((names, [text, f"{answer}{END}"])) for answer in answers)
        lead = better - worse - row.get("margin", 0.0)
        losses.append(-torch.log(torch.sigmoid(lead)) + 0.05 * (better + worse) ** 2)
    assert_step(rank, "rm", assemble(plan, [block]), {}, "rm", torch.stack(losses).mean(), whole, bounds)


def test_an_image_that_is_damaged_is_told_with_its_row(
    rank: Rank, two_models: tuple[Path, Path], tmp_path: Path
) -> None:
    file = write(tmp_path, [row for row, _ in ROWS])
    data = (tmp_path / "c.png").read_bytes()
    (tmp_path / "c.png").write_bytes(data[:3000] + bytes(300) + data[3300:])
    rows = load_demonstrations(file, two_models[0], SftData(train=file), load_model_config(two_models[0]).vision).rows
    [(plan, block)] = pack_sft(rows, num_shards=1, micro_batch_tokens=256)
    rank.build("actor", seeing_spec(two_models[0]))
    with pytest.raises(
        UserError, match=r"rows.jsonl, line [24], field 'images', image [12]: .*c.png cannot be decoded"
    ):
        rank.update("actor", assemble(plan, [block]), {})
