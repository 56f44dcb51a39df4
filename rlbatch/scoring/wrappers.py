"""What wraps a model or one of its modules: which one is inside, and is to be looked into.

`torch.compile`, DistributedDataParallel, FullyShardedDataParallel and PEFT each put a module of their own
around a model, which is the one to call: it gathers weights, adapts layers and joins gradients on the way.
Head, embedding and numbers are those of the module inside. Knows nothing of whether that is what the call
ends in; `rlbatch.scoring.proof` does.
"""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

# Of torch.compile, DistributedDataParallel and FullyShardedDataParallel.
_CHILDREN = ("_orig_mod", "module", "_fsdp_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that wrappers call in the end; itself where it has none.

    PEFT's copies of a module (`modules_to_save`) count as wrappers: the one in use now is inside. Its
    adapters do not, for they compute something of their own.
    """
    *_, innermost = _nested(module)
    return innermost


def called_alone(model: nn.Module) -> nn.Module:
    """The module to call where one rank asks and the others do not.

    DistributedDataParallel and `torch.compile` are taken off. All else stays, for it may compute something:
    PEFT puts prefixes in, FullyShardedDataParallel gathers weights.
    """
    if isinstance(model, DistributedDataParallel):
        return called_alone(model.module)
    compiled = dict(model.named_children()).get("_orig_mod")
    return model if compiled is None else called_alone(compiled)


def call_hooks(*modules: nn.Module) -> tuple[object, ...]:
    """What is hooked onto modules and what they wrap, or put in place of their forwards.

    Equal before and after as long as nobody adds, removes or patches anything; holds nothing alive.
    """
    found: list[object] = []
    for module in (inner for outer in modules for inner in _nested(outer)):
        own = vars(module).get("forward")
        # A bound method is made anew each time it is looked up; its function is not.
        patch = None if own is None else weakref.ref(getattr(own, "__func__", own))
        # Numbers of hooks are never used twice.
        found.append((*module._forward_pre_hooks, *module._forward_hooks, patch))
    return tuple(found)


def _nested(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside it, down to what its wrappers call in the end."""
    yield module
    inner = _inside(module)
    if inner is not None:
        yield from _nested(inner)


def how_spread(model: nn.Module) -> str | None:
    """How the model's weights lie on several ranks, which must then call it together; None where they do not.

    A group of one rank, and copies such as DistributedDataParallel's, are whole.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    for name, module in model.named_modules():
        # What fully_shard has gathered looks whole until the next optimizer step.
        if isinstance(module, FSDPModule) and not _is_whole(model.get_submodule(name).parameters()):
            return f"fully_shard on {name or 'the model'}"
        if isinstance(module, FullyShardedDataParallel) and dist.get_world_size(module.process_group) > 1:
            return f"FullyShardedDataParallel on {name or 'the model'}"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            return f"{name}: a DTensor with placements {parameter.placements}"
        if parameter.numel() == 0:
            return f"{name}: an empty parameter, as ZeRO leaves it outside the forward"
    return None


def _is_whole(parameters: Iterator[nn.Parameter]) -> bool:
    """Whether fully_shard left all of them on one rank; False where they are gathered, which hides it."""
    sizes = {each.device_mesh.size() for each in parameters if isinstance(each, DTensor)}
    return sizes == {1}


def model_name(model: nn.Module) -> str:
    """The class that the model's author wrote: fully_shard puts one of its own in front."""
    classes = type(unwrapped(model)).__mro__
    return next(cls.__name__ for cls in classes if not cls.__name__.startswith("FSDP"))


def _child(module: nn.Module) -> nn.Module | None:
    return next((child for name, child in module.named_children() if name in _CHILDREN), None)


def _inside(module: nn.Module) -> nn.Module | None:
    child = _child(module)
    if child is not None:
        return child
    if "modules_to_save" in dict(module.named_children()):
        return _copy_in_use(module)
    find_base = getattr(module, "get_base_model", None)
    base: nn.Module | None = None if find_base is None else find_base()
    return base


def _copy_in_use(module: nn.Module) -> nn.Module:
    """Of PEFT's copies of one module: that of the active adapter, or the original without one."""
    wrapper: Any = module
    copies: dict[str, nn.Module] = dict(wrapper.modules_to_save.named_children())
    active = list(wrapper.active_adapters)
    if wrapper.disable_adapters or not active or any(name not in copies for name in active):
        original: nn.Module = wrapper.original_module
        return original
    return copies[active[0]]
