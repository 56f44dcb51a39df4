"""GRPO on a CPU, from prompts to optimizer steps, with every token checked on its way from engine to loss.

    python examples/grpo.py --seed 0                      # learns
    python examples/grpo.py --plant shifted               # stops before the first backward: exit code 1
    python examples/grpo.py --plant shifted --unchecked   # what the same fault does where nobody looks

One step: sample with the current weights, keeping the id and the logprob of each token as it was drawn; store
the rollouts as a shard; load it; gate the step on a pass without gradient; then several optimizer steps with
a clipped loss. The policy version counts steps, not optimizer steps, as nothing is sampled between those.
With `--lag N` a step also trains on the rollouts of the last N policies, which are up to N versions old.

The task, and its reward, are in `word_problems.py`; the model beside this file learns it in about a minute.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from word_problems import HELD_OUT_THINGS, THINGS, make_prompts, reward_of

from rlbatch.alignment import Alignment, require_aligned
from rlbatch.assemble import to_samples
from rlbatch.batch import Batch, Layout
from rlbatch.collate import collate
from rlbatch.errors import RlbatchError
from rlbatch.faults import FAULTS
from rlbatch.loader import Checks, RolloutLoader
from rlbatch.records import Provenance, Sample, SamplingParams, Trajectory, Turn, VersionSpan
from rlbatch.scoring import (
    load_model,
    logits_for,
    model_vocab_size,
    tokenizer_fingerprint,
    trainer_logprobs,
)
from rlbatch.storage import open_reader, write_shard
from rlbatch_kernels import policy_ratio

MODEL_DIR = Path(__file__).parent / "tinylm"
NUM_PROMPTS, GROUP_SIZE = 16, 8
TEMPERATURE = 1.0
MAX_NEW_TOKENS = 48
"""A whole answer takes about 20."""
MAX_TOKENS = 512
"""Of a micro-batch. On a CPU a packed row is attended as one square, so that short rows are cheaper."""
NUM_OPTIMIZER_STEPS = 2
"""Per step. At the second the weights are no longer those that sampled, and the clip has something to do."""
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 7e-4, 0.2, 1.0
NUM_HELD_OUT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line decides."""

    seed: int
    steps: int
    lag: int
    layout: Layout
    plant: str | None
    """Code of a fault to plant into the samples of each step."""
    unchecked: bool
    rollouts: Path
    """Directory that gets a shard a step."""


def group_advantages(rewards: Tensor) -> Tensor:
    """[P, N] rewards of N completions a prompt -> [P, N]: distance from the group's mean in deviations."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def provenance_of(model: PreTrainedModel) -> Provenance:
    """How `draw` samples: from the whole softmax at a temperature, which is what its logprobs are of."""
    return Provenance(
        engine="transformers",
        logprobs_mode="processed",
        sampling=SamplingParams(temperature=TEMPERATURE),
        model=MODEL_DIR.name,
        tokenizer_fingerprint=tokenizer_fingerprint(MODEL_DIR),
        vocab_size=model_vocab_size(model),
        eos_token_ids=tuple(model.generation_config.eos_token_id),
    )


@torch.no_grad()
def draw(
    model: PreTrainedModel, prompts: Sequence[list[int]], stop_ids: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """[B, C] ids and [B, C] logprobs at the temperature; rows go on until all have drawn a stop token."""
    width = max(len(prompt) for prompt in prompts)
    # Padded on the left, so that every row draws its next token at the same place.
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    ids, logprobs = input_ids[:, :0], torch.empty(len(prompts), 0)
    while ids.shape[1] < MAX_NEW_TOKENS and not torch.isin(ids, stop_ids).any(1).all():
        # By place: the fourth argument has another name in older versions of transformers.
        output = model(input_ids, attention_mask, position_ids, cache, use_cache=True, logits_to_keep=1)
        distribution = (output.logits[:, -1] / TEMPERATURE).log_softmax(-1)
        input_ids = distribution.exp().multinomial(1, generator=generator)
        ids = torch.cat([ids, input_ids], dim=1)
        logprobs = torch.cat([logprobs, distribution.gather(1, input_ids)], dim=1)
        attention_mask = torch.cat([attention_mask, torch.ones_like(input_ids)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    return ids, logprobs


def sample_turns(
    model: PreTrainedModel, prompts: Sequence[list[int]], version: int, generator: torch.Generator
) -> list[Turn]:
    """One completion a prompt, up to its first stop token; what its row drew after that is nobody's."""
    provenance = provenance_of(model)
    stop_ids = torch.tensor(provenance.eos_token_ids)
    turns = []
    for prompt, ids, logprobs in zip(prompts, *draw(model, prompts, stop_ids, generator), strict=True):
        stops = torch.isin(ids, stop_ids).nonzero()
        length = int(stops[0]) + 1 if len(stops) else len(ids)
        turns.append(
            Turn(
                prompt_token_ids=np.array(prompt, np.int32),
                completion_token_ids=ids[:length].numpy().astype(np.int32),
                inference_logprobs=logprobs[:length].numpy(),
                finish_reason="stop" if len(stops) else "length",
                stop_reason=int(ids[length - 1]) if len(stops) else None,
                policy_versions=(VersionSpan(label=str(version), start=0, stop=length),),
                provenance=provenance,
            )
        )
    return turns


