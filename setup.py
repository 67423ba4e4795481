"""megarl's package. What each extra is for stands beside it; requirements/ locks every version for a CPU."""

from setuptools import find_packages, setup

PINNED = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "sglang": "0.5.21",
    "sglang-router": "0.3.2",
    "ray": "2.60.0",
    "transformers": "5.12.1",
}

RUNTIME = [
    *(f"{name}=={version}" for name, version in PINNED.items() if name != "sglang"),
    "huggingface_hub>=1.33",
    "numpy",
    "safetensors",
    "psutil",
    "py-spy",
    "pyyaml",
    "pydantic>=2",
    "typer",
    "rich",
    "aiohttp",
    "mcp>=2",
    "orjson",
    "jinja2",
    "pyarrow",
    "pillow",
    "math-verify",
    "matplotlib",
    "tensorboard",
    "zstandard",
]

# Folders at the top of a checkout that commands need, too: a wheel has them within the package (megarl/core/shipped.py).
SHIPPED = {
    "recipes": ["*.yaml"],
    "launch": ["slurm.sbatch"],
    "tools": ["make_tiny_model.py", "make_arithmetic.py"],
}

setup(
    name="megarl",
    version="0.1.0",
    description="Reinforcement-learning post-training of large language models on Megatron-core, SGLang and Ray",
    packages=[*find_packages(include=["megarl", "megarl.*"]), *(f"megarl.shipped.{folder}" for folder in SHIPPED)],
    package_dir={f"megarl.shipped.{folder}": folder for folder in SHIPPED},
    package_data={
        "megarl": ["py.typed", "report/page.html", "model_configs/README.md", "model_configs/*/*/config.json"],
        **{f"megarl.shipped.{folder}": files for folder, files in SHIPPED.items()},
    },
    python_requires=">=3.11",
    install_requires=RUNTIME,
    extras_require={
        # On a CPU, SGLang's CUDA-only dependencies are left out: install requirements/cpu.lock with --no-deps.
        "cpu": ["wandb"],
        # Transformer Engine: the newest that megatron-core 0.16.1 names; requirements/sources.txt has the same. Its
        # core is of one CUDA, the pinned torch's; its part for torch is built against the torch that is there.
        # NVIDIA Apex is built from source: PyPI's `apex` is an unrelated package and must not be named here.
        "gpu": [f"sglang=={PINNED['sglang']}", "transformer-engine[core_cu13,pytorch]==2.11.0", "wandb"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-PyYAML", "types-psutil"],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:entry"]},
)
