"""Errors of the kernels: arguments that do not fit, ids that no vocabulary holds, scales that are none.

    ShapeError(ValueError)       a shape that does not fit the others, or a tensor that is empty or freed
    DtypeError(TypeError)        a dtype, device or kind of tensor that the op does not take
    ScaleError(ValueError)       a temperature, logit_scale, soft_cap, loss or kept-set rule outside its range
    TokenRangeError(IndexError)  a trained target outside the vocabulary
    GroupError(ValueError)       ranks that share a vocabulary and disagree on what they compute
    BackendError(RuntimeError)   a backend that was asked for by name and cannot serve the call
    BackendWarning(UserWarning)  a slower backend serves, since the one for this device is missing; said once

Every message names the argument, what was found and what was expected.
"""


class ShapeError(ValueError):
    """An argument's shape does not fit the others, or it is empty where it must not be."""


class DtypeError(TypeError):
    """An argument has a dtype or a device, or is a kind of tensor, that the op does not take."""


class ScaleError(ValueError):
    """A temperature, logit_scale, soft_cap, top_k, top_p, min_p or bound of a loss is outside its range."""


class TokenRangeError(IndexError):
    """A trained position's target is not in the vocabulary."""


class GroupError(ValueError):
    """Ranks that share a vocabulary were given different targets or temperatures."""


class BackendError(RuntimeError):
    """The backend that was asked for by name cannot serve this call."""


class BackendWarning(UserWarning):
    """A slower backend serves, because the one made for this device is missing."""
