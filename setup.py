"""Builds the CPU kernels. Everything else about the package is in pyproject.toml.

Each instruction set has source files of its own, and the choice is made at run time. A checkout
compiles its own processor's alone, a wheel all of them; ``LOCALRT_ISAS`` says otherwise (``all``,
``native``, or names). ``LOCALRT_NO_KERNELS=1`` builds none: answers are then torch's.
The compiler's options end with those of ``LOCALRT_CXXFLAGS``.
"""

import ctypes
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("quant/cpu/csrc")
# Files of an instruction set, those that take longest first; all need the common ones.
ISAS = {
    "portable": ["kernels_portable", "kernels_portable_2"],
    "amx": ["kernels_amx", "kernels_amx_2"],
    "avx512": ["kernels_avx512", "kernels_avx512_2"],
    "avx512bf16": ["kernels_avx512", "kernels_avx512_2", "kernels_bf16"],
    "avx2": ["kernels_avx2", "kernels_avx2_2"],
    "avxvnni": ["kernels_avxvnni", "kernels_avxvnni_2"],
    "i8mm": ["kernels_i8mm", "kernels_i8mm_2"],
    "neon": ["kernels_neon", "kernels_neon_2"],
}
COMMON = ["tile", "codebook_vbmi", "pool", "library", "processor"]
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
FLAGS += os.environ.get("LOCALRT_CXXFLAGS", "").split()


def sources(isas):
    """The C++ files of these instruction sets."""
    names = [name for isa in isas for name in ISAS[isa]] + COMMON
    return [str(CSRC / f"{name}.cpp") for name in dict.fromkeys(names)]


class BuildKernels(build_ext):
    """Compiles the files of the instruction sets asked for, side by side."""

    def run(self):
        """Note whether it is for a checkout, which setuptools forgets while it compiles."""
        self.checkout = self.inplace or self.editable_mode
        super().run()

    def build_extension(self, ext):
        """Compile and link; the compiler is asked for one file at a time, by several threads."""
        isas = os.environ.get("LOCALRT_ISAS") or ("native" if self.checkout else "all")
        if isas == "native":
            ext.sources = sources([self.native_isa()])
        elif isas != "all":
            ext.sources = sources(isas.split(","))
        compile_files = self.compiler.compile
        log = Path(os.environ.get("LOCALRT_BUILD_LOG") or os.devnull)  # who installs shows it

        def compile_one(source, options):
            made = compile_files([source], **options)
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{len(ext.sources)}\n")
            return made

        def compile_each(files, **options):
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                made = threads.map(lambda source: compile_one(source, options), files)
                return [name for names in made for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)

    def native_isa(self):
        """The best instruction set of this processor that the compiler knows."""
        with tempfile.TemporaryDirectory() as folder:
            source = [str(CSRC / "processor.cpp")]
            objects = self.compiler.compile(source, folder, extra_postargs=[*FLAGS, "-fPIC"])
            library = Path(folder, "processor.so")
            self.compiler.link_shared_object(objects, str(library), target_lang="c++")
            isa = ctypes.CDLL(str(library)).lrt_isa_here
            isa.restype = ctypes.c_char_p
            return isa(0).decode()

    def get_export_symbols(self, ext):
        """Those of a plain library: it is no Python module, though it is built like one."""
        return ext.export_symbols


kernels = Extension(
    "localrt.quant.cpu._native",
    sources=sources(ISAS),
    depends=sorted(map(str, CSRC.glob("*.h"))),
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    language="c++",
)
if __name__ == "__main__":
    without = os.environ.get("LOCALRT_NO_KERNELS", "0") != "0"
    setup(cmdclass={"build_ext": BuildKernels}, ext_modules=[] if without else [kernels])
