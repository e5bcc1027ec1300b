"""Builds the CPU kernels. Everything else about the package is in pyproject.toml.

Each source file names the instruction set it is for (``#pragma GCC target``) and the choice is made
at run time: nothing of the building machine's processor gets into a wheel. Without a C++ compiler
the package installs all the same, and runs on torch if that is there.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = (
    "kernels_portable",  # takes longest: first
    "kernels_avx2",
    "kernels_avx512",
    "kernels_bf16",
    "kernels_amx",
    "kernels_avxvnni",
    "kernels_neon",
    "codebook_vbmi",
    "library",
    "pool",
    "tile",
)

flags = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
if sys.platform == "win32":
    flags = ["/std:c++17", "/O2"]


class BuildInParallel(build_ext):
    """Compiles an extension's files side by side; setuptools takes one after the other."""

    def build_extensions(self):
        """Build with a compiler whose every call shares its files out among threads."""
        compile_files = self.compiler.compile

        def compile_one(source, options):
            made = compile_files([source], **options)
            if log := os.environ.get("LOCALRT_BUILD_LOG"):  # who installs counts its lines
                with Path(log).open("a", encoding="utf-8") as file:
                    file.write(f"{source}\n")
            return made

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                made = threads.map(lambda source: compile_one(source, options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = compile_each
        super().build_extensions()

    def get_export_symbols(self, ext):
        """Those of a plain library: it is no Python module, though it is built like one."""
        return ext.export_symbols


setup(
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[
        Extension(
            "localrt.quant.cpu._native",
            sources=[f"quant/cpu/csrc/{name}.cpp" for name in SOURCES],
            depends=sorted(str(header) for header in Path("quant/cpu/csrc").glob("*.h")),
            extra_compile_args=flags,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            language="c++",
            optional=True,
        )
    ],
)
