"""How each system spells a capture point. Point k is the residual stream entering layer k: the output of layer k-1.

Systems count layers differently by one, and one of them by what stands first in the list; a wrong spelling is
accepted and gives states of another layer (sglang#25454, vllm#43671: acceptance falls from 45 % to 10 %). The
rules were read in the sources of SGLang 0.5.14 to 0.5.23, SpecForge 0.2.0, TorchSpec and speculators 0.9.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LIST_FLAG = "--return-aux-hidden-state-layer-ids"


class Cannot(Exception):
    """These points cannot be captured this way; the text says why."""


class Rule(NamedTuple):
    """How ids become points: `shift` is added to each. `last` says whether the point after the last layer works.

    `odd` names the exception that a model's code makes.
    """

    shift: int
    last: bool = False
    odd: str = ""


OUTPUT = Rule(1)
INPUT = Rule(0)
OUTPUT_LAST = Rule(1, last=True)
DEEPSEEK = Rule(0, odd="first-1")
"""Ids are points, but where the first id is 1 all of them mean one layer later."""


class Family(NamedTuple):
    """What SGLang's code of some architectures captures; None: not at all. `default` is added to the default points."""

    eagle3: Rule | None
    dflash: Rule | None
    default: int = 0


_FAMILIES: list[tuple[Family, str]] = [
    (Family(OUTPUT, OUTPUT), """
        LlamaForCausalLM MistralForCausalLM Ministral3ForCausalLM Phi3ForCausalLM InternLM3ForCausalLM
        TeleFLMForCausalLM IQuestCoderForCausalLM Llama4ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
        MellumForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Glm5NextForConditionalGeneration
        Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration
        Qwen3_5MoeForConditionalGeneration InternS1ProForConditionalGeneration InternS2PreviewForConditionalGeneration
        InternS2MobiusForConditionalGeneration Cosmos3ForConditionalGeneration Qwen4ExpForConditionalGeneration"""),
    (Family(OUTPUT_LAST, OUTPUT_LAST), """
        GptOssForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration"""),
    (Family(DEEPSEEK, OUTPUT), """
        DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM KimiK25ForConditionalGeneration
        Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM MistralLarge3ForCausalLM"""),
    (Family(OUTPUT, None), """
        ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM SarvamMoEForCausalLM
        ExaoneMoEForCausalLM ExaoneMoeForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Glm4MoeForCausalLM
        LongcatFlashForCausalLM MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
        Qwen2_5_VLForConditionalGeneration Llama4ForConditionalGeneration"""),
    (Family(OUTPUT_LAST, OUTPUT_LAST, default=1), "MiniMaxM3SparseForConditionalGeneration"),
    (Family(None, INPUT), "MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration"),
    (Family(None, OUTPUT_LAST), """
        BeamForCausalLM MuseSparkForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
        Lfm2VlForConditionalGeneration NemotronHForCausalLM NemotronHPuzzleForCausalLM"""),
    (Family(None, OUTPUT), """
        InklingForConditionalGeneration LagunaForCausalLM MiMoV2ForCausalLM MiMoV2FlashForCausalLM NanbeigeForCausalLM
        NemotronH_Nano_VL_V2 NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Omni_Reasoning_V3"""),
]  # fmt: skip
FAMILIES = {name: family for family, names in _FAMILIES for name in names.split()}
"""By architecture, as config.json names it. Kimi-K3 is left out: what its ids mean depends on how it runs."""

MODELS = {
    "kimi-k2.5": ("KimiK25ForConditionalGeneration", 61),
    "kimi-k2": ("DeepseekV3ForCausalLM", 61),
    "deepseek-v3": ("DeepseekV3ForCausalLM", 61),
    "deepseek-r1": ("DeepseekV3ForCausalLM", 61),
    "llama-3.1-8b": ("LlamaForCausalLM", 32),
    "llama-3.3-70b": ("LlamaForCausalLM", 80),
    "qwen3-8b": ("Qwen3ForCausalLM", 36),
    "gpt-oss-20b": ("GptOssForCausalLM", 24),
    "gpt-oss-120b": ("GptOssForCausalLM", 36),
}
"""Short names of models that are often meant, with their layers."""


@dataclass(frozen=True)
class Spelling:
    """What to write in one system. `ids` is None where it cannot capture these points, and `note` says why."""

    system: str
    write: str
    ids: list[int] | None
    note: str = ""


def check_points(points: Sequence[int], layers: int) -> list[int]:
    """Return the points in rising order. Raises Cannot for ones that are none of this model's."""
    if not points:
        raise Cannot("there are no capture points; write for example 3,31,59")
    if len(set(points)) != len(points):
        raise Cannot(f"a capture point stands twice in {_row(points)}")
    if min(points) < 0 or max(points) > layers:
        raise Cannot(f"{_row(points)}: with {layers} layers a capture point is 0 (the embeddings) to {layers}")
    return sorted(points)


