"""Builds the CPU kernels. Everything else about the package is in pyproject.toml.

Each source file names the instruction set it is for (``#pragma GCC target``) and the choice is made
at run time: nothing of the building machine's processor gets into a wheel. Without a C++ compiler
the package installs all the same, and runs on torch if that is there.
"""

import sys

from setuptools import Extension, setup

SOURCES = (
    "library",
    "pool",
    "tile",
    "kernels_portable",
    "kernels_avx2",
    "kernels_avxvnni",
    "kernels_avx512",
    "kernels_neon",
)

flags = ["-std=c++17", "-O3", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
if sys.platform == "win32":
    flags = ["/std:c++17", "/O2"]

setup(
    ext_modules=[
        Extension(
            "localrt.quant.ops._native",
            sources=[f"quant/csrc/{name}.cpp" for name in SOURCES],
            depends=[
                f"quant/csrc/{name}.h"
                for name in (
                    "abi",
                    "activation",
                    "acts",
                    "attention",
                    "ceilings",
                    "experts",
                    "formats",
                    "kernels",
                    "kv",
                    "latent",
                    "latent_args",
                    "matmul",
                    "panel",
                    "pool",
                    "routing",
                    "steps",
                    "vec_avx2",
                    "vec_avx512",
                    "vec_neon",
                    "vec_portable",
                )
            ],
            extra_compile_args=flags,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
