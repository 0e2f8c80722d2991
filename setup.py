"""Builds the CPU kernels into the package where torch can be imported (pip install --no-build-isolation, make).

Elsewhere the wheel is pure Python, and the first import builds them: kernels/kimi_k3_kernels/native.py.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path(__file__).parent / "kernels" / "kimi_k3_kernels"


def load_native():
    """The builder alone: importing the package would build the kernels a first time."""
    spec = importlib.util.spec_from_file_location("kimi_k3_native", FOLDER / "native.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    def _target(self) -> Path:
        folder = FOLDER if self.inplace else Path(self.build_lib) / FOLDER.name
        return folder / load_native().installed_library().name

    def run(self) -> None:
        try:
            load_native().build(self._target())
        except (RuntimeError, OSError) as error:
            print(f"kimi_k3: the CPU kernels did not build; the first import tries again:\n{error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [str(self._target())] if self._target().exists() else []


if importlib.util.find_spec("torch") is None:
    setup()
else:
    setup(ext_modules=[Extension("kimi_k3_kernels._native", [])], cmdclass={"build_ext": BuildKernels})
