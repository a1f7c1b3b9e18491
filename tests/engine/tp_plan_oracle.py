"""`python -m tests.engine.tp_plan_oracle RANK WORLD PORT FOLDER OUT TOKEN...`: one rank of a model that transformers
divides by itself. Writes its part of the layers' weights to the file OUT; the main rank prints what follows the tokens.
"""

import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

NEW = 12


def main(rank: str, world: str, port: str, folder: str, out: str, *prompt: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    loader: Any = AutoModelForCausalLM
    plan = DistributedConfig(tp_plan="auto")
    model = loader.from_pretrained(folder, dtype=torch.float32, distributed_config=plan, local_files_only=True)
    tokens = model.generate(torch.tensor([[int(token) for token in prompt]]), max_new_tokens=NEW, do_sample=False)
    parts = {name: getattr(weight, "_local_tensor", weight) for name, weight in model.named_parameters()}
    save_file({name: part.detach().contiguous() for name, part in parts.items() if ".layers." in name}, out)
    if rank == "0":
        sys.stdout.write(" ".join(map(str, tokens[0, len(prompt) :].tolist())))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
