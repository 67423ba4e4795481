"""megarl: reinforcement-learning post-training of large language models on Megatron-core, SGLang and Ray."""
