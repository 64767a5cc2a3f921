"""Distillation to a teacher's likeliest candidates, as inference engines report them (top-k log-probs per token).

Row `t` of `teacher_ids` and `teacher_logprobs` speaks about token `t`; the first row has no meaning. What is made of
the mass outside the candidates is `tail`: here one more candidate.
"""

from dataclasses import replace

import torch
from toy import rollouts, small_model

import treewise as tw

NUM_CANDIDATES = 8


@torch.no_grad()
def with_teacher(teacher: torch.nn.Module, item: tw.Trajectory) -> tw.Trajectory:
    ids = torch.from_numpy(item.token_ids).long()[None]
    logprobs = torch.log_softmax(teacher(input_ids=ids).logits[0].float(), dim=-1)
    logprobs = torch.cat([logprobs[:1], logprobs[:-1]])  # from "after token t" to "about token t"
    best = logprobs.topk(NUM_CANDIDATES)
    return replace(item, teacher_ids=best.indices.numpy(), teacher_logprobs=best.values.numpy())


def main(num_steps: int = 20) -> float:
    teacher, student = small_model(seed=1).eval(), small_model()
    with torch.no_grad():
        teacher.lm_head.weight *= 20  # a teacher with an opinion
    engine = tw.TreeEngine(student, max_tokens=64)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    objective = tw.Distillation(tail="bucket")
    for step in range(num_steps):
        items = [with_teacher(teacher, item) for item in rollouts(teacher, seed=step)]
        out = engine.step(tw.Forest.from_trajectories(items), objective)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: KL {out.loss:.4f}, student's mass on candidates {out.metrics['student_mass']:.3f}")
    return out.loss


if __name__ == "__main__":
    main()
