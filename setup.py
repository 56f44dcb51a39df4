"""The one thing that pyproject.toml cannot say in a stable way: the C kernels are built at installation.

A plain shared library, loaded through ctypes: it needs no header of Python or torch, and one wheel serves
every Python from 3.11 on (a free-threaded one, which has no limited API, gets a wheel of its own). Without a
C compiler the package installs all the same, and plain torch serves.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("kernels/rlbatch_kernels/csrc")

LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

KERNELS = Extension(
    # Beside its sources, in a folder that is no package: it is no module that Python could import.
    name="rlbatch_kernels.csrc.kernels",
    sources=[str(CSRC / "kernels.c")],
    depends=sorted(str(header) for header in CSRC.glob("*.h")),
    # The flags that let products and sums fuse and vectors hold selections; none that reorders a sum.
    extra_compile_args=[
        *("-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
        *("-Wno-psabi", "-pthread"),
    ],
    extra_link_args=["-pthread"],
    libraries=["m"],
    py_limited_api=LIMITED_API,
    optional=True,
)

setup(ext_modules=[KERNELS], options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {})
