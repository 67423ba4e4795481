"""Sections and recipes of supervised runs: demonstrations (sft), reward models (rm), pairs (dpo), labelled answers (kto)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.dataset import DataSet, ImagesKey, MaxImagePixels, Mix, MixKey
from megarl.recipe.keep import KeptBest
from megarl.recipe.roles import Adapters, Optimizer, Parallel, Reference
from megarl.recipe.run import Cluster, Deadlines, Model, Report, Run
from megarl.recipe.section import (
    AsyncSave,
    AuxLossCoef,
    Epochs,
    KeepEvery,
    KeepLast,
    Offload,
    PositiveFloat,
    PositiveInt,
    Recompute,
    RecomputeNumLayers,
    SaveEvery,
    Section,
    Steps,
)


class RowData(DataSet):
    """Rows of a supervised run; JSONL or Parquet."""

    prompt_key: str = Field("prompt", description="field with a string or chat messages")
    max_tokens: PositiveInt = Field(
        2048, description="longest sequence, prompt and response; rows with a longer one are counted and dropped"
    )
    images_key: ImagesKey = "images"
    max_image_pixels: MaxImagePixels = None
    shuffle: bool = Field(True, description="a new order every epoch, from run.seed")
    mix: Mix = Field({})
    mix_key: MixKey = "data_source"


class SftData(RowData):
    """Demonstrations: rows with `messages`, or with a prompt and a response."""

    response_key: str = Field("response", description="field with the assistant's text")
    messages_key: str = Field(
        "messages", description="field with whole chats, the last message the assistant's; used where present"
    )


class PairData(RowData):
    """Preferences: a better and a worse answer, as texts beside a prompt or as whole chats."""

    chosen_key: str = Field("chosen", description="field with the better answer: text, or a whole chat")
    rejected_key: str = Field("rejected", description="field with the worse answer: text, or a whole chat")
    margin_key: str = Field(
        "margin",
        description="field with a number, used where present: how far the better answer shall be ahead, in units of the "
        "score (rm) or of the reward (dpo)",
    )


class UnpairedData(RowData):
    """Answers that are labelled one by one, as texts beside a prompt or as whole chats."""

    response_key: str = Field("completion", description="field with the answer: text, or a whole chat")
    label_key: str = Field(
        "label", description="field that says whether the answer is desirable: true or false, 1 or 0"
    )


class HeldOut(Section):
    """The held-out rows, before, during and after; needs data.eval."""

    before: bool = Field(True, description="evaluate before the first step, too")
    every: PositiveInt | None = Field(None, description="steps between evaluations; default: only before and after")


class SftTrain(Section):
    """Length and batch of supervised training."""

    steps: Steps = Field(0, description="optimizer steps; 0: as train.epochs says")
    epochs: Epochs = None
    batch_samples: PositiveInt = Field(
        description="rows in one optimizer step: demonstrations, pairs or labelled answers"
    )
    save_every: SaveEvery = None
    keep_last: KeepLast = 2
    async_save: AsyncSave = False
    keep_every: KeepEvery = None
    keep_best: KeptBest = None


class SftActor(Section):
    """The model under supervised training, on Megatron."""

    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    micro_batch_tokens: PositiveInt = Field(
        16384,
        description="most tokens of one forward pass, on one data-parallel rank; beyond it each sequence is padded to a multiple "
        "of 2 cp where cp is above 1, times tp with sequence_parallel",
    )
    recompute: Recompute = "none"
    recompute_num_layers: RecomputeNumLayers = None
    aux_loss_coef: AuxLossCoef = 0.0
    lora: Adapters = None
    offload: Offload = ()


class Sft(Section):
    """What a model learns from demonstrations."""

    loss: Literal["nll", "dft"] = Field(
        "nll",
        description="nll: cross entropy; dft: that of each token times its probability, which gets no gradient (arXiv "
        "2508.05629)",
    )


class Rm(Section):
    """What a reward model learns from pairs."""

    center_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of (chosen + rejected score)^2, which keeps scores around 0 (arXiv 2312.09244)"
    )


class Dpo(Section):
    """What a policy learns from pairs (arXiv 2305.18290)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo"] = Field(
        "sigmoid",
        description="sigmoid: DPO's; robust: of labels that are wrong by chance (arXiv 2403.00409); hinge (2309.06657); ipo: a "
        "square around a finite lead (2310.12036); apo_zero, apo_down: the better answer goes up, or down (2408.06266); without "
        "a reference simpo (2405.14734) and orpo (2403.07691)",
    )
    beta: PositiveFloat = Field(
        0.1,
        description="reward = beta x log-ratio of policy and reference; simpo: beta x log-prob a token; orpo: weight of the odds "
        "ratio's loss beside the better answer's own",
    )
    margin: Annotated[float, Field(ge=0)] = Field(
        0.0, description="how far each better answer shall be ahead, beside its row's margin; gamma of simpo"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="share of pairs that are taken to be the wrong way round (cDPO; robust)"
    )
    length_normalized: bool = Field(
        False, description="log-ratios are means over a response's tokens, not sums (arXiv 2411.15124, section 5)"
    )
    sft_coef: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="weight of the better answer's negative log-prob, mean over its tokens (arXiv 2404.19733, equation 1)",
    )

    @property
    def with_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss not in ("simpo", "orpo")


class Kto(Section):
    """What a policy learns from labelled answers (arXiv 2402.01306)."""

    loss: Literal["kto", "apo_zero"] = Field(
        "kto",
        description="what a reward is held against: kto: the policy's KL to the reference; apo_zero: 0, as in APO (arXiv "
        "2408.06266), and no KL is estimated",
    )
    beta: PositiveFloat = Field(0.1, description="reward = beta x log-ratio of policy and reference")
    desirable_weight: PositiveFloat = Field(1.0, description="what the loss of a desirable answer counts (lambda_D)")
    undesirable_weight: PositiveFloat = Field(
        1.0, description="what the loss of an undesirable answer counts (lambda_U)"
    )


class SupervisedRecipe(Section):
    """What every supervised run has."""

    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model
    data: SftData | PairData | UnpairedData
    actor: SftActor = SftActor()
    eval: HeldOut = HeldOut()
    train: SftTrain
    deadlines: Deadlines = Deadlines()
    report: Report = Report()


class SftRecipe(SupervisedRecipe):
    """Demonstrations: `megarl sft`."""

    data: SftData
    sft: Sft = Sft()


class RmRecipe(SupervisedRecipe):
    """A reward model from preferences: `megarl rm`."""

    data: PairData
    rm: Rm


class DpoRecipe(SupervisedRecipe):
    """A policy from preferences: `megarl dpo`."""

    data: PairData
    dpo: Dpo
    reference: Reference = Reference()


class KtoRecipe(SupervisedRecipe):
    """A policy from labelled answers: `megarl kto`."""

    data: UnpairedData
    kto: Kto
    reference: Reference = Reference()


def with_reference(recipe: SupervisedRecipe) -> bool:
    """Whether the run compares its policy with a reference."""
    return isinstance(recipe, KtoRecipe) or (isinstance(recipe, DpoRecipe) and recipe.dpo.with_reference)


def estimates_kl(recipe: SupervisedRecipe) -> bool:
    """Whether each step estimates the policy's KL to its reference, from mismatched rows."""
    return isinstance(recipe, KtoRecipe) and recipe.kto.loss == "kto"
