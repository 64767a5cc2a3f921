"""The whole idea of treewise in one file, on torch and NumPy alone: python examples/tiny_treewise.py

Agents that sample several answers, call tools or search leave token sequences that share prefixes. Flat training
computes a shared prefix once per sequence. Here it is computed once, in micro-batches of bounded size, and every
parameter gets the gradient of flat training, to the last bits of float64: the last block asserts it.

Read it from top to bottom. Each block names the module of treewise that does it for real: in linear time, on models of
transformers, in bfloat16, on several ranks; the functions of a step name their parts of `treewise.engine.step`. What is
left out here on purpose: trunks longer than a micro-batch, kernels that never build a mask, logits in chunks, recurrent
layers.

Letters: T tokens of a micro-batch, K keys (those of the gateway first), E edges, M width, H heads, D width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

VOCAB_SIZE, MAX_LENGTH = 50, 64
Loss = Callable[[list[Tensor]], Tensor]


# -- 1. Sequences to a prefix tree (treewise.tree.prefix_merge, treewise.tree.forest) ---------------------------------
# Sequences with the same beginning share its tokens. Tokens stand in depth-first order, so that everything below a
# token is one interval: the subtree of token t is t, t + 1, ..., end[t] - 1.


@dataclass
class Tree:
    token_ids: np.ndarray  # [all tokens], as are:
    parent: np.ndarray  # position in the tree; -1 at a root
    depth: np.ndarray  # position in the sequence
    end: np.ndarray  # one past the last token of the subtree
    paths: list[np.ndarray]  # for each sequence the tree position of each of its tokens


def prefix_tree(sequences: Sequence[Sequence[int]]) -> Tree:
    children: list[dict[int, int]] = [{}]  # of each node by token; node 0 is the empty prefix
    nodes_of = []
    for sequence in sequences:
        nodes = [0]
        for token in sequence:
            node = children[nodes[-1]].setdefault(token, len(children))
            if node == len(children):
                children.append({})
            nodes.append(node)
        nodes_of.append(nodes[1:])
    ids, parent, depth, end = [], [], [], []
    position = np.zeros(len(children), dtype=int)

    def visit(node: int, above: int, level: int) -> None:
        for token, child in children[node].items():
            here = position[child] = len(ids)
            ids.append(token), parent.append(above), depth.append(level), end.append(0)
            visit(child, here, level + 1)
            end[here] = len(ids)

    visit(0, -1, 0)
    return Tree(*map(np.array, (ids, parent, depth, end)), [position[nodes] for nodes in nodes_of])


# -- 2. Intervals to a mask (treewise.planning.plans, treewise.nn.attention) -------------------------------------------
# A query may see the keys on its path to the root. Since a micro-batch keeps depth-first order, the queries below a key
# are an interval, too: two integers per key are the whole mask, whatever the tree. treewise hands them to kernels
# (treewise.nn.attention.cascade, treewise.nn.attention.flex); only its specification builds a dense mask, as here
# (treewise.nn.attention.reference).


def visible(tree: Tree, rows_T: np.ndarray, keys_K: np.ndarray) -> np.ndarray:
    """[T, K] bool: whether query `rows_T[q]` sees key `keys_K[k]`; both are positions in the tree, in order."""
    lo_K = np.searchsorted(rows_T, keys_K)
    hi_K = np.searchsorted(rows_T, tree.end[keys_K])
    query_T1 = np.arange(len(rows_T))[:, None]
    return (lo_K <= query_T1) & (query_T1 < hi_K)


# -- 3. A transformer that takes a mask, and keys and values from outside (treewise.nn.attention.interface) ------------
# An ordinary one. treewise patches no model: it registers an attention with transformers, which gets lo and hi.

KeysValues = list[tuple[Tensor, Tensor]]  # of each layer: [H, K, D] each


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_TM: Tensor, mask_TK: Tensor, gateway: tuple[Tensor, Tensor] | None):
        q, k, v = self.qkv(self.norm_1(x_TM)).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)  # [H, T, D]
        own = (k, v)
        if gateway is not None:
            k, v = (torch.cat([before, here], dim=1) for before, here in zip(gateway, own, strict=True))
        scores_HTK = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask_TK, -math.inf)
        x_TM = x_TM + self.out((scores_HTK.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return x_TM + self.mlp(self.norm_2(x_TM)), own


class Transformer(nn.Module):
    def __init__(self, width: int = 32, num_layers: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB_SIZE, width), nn.Embedding(MAX_LENGTH, width)
        self.layers = nn.ModuleList([Layer(width, num_heads) for _ in range(num_layers)])
        self.head = nn.Linear(width, VOCAB_SIZE)

    def forward(self, ids_T, positions_T, mask_TK, gateway: KeysValues | None = None) -> tuple[Tensor, KeysValues]:
        """[T, M] hidden rows, and the keys and values of these tokens in every layer."""
        x_TM = self.tokens(torch.as_tensor(ids_T)) + self.positions(torch.as_tensor(positions_T))
        keys_values = []
        for index, layer in enumerate(self.layers):
            x_TM, own = layer(x_TM, torch.as_tensor(mask_TK), gateway[index] if gateway else None)
            keys_values.append(own)
        return x_TM, keys_values

    def logprobs(self, rows_EM: Tensor, next_ids_E) -> Tensor:
        """[E] log-prob of a next token after each hidden row."""
        return self.head(rows_EM).log_softmax(-1).gather(1, torch.as_tensor(next_ids_E)[:, None])[:, 0]


# -- 4. Log-probs on edges, and restoring (treewise.nn.lm_head, treewise.engine) ---------------------------------------
# Every token but a first one has one parent, so its log-prob belongs to the edge parent -> token, and one hidden row at
# a fork predicts several tokens. A gather along the paths restores the log-probs of each trajectory; the gradient of
# that gather sums over branches. So a loss that is written for flat trajectories is exact on trees as it stands.
# Where a loss is a sum over tokens nothing is restored: `StepLoss` of treewise.engine.step.


def restore(logprobs: Tensor, tree: Tree) -> list[Tensor]:
    """Of [all tokens] log-probs on the tree, those of every trajectory's tokens but the first: [length - 1] each.

    This is `restored_logprobs` of treewise.engine.values.
    """
    return [logprobs[path[1:]] for path in tree.paths]


# -- 5. Losses on trajectories, as flat training has them (treewise.objectives) ----------------------------------------


def sft(logprobs: list[Tensor]) -> Tensor:
    """The mean negative log-likelihood of all tokens of all trajectories."""
    return -torch.cat(logprobs).mean()


def grpo(logprobs: list[Tensor], rewards: Tensor, old_logprobs: list[Tensor], clip: float = 0.2) -> Tensor:
    """Group-relative policy optimization (arXiv 2402.03300, equation 3, no KL term): advantages differ by branch."""
    advantages = (rewards - rewards.mean()) / rewards.std()
    losses = []
    for logprob, old, advantage in zip(logprobs, old_logprobs, advantages, strict=True):
        ratio = torch.exp(logprob - old)
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage))
    return torch.cat(losses).mean()


# -- 6. A budget: one trunk, its gateway, and pieces below it (treewise.planning.partition, treewise.engine.step) ------
# A token is open if its subtree exceeds the budget, otherwise closed. Open tokens are the top of the tree: the trunk.
# The largest closed subtrees are packed into pieces. The trunk runs first, without a graph, and leaves its keys and
# values: the gateway, detached. Every piece runs forward and backward once, and adds its gradients into the gateway.
# Then the trunk runs again, with a graph, and its backward starts from its own loss and the gateway's gradients. At no
# time do more than `budget` tokens hold activations.


def partition(tree: Tree, budget: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Positions in the tree of the trunk, and of each piece: `plan` of treewise.planning.planner."""
    size = tree.end - np.arange(len(tree.end))
    is_open = size > budget
    assert is_open.sum() <= budget, "more open tokens than the budget; treewise.planning cuts a trunk at any token"
    pieces: list[list[int]] = [[]]
    for top in np.flatnonzero(~is_open & ((tree.parent < 0) | is_open[tree.parent])):
        if len(pieces[-1]) + size[top] > budget:
            pieces.append([])
        pieces[-1] += range(top, tree.end[top])
    return np.flatnonzero(is_open), [np.array(piece) for piece in pieces]


