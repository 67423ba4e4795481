"""The recipe's keys beside the names that verl, slime (miles has the same), TRL, OpenRLHF and NeMo-RL have for the same thing.

    python -m megarl.recipe.glossary > docs/glossary.md

An unknown key that is one of theirs, or one of ours of an earlier version, is answered with today's name. Not a converter:
defaults and units differ, and the page says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Earlier names of a section's keys.
RENAMED: Mapping[str, str] = MappingProxyType({"resting": "offload", "virtual_stages": "vpp", "by": "grader"})


@dataclass(frozen=True)
class Entry:
    """One key, or a few of one section, and the others' names; several are separated by blanks. note: what differs.

    A name that means this key in one of a peer's sections alone stands with it: `val_kwargs.n`.
    """

    key: str
    verl: str = ""
    slime: str = ""
    trl: str = ""
    openrlhf: str = ""
    note: str = ""
    nemo_rl: str = ""

    def names(self) -> Iterator[tuple[str, str]]:
        """(peer, name) of every name of a peer."""
        theirs = {
            "verl": self.verl,
            "slime": self.slime,
            "TRL": self.trl,
            "OpenRLHF": self.openrlhf,
            "NeMo-RL": self.nemo_rl,
        }
        for peer, names in theirs.items():
            yield from ((peer, name) for name in names.split())


ENTRIES = (
    Entry("run.name", "experiment_name", "wandb_group", "run_name", "wandb_run_name"),
    Entry("run.dir", "default_local_dir", "save", "output_dir", "save_path", nemo_rl="checkpoint_dir log_dir"),
    Entry("run.seed", "seed", "seed rollout_seed", "seed", "seed", nemo_rl="seed"),
    Entry("model.path", "path", "hf_checkpoint ref_load", "model_name_or_path", "pretrain", nemo_rl="model_name"),
    Entry("model.dtype", "dtype", "bf16", "bf16", "param_dtype", nemo_rl="precision"),
    Entry("cluster.devices", "n_gpus_per_node nnodes", "actor_num_gpus_per_node actor_num_nodes", "", "actor_num_gpus_per_node actor_num_nodes", "all devices of the roles", nemo_rl="gpus_per_node num_nodes"),
    Entry("data.train", "train_files", "prompt_data", "train_dataset dataset_name", "prompt_data", nemo_rl="train_data_path dataset_name"),
    Entry("data.eval", "val_files", "eval_prompt_data", "eval_dataset", "eval_dataset", nemo_rl="val_data_path validation.data_path"),
    Entry("data.config", "", "", "dataset_config", ""),
    Entry("data.train_split", "", "", "dataset_train_split", "prompt_split", nemo_rl="train_split"),
    Entry("data.eval_split", "", "", "dataset_test_split", "eval_split", nemo_rl="val_split"),
    Entry("data.chat_template_kwargs", "apply_chat_template_kwargs", "apply_chat_template_kwargs", "chat_template_kwargs", "", nemo_rl="chat_template_kwargs"),
    Entry("data.mix", "", "", "", "prompt_data_probs", "shares by a field of the rows, data.mix_key"),
    Entry("data.system_prompt", "", "", "", "", nemo_rl="system_prompt_file"),
    Entry("data.prompt_template", "", "", "", "input_template", "`{prompt}` stands where the prompt goes", nemo_rl="prompt_file"),
    Entry("data.prompt_key", "prompt_key", "input_key", "", "input_key", nemo_rl="input_key"),
    Entry("data.answer_key", "", "label_key", "", "label_key", "verl reads a row's reward_model.ground_truth, and so does megarl", nemo_rl="output_key"),
    Entry("data.images_key", "image_key", "multimodal_keys", "", "", "slime's is a mapping of kinds to columns"),
    Entry("data.max_image_pixels", "", "", "", ""),
    Entry("data.max_prompt_tokens", "max_prompt_length", "rollout_max_prompt_len", "max_prompt_length", "prompt_max_len", nemo_rl="max_input_seq_length"),
    Entry("data.over_length", "filter_overlong_prompts truncation", "", "", "", "drop or error; a prompt is never cut"),
    Entry("data.shuffle", "shuffle", "rollout_shuffle", "shuffle_dataset", "", nemo_rl="shuffle"),
    Entry("rollout.prompts_per_step", "train_batch_size", "rollout_batch_size", "", "rollout_batch_size", "prompts; TRL counts samples", nemo_rl="num_prompts_per_step"),
    Entry("rollout.samples_per_prompt", "n", "n_samples_per_prompt", "num_generations", "n_samples_per_prompt", nemo_rl="num_generations_per_prompt"),
    Entry("rollout.max_response_tokens", "max_response_length response_length", "rollout_max_response_len", "max_completion_length", "generate_max_len max_new_tokens", nemo_rl="max_new_tokens"),
    Entry("rollout.temperature", "temperature", "rollout_temperature", "temperature", "temperature", "the trainer divides its logits by it too", nemo_rl="temperature"),
    Entry("rollout.top_p", "top_p", "rollout_top_p", "top_p", "top_p", "1.0 alone: the trainer's log-probs are of the whole distribution", nemo_rl="top_p"),
    Entry("rollout.top_k", "top_k", "rollout_top_k", "top_k", "", "-1 alone, as with top_p", nemo_rl="top_k"),
    Entry("rollout.stop", "", "rollout_stop", "", "", nemo_rl="stop_strings"),
    Entry("rollout.servers", "", "rollout_num_gpus", "", "vllm_num_engines", "servers, not devices"),
    Entry("rollout.tp", "tensor_model_parallel_size", "rollout_num_gpus_per_engine", "vllm_tensor_parallel_size", "vllm_tensor_parallel_size", nemo_rl="vllm_cfg.tensor_parallel_size"),
    Entry("rollout.kv_tokens", "gpu_memory_utilization", "sglang_mem_fraction_static", "vllm_gpu_memory_utilization", "vllm_gpu_memory_utilization", "tokens of the KV cache (SGLang: max_total_tokens); a share of the memory is --mem-fraction-static in rollout.server_args", nemo_rl="gpu_memory_utilization"),
    Entry("rollout.max_running_requests", "max_num_seqs", "sglang_max_running_requests", "", "", "SGLang's name"),
    Entry("rollout.concurrency", "", "sglang_server_concurrency", "", ""),
    Entry("rollout.offload", "free_cache_engine", "offload_rollout", "vllm_enable_sleep_mode", "vllm_enable_sleep", "vLLM's sleep, SGLang's release_memory_occupation"),
    Entry("rollout.max_staleness", "staleness_threshold", "", "max_staleness", "async_queue_size", "weight versions; verl's is a share of a step's samples", nemo_rl="max_trajectory_age_steps"),
    Entry("rollout.in_flight", "partial_rollout", "partial_rollout", "", "partial_rollout", "abort goes on with partial answers; NeMo-RL's is in_place", nemo_rl="in_flight_weight_updates"),
    Entry("rollout.keep_kv", "", "", "", "", "NeMo-RL's is the other way round", nemo_rl="recompute_kv_cache_after_weight_updates"),
    Entry("rollout.oversample", "", "over_sampling_batch_size", "", "vllm_generate_batch_size", "a factor; unfinished groups are carried over, unless rollout.late is drop"),
    Entry("rollout.collectors", "num_workers", "", "", "", "processes"),
    Entry("rollout.server_args", "engine_kwargs", "", "", "", "SGLang's own flags; slime takes them as --sglang-*", nemo_rl="vllm_kwargs"),
    Entry("reward.fn", "custom_reward_function compute_score", "custom_rm_path rm_type", "reward_funcs", "remote_rm_url", "remote rewards: reward.graders"),
    Entry("reward.graders", "", "", "reward_weights", "", "several, each with a weight"),
    Entry("reward.graders.NAME.only", "data_source", "rm_type", "", "", "the rows that a grader is for, by values of their fields, such as data_source"),
    Entry("reward_model.path", "", "", "", "reward_pretrain"),
    Entry("teacher.path", "", "opd_teacher_load"),
    Entry("teacher.servers", "", "opd_type", "", "", "slime's sglang, with rm_url its address; its megatron is teacher.path"),
    Entry("algorithm.advantage", "adv_estimator", "advantage_estimator", "multi_objective_aggregation", "advantage_estimator", "TRL's normalize_then_sum: gdpo", nemo_rl="use_leave_one_out_baseline"),
    Entry("algorithm.normalize_std", "norm_adv_by_std_in_grpo", "disable_grpo_std_normalization", "scale_rewards", "", "slime's is the other way round", nemo_rl="normalize_rewards"),
    Entry("algorithm.gamma", "gamma", "gamma", "", "gamma"),
    Entry("algorithm.lam", "lam", "lambd", "", "lambd"),
    Entry("algorithm.whiten", "", "normalize_advantages", "", ""),
    Entry("algorithm.advantage_clip", "", "", "", "", "on both sides of 0", nemo_rl="advantage_clip_low advantage_clip_high"),
    Entry("algorithm.policy_loss", "loss_mode", "", "importance_sampling_level", "", "TRL's level: gspo; verl's geo_mean: gmpo", nemo_rl="sequence_level_importance_ratios"),
    Entry("algorithm.distill_top_k", note="of the teacher's likeliest tokens; all others are one class more", nemo_rl="topk_logits_k"),
    Entry("algorithm.distill_beta", note="1 reverse, 0 forward", nemo_rl="kl_type"),
    Entry("algorithm.distill_forward_weight", note="where their kl_type is mixed", nemo_rl="mixed_kl_weight"),
    Entry("algorithm.clip_low", "clip_ratio clip_ratio_low", "eps_clip", "epsilon", "eps_clip eps_clip_low_high", nemo_rl="ratio_clip_min"),
    Entry("algorithm.clip_high", "clip_ratio clip_ratio_high", "eps_clip eps_clip_high", "epsilon epsilon_high", "eps_clip eps_clip_low_high", "0.2 by default, whatever clip_low is", nemo_rl="ratio_clip_max"),
    Entry("algorithm.dual_clip", "clip_ratio_c", "eps_clip_c", "delta", "dual_clip", nemo_rl="ratio_clip_c"),
    Entry("algorithm.reduction", "loss_agg_mode", "calculate_per_token_loss", "loss_type", "", nemo_rl="token_level_loss"),
    Entry("algorithm.kl_coef", "kl_loss_coef kl_coef use_kl_loss", "kl_loss_coef kl_coef use_kl_loss", "beta", "init_kl_coef", nemo_rl="reference_policy_kl_penalty"),
    Entry("algorithm.kl_kind", "kl_loss_type kl_penalty", "kl_loss_type", "", "kl_estimator", "verl's low_var_kl is k3", nemo_rl="reference_policy_kl_type"),
    Entry("algorithm.kl_in", "use_kl_in_reward", "", "", ""),
    Entry("algorithm.kl_control", "kl_ctrl target_kl horizon", "", "", "kl_target kl_horizon"),
    Entry("algorithm.entropy_coef", "entropy_coeff", "entropy_coef", "", "entropy_loss_coef"),
    Entry("algorithm.overlong_buffer", "overlong_buffer", "", "", "overlong_buffer_len", "a share of max_response_tokens", nemo_rl="overlong_buffer_length"),
    Entry("algorithm.drop_zero_variance_groups", "filter_groups", "dynamic_sampling_filter_path", "", "dynamic_filtering", nemo_rl="use_dynamic_sampling"),
    Entry("algorithm.keep_groups", "filter_groups", "", "", "dynamic_filtering_reward_range", "bounds on a group's mean; verl's filter_groups.metric is its grader"),
    Entry("algorithm.truncated", "", "", "mask_truncated_completions", "", "mask where theirs is true", nemo_rl="overlong_filtering"),
    Entry("algorithm.refill_rounds", "max_num_gen_batches", "over_sampling_batch_size", "", "", nemo_rl="dynamic_sampling_max_gen_batches"),
    Entry("algorithm.old_logprobs", "bypass_mode", "use_rollout_logprobs", "", ""),
    Entry("algorithm.correction", "rollout_is tis_imp_ratio_cap", "use_tis tis_clip", "vllm_importance_sampling_correction vllm_importance_sampling_cap", "enable_vllm_is_correction", nemo_rl="use_importance_sampling_correction truncated_importance_sampling_ratio"),
    Entry("algorithm.correction.reject", "rollout_rs rollout_rs_threshold", "use_rs", "", "", "beside algorithm.correction's weights"),
    Entry("agent.max_turns", "max_assistant_turns", "", "max_tool_calling_iterations", "", "responses of the policy in one episode", nemo_rl="max_rollout_turns"),
    Entry("agent.environment", "interaction_config_path", "", "environment_factory", "agent_func_path", "a class; docs/coming_from.md has their methods beside ours"),
    Entry("agent.environment_tools", "tool_config_path", "", "", "", "methods of the environment, by name; functions are named in agent.tools"),
    Entry("agent.max_calls", "max_parallel_calls", "", "", "", "further calls are answered with an error"),
    Entry("agent.tool_result_characters", "max_tool_response_length", "", "", "", "cut in the middle, as verl's tool_response_truncate_side middle"),
    Entry("actor.mini_batch_samples", "ppo_mini_batch_size", "global_batch_size", "gradient_accumulation_steps", "train_batch_size", "samples; verl counts prompts", nemo_rl="train_global_batch_size"),
    Entry("actor.micro_batch_tokens", "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu", "max_tokens_per_gpu micro_batch_size", "per_device_train_batch_size", "micro_train_batch_size train_max_tokens_per_gpu", "packed tokens, always", nemo_rl="train_mb_tokens train_micro_batch_size"),
    Entry("actor.epochs", "ppo_epochs", "", "num_iterations", "max_epochs"),
    Entry("actor.recompute", "enable_gradient_checkpointing recompute_granularity", "recompute_granularity", "gradient_checkpointing", "gradient_checkpointing", nemo_rl="activation_checkpointing"),
    Entry("actor.recompute_num_layers", "recompute_num_layers", "recompute_num_layers", "", "", "Megatron's method block"),
    Entry("actor.offload", "param_offload grad_offload optimizer_offload", "offload_train", "", "adam_offload deepspeed_enable_sleep"),
    Entry("actor.aux_loss_coef", "", "moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_coef"),
    Entry("actor.optimizer.freeze_router", "", "", "", "", nemo_rl="freeze_moe_router"),
    Entry("actor.optimizer.freeze_vision_tower", "freeze_vision_tower", "", "", ""),
    Entry("actor.routing_replay", "", "use_rollout_routing_replay", "", ""),
    Entry("actor.lora.rank", "lora_rank", "", "lora_r", "lora_rank", nemo_rl="lora_cfg.dim"),
    Entry("actor.lora.targets", "target_modules", "", "lora_target_modules", "target_modules", "Megatron's names; all: their all-linear", nemo_rl="lora_cfg.target_modules"),
    Entry("actor.lora.alpha", "lora_alpha", "", "lora_alpha", "lora_alpha", nemo_rl="lora_cfg.alpha"),
    Entry("actor.parallel.tp", "tensor_model_parallel_size", "tensor_model_parallel_size", "", "", nemo_rl="megatron_cfg.tensor_model_parallel_size dtensor_cfg.tensor_parallel_size"),
    Entry("actor.parallel.pp", "pipeline_model_parallel_size", "pipeline_model_parallel_size", "", "", nemo_rl="pipeline_model_parallel_size"),
    Entry("actor.parallel.cp", "context_parallel_size", "context_parallel_size", "", "ring_attn_size", nemo_rl="context_parallel_size"),
    Entry("actor.parallel.ep", "expert_model_parallel_size", "expert_model_parallel_size", "", "", nemo_rl="expert_model_parallel_size"),
    Entry("actor.parallel.etp", "expert_tensor_parallel_size", "expert_tensor_parallel_size", "", "", nemo_rl="expert_tensor_parallel_size"),
    Entry("actor.parallel.vpp", "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "", ""),
    Entry("actor.parallel.first_stage_layers", "num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers", "", "", nemo_rl="num_layers_in_first_pipeline_stage"),
    Entry("actor.parallel.last_stage_layers", "num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers", "", "", nemo_rl="num_layers_in_last_pipeline_stage"),
    Entry("actor.optimizer.lr", "lr", "lr", "learning_rate", "actor_learning_rate", nemo_rl="lr"),
    Entry("actor.optimizer.schedule", "lr_decay_style lr_scheduler_type", "lr_decay_style", "lr_scheduler_type", "lr_scheduler", nemo_rl="lr_decay_style"),
    Entry("actor.optimizer.warmup_steps", "lr_warmup_steps", "lr_warmup_iters", "warmup_steps", "", "optimizer steps", nemo_rl="lr_warmup_iters"),
    Entry("actor.optimizer.warmup_share", "lr_warmup_steps_ratio", "lr_warmup_fraction", "warmup_ratio", "lr_warmup_ratio"),
    Entry("actor.optimizer.min_lr", "min_lr", "min_lr", "", "", nemo_rl="min_lr"),
    Entry("actor.optimizer.weight_decay", "weight_decay", "weight_decay", "weight_decay", "l2", nemo_rl="weight_decay"),
    Entry("actor.optimizer.clip_grad", "clip_grad grad_clip", "clip_grad", "max_grad_norm", "max_norm", nemo_rl="clip_grad max_grad_norm"),
    Entry("actor.optimizer.beta1", "", "adam_beta1", "adam_beta1", "adam_betas", nemo_rl="adam_beta1"),
    Entry("actor.optimizer.beta2", "", "adam_beta2", "adam_beta2", "adam_betas", nemo_rl="adam_beta2"),
    Entry("reference.refresh_every", "", "ref_update_interval", "ref_model_sync_steps", ""),
    Entry("critic.value_clip", "cliprange_value", "value_clip", "cliprange_value", "value_clip"),
    Entry("critic.warmup_steps", "critic_warmup", "num_critic_only_steps", "", "freezing_actor_steps"),
    Entry("critic.optimizer.lr", "", "critic_lr", "", "critic_learning_rate"),
    Entry("placement.name", "", "colocate", "vllm_mode", "colocate_all_models", "auto searches; see docs/placement.md"),
    Entry("placement.pools", "resource_pool_spec", "", "", ""),
    Entry("sync.bucket_mb", "update_weights_bucket_megabytes", "update_weight_buffer_size", "", "", "megabytes"),
    Entry("eval.before", "val_before_train", "skip_eval_before_train", "", "", "the opposite of slime's", nemo_rl="val_at_start"),
    Entry("eval.every", "test_freq", "eval_interval", "eval_steps", "eval_steps", nemo_rl="val_period"),
    Entry("eval.samples_per_prompt", "val_kwargs.n", "n_samples_per_eval_prompt", "num_generations_eval", "eval_n_samples_per_prompt"),
    Entry("eval.max_prompts", "val_max_samples", "", "", "", "or, of one set, eval.sets.NAME.max_prompts", nemo_rl="max_val_samples"),
    Entry("eval.sets", "", "eval_config", "", "", "a section by a set's name"),
    Entry("eval.set_key", "data_source", "", "", "datasource"),
    Entry("eval.temperature", "val_kwargs.temperature", "eval_temperature", "", "eval_temperature"),
    Entry("eval.top_p", "val_kwargs.top_p", "eval_top_p", "", ""),
    Entry("eval.top_k", "val_kwargs.top_k", "eval_top_k", "", ""),
    Entry("eval.max_response_tokens", "", "eval_max_response_len", "", ""),
    Entry("train.steps", "total_training_steps", "num_rollout", "max_steps", "", "rollout-and-update steps", nemo_rl="max_num_steps"),
    Entry("train.epochs", "total_epochs", "num_epoch", "num_train_epochs", "num_episodes", "a step may begin in one and end in the next", nemo_rl="max_num_epochs"),
    Entry("train.save_every", "save_freq", "save_interval", "save_steps", "save_steps", nemo_rl="save_period"),
    Entry("train.keep_last", "max_actor_ckpt_to_keep", "", "save_total_limit", "max_ckpt_num", nemo_rl="keep_top_k"),
    Entry("train.async_save", "", "async_save", "", ""),
    Entry("data.max_tokens", "", "", "max_length", "max_len", "of supervised runs: longer rows are dropped, not cut", nemo_rl="max_total_sequence_length"),
    Entry("data.response_key", "", "", "", "output_key", "of supervised runs; TRL's column is completion"),
    Entry("train.batch_samples", "", "", "per_device_train_batch_size gradient_accumulation_steps", "train_batch_size", "of supervised runs: rows of an optimizer step on all devices, TRL's two times the devices", nemo_rl="train_global_batch_size"),
    Entry("sft.loss", "", "", "loss_type", ""),
    Entry("rm.center_coef", "", "", "center_rewards_coefficient", ""),
    Entry("dpo.loss", "", "", "loss_type", "", "ipo goes by sums: TRL's by means, as with dpo.length_normalized"),
    Entry("dpo.beta", "", "", "beta", "beta", nemo_rl="reference_policy_kl_penalty"),
    Entry("dpo.label_smoothing", "", "", "label_smoothing", "label_smoothing"),
    Entry("dpo.margin", "", "", "simpo_gamma", ""),
    Entry("dpo.sft_coef", "", "", "cpo_alpha rpo_alpha", "nll_loss_coef", "mean over an answer's tokens, then over pairs", nemo_rl="sft_loss_weight"),
    Entry("kto.beta", "", "", "beta", ""),
    Entry("kto.desirable_weight", "", "", "desirable_weight", ""),
    Entry("kto.undesirable_weight", "", "", "undesirable_weight", ""),
    Entry("report.wandb", "logger project_name", "use_wandb wandb_project", "report_to", "use_wandb wandb_project", nemo_rl="wandb_enabled"),
    Entry("report.profiler.steps", "global_profiler.steps", "profile_step_start", "", ""),
    Entry("report.profiler.ranks", "profiler.ranks", "profile_ranks", "", ""),
    Entry("report.writer", "", "", "", "", nemo_rl="mlflow_enabled swanlab_enabled"),
    Entry("report.tensorboard", "", "use_tensorboard", "logging_dir", "use_tensorboard", nemo_rl="tensorboard_enabled"),
)  # fmt: skip

HEAD = """# Glossary: megarl's words beside the field's

