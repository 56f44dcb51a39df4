"""What can be known of samples without a trainer."""

from rlbatch.soundness.gate import check_sound, require_sound

__all__ = ["check_sound", "require_sound"]
