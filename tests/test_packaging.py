"""What is shipped: the wheel's contents, what its torch-free half needs, and the names it exports."""

import ctypes
import importlib
import importlib.metadata
import os
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import rlbatch
import rlbatch_kernels
from rlbatch_kernels import c_library

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "rlbatch", "kernels")
SHIPPED = ("rlbatch", "rlbatch_kernels")
BARE_REQUIREMENTS = ("numpy", "msgspec", "safetensors")
"""All that the sampler's side of rlbatch may need."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, itself built from a copy of the sources: no stale build folder can leak in."""
    directory = tmp_path_factory.mktemp("packaging")
    source = directory / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An interpreter that has numpy, msgspec, safetensors and the wheel, and nothing else."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    (site_packages,) = home.glob("lib/python*/site-packages")
    for requirement in BARE_REQUIREMENTS:
        # Linked from this environment, so that the test needs no network.
        distribution = importlib.metadata.distribution(requirement)
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for top in tops:
            (site_packages / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    python = home / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([sys.executable, *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


def run_isolated(python: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), "-I", "-c", program], capture_output=True, text=True, check=False)


def torch_free_modules() -> list[str]:
    """The modules that the import contract in pyproject.toml holds to be torch-free, with what is inside."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if "torch" in contract.get("forbidden_modules", ())]
    names = ["rlbatch"]
    for name in contract["source_modules"]:
        names.append(name)
        path = getattr(importlib.import_module(name), "__path__", [])
        names += [module.name for module in pkgutil.walk_packages(path, f"{name}.")]
    return names


def packages(root: ModuleType) -> list[str]:
    inner = pkgutil.walk_packages(root.__path__, f"{root.__name__}.")
    return [root.__name__, *(module.name for module in inner if module.ispkg)]


def own_names(package: ModuleType) -> set[str]:
    """Public names that a package defines; where it defines none, it is there to pass on what it imports."""
    public = {name: value for name, value in vars(package).items() if not name.startswith("_")}
    origin = {name: getattr(value, "__module__", "") for name, value in public.items()}
    defined = {name for name in public if origin[name] == package.__name__}
    return defined or {name for name in public if origin[name].partition(".")[0] in SHIPPED}


def test_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    version = importlib.metadata.version("rlbatch")
    assert tops == {*SHIPPED, f"rlbatch-{version}.dist-info"}


def test_wheel_holds_every_source_and_data_file(wheel: Path) -> None:
    expected = {
        str(file.relative_to(root))
        for root, package in ((ROOT, "rlbatch"), (ROOT / "kernels", "rlbatch_kernels"))
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
    }
    assert {"rlbatch/py.typed", "rlbatch_kernels/py.typed"} <= expected
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped - {"rlbatch_kernels/csrc/kernels.abi3.so"} == expected


COMPILERS = (*os.environ.get("CC", "").split()[:1], "cc", "gcc", "clang")


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")
def test_where_there_is_a_compiler_the_c_kernels_are_built_and_load(wheel: Path, tmp_path: Path) -> None:
    """The build is optional: sources that do not compile would else only skip every test of theirs."""
    assert c_library.missing() is None
    library = zipfile.ZipFile(wheel).extract("rlbatch_kernels/csrc/kernels.abi3.so", tmp_path)
    assert ctypes.CDLL(library).rlb_interface() == c_library.INTERFACE


def test_wheel_carries_the_licence(wheel: Path) -> None:
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/licenses/LICENSE")]
    assert zipfile.ZipFile(wheel).read(name) == (ROOT / "LICENSE").read_bytes()


def test_kernels_folder_is_a_source_root_and_no_package() -> None:
    """A top-level package `kernels` would overwrite Hugging Face's package of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_sampler_side_imports_in_a_bare_environment(bare_python: Path) -> None:
    modules = torch_free_modules()
    done = run_isolated(
        bare_python,
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        # A module without a spec was made in memory by an extension.
        "real = {name for name, module in sys.modules.items() if getattr(module, '__spec__', None)}\n"
        "print(*{name.partition('.')[0] for name in real} - set(sys.stdlib_module_names))",
    )
    assert done.returncode == 0, done.stderr
    loaded = {name for name in done.stdout.split() if not name.startswith("_")}
    assert "rlbatch" in loaded
    assert loaded <= {"rlbatch", *BARE_REQUIREMENTS}


def test_sampler_side_loads_no_torch_where_torch_is_installed() -> None:
    done = run_isolated(
        Path(sys.executable),
        f"import importlib, sys\nfor name in {torch_free_modules()}: importlib.import_module(name)\n"
        "print(*{'torch', 'transformers', 'einops', 'rlbatch_kernels'} & set(sys.modules))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_bare_environment_has_no_torch(bare_python: Path) -> None:
    """Else the tests above would show nothing."""
    done = run_isolated(bare_python, "import rlbatch.batch")
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("name", [*packages(rlbatch), *packages(rlbatch_kernels)])
def test_exported_names_are_sorted_and_complete(name: str) -> None:
    package = importlib.import_module(name)
    exported = package.__all__
    assert exported == sorted(set(exported))
    assert [public for public in exported if not hasattr(package, public)] == []
    assert own_names(package) - set(exported) == set()
