"""Builds the extension `turbomind._C` with CMake; everything else is in pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeExtension(Extension):
    """An extension whose sources are listed in CMakeLists.txt."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures, builds and installs `_C` into the place setuptools expects.

    Honours CMAKE_ARGS (more options for the configuration) and CMAKE_BUILD_PARALLEL_LEVEL
    (compilers at once; the processors of this process by default).
    """

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        # The build requirements install cmake and ninja, perhaps in an environment that is not
        # activated.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
        env = os.environ | {"PATH": path}
        ninja = shutil.which("ninja", path=path)
        if ninja is None or shutil.which("cmake", path=path) is None:
            raise RuntimeError("cmake and ninja are needed: pip install -r requirements/build.txt")
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = ROOT / "build" / f"cmake-py{sys.version_info.major}.{sys.version_info.minor}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DTM_BUILD_TESTS=OFF",  # the tests switch it on in this folder
            f"-DCMAKE_INSTALL_PREFIX={target}",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",  # an isolated build removes its ninja afterwards
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DTM_VERSION={self.distribution.get_version()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]  # fmt: skip
        subprocess.run(configure, check=True, env=env)
        processors = len(os.sched_getaffinity(0))
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(processors)
        install = ["cmake", "--build", str(build), "--target", "install", "--parallel", jobs]
        subprocess.run(install, check=True, env=env)


setup(ext_modules=[CMakeExtension("turbomind._C")], cmdclass={"build_ext": CMakeBuild})
