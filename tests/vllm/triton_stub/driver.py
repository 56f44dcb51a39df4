"""Where Triton looks for the driver of a backend."""

from types import ModuleType
from typing import NoReturn

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """One device, one stream, nothing to set up."""

    def __init__(self) -> None:
        """Nothing: the base would look for a compiler."""

    @staticmethod
    def is_active() -> bool:
        """It always is."""
        return True

    def get_current_target(self) -> GPUTarget:
        """What `CPUBackend` supports."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        """The only one."""
        return torch.device("cpu")

    def get_device_interface(self) -> ModuleType:
        """Its functions in torch."""
        return torch.cpu

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: object = None) -> int:
        """The only one."""
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No launcher is written, so no type needs another name."""
        return ty

    def get_benchmarker(self) -> NoReturn:
        """Nothing is tuned here."""
        raise NotImplementedError("kernels run in the interpreter only")


# As in the compiler.
del DriverBase
