"""What a training run is drawn from: families, what is trained, objectives, and every setting of the public interface.

The first value of each setting is its default. Names of values are read by `case.py` (model, data, objective) and
`sides.py` (how both sides train).
"""

import random
from collections.abc import Mapping
from typing import Any

from tests import image_models as images
from tests.crossings.drawing import Rule
from tests.replayed_rows import MIXTURES
from treewise.nn.support_table import SUPPORTED, CapabilityTable

# Fields of the configuration in place of the tiny model's; of the text's part where it has one.
_LONGER = {"factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "one_kv_head": {"num_key_value_heads": 1},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 3, "use_sliding_window": True},
    "partial": {"partial_rotary_factor": 0.5},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **_LONGER}},
    "routed": {"output_router_logits": True, "router_aux_loss_coef": 0.1},
}
ROUTED = ("mixtral", "qwen3_moe", "jamba")  # families that take the last one
# Regular expressions on names of parameters; LAST stands for the number of the last layer.
TRAINED: Mapping[str, str] = {
    "all": ".",
    "embeddings": "(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings)[.]weight",
    "head": "(lm_head|embed_out|output)[.]weight",
    "norms": "norm|ln_",
    "first_layer": "(layers|h|blocks|layer)[.]0[.]",
    "last_layer": "(layers|h|blocks|layer)[.]LAST[.]",
    "queries": "q_proj|query|qkv|c_attn|in_proj|W_pack",
    "values": "v_proj|value|qkv|c_attn|out_proj",
    "tower": "^(?!.*(projector|merger|connector)).*(vision|visual)",
    "projector": "projector|merger|connector",
}
# Classes of PEFT and their arguments; LINEAR, HEAD, EMBEDDING and PROJECTOR stand for names of the model's modules,
# ROUTERS for those of its routers' parameters.
ADAPTERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "use_dora": True}),
    "rslora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "use_rslora": True, "lora_bias": False}),
    "lora_one_layer": ("LoraConfig", {"r": 4, "target_modules": "LINEAR", "layers_to_transform": [1]}),
    "lora_head": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "modules_to_save": ["HEAD"]}),
    "lora_of_head": ("LoraConfig", {"r": 4, "target_modules": ["HEAD"]}),
    "lora_embedding": ("LoraConfig", {"r": 4, "target_modules": "LINEAR", "modules_to_save": ["EMBEDDING"]}),
    "lora_tokens": ("LoraConfig", {"r": 4, "target_modules": "LINEAR", "trainable_token_indices": [5, 9]}),
    "lora_dropout": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}),
    "lora_routers": ("LoraConfig", {"r": 4, "target_modules": [], "target_parameters": ["ROUTERS"]}),
    "lora_projector": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["PROJECTOR"]}),
    "ia3": ("IA3Config", {"target_modules": "LINEAR", "feedforward_modules": []}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": "LINEAR"}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "target_modules": "LINEAR"}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": "LINEAR"}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 2}),
}
# Arguments of `PolicyGradient`. Bounds are far from the ratios that the data has, so rounding crosses none.
POLICY: Mapping[str, dict[str, Any]] = {
    "reinforce": {"surrogate": "reinforce"},
    "grpo": {},
    "on_policy": {},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.6},
    "cispo": {"surrogate": "cispo", "max_ratio": 1.3, "clip_low": None, "clip_high": None},
    "gspo": {"ratio_level": "sequence", "clip_low": None, "clip_high": None},
    "turns": {"ratio_level": "turn", "clip_low": None, "clip_high": None},
    "entropy": {"entropy_coefficient": 0.1},
    "truncated": {"sampler_correction": "truncate", "sampler_max": 1.5},
    "masked": {"sampler_correction": "mask", "sampler_min": 0.6, "sampler_max": 1.5},
    "sequence_masked": {"sampler_correction": "truncate", "sampler_level": "sequence", "sampler_max": 1e3},
}
PREFERENCES: Mapping[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "conservative": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.5},
    "hinge": {"loss": "hinge", "beta": 0.01},
    "kto": {"beta": 0.3, "undesirable_weight": 1.5},
    "kto_zero": {"beta": 0.3, "baseline": "zero"},
}
DISTILLATIONS: Mapping[str, dict[str, Any]] = {
    "bucket": {},
    "ignored_tail": {"tail": "ignore"},
    "renormalized": {"tail": "renormalize", "divergence": "cross_entropy"},
}
FUNCTIONS = ("function", "function_of_trained")
SEEING = tuple(images.FAMILIES)
_ATTENTION = {
    "full attention",
    "latent attention",
    "chunked attention",
    "sliding windows",
    "sinks",
    "score cap",
    "experts",
}
RECURRENT = tuple(row.family for row in CapabilityTable.load().rows if not _ATTENTION.issuperset(row.layers))
OF_IMAGES = ("tower", "projector", "lora_projector")
# Their parts have millions of parameters, whatever the configuration.
LARGE = (
    "janus",
    "muse_glimmer",
    "gemma4_unified",
    "deepseek_vl_hybrid",
    "cohere2_vision",
    "got_ocr2",
    "pp_chart2table",
    "qwen3_omni_moe_thinker",
)
NEEDS_MORE = ("entropy", *DISTILLATIONS)  # than log-probs of the trajectories' own tokens
OF_LOGPROBS = ("logprobs", "shared")  # interfaces that give these alone
_PER_STEP = ("kto", "routed")

