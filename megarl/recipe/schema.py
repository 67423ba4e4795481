"""The recipe: every key that a run understands, its type, default and meaning. Frozen; unknown keys are errors.

This room imports no torch: a recipe is read and refused in milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Recompute = Literal["none", "selective", "full"]


def _expand_home(path: Path) -> Path:
    """`~/x` as a shell would have it: shells do not expand it after the `=` of an override."""
    return path.expanduser() if path.parts[:1] == ("~",) else path


UserPath = Annotated[Path, AfterValidator(_expand_home)]


class Section(BaseModel):
    """Base of every section: strict types, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Run(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("run", description="folder name of the run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: UserPath = Field(Path("runs"), strict=False, description="folder that holds all runs")
    seed: Annotated[int, Field(ge=0)] = Field(1, description="seed of the data order and of everything else random")

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.dir / self.name


class Cluster(Section):
    """What the run may use."""

    platform: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where a GPU is visible")
    devices: PositiveInt = Field(
        1, description="devices in the colocated pool; on cpu, one process counts as one device"
    )
    peak_tflops: PositiveFloat | None = Field(
        None, description="what one device could do in model.dtype, TFLOP/s; gives perf/mfu"
    )


class Model(Section):
    """The policy to train."""

    path: UserPath = Field(strict=False, description="HF folder: config.json, tokenizer, safetensors")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of the weights in forward, backward and rollout"
    )


class Data(Section):
    """Prompts and answers; JSONL or Parquet."""

    train: UserPath = Field(strict=False, description="rows to train on")
    eval: UserPath | None = Field(None, strict=False, description="held-out rows")
    prompt_key: str = Field("prompt", description="field with a string or a list of chat messages")
    answer_key: str | None = Field(
        None, description="field with the answer; default: answer, label, reward_model.ground_truth"
    )
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt, in tokens")
    over_length: Literal["drop", "error"] = Field(
        "drop", description="what happens to a prompt over the limit; drops are counted"
    )
    shuffle: bool = Field(True, description="a new order every epoch, from run.seed")


class Rollout(Section):
    """Generation with a pool of SGLang servers."""

    servers: PositiveInt = Field(1, description="number of SGLang servers")
    tp: PositiveInt = Field(1, description="tensor parallel size of one server")
    prompts_per_step: PositiveInt = Field(description="groups in one step")
    samples_per_prompt: PositiveInt = Field(description="samples in one group")
    max_response_tokens: PositiveInt = Field(description="longest response, in tokens")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature; the trainer applies the same")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus sampling")
    top_k: int = Field(-1, description="top-k sampling; -1 is off")
    stop: tuple[str, ...] = Field(
        (), strict=False, description="strings that end a response, beside the end-of-sequence token"
    )
    max_running_requests: PositiveInt = Field(64, description="most sequences that one server decodes at once")
    kv_tokens: PositiveInt | None = Field(
        None, description="KV cache of one server, in tokens; default: SGLang decides; needed on cpu"
    )
    concurrency: PositiveInt = Field(512, description="most requests in flight from the collector")
    server_args: tuple[str, ...] = Field(
        (), strict=False, description="extra flags of sglang.launch_server, word by word"
    )


class Reward(Section):
    """How a response is graded."""

    fn: str = Field(
        "math", description="math, exact, or pkg.module:function(prompt, response, answer, metadata) -> float"
    )
    workers: PositiveInt = Field(1, description="grader processes")
    timeout_s: PositiveFloat = Field(10.0, description="deadline of one grade, seconds; then it is a counted failure")


class Algorithm(Section):
    """What is learned from the graded samples."""

    advantage: Literal["grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "egpo"] = Field(
        "grpo", description="how a sample is compared with its group; formulas and papers in docs/algorithms.md"
    )
    normalize_std: bool = Field(
        True, description="divide by the group's standard deviation; off: Dr.GRPO (arXiv 2503.20783)"
    )
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of max_response_tokens over which the reward falls by 1 (DAPO); default: no penalty"
    )
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = Field(
        "ppo", description="what is minimised; formulas and papers in docs/algorithms.md"
    )
    clip_low: Fraction = Field(0.2, description="ratio is clipped below at 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="ratio is clipped above at 1 + clip_high")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="with ppo, a negative advantage costs at most so many times itself (arXiv 1912.09729)"
    )
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of the KL to the reference in the loss; 0: no reference model"
    )
    kl_kind: Literal["k1", "k2", "k3", "abs"] = Field("k3", description="estimator of the KL")
    entropy_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the entropy bonus")
    reduction: Literal["token-mean", "sequence-mean", "group-mean", "constant"] = Field(
        "token-mean",
        description="denominator of the loss; constant: tokens over samples x max_response_tokens (Dr.GRPO)",
    )
    drop_zero_variance_groups: bool = Field(
        False, description="leave out groups whose rewards are all equal; they are counted either way"
    )


