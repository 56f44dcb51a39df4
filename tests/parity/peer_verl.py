"""Run by verl's own interpreter: its DataProto, metrics and policy loss on a dict that rlbatch made."""

import torch
from peer_io import answer
from verl import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils.model import compute_position_id_with_mask
from verl.workers.config import ActorConfig


def compute(question):
    proto = DataProto.from_dict(tensors=question["form"])
    parts = proto.split(1)
    batch = DataProto.concat(parts).batch
    mask = batch["response_mask"].bool()
    metrics = compute_offpolicy_metrics(batch["old_log_probs"], batch["rollout_log_probs"], mask)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=batch["old_log_probs"],
        log_prob=question["trainer_logprobs"],
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        loss_agg_mode="token-mean",
        config=config,
    )
    positions = compute_position_id_with_mask(batch["attention_mask"])
    return {
        "kl": float(metrics["kl"]),
        "k3_kl": float(metrics["k3_kl"]),
        "loss": float(loss),
        "positions_agree": bool(torch.equal(positions, batch["position_ids"])),
    }


answer(compute)
