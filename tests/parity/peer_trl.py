"""Run by TRL's own interpreter: its GRPO loss on a dict that rlbatch made."""

import tempfile

import torch
from datasets import Dataset
from peer_io import answer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def compute(question):
    form, trainer_logprobs = question["form"], question["trainer_logprobs"]
    losses = {}
    for loss_type in ("dapo", "grpo", "bnpo"):
        losses[loss_type] = loss(loss_type, form, trainer_logprobs)
    return losses | {"num_kept": kept_at(question["thresholds"], form, trainer_logprobs)}


def kept_at(thresholds, form, trainer_logprobs):
    """[B] at how many thresholds its off-policy mask keeps each row: it compares with the sampler there."""
    masks = [
        GRPOTrainer.get_off_policy_mask(
            advantages=form["advantages"][:, None],
            per_token_logps=trainer_logprobs,
            sampling_per_token_logps=form["sampling_per_token_logps"],
            mask=form["completion_mask"] * form["tool_mask"],
            off_policy_threshold=threshold,
        )
        for threshold in thresholds
    ]
    return [int(count) for count in sum(masks)[:, 0]]


def loss(loss_type, form, trainer_logprobs):
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    with tempfile.TemporaryDirectory() as directory:
        args = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            loss_type=loss_type,
            report_to=[],
            per_device_train_batch_size=2,
            num_generations=2,
            steps_per_generation=1,
        )
        trainer = GRPOTrainer(
            model=Qwen3ForCausalLM(config),
            reward_funcs=lambda **_: [0.0],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
            processing_class=tokenizer(),
        )
    trainer.current_gradient_accumulation_steps = 1
    entropies = torch.zeros_like(trainer_logprobs)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (trainer_logprobs, entropies, None)
    return float(trainer._compute_loss(trainer.model, form))


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")


answer(compute)
