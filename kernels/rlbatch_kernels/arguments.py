"""What the ops ask of their arguments, and `Trained`: the positions they compute.

Validation happens here, once, before any backend; a backend may trust what it is given. Knows nothing of
what the ops compute.
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch_kernels.errors import DtypeError, ScaleError, ShapeError, TokenRangeError

MAX_OFFENDERS_SHOWN = 5
"""An error names this many positions and counts the rest."""

LOGIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOGPROB_DTYPES = (torch.float32, torch.float64)
"""Half precision is refused: bfloat16 logprobs are up to 0.07 nats off, the size of a real misalignment."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The least normal float32, 1.2e-38: logits are float32, and 1 / 1e-39 is infinite there."""
_LEAST = f"at least {LEAST_SCALE:.2g}"
ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SEGMENT_DTYPES = (torch.int32, torch.int64)

# Kinds of tensor whose data is not, or not wholly, here. Looked up only where their module is loaded
# already: where it is not, no such tensor can exist, and torch.distributed may be absent.
_WITHOUT_DATA = (
    (
        "torch.distributed.tensor",
        "DTensor",
        "a DTensor, which may be sharded",
        "a plain tensor: call the op inside the module's own forward, where FSDP has gathered the weight, "
        "or pass full_tensor()",
    ),
    ("torch._subclasses.fake_tensor", "FakeTensor", "a fake tensor, which has no data", "a tensor with data"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """The N trained positions of an argument of shape [...], gathered first: no other costs anything."""

    where: tuple[Tensor, ...]
    """Indices [N] int64, one an axis of [1, ...]; the leading axis makes a single position like any other."""
    target_ids: Tensor
    """[N] int64, each in [0, V)."""
    temperature: Tensor
    """[N] float64, finite and above 0."""
    shape: torch.Size
    """The [...] that results have."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.target_ids.numel()

    def gather(self, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Of `values` [..., X] the trained rows, or the `rows` among them: [N, X], a copy."""
        return values.unsqueeze(0)[tuple(index[rows] for index in self.where)]

    def offsets(self, values: Tensor) -> Tensor:
        """[N] int64: how many elements after the first of `values` [..., X] each trained row begins."""
        strides = values.unsqueeze(0).stride()
        found = torch.zeros_like(self.target_ids)
        for index, stride in zip(self.where, strides, strict=False):
            found += index * stride
        return found

    def positions(self) -> Tensor:
        """[N] int64: each trained position, counted through the leading axes in row-major order."""
        flat = torch.zeros_like(self.target_ids)
        for index, size in zip(self.where, (1, *self.shape), strict=True):
            flat = flat * size + index
        return flat

    def zero_elsewhere(self, out: Tensor) -> None:
        """Fill with 0 the rows of `out` [..., X] that are not trained."""
        if self.num_tokens == self.shape.numel():
            return
        untrained = torch.ones((1, *self.shape), dtype=torch.bool, device=out.device)
        untrained[self.where] = False
        out.unsqueeze(0).masked_fill_(untrained.unsqueeze(-1), 0)

    def put(self, out: Tensor, values: Tensor, rows: slice = slice(None)) -> None:
        """Write `values` [N, X] to where `gather` would read them in `out` [..., X]."""
        out.unsqueeze(0)[tuple(index[rows] for index in self.where)] = values.to(out.dtype)


def require_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse what is not a dense tensor of one of `dtypes` with its data in place."""
    if not isinstance(value, Tensor):
        raise DtypeError(f"{name}: found {type(value).__name__}, expected a torch.Tensor")
    for module, kind, found, expected in _WITHOUT_DATA:
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], kind)):
            raise DtypeError(f"{name}: found {found}, expected {expected}")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise DtypeError(
            f"{name}: found a tensor of torch.func or torch.vmap, expected a plain one: call the op "
            "outside of transforms, and backward() for gradients"
        )
    if value.is_meta:
        raise DtypeError(f"{name}: found a meta tensor, which has no data, expected a tensor with data")
    if value.layout is not torch.strided:
        raise DtypeError(f"{name}: found layout {value.layout}, expected a dense tensor (torch.strided)")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(f"{name}: found {value.dtype}, expected one of {names}")
    if value.numel() and value.untyped_storage().nbytes() == 0:
        raise ShapeError(
            f"{name}: found shape {list(value.shape)} over a freed storage of 0 bytes (a sharded parameter "
            "outside its module's forward?), expected a tensor with data"
        )


def may_overlap(value: Tensor) -> bool:
    """Whether two elements may share a place in memory; True also for some exotic strides where none do.

    Example:
        [300].expand(3, 300) -> True; [3, 300].t() -> False
    """
    span = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False


def require_shape(name: str, value: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Refuse a shape other than `expected`; `meaning` says where that comes from."""
    if tuple(value.shape) != tuple(expected):
        raise ShapeError(f"{name}: found shape {list(value.shape)}, expected {list(expected)} ({meaning})")


def require_device(name: str, value: Tensor, device: torch.device, other: str) -> None:
    """Refuse a tensor that is not on `device`, where the argument `other` is."""
    if value.device != device:
        raise DtypeError(f"{name}: found device {value.device}, expected {device} (that of {other})")


def require_scale(name: str, value: object) -> float:
    """The number, refused unless it is a real one, finite and above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{name}: found {type(value).__name__} {value!r}, expected a float")
    if not (
        math.isfinite(value) and LEAST_SCALE <= torch.tensor(value, dtype=torch.float32).item() < math.inf
    ):
        raise ScaleError(f"{name}: found {value!r}, expected a finite number above 0 ({_LEAST})")
    return float(value)


def require_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse hidden states [..., D], weight [V, D] and bias [V] that are no head."""
    require_tensor("hidden", hidden, LOGIT_DTYPES)
    require_tensor("weight", weight, LOGIT_DTYPES)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ShapeError(
            f"weight: found shape {list(weight.shape)}, expected [V, D] with data "
            "(a sharded parameter is empty outside its module's forward)"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"hidden: found shape {list(hidden.shape)}, expected [..., {weight.shape[1]}] (D of weight)"
        )
    head = [("weight", weight)]
    if bias is not None:
        require_tensor("bias", bias, LOGIT_DTYPES)
        require_shape("bias", bias, (weight.shape[0],), "V of weight")
        head.append(("bias", bias))
    for name, value in head:
        require_device(name, value, hidden.device, "hidden")
        if (value.dtype == torch.float64) != (hidden.dtype == torch.float64):
            raise DtypeError(
                f"{name}: found {value.dtype} with hidden in {hidden.dtype}, expected float64 for all or none"
            )


def select_trained(
    target_ids: Tensor,
    mask: Tensor,
    temperature: float | Tensor,
    *,
    vocab_size: int,
    vocab_mask: Tensor | None,
    like: tuple[str, Tensor],
) -> Trained:
    """Check targets, mask and temperature against the argument `like` [..., X], and gather what is trained.

    `vocab_mask` [V] bool: no trained target may be one that it excludes.

    Two device-to-host copies: the number of trained positions, and whether all of them are in order.
    """
    name, reference = like
    shape = reference.shape[:-1]
    require_tensor("target_ids", target_ids, ID_DTYPES)
    require_tensor("mask", mask, (torch.bool,))
    for argument, value in (("target_ids", target_ids), ("mask", mask)):
        require_shape(argument, value, shape, f"the leading axes of {name}")
        require_device(argument, value, reference.device, name)
    where = mask.unsqueeze(0).nonzero(as_tuple=True)
    trained = Trained(
        where=where,
        target_ids=target_ids.unsqueeze(0)[where].to(torch.int64),
        temperature=_trained_temperature(temperature, where, like),
        shape=shape,
    )
    _require_in_order(trained, vocab_size, vocab_mask)
    return trained


def _trained_temperature(
    temperature: float | Tensor, where: tuple[Tensor, ...], like: tuple[str, Tensor]
) -> Tensor:
    name, reference = like
    if not isinstance(temperature, Tensor):
        value = require_scale("temperature", temperature)
        return torch.full((where[0].numel(),), value, dtype=torch.float64, device=reference.device)
    require_tensor("temperature", temperature, LOGIT_DTYPES)
    require_shape("temperature", temperature, reference.shape[:-1], f"a float, or the leading axes of {name}")
    require_device("temperature", temperature, reference.device, name)
    if temperature.requires_grad and torch.is_grad_enabled():
        raise DtypeError(
            "temperature: found a tensor that requires grad, expected a constant: it gets no gradient"
        )
    return temperature.detach().unsqueeze(0)[where].to(torch.float64)


def require_vocab_mask(value: object, vocab_size: int, like: tuple[str, Tensor]) -> Tensor | None:
    """[V] bool, contiguous, from a tensor of that or the number of ids that count; None where all do."""
    if value is None:
        return None
    name, reference = like
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= vocab_size:
            raise ShapeError(f"vocab_mask: found {value} ids, expected from 1 to {vocab_size} (V)")
        return None if value == vocab_size else torch.arange(vocab_size, device=reference.device) < value
    require_tensor("vocab_mask", value, (torch.bool,))
    mask: Tensor = value  # type: ignore[assignment]
    require_shape("vocab_mask", mask, (vocab_size,), f"V, of all ranks of a group, with {name}")
    require_device("vocab_mask", mask, reference.device, name)
    return mask.contiguous()


def _require_in_order(trained: Trained, vocab_size: int, vocab_mask: Tensor | None) -> None:
    ids, temperature = trained.target_ids, trained.temperature.to(torch.float32)
    id_outside = (ids < 0) | (ids >= vocab_size)
    no_scale = ~(temperature.isfinite() & (temperature >= LEAST_SCALE))
    is_excluded = (
        torch.zeros_like(id_outside) if vocab_mask is None else ~vocab_mask[ids.clamp(0, vocab_size - 1)]
    )
    found = torch.stack([id_outside.any(), is_excluded.any(), no_scale.any()])
    any_outside, any_excluded, any_no_scale = found.tolist()
    if any_outside:
        raise TokenRangeError(
            f"target_ids: found {offenders(trained, id_outside, ids, 'id')}; "
            f"expected 0 <= id < {vocab_size} (V) at every trained position"
        )
    if any_excluded:
        raise TokenRangeError(
            f"target_ids: found {offenders(trained, is_excluded, ids, 'id')}, which vocab_mask excludes; "
            "expected an id that it counts at every trained position"
        )
    if any_no_scale:
        raise ScaleError(
            f"temperature: found {offenders(trained, no_scale, trained.temperature, 'temperature')}; "
            f"expected a finite number above 0 ({_LEAST}) at every trained position"
        )


def offenders(trained: Trained, offending: Tensor, values: Tensor, noun: str) -> str:
    """The first trained positions where `offending` [N] holds, with their `values` [N], and how many more.

    Example:
        id 5 at (0, 1), id -1 at (0, 2) and 3 more
    """
    rows = offending.nonzero()[:, 0]
    shown = rows[:MAX_OFFENDERS_SHOWN]
    # [1:] leaves out the axis that `Trained` puts in front.
    positions = zip(*(index[shown].tolist() for index in trained.where[1:]), strict=True)
    places = [tuple(position) for position in positions] or [()] * len(shown)
    texts = [
        f"{noun} {value} at {place}" for value, place in zip(values[shown].tolist(), places, strict=True)
    ]
    rest = rows.numel() - len(texts)
    return ", ".join(texts) + (f" and {rest} more" if rest else "")