class Rollouts:
    """What the policy does with prompts: groups to train on, and one figure for prompts that are held out."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._model = model
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL_DIR)
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def groups(self, version: int) -> list[Sample]:
        """`GROUP_SIZE` completions of each of `NUM_PROMPTS` new prompts."""
        prompts = make_prompts(NUM_PROMPTS, THINGS, self._rng)
        repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
        turns, rewards = self._complete(repeated, version, self._generator)
        advantages = group_advantages(rewards.reshape(NUM_PROMPTS, GROUP_SIZE)).flatten()
        trajectories = [
            Trajectory(
                trajectory_id=f"{version}/{index}",
                group_id=f"{version}/{index // GROUP_SIZE}",
                turns=(turn,),
                reward=float(rewards[index]),
                advantage=float(advantages[index]),
            )
            for index, turn in enumerate(turns)
        ]
        return [sample for trajectory in trajectories for sample in to_samples(trajectory)]

    def held_out_reward(self, version: int) -> float:
        """Mean reward over the same prompts, and the same random numbers, whatever the seed and version."""
        prompts = make_prompts(NUM_HELD_OUT, HELD_OUT_THINGS, np.random.default_rng(0))
        _, rewards = self._complete(prompts, version, torch.Generator().manual_seed(0))
        return float(rewards.mean())

    def _complete(
        self, prompts: Sequence[str], version: int, generator: torch.Generator
    ) -> tuple[list[Turn], Tensor]:
        # The one place where text becomes ids. Completions are decoded for their reward, never encoded.
        encoded = [self._tokenizer.encode(prompt) for prompt in prompts]
        turns = sample_turns(self._model, encoded, version, generator)
        completions = [turn.completion_token_ids.tolist() for turn in turns]
        texts = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        return turns, torch.tensor([reward_of(text) for text in texts])


def load_batches(shard: Path, settings: Settings, vocab_size: int) -> list[Batch]:
    """The micro-batches of one shard."""
    if not settings.unchecked:
        checks = Checks(vocab_size=vocab_size)
        loader = RolloutLoader(shard, layout=settings.layout, max_tokens=MAX_TOKENS, checks=checks)
        return list(loader)
    samples = open_reader(shard).samples()
    return [collate(samples[at : at + 8], layout=settings.layout) for at in range(0, len(samples), 8)]


def gate(model: PreTrainedModel, batches: Sequence[Batch], version: int) -> Alignment:
    """Refuse the whole step, before its first backward, unless its logprobs line up."""
    with torch.no_grad():
        logprobs = [trainer_logprobs(model, batch) for batch in batches]
    # Each batch has its own ratios, but metrics and warnings are of the step.
    return require_aligned(batches, logprobs, trainer_version=version, logits_for=logits_for(model))[0]


def summary(step: Alignment) -> str:
    """Inference KLD by the age of the rollouts, and the warnings.

    Rollouts of earlier policies are further off, and rightly: they warn, and the clip deals with them.
    """
    name = "rlbatch/inference_kld_capped/version_lag_"
    klds = {key.removeprefix(name): kld for key, kld in step.metrics.items() if key.startswith(name)}
    counts = Counter(warning.code for warning in step.warnings)
    parts = [f"KLD {kld:.1e} at lag {age}" for age, kld in klds.items()]
    return ", ".join(parts + [f"{count} x {code}" for code, count in counts.items()])


def clipped_loss(logprobs: Tensor, batch: Batch, num_loss_tokens: int) -> Tensor:
    """What one micro-batch adds to the loss of the step.

    Args:
        logprobs: [B, T] nats, of the weights in training.
        batch: has the logprobs of the policy that sampled, whatever its version, and the advantages.
        num_loss_tokens: of the whole step: a token weighs the same whichever micro-batch it is in.
    """
    ratio = policy_ratio(logprobs, batch.inference_logprobs, batch.loss_mask).ratio
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    return -gain[batch.loss_mask].sum() / num_loss_tokens


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> float:
    """Several optimizer steps on the same batches; the loss of the last one."""
    num_loss_tokens = sum(batch.num_loss_tokens for batch in batches)
    total = 0.0
    for _ in range(NUM_OPTIMIZER_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            # Hidden states become logprobs in rlbatch_kernels.linear_logprobs; logits never exist.
            loss = clipped_loss(trainer_logprobs(model, batch), batch, num_loss_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
    return total


def train(model: PreTrainedModel, settings: Settings) -> Iterator[str]:
    """Train, and tell of each step in a line."""
    # The model stays in eval mode, as it was loaded: dropout would make the trainer another policy.
    rollouts, fault_rng = Rollouts(model, settings.seed), np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    kept: deque[list[Batch]] = deque(maxlen=settings.lag + 1)
    yield f"held-out reward {rollouts.held_out_reward(0):.3f}"
    for version in range(settings.steps):
        samples = rollouts.groups(version)
        if settings.plant is not None:
            samples = FAULTS[settings.plant].plant(samples, fault_rng)
        shard = settings.rollouts / f"{version:06d}.safetensors"
        write_shard(shard, samples)
        kept.append(load_batches(shard, settings, model_vocab_size(model)))
        batches = [batch for part in kept for batch in part]
        told = "unchecked" if settings.unchecked else summary(gate(model, batches, version))
        loss = update(model, optimizer, batches)
        reward = np.mean([sample.reward for sample in samples])
        yield f"step {version}: reward {reward:.3f}, loss {loss:+.3f}, {told}"
    yield f"held-out reward {rollouts.held_out_reward(settings.steps):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 with the error on stderr."""
    parser = argparse.ArgumentParser(description="GRPO on a CPU, checked from the engine to the loss.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lag", type=int, default=0, help="earlier policies to train on the rollouts of too")
    parser.add_argument("--layout", choices=["packed", "padded"], default="packed")
    parser.add_argument(
        "--plant", choices=sorted(FAULTS), help="fault to plant into each step; a few only warn"
    )
    parser.add_argument("--unchecked", action="store_true", help="no checks, to see what they are for")
    parser.add_argument("--rollouts", type=Path, help="new directory for the shards (default: temporary)")
    options = parser.parse_args(arguments)
    if min(options.seed, options.steps, options.lag) < 0:
        parser.error("--seed, --steps and --lag: expected at least 0")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        options.rollouts = options.rollouts or Path(temporary)
        options.rollouts.mkdir(parents=True, exist_ok=True)
        try:
            model = load_model(MODEL_DIR, device="cpu", dtype=torch.float32)
            for line in train(model, Settings(**vars(options))):
                print(line, flush=True)
        except RlbatchError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
