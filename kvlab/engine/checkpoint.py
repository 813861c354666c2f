"""Builds the small model that the embedded profile serves, from a seed, without any download.

Random weights with a standard deviation of 0.05 make the output depend on the whole context, which
vLLM's `--load-format dummy` (weights near zero) does not: with it a wrong cache would go unseen.
The same seed gives the same files on the same machine; `kvlab-model.json` states their hashes.

    python -m kvlab.engine.checkpoint --preset hybrid --out data/models/hybrid --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.engine import geometry
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MANIFEST = "kvlab-model.json"
SCHEMA = 1
VOCABULARY = 4096
UNKNOWN = "<unk>"
WEIGHT_STD = 0.05
MAX_POSITIONS = 32768
DTYPE = "bfloat16"

HYBRID_GDN = geometry.DeltaNet(key_heads=4, value_heads=8, head_dim=64)
DENSE_ATTENTION = geometry.Attention(kv_heads=4, head_dim=64, rotary_dim=64, block_tokens=128)
"""128 tokens is the block of vLLM's CPU build when `--block-size` is not given."""
WIDE_ATTENTION = geometry.Attention(kv_heads=8, head_dim=128, rotary_dim=128, block_tokens=128)
"""Much to store and little to compute: in 4 layers 16 KiB per token, 4 MiB per 256 tokens."""


class CheckpointError(KvlabError):
    """A model that was not built, and why."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines a model's files."""

    preset: str
    seed: int
    layers: int

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer: the hybrid alternates recurrent and full attention."""
        hybrid = self.preset == "hybrid"
        kinds = ("linear_attention", "full_attention") if hybrid else ("full_attention",)
        return list(itertools.islice(itertools.cycle(kinds), self.layers))


DEFAULT_LAYERS = {"hybrid": 2, "dense": 8, "wide": 4}
HIDDEN = {"hybrid": 256, "dense": 256, "wide": 128}


def prepare_recipe(preset: str, seed: int, layers: int | None) -> Recipe:
    """Return the checked recipe for a preset, or raise an error that names what is wrong."""
    if preset not in DEFAULT_LAYERS:
        raise CheckpointError(
            f"there is no preset {preset!r}", hint=f"use one of {', '.join(DEFAULT_LAYERS)}"
        )
    if not 0 <= seed < 2**63:
        raise CheckpointError(f"{seed} is no seed", hint="use a whole number from 0")
    recipe = Recipe(
        preset=preset, seed=seed, layers=DEFAULT_LAYERS[preset] if layers is None else layers
    )
    if preset == "hybrid":
        geometry.check_layers(recipe.layers, moe_layers=recipe.layers)
        geometry.check_dtype(DTYPE)
    elif recipe.layers < 1:
        raise CheckpointError(f"{recipe.layers} layers are no model", hint="use 1 or more")
    return recipe


def describe_cache(recipe: Recipe) -> dict[str, Any]:
    """Return the cache geometry that vLLM should arrive at, as the manifest states it."""
    attention = _attention(recipe)
    geometry.check_attention(attention)
    attention_layers = recipe.layer_types.count("full_attention")
    cache: dict[str, Any] = {
        "attention": asdict(attention),
        "attention_layers": attention_layers,
        "attention_block_tokens": attention.block_tokens,
        "kv_bytes_per_token": attention_layers * attention.token_bytes,
        "page_bytes": attention.page_bytes,
        "state_page_bytes": None,
    }
    if recipe.preset == "hybrid":
        cache["delta_net"] = asdict(HYBRID_GDN)
        cache["recurrent_layers"] = recipe.layers - attention_layers
        cache["state_page_bytes"] = HYBRID_GDN.state_page_bytes
    return cache


def build_checkpoint(recipe: Recipe, out: Path) -> tuple[dict[str, Any], bool]:
    """Return the manifest of the model in `out`, and whether it had to be built.

    A folder whose files still match their hashes is left alone. The new model is written beside
    `out` and renamed, so an interrupted build leaves no half model behind.
    """
    manifest = verify_checkpoint(out, recipe)
    if manifest is not None:
        return manifest, False
    _refuse_foreign_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        manifest = _write_model(recipe, fresh)
        if out.exists():
            out.rename(Path(scratch) / "old")
        fresh.rename(out)
    return manifest, True


def verify_checkpoint(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the manifest when the folder holds exactly this recipe's files, else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        return None
    if manifest.get("recipe") != _recipe_entry(recipe):
        return None
    return manifest if manifest.get("sha256") == hash_files(folder) else None


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a model but its manifest, by name."""
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def name_words() -> list[str]:
    """Return the vocabulary: an unknown token and 4,095 pronounceable words such as `badu`."""
    syllables = ["".join(pair) for pair in itertools.product("bdfghjklmnprstvz", "aiou")]
    words = ["".join(pair) for pair in itertools.product(syllables, syllables)]
    return [UNKNOWN, *words[1:]]


