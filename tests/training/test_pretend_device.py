"""The engine on a device that is not there: nothing of it meets a tensor of the host, and no number changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# All ways of a role's tensors: in, forward, backward, steps, out, to files and back, asleep; experts, latents, adapters.
TESTS = (
    "tests/training/on_pretended_device.py",
    "tests/training/test_engine.py::test_three_adam_steps_equal_a_plain_torch_loop",
    "tests/training/test_engine.py::test_bfloat16_trains_on_float32_main_weights",
    "tests/training/test_engine.py::test_distillation_at_the_likeliest_tokens_equals_plain_torch_on_whole_logits[0.3]",
    "tests/training/test_unpaired_loss.py::test_updates_are_those_of_a_hand_written_loop[3]",
    "tests/training/test_roles.py::test_adapters_learn_and_the_model_without_them_is_the_reference",
    "tests/training/test_roles.py::test_replayed_routing_is_that_of_backward_too[full-2]",
    "tests/training/test_roles.py::test_the_balance_of_experts_enters_the_gradient_as_a_mean_over_tokens",
    "tests/training/test_roles.py::test_a_reference_is_refreshed_from_the_actor_bit_for_bit",
    "tests/training/test_checkpoint.py::test_a_resumed_run_takes_the_very_same_step[adam-bf16]",
    "tests/training/test_critic.py::test_updates_are_those_of_a_hand_written_loop",
    "tests/training/test_offload.py::test_a_frozen_role_says_the_same_after_sleep",
    # A vision tower that learns.
    "tests/training/test_learning_tower.py::test_an_offloaded_role_learns_the_very_same[Qwen3VLForConditionalGeneration]",
    "tests/training/test_learning_tower.py::test_blocks_are_computed_again_with_the_same_numbers_and_less_memory"
    "[Qwen2_5_VLForConditionalGeneration]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[deepseek_v3]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[gemma3]",
    # Sinks; norms over all heads and rotations that differ; scaled sums; scaled queries, by position too; a gate; neighbours.
    "tests/models/test_gpt.py::test_gradients_equal_transformers[gpt_oss]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[olmo3]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[granite]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[phi3 with longrope]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[ministral3]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[qwen2_moe]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[glm4]",
    # Gated DeltaNet, in two tensors and in four, with a gate behind attention; a part of each head that turns, norms over all.
    "tests/models/test_gpt.py::test_gradients_equal_transformers[qwen3_next]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[qwen3_5_moe]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[minimax_m2]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[seed_oss]",
    # An activation that learns; a bias beside a softmax; norms behind the rotation.
    "tests/models/test_gpt.py::test_gradients_equal_transformers[apertus]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[ernie4_5_moe]",
    "tests/models/test_gpt.py::test_gradients_equal_transformers[hunyuan_v1_moe]",
    # Heads that differ by layer, keys that are values, experts beside an MLP.
    "tests/models/test_gpt.py::test_gradients_equal_transformers[gemma4 with experts]",
    "tests/sync/test_tensor_hash.py::test_tiles_are_the_kernels",
    "tests/sync/test_shared_memory.py::test_ranks_tell_each_other_by_tensors_of_their_own_device",
)


@pytest.mark.slow
@pytest.mark.host_only  # pretended on a CPU, which a rank cannot be where torch sees a device
def test_the_engine_keeps_to_its_device() -> None:
    """In a process of its own, whose torch is another; any mistake is an error there."""
    command = [sys.executable, "-m", "tests.support.pretend_device", "-q", "-p", "no:cacheprovider", *TESTS]
    variables = {**os.environ, "MEGARL_TEST_PLATFORM": "cuda", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-500:]
