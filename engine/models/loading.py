"""A model from a local Hugging Face directory, checked before anything large is read."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.cache_pool import DTYPES
from engine.contexts import VALUE_BYTES
from engine.errors import IncompleteModel, UnsupportedModel
from engine.geometry import CacheGeometry, group_layers
from engine.models.binding import ATTENTION_NAME, register_attention
from engine.models.families import KVShape, check_supported, kv_shape, layer_types, window
from engine.models.sharding import check_plan, cut
from engine.sizing import ModelSizes
from engine.tensor_parallel import WHOLE, Shard, check_divisible, kv_heads_per_rank
from protocol.context import ContextLayout, ContextName, ContextPart
from protocol.layout import DType

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class LoadedModel:
    """`model` is the causal LM, or only its base where there is no head to sample from (`head` False). `layer_types`
    and `window`: as `group_layers` takes them. `kv` is of the whole model, `sizes` of the shard."""

    model: torch.nn.Module
    dtype: DType
    layers: int
    kv: KVShape
    vocab_size: int
    max_positions: int
    layer_types: tuple[str, ...] | None
    window: int | None
    eos_token_ids: frozenset[int]
    sizes: ModelSizes
    shard: Shard = WHOLE

    def context(self, names: Sequence[ContextName]) -> ContextLayout:
        """Of such parts; logits are those of a whole model's head."""
        sizes: dict[ContextName, int] = {"hidden": self.sizes.hidden, "logits": self.vocab_size}
        return ContextLayout(tuple(ContextPart(name, sizes[name] * VALUE_BYTES) for name in names))

    def geometry(self, page_size: int) -> CacheGeometry:
        """Of the shard."""
        groups = group_layers(self.layers, self.layer_types, self.window)
        heads = kv_heads_per_rank(self.kv.heads, self.shard.world)
        return CacheGeometry(page_size, heads, self.kv.dim, self.dtype, groups, self.kv.parts)


def load_model(
    directory: str | PathLike[str], dtype: DType = "float32", head: bool = True, shard: Shard = WHOLE
) -> LoadedModel:
    """`head` False loads the base model alone, for a node that never samples.

    Raises IncompleteModel or UnsupportedModel, before the weights are read.
    """
    directory = Path(directory)
    config = check_model(directory, shard.world)
    register_attention()
    model = _read_weights(directory, DTYPES[dtype], head)
    if not shard.is_whole:
        cut(model, shard)
    return LoadedModel(
        model=model,
        dtype=dtype,
        layers=config.num_hidden_layers,
        kv=kv_shape(config),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        layer_types=layer_types(config),
        window=window(config),
        eos_token_ids=_end_tokens(directory, config),
        sizes=ModelSizes.of(config).divided(shard.world),
        shard=shard,
    )


def check_model(directory: Path, world: int = 1) -> Any:
    """The configuration of a model that `world` devices can serve. Raises IncompleteModel or UnsupportedModel."""
    check_complete(directory)
    config = _read_config(directory)
    check_supported(config)
    if world > 1:
        check_plan(config)
        check_divisible(config, world)
    return config


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise UnsupportedModel(f"{directory / 'config.json'} cannot be used: {reason}") from error


def _read_weights(directory: Path, dtype: torch.dtype, head: bool) -> torch.nn.Module:
    """transformers fills what is missing with random numbers and reports it; here that is an error."""
    loader: Any = AutoModelForCausalLM if head else AutoModel
    try:
        with _quiet_loading():
            model, info = loader.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise IncompleteModel(f"{directory}: its weights cannot be read: {error}") from error
    wrong = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if wrong:
        raise IncompleteModel(f"{directory}: its weights lack, or have in another shape, {', '.join(wrong[:5])}")
    return cast(torch.nn.Module, model.eval())


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar, and no report: it warns of an unused head, which is what a node without a head wants."""
    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_complete(directory: Path) -> None:
    """Raises IncompleteModel, naming all that is missing."""
    check_folder(directory)
    missing = [name for name in ("config.json", *_weight_files(directory)) if not (directory / name).is_file()]
    if missing:
        raise IncompleteModel(f"{directory} lacks {', '.join(missing)}")


def check_folder(directory: Path) -> None:
    """Raises IncompleteModel. A model's name is not looked up anywhere."""
    if not directory.is_dir():
        raise IncompleteModel(f"{directory}: no such folder")


def _weight_files(directory: Path) -> list[str]:
    index = directory / _WEIGHTS_INDEX
    if not index.is_file():
        return [_WEIGHTS]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def _end_tokens(directory: Path, config: Any) -> frozenset[int]:
    """Of both configurations: either may be the one that names the end of a chat turn."""
    ids = _as_set(config.eos_token_id)
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids |= _as_set(json.loads(generation.read_text()).get("eos_token_id"))
    return ids


def _as_set(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset([ids] if isinstance(ids, int) else ids or ())