def _attention(recipe: Recipe) -> geometry.Attention:
    if recipe.preset == "hybrid":
        return geometry.fit_attention(HYBRID_GDN)
    return {"dense": DENSE_ATTENTION, "wide": WIDE_ATTENTION}[recipe.preset]


def _recipe_entry(recipe: Recipe) -> dict[str, Any]:
    """The recipe as stored: shapes included, so that changed shapes in the code cause a rebuild."""
    return {
        **asdict(recipe),
        "vocabulary": VOCABULARY,
        "weight_std": WEIGHT_STD,
        "dtype": DTYPE,
        "cache": describe_cache(recipe),
    }


def _refuse_foreign_folder(out: Path) -> None:
    if out.is_dir() and not (out / MANIFEST).exists() and any(out.iterdir()):
        raise CheckpointError(
            f"{out} holds files, but no {MANIFEST}", hint="give an empty or a new folder"
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is not a folder", hint="give an empty or a new folder")


def _write_model(recipe: Recipe, folder: Path) -> dict[str, Any]:
    model = _make_model(recipe)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # a server in a container may be another user
    manifest = {
        "schema": SCHEMA,
        "recipe": _recipe_entry(recipe),
        "versions": _library_versions(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "sha256": hash_files(folder),
    }
    text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def _make_model(recipe: Recipe) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    config = _hybrid_config(recipe) if recipe.preset == "hybrid" else _dense_config(recipe)
    torch.manual_seed(recipe.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.to(getattr(torch, DTYPE))


def _hybrid_config(recipe: Recipe) -> PreTrainedConfig:
    from transformers import Qwen3NextConfig

    attention = _attention(recipe)
    return Qwen3NextConfig(
        **_common_settings(recipe),
        num_attention_heads=4,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        partial_rotary_factor=attention.rotary_factor,
        linear_num_key_heads=HYBRID_GDN.key_heads,
        linear_num_value_heads=HYBRID_GDN.value_heads,
        linear_key_head_dim=HYBRID_GDN.head_dim,
        linear_value_head_dim=HYBRID_GDN.head_dim,
        linear_conv_kernel_dim=HYBRID_GDN.conv_kernel,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )


def _dense_config(recipe: Recipe) -> PreTrainedConfig:
    from transformers import Qwen3Config

    attention = _attention(recipe)
    return Qwen3Config(
        **_common_settings(recipe),
        num_attention_heads=8,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
    )


def _common_settings(recipe: Recipe) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN[recipe.preset],
        "num_hidden_layers": recipe.layers,
        "layer_types": recipe.layer_types,
        "intermediate_size": 512,
        "initializer_range": WEIGHT_STD,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(name_words())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN)
    fast.save_pretrained(folder)


def _library_versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": str(torch.__version__), "transformers": transformers.__version__}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.engine.checkpoint", description="Build the embedded model."
    )
    parser.add_argument("--preset", default="hybrid", help="hybrid (default), dense or wide")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="default: hybrid 2, dense 8, wide 4")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 when the model is there, 2 when it could not be built."""
    chosen = parse_arguments(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        recipe = prepare_recipe(chosen.preset, chosen.seed, chosen.layers)
        manifest, built = build_checkpoint(recipe, chosen.out)
    except (KvlabError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps({"path": str(chosen.out), "built": built, **manifest}))
    else:
        print(f"{'built' if built else 'unchanged'}: {recipe.preset} model in {chosen.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