# Processes, batches that they compute at a time, and arguments of `TreeTrainingArguments`.
MESHES: Mapping[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "copies": (2, 2, {}),
    "sharded": (2, 2, {"sharded": True}),
    "tensor": (2, 1, {"tp_size": 2}),
    "experts": (2, 2, {"ep_size": 2, "sharded": True}),
    "context": (2, 1, {"context_size": 2}),
    "three": (3, 3, {"sharded": True}),
    "sharded_tensor": (4, 2, {"tp_size": 2, "sharded": True}),
    "experts_tensor": (4, 2, {"tp_size": 2, "ep_size": 4, "sharded": True}),
}
LOADED = ("tensor", "experts", "sharded_tensor", "experts_tensor")  # the model has to be loaded for these

SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "family": ("llama",),  # and others, by `settings_of`
    "variant": tuple(VARIANTS),
    "trained": (*TRAINED, *ADAPTERS),
    "objective": ("sft", *POLICY, *PREFERENCES, *DISTILLATIONS, *FUNCTIONS),
    "weighting": ("per_trajectory", "once", "per_rollout"),
    "normalization": ("token_mean", "trajectory_mean", "rollout_mean", "rollout_sum", "constant"),
    "reference": ("none", "k1", "k2", "k3"),
    "images": ("none", "prompt", "branches"),
    "replay": ("none", "exact", "by_tokens", "off"),  # of recorded experts
    "shape": ("bushy", "chain", "star", "copies", "rows", "apart"),
    "items": ("trees", "rows"),  # of the data: whole trees, or each row by itself
    "interface": ("step", "logprobs", "trainer", "shared"),
    "budget": ("whole", "tiny", "half"),
    "hold": ("auto", "never", "always"),
    "offload": (False, True),
    "attention": ("auto", "reference", "cascade", "flex"),
    "dtype": ("float32", "float64", "bfloat16"),
    "autocast": (False, True),
    "temperature": (1.0, 0.7),
    "accumulation": (1, 2),
    "window": ("none", "held", "again", "bounded"),  # around the calls of a step; log-probs come in drawn parts
    "checkpoints": ("none", "on", "reentrant", "auto"),
    "compiled": (False, True),
    "clip": (0.0, 0.05),
    "optimizer": ("sgd", "adamw"),
    "hooks": ("none", "gradient", "accumulated", "output"),
    "probe": (True, False),
    "resumed": (False, True),
    "processes": tuple(MESHES),
}
RARITY: Mapping[tuple[str, Any], float] = {
    **{("processes", name): 10.0 for name in MESHES if name != "one"},
    **{("processes", name): 30.0 for name in ("three", "sharded_tensor", "experts_tensor")},
    ("compiled", True): 60.0,
    ("resumed", True): 10.0,
    ("interface", "trainer"): 2.0,
    ("attention", "flex"): 10.0,
    ("trained", "prompt"): 4.0,
    ("trained", "lora_dropout"): 4.0,
    ("dtype", "bfloat16"): 2.0,
    ("autocast", True): 4.0,
    ("hooks", "accumulated"): 2.0,
}