def ids_for(rule: Rule, points: Sequence[int], layers: int) -> list[int]:
    """Return the ids that capture these points. Raises Cannot."""
    if max(points) == layers and not rule.last:
        raise Cannot(f"its code captures no point after the last layer ({layers})")
    ids = [point - rule.shift for point in points]
    if min(ids) < 0:
        raise Cannot("an id counts outputs of layers, so that the embeddings (point 0) have none")
    if max(ids) >= layers:
        raise Cannot(f"an id must be below {layers}")
    if rule.odd == "first-1" and ids[0] == 1:
        if len(ids) == 1:
            raise Cannot("a list that begins with 1 is read as one layer later")
        return [*ids[1:], 1]  # the order has no meaning but in its first place
    return ids


def default_points(layers: int, family: Family | None = None) -> list[int]:
    """Return the points that SGLang captures where no ids are given."""
    extra = family.default if family else 0
    return [2 + extra, layers // 2 + extra, layers - 3 + extra]


def server_spelling(architecture: str, points: Sequence[int], layers: int) -> tuple[str, list[int]]:
    """Return (convention, ids) for SGLang's flags: DFLASH, which has no exceptions, where it can, else EAGLE3.

    Raises Cannot, also for an architecture whose rule is not known: a guess would be wrong by one layer.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        raise Cannot(f"how SGLang counts the layers of {architecture} is not known here")
    reasons = []
    for name, rule in (("DFLASH", family.dflash), ("EAGLE3", family.eagle3)):
        try:
            if rule is not None:
                return name, ids_for(rule, points, layers)
        except Cannot as error:
            reasons.append(f"{name}: {error}")
    raise Cannot("; ".join(reasons))


def spellings(architecture: str, layers: int, points: Sequence[int]) -> list[Spelling]:
    """Return what every system calls these points. Raises Cannot for points that the model does not have."""
    points = check_points(points, layers)
    family = FAMILIES.get(architecture)
    return [
        _sglang("EAGLE3", family, family.eagle3 if family else None, points, layers),
        _sglang("DFLASH", family, family.dflash if family else None, points, layers),
        _sglang_default(family, points, layers),
        _specforge(family, points, layers),
        _torchspec(points, layers),
        _vllm(points, layers),
    ]


def _sglang(name: str, family: Family | None, rule: Rule | None, points: Sequence[int], layers: int) -> Spelling:
    system = f"SGLang {name}"
    if family is None:
        return Spelling(system, "", None, "not known for this architecture: see its set_*_layers_to_capture")
    if rule is None:
        return Spelling(system, "", None, "SGLang's code of this architecture has no such capture")
    try:
        ids = ids_for(rule, points, layers)
    except Cannot as error:
        return Spelling(system, "", None, str(error))
    note = "each id is the output of that layer" if rule.shift else "each id is the input of that layer"
    note += "; beware: all mean one layer later where the first id is 1" if rule.odd else ""
    return Spelling(system, f"--speculative-algorithm {name} {LIST_FLAG} {_row(ids)}", ids, note)


def _sglang_default(family: Family | None, points: Sequence[int], layers: int) -> Spelling:
    found = default_points(layers, family)
    if family is None or family.eagle3 is None:
        return Spelling("SGLang default", "", None, "its code of this architecture has no default")
    if list(points) == found:
        return Spelling("SGLang default", "--speculative-algorithm EAGLE3 without ids", found, "these are its default")
    return Spelling("SGLang default", "", None, f"without ids it captures the points {_row(found)}")


def _specforge(family: Family | None, points: Sequence[int], layers: int) -> Spelling:
    """SpecForge gives its ids to SGLang's EAGLE-3 code, so the exceptions of that hold for it too."""
    key = "aux_hidden_state_layer_ids"
    if len(points) != 3:
        return Spelling("SpecForge", "", None, "it takes exactly three")
    rule = family.eagle3 if family else OUTPUT
    if rule is None:
        return Spelling("SpecForge", "", None, "it captures by SGLang's EAGLE3, which this architecture has not")
    try:
        ids = ids_for(rule, points, layers)
    except Cannot as error:
        return Spelling("SpecForge", "", None, str(error))
    note = "it hands them to SGLang's EAGLE3"
    if not rule.shift and points[0] > 0:
        note += f", which takes inputs of layers here; as outputs of layers they are {_row([p - 1 for p in points])}"
    return Spelling("SpecForge", f"{key}: [{', '.join(map(str, ids))}]", ids, note)


def _torchspec(points: Sequence[int], layers: int) -> Spelling:
    ids = [point - 1 for point in points]
    if min(ids) < 0:
        return Spelling("TorchSpec", "", None, "an id counts outputs of layers: the embeddings (point 0) have none")
    return Spelling("TorchSpec", f"layer ids {_row(ids)}", ids, "with its vLLM engine, which adds one")


def _vllm(points: Sequence[int], layers: int) -> Spelling:
    ids = list(points)
    note = "an id is a point; it appends the last layer itself"
    return Spelling("vLLM/speculators", f"--target-layer-ids {_row(ids)}", ids, note)


def _row(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
