"""`alignment_stats` beside copy_, the same statistics in eager and compiled torch, and others' metrics.

    python kernels/bench/alignment_stats.py [--quick] [--threads N]

All tokens trained and every row a segment. Bytes are the 9 of a token (two float32 and a bool); copy_ moves 8
of a float32.
"""

import ast
import inspect
import math
import textwrap
import types
from collections import defaultdict

import harness
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlbatch_kernels import LAGS, RESIDUAL_CLIP, alignment_stats, last_backend

ROWS, PEER_ROWS, LENGTH = 2048, 512, 8192
BYTES_A_TOKEN, BYTES_A_COPY = 9, 8
SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::_to_copy")


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs of an exponential distribution, and the same with noise of 0.01 nats."""
    inference = torch.rand(rows, LENGTH).log_()
    trainer = inference + 0.01 * torch.randn(rows, LENGTH)
    mask = torch.ones(rows, LENGTH, dtype=torch.bool)
    segments = torch.tensor([(row, 0, LENGTH, 0) for row in range(rows)], dtype=torch.int32)
    return trainer, inference, mask, segments


def dense_stats(trainer: Tensor, inference: Tensor, mask: Tensor) -> Tensor:
    """The columns of `alignment_stats` for rows that are segments, as one would write them in torch."""
    t_fine, i_fine = trainer.isfinite(), inference.isfinite()
    both = mask & t_fine & i_fine
    d = torch.where(both, trainer - inference, 0.0)
    ratio = torch.where(both, d.clamp(-20, 20).exp(), 0.0)
    nats = torch.where(d.abs() < 0.5, d * d * (0.5 + d / 6 + d * d / 24 + d**3 / 120), ratio - 1 - d)
    nats = torch.where(both, nats, 0.0)
    zeros = both & (inference == 0) & (trainer < -1e-3)
    confident = both & (inference >= math.log(0.5)) & (d < -2)
    columns = [
        *(mask.sum(-1), both.sum(-1), d.sum(-1), d.abs().sum(-1), d.square().sum(-1)),
        *(nats.sum(-1), nats.clamp(max=1).sum(-1), ratio.sum(-1), ratio.square().sum(-1)),
        *(
            d.abs().amax(-1),
            torch.where(both, inference, -math.inf).amax(-1),
            zeros.sum(-1),
            confident.sum(-1),
        ),
        *((mask & ~t_fine).sum(-1), (mask & ~i_fine).sum(-1)),
    ]
    length = trainer.shape[1]
    for lag in LAGS:
        ours = slice(max(0, -lag), length - max(0, lag))
        theirs = slice(max(0, lag), length + min(0, lag))
        pair = mask[:, ours] & i_fine[:, ours] & mask[:, theirs] & t_fine[:, theirs]
        apart = (inference[:, ours] - trainer[:, theirs]).abs().clamp(max=RESIDUAL_CLIP)
        columns += [torch.where(pair, apart, 0.0).sum(-1), pair.sum(-1)]
    return torch.stack([column.to(torch.float32) for column in columns], dim=1)


class HostSyncs(TorchDispatchMode):
    """Counts operations that would wait for a device on which `tensors`, and all made of them, were."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.count = 0
        self._kept = list(tensors)
        self._storages = {self._storage(tensor) for tensor in tensors}

    @staticmethod
    def _storage(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        ours = any(isinstance(leaf, Tensor) and self._storage(leaf) in self._storages for leaf in leaves)
        result = func(*args, **(kwargs or {}))
        if not ours:
            return result
        # A copy that names a device may leave the one it is on.
        leaves_device = func._schema.name != "aten::_to_copy" or (kwargs or {}).get("device") is not None
        self.count += func._schema.name in SYNCS and leaves_device
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._kept.append(leaf)
                self._storages.add(self._storage(leaf))
        return result


def host_syncs() -> int:
    """Of a step's statistics on a device: those of the op, and the copy of its table."""
    trainer, inference, mask, segments = batch(4)
    with HostSyncs((trainer, inference, mask)) as seen:
        alignment_stats(trainer, inference, mask, segments, backend="torch").to("cpu", copy=True)
    return seen.count


def verl(trainer: Tensor, inference: Tensor, mask: Tensor) -> harness.Case:
    from verl.trainer.ppo import rollout_corr_helper

    return lambda: rollout_corr_helper.compute_rollout_corr_metrics_from_logprobs(trainer, inference, mask)


def prime_rl(trainer: Tensor, inference: Tensor, mask: Tensor) -> harness.Case:
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.rl import loss

    inputs = loss.LossInputs(
        trainer_logprobs=trainer.flatten(),
        inference_logprobs=inference.flatten(),
        ref_logprobs=None,
        advantages=torch.ones(trainer.numel()),
        loss_mask=mask.flatten(),
    )
    return lambda: loss.default_loss_fn(inputs, DefaultLossConfig())


def trl(trainer: Tensor, inference: Tensor, mask: Tensor) -> harness.Case:
    """The two stretches of its trainer's method that compute ratio and metrics, as they stand there."""
    from trl.trainer import grpo_trainer

    method = grpo_trainer.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    test = "self.use_vllm and self.vllm_importance_sampling_correction"
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == test]
    ours = [node for node in found if {"mean_delta", "per_token_logps_diff"} & names_in(node)]
    ours.sort(key=lambda node: node.lineno)
    code = compile(ast.Module(body=ours, type_ignores=[]), grpo_trainer.__file__, "exec")
    fake = types.SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=3.0,
        vllm_importance_sampling_clip_min=None,
        accelerator=types.SimpleNamespace(gather=lambda value: value),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    scope = {
        **vars(grpo_trainer),
        **{"self": fake, "mode": "train", "device": trainer.device, "tool_mask": None},
        **{"completion_mask": mask.long(), "old_per_token_logps": trainer},
        "sampling_per_token_logps": inference,
    }
    return lambda: exec(code, scope)


