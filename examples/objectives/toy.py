"""What the examples of this folder share: a small random model, rollouts of it, and a reward that a program checks.

The task: after a prompt of a few tokens, write even tokens. Put your own model, prompts and reward in place of these.
"""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from treewise import Trajectory

VOCABULARY, PROMPT_LENGTH = 32, 6


def small_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def reward_of(completion: np.ndarray) -> float:
    """The share of even tokens."""
    return float((completion % 2 == 0).mean())


@torch.no_grad()
def rollouts(model: PreTrainedModel, seed: int, num_prompts: int = 2, num_samples: int = 8) -> list[Trajectory]:
    """`num_samples` completions of each prompt: token ids and log-probs as the sampler saw them, and a reward.

    Only the completion is trained. A group is the samples of one prompt.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    items = []
    for prompt in range(num_prompts):
        ids = torch.from_numpy(rng.integers(2, VOCABULARY, (1, PROMPT_LENGTH)))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            num_return_sequences=num_samples,
            max_new_tokens=10,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = torch.log_softmax(torch.stack(out.logits, dim=1), dim=-1)
        chosen = logprobs.gather(2, out.sequences[:, PROMPT_LENGTH:, None])[..., 0].numpy()
        for sample, sequence in enumerate(out.sequences.numpy()):
            ended = np.flatnonzero(sequence == 1)
            length = int(ended[0]) + 1 if len(ended) else len(sequence)
            sampler = np.concatenate([np.zeros(PROMPT_LENGTH), chosen[sample]])[:length]
            items.append(
                Trajectory(
                    sequence[:length],
                    loss_weights=np.arange(length) >= PROMPT_LENGTH,
                    sampler_logprobs=sampler,
                    reward=reward_of(sequence[PROMPT_LENGTH:length]),
                    group=f"prompt {prompt}",
                    rollout=sample,
                )
            )
    return items


def mean_reward(items: list[Trajectory]) -> float:
    return float(np.mean([item.reward for item in items]))