Generated by `python -m megarl.recipe.glossary > docs/glossary.md`. A recipe with one of the others' keys is refused with ours:
write `adv_estimator`, and the error says `algorithm.advantage`. Their names stand without the section; defaults and units differ
where the last column says so, and often elsewhere: `megarl recipe show` prints every value that a run has.

## Words

| megarl | verl | slime | TRL | is |
|---|---|---|---|---|
| rollout | rollout | rollout | generation | answers of the policy to a step's prompts, graded |
| step | training step | rollout id | step | one rollout, and the updates on it |
| sample, response | sample, response | sample, response | completion | one answer to a prompt, with its log-probs and reward |
| group | group, `uid` | group | group | the samples of one prompt |
| mini-batch | PPO mini-batch | global batch | step of the optimizer | samples of one optimizer step |
| micro-batch | micro-batch | micro-batch | per-device batch | what one forward pass takes: packed up to a number of tokens |
| actor, reference, critic, reward model | the same | actor, ref, critic | model, ref_model, value model, reward model | the models that Megatron holds; a *role* each |
| pool | resource pool | placement group | | devices that some roles share |
| colocated | colocated, hybrid engine | colocate | colocate | roles and servers take turns on the same devices |
| offload | offload | offload | sleep mode | leave the device's memory while others work |
| server | rollout replica | engine | vLLM server | one SGLang server; all of them and the router: the *server pool* |
| weight sync | update_weights | update_weights | sync | the actor's weights go to the servers; verified by log-probs |
| weight version | global step | weight version | | how often the weights were sent; every sample names its own |
| staleness | staleness | | max_staleness | how many weight versions a sample's oldest trained token is behind |
| carried over | partial rollout | partial rollout | | begun in one step and trained on in a later one, with the tokens that it has |
| correction | rollout correction | TIS | importance sampling correction | weights for samples whose rollout log-probs differ from the trainer's |
| grader | reward function, reward manager | rm | reward function | what gives a response its reward |
| collector | agent loop worker | rollout manager | | a process that asks the servers, grades, and keeps the samples |
| coordinator | rollouter, message queue | rollout manager | | the process that decides what is asked for and what a step takes: numbers only |
| shard | data-parallel chunk | data-parallel partition | | one data-parallel rank's part of a step |
| column | tensor of a DataProto | | | one number a token beside the samples: log-probs, values, advantages |
| layout | parallel sizes | parallel sizes | | tp, pp, cp, ep, etp and vpp of one role |
| recipe | config | arguments | config | the YAML file that says all of a run |

