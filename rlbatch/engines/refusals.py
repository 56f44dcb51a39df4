"""`refusal`: the error of one finding, as every reader of replies raises it."""

from rlbatch.catalogue import finding
from rlbatch.errors import ReplyError


def refusal(
    code: str, expected: str, found: str, *, likely: str | None = None, fix: str | None = None
) -> ReplyError:
    """The error of one finding; cause and remedy are the catalogue's where none are given."""
    return ReplyError.of(finding(code, expected=expected, found=found, likely=likely, fix=fix))