def names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def main() -> None:
    given = harness.arguments(__doc__ or "")
    runs = harness.QUICK_RUNS if given.quick else harness.RUNS
    figures: dict[str, float | int | None] = {}
    trainer, inference, mask, segments = batch(ROWS)
    out, compiled = torch.empty_like(trainer), torch.compile(dense_stats)
    times = harness.medians(
        {
            "ours": lambda: alignment_stats(trainer, inference, mask, segments),
            "copy_": lambda: out.copy_(trainer),
            "torch.compile": lambda: compiled(trainer, inference, mask),
            "eager": lambda: dense_stats(trainer, inference, mask),
        },
        runs,
    )
    rates = {"ours": BYTES_A_TOKEN * trainer.numel() / times["ours"]}
    rates["copy_"] = BYTES_A_COPY * trainer.numel() / times["copy_"]
    figures["copy_fraction"] = rates["ours"] / rates["copy_"]
    figures["vs_compile"] = harness.ratio(times, "torch.compile", "ours")
    figures["vs_eager"] = harness.ratio(times, "eager", "ours")
    rows = {f"{name} [{ROWS}, {LENGTH}]": seconds for name, seconds in times.items()}
    small = batch(PEER_ROWS)
    peers = {
        "verl": harness.peer(lambda: verl(*small[:3])),
        "prime_rl": harness.peer(lambda: prime_rl(*small[:3])),
        "trl": harness.peer(lambda: trl(*small[:3])),
    }
    times = harness.medians({"ours": lambda: alignment_stats(*small), **peers}, runs)
    figures |= {f"vs_{name}": harness.ratio(times, name, "ours") for name in peers}
    # Of what was timed: the count of syncs runs on another backend.
    backend = last_backend("alignment_stats")
    figures["host_syncs"] = host_syncs()
    rows |= {f"{name} [{PEER_ROWS}, {LENGTH}]": seconds for name, seconds in times.items()}
    print(f"backend {backend}, {torch.get_num_threads()} threads")
    print(", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()))
    harness.report(rows, figures)


if __name__ == "__main__":
    main()
