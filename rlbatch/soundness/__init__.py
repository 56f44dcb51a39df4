"""What can be known of turns, of samples, and of a batch's layout, without a trainer."""

from rlbatch.soundness.gate import check_sound, require_sound
from rlbatch.soundness.layout import check_sound_layout, require_sound_layout
from rlbatch.soundness.turns import check_sound_trajectory, require_sound_trajectory

__all__ = [
    "check_sound",
    "check_sound_layout",
    "check_sound_trajectory",
    "require_sound",
    "require_sound_layout",
    "require_sound_trajectory",
]