_IS_SUM = ("sft", *POLICY, *DISTILLATIONS)
RULES = (
    Rule(
        ("objective", "weighting"), lambda objective, weighting: objective in _IS_SUM or weighting == "per_trajectory"
    ),
    Rule(("objective", "normalization"), lambda objective, kind: objective in _IS_SUM or kind == "token_mean"),
    Rule(("objective", "reference"), lambda objective, kl: objective in POLICY or kl == "none"),
    # Ratios and scores of whole rollouts count a token of several rows once.
    Rule(("objective", "shape"), lambda objective, shape: objective not in PREFERENCES or shape != "chain"),
    Rule(("objective", "interface"), lambda name, way: way not in OF_LOGPROBS or name not in NEEDS_MORE),
    Rule(("objective", "interface"), lambda name, way: way != "trainer" or name not in FUNCTIONS),
    Rule(("accumulation", "interface"), lambda number, way: number == 1 or way not in OF_LOGPROBS),
    *(  # one call of the engine has a baseline and router counts of its own; a step of the trainer has one
        Rule(
            ("accumulation", what, "interface"),
            lambda number, it, way: number == 1 or it not in _PER_STEP or way == "trainer",
        )
        for what in ("objective", "variant")
    ),
    Rule(("variant", "family"), lambda variant, family: variant != "routed" or family in ROUTED),
    Rule(("variant", "interface"), lambda variant, way: variant != "routed" or way not in OF_LOGPROBS),
    Rule(("autocast", "dtype"), lambda autocast, dtype: not autocast or dtype == "float32"),
    Rule(
        ("autocast", "family", "replay"),
        lambda autocast, family, replay: not autocast or family not in ROUTED or replay in ("exact", "by_tokens"),
    ),
    Rule(("trained", "family"), lambda trained, family: trained != "lora_routers" or family in MIXTURES),
    Rule(("items", "interface"), lambda items, way: items == "trees" or way in ("step", "trainer")),
    # Where rows are trees of their own, a token counts in each, and takes no experts of another.
    Rule(("items", "weighting"), lambda items, weighting: items == "trees" or weighting != "once"),
    Rule(("items", "replay"), lambda items, replay: items == "trees" or replay in ("none", "off")),
    Rule(("items", "processes"), lambda items, processes: items == "trees" or processes in ("one", "copies")),
    Rule(("family", "replay"), lambda family, replay: replay == "none" or family in MIXTURES),
    Rule(("interface", "replay"), lambda way, replay: way != "shared" or replay == "none"),  # TRL's rows have no record
    Rule(("accumulation", "hooks"), lambda number, hooks: number == 1 or hooks != "accumulated"),
    Rule(("family", "images"), lambda family, images: images == "none" or family in SEEING),
    Rule(("trained", "images"), lambda trained, images: images != "none" or trained not in OF_IMAGES),
    Rule(("interface", "window"), lambda way, window: way != "trainer" or window == "none"),
    # Refused by name, which tests/engine/window tests; flat training came first here, token by token, and took minutes.
    Rule(("family", "window"), lambda family, window: window == "none" or family not in RECURRENT),
    Rule(("interface", "hold"), lambda way, hold: way != "shared" or hold == "auto"),
    Rule(("interface", "offload"), lambda way, offload: way != "shared" or not offload),
    Rule(("interface", "images"), lambda way, images: way != "shared" or images == "none"),
    Rule(("interface", "probe"), lambda way, probe: way in ("step", "logprobs") or probe),
    Rule(("interface", "resumed"), lambda way, resumed: way == "trainer" or not resumed),
    # Not every family reads every field of its configuration, which only the probe sees.
    Rule(("variant", "probe"), lambda variant, probe: probe or variant in ("plain", "tied", "untied")),
    Rule(("checkpoints", "interface"), lambda checkpoints, way: checkpoints != "auto" or way == "trainer"),
    Rule(("checkpoints", "processes"), lambda checkpoints, processes: checkpoints != "auto" or processes == "one"),
    Rule(("interface", "processes"), lambda way, processes: way == "trainer" or processes == "one"),
    Rule(("compiled", "processes"), lambda compiled, processes: not compiled or processes == "one"),
    Rule(("trained", "processes"), lambda trained, processes: trained in TRAINED or processes not in LOADED),
    Rule(("images", "processes"), lambda images, processes: images == "none" or processes not in LOADED),
    Rule(("trained", "probe"), lambda trained, probe: trained != "lora_dropout" or probe),
)


def settings_of(seed: int, num_families: int = 36, num_mixtures: int = 8) -> dict[str, tuple[Any, ...]]:
    """The table of settings with so many of the supported families: llama, those whose tiny models see, and mixtures
    and others by the seed.
    """
    fixed = ("llama", *ROUTED, *SEEING)
    rows = [row for row in CapabilityTable.load().rows if row.status == SUPPORTED]
    names = [row.family for row in rows if row.family not in (*fixed, *LARGE)]
    random.Random(seed).shuffle(names)
    first = [each for each in names if each in MIXTURES][:num_mixtures]
    others = [each for each in names if each not in first][: num_families - len(fixed) - len(first)]
    return {**SETTINGS, "family": (*fixed, *first, *others)}
