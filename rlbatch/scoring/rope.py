"""Models whose RoPE follows the longest sequence of a call: rows that they score otherwise than alone.

transformers chooses the frequencies of the kinds `longrope` and `dynamic` once a call, by its largest
position: a short sequence is rotated differently as soon as a long one is beside it, packed or padded. Short
probes do not show it, and long ones cost too much; so the kind is read from the model.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError, Where
from rlbatch.scoring.wrappers import model_name


def follows_length(model: nn.Module) -> bool:
    """Whether logits of a token may depend on how many come after it."""
    return any(True for _ in _boundaries(model))


def require_alike_in_length(model: nn.Module, batch: Batch) -> None:
    """Pass a batch of which every sequence has the frequencies that it has alone.

    `longrope` has two sets of frequencies, for calls of up to so many positions and for longer ones.
    `dynamic` has a set for each length beyond its limit, and keeps that of the longest call so far: there,
    even sequences of one length are scored by what came before them.

    Raises:
        ScoringError: `rope-by-length`, at the first sequence that is not.
    """
    boundaries = list(_boundaries(model))
    if not boundaries:
        return
    lengths = batch.sequence_num_tokens
    # Padding has positions too, which count.
    longest = max(lengths) if batch.position_ids is None else int(batch.position_ids.max()) + 1
    for kind, boundary in boundaries:
        is_long = longest > boundary
        odd = [at for at, length in enumerate(lengths) if (length > boundary) != is_long]
        if kind == "dynamic" and is_long:
            odd = [at for at in range(len(lengths)) if at not in odd] or odd
        if odd:
            raise _mixed(model, batch, odd, longest, kind=kind, boundary=boundary)


def _boundaries(model: nn.Module) -> Iterator[tuple[str, int]]:
    """(kind, positions up to which the frequencies are the usual ones) of each such RoPE of the model."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        # A model with several kinds of layers has a RoPE for each.
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            if kind == "longrope":
                yield kind, _original_length(module, layer)
            elif isinstance(kind, str) and "dynamic" in kind:
                yield "dynamic", _unscaled_length(module, layer)


def _unscaled_length(module: nn.Module, layer: str | None) -> int:
    owner: Any = module
    usual = int(owner.original_max_seq_len)
    longest_before = getattr(owner, f"{layer}_max_seq_len_cached", owner.max_seq_len_cached)
    # After a longer call only one below the usual length brings the usual frequencies back.
    return usual - 1 if int(longest_before) > usual else usual


def _original_length(module: nn.Module, layer: str | None) -> int:
    config: Any = module.config
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters if layer is None else parameters[layer]
    # Before transformers 5 the number stood in the configuration itself.
    return int(parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings)


def _mixed(
    model: nn.Module, batch: Batch, odd: list[int], longest: int, *, kind: str, boundary: int
) -> ScoringError:
    ref, length = batch.refs[odd[0]], batch.sequence_num_tokens[odd[0]]
    only = (
        f"at most {boundary} positions"
        if kind == "dynamic"
        else f"all at most {boundary} positions, or all more"
    )
    return ScoringError.of(
        finding(
            "rope-by-length",
            where=Where(path=ref.path, sample=ref.index, trajectory=ref.trajectory_id, start=0, stop=length),
            expected=f"for {model_name(model)}, whose RoPE is {kind}: a batch of {only}",
            found=f"{length} tokens in a batch with positions up to {longest} "
            f"({len(odd)} such sequences of {len(batch.refs)})",
        )
    )
