"""Build script: everything a resolver needs to know about pp_offload."""

from setuptools import find_packages, setup

HF = ["transformers>=5", "peft", "accelerate"]

setup(
    name="pp_offload",
    version="0.1.0",
    description="Fine-grained activation offloading for pipeline-parallel training",
    license="Apache-2.0",
    packages=find_packages(include=["pp_offload", "pp_offload.*"]),
    python_requires=">=3.11",
    install_requires=["torch>=2.13,<2.14", "numpy"],
    extras_require={
        "test": ["pytest", "pytest-xdist", "hypothesis", "ninja"],
        "examples": ["tqdm", *HF],
        "hf": HF,
        "dev": ["ruff", "mypy"],
    },
    zip_safe=False,
)