def run(model: Transformer, tree: Tree, rows: np.ndarray, trunk: np.ndarray, gateway: KeysValues | None):
    """One micro-batch, `Walk.forward` of treewise.engine.step: tokens that its edges lead to ([E]), their log-probs
    ([E], `EdgeScorer` of treewise.engine.edge_scorer), and its keys and values."""
    mask_TK = visible(tree, rows, np.concatenate([trunk, rows]) if gateway else rows)
    hidden_TM, keys_values = model(tree.token_ids[rows], tree.depth[rows], mask_TK, gateway)
    edges = np.flatnonzero(np.isin(tree.parent, rows))  # a child may stand in another micro-batch
    rows_EM = hidden_TM[np.searchsorted(rows, tree.parent[edges])]
    return edges, model.logprobs(rows_EM, tree.token_ids[edges]), keys_values


def tree_backward(model: Transformer, sequences: Sequence[Sequence[int]], loss_of: Loss, budget: int) -> Tensor:
    """Adds the gradients of any loss of all log-probs, in micro-batches of at most `budget` tokens.

    `take_step` of treewise.engine.step; the passes are `Walk.visit` and `Walk.train`, the loss between them is
    `backward_through` of treewise.engine.values.
    """
    tree = prefix_tree(sequences)
    trunk, pieces = partition(tree, budget)

    # The trunk without a graph; its keys and values become leaves that gather gradients.
    gateway = None
    with torch.no_grad():
        logprobs = torch.zeros(len(tree.parent), dtype=torch.float64)
        if len(trunk):
            edges, logprobs[edges], keys_values = run(model, tree, trunk, trunk, None)
            gateway = [(k.requires_grad_(), v.requires_grad_()) for k, v in keys_values]
        # First pass: all log-probs. (treewise skips it where a loss is a sum over tokens, as SFT is.)
        for piece in pieces:
            edges, logprobs[edges], _ = run(model, tree, piece, trunk, gateway)

    # The loss on restored trajectories, and its slope by each log-prob of the tree.
    loss = loss_of(restore(logprobs.requires_grad_(), tree))
    (slopes,) = torch.autograd.grad(loss, logprobs)

    # Second pass: each piece forward and backward, then the trunk, with the gradients that its keys and values got.
    for piece in pieces:
        edges, values, _ = run(model, tree, piece, trunk, gateway)
        torch.autograd.backward([(values * slopes[edges]).sum()])
    if len(trunk):
        edges, values, keys_values = run(model, tree, trunk, trunk, None)
        outputs = [tensor for layer in keys_values for tensor in layer]
        injected = [tensor.grad for layer in gateway for tensor in layer]
        torch.autograd.backward([(values * slopes[edges]).sum(), *outputs], [None, *injected])
    return loss