class Parallel(Section):
    """Layout of one role; data parallel is what is left of the devices."""

    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    cp: PositiveInt = Field(1, description="context parallel size: each sequence is cut over so many ranks")
    ep: PositiveInt = Field(1, description="expert parallel size: experts are dealt to so many ranks")
    etp: PositiveInt = Field(1, description="tensor parallel size within an expert")
    virtual_stages: PositiveInt = Field(1, description="stages of each pipeline rank, interleaved; needs pp")
    sequence_parallel: bool = Field(True, description="with tp: cut the activations between its regions too")
    first_stage_layers: PositiveInt | None = Field(None, description="layers of the first pipeline rank; default: even")
    last_stage_layers: PositiveInt | None = Field(None, description="layers of the last pipeline rank; default: even")


class Optimizer(Section):
    """Adam or SGD, as Megatron runs it."""

    name: Literal["adam", "sgd"] = Field(
        "adam", description="adam: Apex or Transformer Engine's fused one where present, torch's otherwise"
    )
    lr: PositiveFloat = Field(1e-6, description="peak learning rate")
    beta1: Fraction = Field(0.9, description="Adam's first moment")
    beta2: Fraction = Field(0.95, description="Adam's second moment")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="decoupled weight decay; not on norms and biases"
    )
    clip_grad: PositiveFloat = Field(1.0, description="largest global gradient norm")
    momentum: Fraction = Field(0.0, description="SGD's momentum")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after warm-up, down to min_lr at the last step"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="optimizer steps of linear warm-up")
    min_lr: Annotated[float, Field(ge=0)] = Field(
        0.0, description="learning rate at the end of a linear or cosine schedule"
    )


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685): the model itself stays as it is, and is its own reference."""

    rank: PositiveInt = Field(32, description="width of an adapter")
    alpha: PositiveFloat = Field(32.0, description="an adapter's output is multiplied by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("linear_qkv", "linear_proj"),
        strict=False,
        description="linears that get adapters: also linear_fc1, linear_fc2; those of latent attention",
    )


Part = Literal["grads", "params", "optimizer"]


class Actor(Section):
    """The policy on Megatron."""

    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    mini_batch_samples: PositiveInt | None = Field(
        None, description="samples of one optimizer step; default: all of the step's"
    )
    micro_batch_tokens: PositiveInt = Field(
        16384, description="most tokens of one forward pass, on one data-parallel rank"
    )
    epochs: PositiveInt = Field(1, description="times that a step's samples are gone through")
    recompute: Recompute = Field(
        "none", description="activations computed again in backward: none, selective (attention), full (every layer)"
    )
    aux_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of the load-balancing loss of a mixture of experts"
    )
    routing_replay: bool = Field(
        False, description="train a mixture of experts on the routing that the rollout used (R3, arXiv 2510.11370)"
    )
    lora: Lora | None = Field(None, description="train low-rank adapters alone; default: the whole model")
    resting: tuple[Part, ...] = Field(
        (), strict=False, description="what leaves the device while nothing needs it: grads, params, optimizer"
    )


class Reference(Section):
    """The frozen policy that the KL is measured to."""

    parallel: Parallel | None = Field(None, description="its own layout; default: the actor's")
    resting: tuple[Part, ...] = Field(
        (), strict=False, description="params: they leave the device while nothing needs them"
    )


class Sync(Section):
    """Weights from the actor to the servers."""

    bucket_mb: PositiveInt = Field(512, description="most megabytes gathered and sent at once")
    tolerance: PositiveFloat | None = Field(
        None,
        description="largest |log-prob| difference, server to trainer; default 1e-3 in float32, 0.3 in bfloat16",
    )


class Eval(Section):
    """Held-out answers, before, during and after; needs data.eval."""

    every: PositiveInt | None = Field(None, description="steps between evaluations; default: only before and after")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0 is greedy")
    samples_per_prompt: PositiveInt = Field(1, description="answers to each prompt")
    max_prompts: PositiveInt | None = Field(None, description="only the first so many rows")


class Train(Section):
    """How long, and what is kept."""

    steps: PositiveInt = Field(description="rollout-and-update steps")
    save_every: PositiveInt | None = Field(None, description="steps between checkpoints; default: only at the end")
    keep_last: PositiveInt = Field(2, description="newest checkpoints kept")
    async_save: bool = Field(
        False, description="write checkpoints while training goes on; each is committed one step later"
    )
    keep_every: PositiveInt | None = Field(None, description="also keep those of every so many steps, for good")


class Deadlines(Section):
    """Longest waits, in seconds; when one passes, the run stops with phase, role, ranks and stacks."""

    start_s: PositiveFloat = Field(600.0, description="servers and ranks up and loaded")
    rollout_s: PositiveFloat = Field(3600.0, description="one step's samples, or one evaluation")
    train_s: PositiveFloat = Field(3600.0, description="one log-prob pass or one update")
    sync_s: PositiveFloat = Field(600.0, description="one verified weight sync")
    save_s: PositiveFloat = Field(1800.0, description="one checkpoint or export")


class Wandb(Section):
    """Weights & Biases; offline when no key is in the environment."""

    project: str = Field("megarl", description="project name")


class Report(Section):
    """Where metrics go, beside the console and metrics.jsonl."""

    tensorboard: bool = Field(True, description="event files in the run's folder")
    wandb: Wandb | None = Field(None, description="also to wandb")
    samples: Annotated[int, Field(ge=0)] = Field(
        16, description="samples of each step written to samples/, for reading"
    )


class SftData(Section):
    """Demonstrations: rows with `messages`, or with a prompt and a response."""

    train: UserPath = Field(strict=False, description="JSONL or Parquet")
    prompt_key: str = Field("prompt", description="field with a string or chat messages")
    response_key: str = Field("response", description="field with the assistant's text")
    messages_key: str = Field(
        "messages", description="field with whole chats, the last message the assistant's; used where present"
    )
    max_tokens: PositiveInt = Field(2048, description="longest demonstration; longer ones are counted and dropped")
    shuffle: bool = Field(True, description="a new order every epoch, from run.seed")


class SftTrain(Section):
    """Length and batch of supervised training."""

    steps: PositiveInt = Field(description="optimizer steps")
    batch_samples: PositiveInt = Field(description="demonstrations in one optimizer step")
    save_every: PositiveInt | None = Field(None, description="steps between checkpoints; default: only at the end")
    keep_last: PositiveInt = Field(2, description="newest checkpoints kept")
    async_save: bool = Field(
        False, description="write checkpoints while training goes on; each is committed one step later"
    )
    keep_every: PositiveInt | None = Field(None, description="also keep those of every so many steps, for good")


class SftActor(Section):
    """The model under supervised training, on Megatron."""

    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    micro_batch_tokens: PositiveInt = Field(
        16384, description="most tokens of one forward pass, on one data-parallel rank"
    )
    recompute: Recompute = Field(
        "none", description="activations computed again in backward: none, selective (attention), full (every layer)"
    )
    aux_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of the load-balancing loss of a mixture of experts"
    )
    lora: Lora | None = Field(None, description="train low-rank adapters alone; default: the whole model")
    resting: tuple[Part, ...] = Field(
        (), strict=False, description="what leaves the device while nothing needs it: grads, params, optimizer"
    )


class Recipe(Section):
    """One reinforcement-learning run: `megarl train`, `megarl eval`."""

    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model
    data: Data
    rollout: Rollout
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    actor: Actor = Actor()
    reference: Reference = Reference()
    sync: Sync = Sync()
    eval: Eval = Eval()
    train: Train
    deadlines: Deadlines = Deadlines()
    report: Report = Report()


class SftRecipe(Section):
    """One supervised run: `megarl sft`."""

    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model
    data: SftData
    actor: SftActor = SftActor()
    train: SftTrain
    deadlines: Deadlines = Deadlines()
    report: Report = Report()


AnyRecipe = Recipe | SftRecipe
RecipeDict = dict[str, Any]
