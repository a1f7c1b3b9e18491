"""The generated pages are what the code says."""

import argparse
from pathlib import Path

from engine import batch_reference, config_reference
from engine.config_reference import OPTIONS
from engine.options import add_engine_options

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_pages_are_up_to_date() -> None:
    for page, written_by in (
        ("engine-configuration.md", config_reference),
        ("generation-file.md", batch_reference),
    ):
        module = written_by.__name__
        assert (DOCS / page).read_text() == written_by.reference(), f"run python -m {module} > docs/{page}"


def test_every_field_has_what_is_allowed_its_default_its_option_and_its_meaning() -> None:
    page = config_reference.reference()
    assert "| `page_size` | a whole number from 4 to 2^31 - 1 | `256` | `--page-size`, default `64` | Tokens in" in page
    assert (
        "| `max_overtakes` | a whole number from 0 to 2^31 - 1 | `64` |  | *(ours)* Times that later requests" in page
    )
    assert "- `block_size`: deprecated, it is page_size" in page


def test_the_options_on_the_page_exist() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    words = parser.format_help().split()
    assert all(option in words for option in OPTIONS.values())


def test_every_field_of_a_line_is_on_the_page_of_lines() -> None:
    page = batch_reference.reference()
    assert "| `top_p` | a number, above 0 and at most 1 | `--top-p`, `1.0` |" in page
    assert "| `id` | text, 1 to 512 long, or a whole number | none |" in page
    assert "| `index` | " in page
