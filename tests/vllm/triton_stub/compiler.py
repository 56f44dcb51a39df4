"""Where Triton looks for the compiler of a backend."""

from typing import NoReturn

from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Knows the target, and refuses to compile for it."""

    @staticmethod
    def supports_target(target: object) -> bool:
        """Whether the target is the one that the driver names."""
        return getattr(target, "backend", None) == "cpu"

    def _refuse(self, *_: object) -> NoReturn:
        raise NotImplementedError("kernels run in the interpreter only: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _refuse


# Triton takes whatever subclass of its base it finds in here, the base itself too.
del BaseBackend
