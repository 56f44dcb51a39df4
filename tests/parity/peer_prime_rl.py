"""Run with prime-rl on the path: its MicroBatch and loss on a dict that rlbatch made."""

import msgspec
import torch
from peer_io import answer
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.rl.loss import LossInputs, default_loss_fn, shift_tensor_right
from prime_rl.transports.rollouts.types import MicroBatch, RoutedExperts


def compute(question):
    form = dict(question["form"])
    form["routed_experts"] = RoutedExperts(**form["routed_experts"])
    sent = msgspec.msgpack.encode(MicroBatch(**form))
    batch = msgspec.msgpack.Decoder(MicroBatch).decode(sent)
    # What its trainer computes predicts the next token; it moves that to the token itself.
    trainer = shift_tensor_right(question["trainer_logprobs"])[0]
    inputs = zip(
        *(
            values.split(batch.seq_lens)
            for values in (
                trainer,
                torch.tensor(batch.inference_logprobs),
                torch.tensor(batch.advantages),
                torch.tensor(batch.loss_mask),
            )
        ),
        strict=True,
    )
    losses = [
        default_loss_fn(
            LossInputs(
                trainer_logprobs=ours,
                inference_logprobs=theirs,
                ref_logprobs=None,
                advantages=advantages,
                loss_mask=mask,
            ),
            DefaultLossConfig(),
        ).loss
        for ours, theirs, advantages, mask in inputs
    ]
    return {"losses": [float(loss) for loss in losses], "experts_shape": batch.routed_experts.shape}


answer(compute)
