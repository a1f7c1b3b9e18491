"""`python -m engine.config_reference`: docs/engine-configuration.md, from the fields of ContinuousBatchingConfig."""

import argparse
import sys
from dataclasses import Field, fields
from typing import Any, get_type_hints

from engine.config import OMITTED, ContinuousBatchingConfig
from engine.documented import allowed, field_texts
from engine.options import add_engine_options, engine_options_from

HEAD = """\
# Engine configuration

`engine.config.ContinuousBatchingConfig`, field by field. Names and defaults are those of transformers' class of the
same name where it has the field; *(ours)* marks the others. A value of another type, or outside what is allowed, raises
ValueError at construction. *Option* is how `kvferry generate`, `prefill` and `decode` spell it, with their default
where it is another one. The scheduler is by default `fifo`, on prefill nodes `prefill_first`.

This page is written by `python -m engine.config_reference`.

| field | allowed | default | option | meaning |
|---|---|---|---|---|
"""
OMITTED_HEAD = """
## Fields of transformers' class that are not here

"""
OPTIONS = {
    "page_size": "--page-size",
    "num_blocks": "--num-blocks",
    "max_batch_tokens": "--max-batch-tokens",
    "max_memory_percent": "--max-memory-percent",
    "max_requests_per_batch": "--max-requests",
    "allow_block_sharing": "--no-block-sharing",
    "use_async_batching": "--async-batching",
    "scheduler_type": "--scheduler",
    "eviction_policy": "--eviction-policy",
    "safety_margin": "--safety-margin",
    "cpu_offload_space": "--cpu-offload-space",
    "debug_pages": "--debug-pages",
}
"""Fields that can be set on a command line."""


def reference() -> str:
    """The page's text."""
    texts = field_texts(ContinuousBatchingConfig)
    hints = get_type_hints(ContinuousBatchingConfig, include_extras=True)
    on_command_line = _command_line_defaults()
    rows = [
        f"| `{field.name}` | {allowed(hints[field.name])} | `{_shown(field.default)}` "
        f"| {_option(field, on_command_line)} | {texts[field.name].replace('(ours)', '*(ours)*')} |\n"
        for field in fields(ContinuousBatchingConfig)
    ]
    omitted = [f"- `{name}`: {reason}\n" for name, reason in sorted(OMITTED.items())]
    return HEAD + "".join(rows) + OMITTED_HEAD + "".join(omitted)


def _command_line_defaults() -> ContinuousBatchingConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_options_from(parser, parser.parse_args(["--model", "DIR"])).batching


def _option(field: "Field[Any]", on_command_line: ContinuousBatchingConfig) -> str:
    if field.name not in OPTIONS:
        return ""
    default = getattr(on_command_line, field.name)
    return f"`{OPTIONS[field.name]}`" + ("" if default == field.default else f", default `{_shown(default)}`")


def _shown(value: object) -> str:
    return repr(value).replace("'", '"')


if __name__ == "__main__":
    sys.stdout.write(reference())