# -- 7. Flat training, and the assertion (treewise.verification) -------------------------------------------------------


def flat_logprobs(model: Transformer, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Every sequence alone, under a causal mask."""
    logprobs = []
    for sequence in sequences:
        hidden_TM, _ = model(sequence, range(len(sequence)), np.tri(len(sequence), dtype=bool))
        logprobs.append(model.logprobs(hidden_TM[:-1], sequence[1:]))
    return logprobs


def taken_gradients(model: Transformer) -> Tensor:
    """All gradients as one vector; the model's own are cleared."""
    vector = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return vector


def rollouts(rng: np.random.Generator) -> list[list[int]]:
    """Eight rollouts of one prompt: two plans, two tool calls after each plan, two answers after each call."""
    paths = [rng.integers(VOCAB_SIZE, size=12).tolist()]
    for length in (6, 5, 4):
        paths = [[*path, *rng.integers(VOCAB_SIZE, size=length).tolist()] for path in paths for _ in range(2)]
    return paths


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Transformer().double()
    sequences = [*rollouts(rng), rollouts(rng)[0]]  # the last one is of another prompt: two trees
    rewards = torch.from_numpy(rng.random(len(sequences)))
    with torch.no_grad():  # the policy that sampled was a slightly different one
        old_logprobs = [each + 0.3 * torch.randn_like(each) for each in flat_logprobs(model, sequences)]
    num_tokens = len(prefix_tree(sequences).parent)
    print(f"{sum(map(len, sequences))} tokens flat, {num_tokens} on the tree")
    for name, loss_of in {"SFT": sft, "GRPO": partial(grpo, rewards=rewards, old_logprobs=old_logprobs)}.items():
        expected_loss = loss_of(flat_logprobs(model, sequences))
        expected_loss.backward()
        expected = taken_gradients(model)
        for budget in (num_tokens, 40, 26):
            loss, computed = tree_backward(model, sequences, loss_of, budget), taken_gradients(model)
            error = float((computed - expected).norm() / expected.norm())
            print(f"{name}, at most {budget} tokens at a time: loss {loss:.6f}, error of all gradients {error:.0e}")
            assert torch.isclose(loss, expected_loss, rtol=1e-12), f"loss {loss}, flat {expected_loss}"
            assert error < 1e-12, f"the gradients are {error:.1e} away from those of flat training"


if __name__ == "__main__":
    main()