## Keys

| megarl | verl | slime | TRL | OpenRLHF | NeMo-RL | |
|---|---|---|---|---|---|---|"""


def page() -> str:
    """The glossary as Markdown."""

    def cell(names: str) -> str:
        return " ".join(f"`{name}`" for name in names.split())

    rows = [
        [
            f"`{each.key}`",
            *(cell(names) for names in (each.verl, each.slime, each.trl, each.openrlhf, each.nemo_rl)),
            each.note,
        ]
        for each in ENTRIES
    ]
    return "\n".join([HEAD, *("| " + " | ".join(row) + " |" for row in rows)])


@dataclass(frozen=True)
class Meant:
    """A key that a peer's name stands for. peers: that have the name, in words. note: what differs."""

    key: str
    peers: str
    note: str

    @property
    def words(self) -> str:
        """The key, with what differs."""
        return f"`{self.key}`" + (f" ({self.note})" if self.note else "")


def meant_by(name: str, section: Sequence[str] = ()) -> list[Meant]:
    """The keys that a peer's name stands for: several where one name is more than one key; none where no peer has it.

    name: with or without leading dashes, words joined by dashes or underscores. section: the words that it stands under;
    they choose where one name is that of several keys, as `tensor_model_parallel_size` is of servers and actor.
    """
    plain, found = name.lstrip("-").replace("-", "_"), []
    for entry in ENTRIES:
        own = entry.key.split(".")
        names = [(peer, *theirs.rpartition(".")[::2]) for peer, theirs in entry.names()]
        met = [
            (peer, under)
            for peer, under, theirs in names
            if theirs == plain and (not under or {under, own[0]} & {*section[-1:]})
        ]
        if met:
            bound = any(under for _, under in met)
            score = (bound, len(set(section).intersection(own)))
            found.append((score, Meant(entry.key, " and ".join(dict.fromkeys(peer for peer, _ in met)), entry.note)))
    best = max((score for score, _ in found), default=None)
    return [meant for score, meant in found if score == best]


if __name__ == "__main__":
    print(page())
